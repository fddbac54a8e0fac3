"""Jobs under torchrun: how its agents are started in each of its modes, and a job that dies and goes on."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests import restart_job
from tests.scripts import Run, finish, start_command


def _two_agents(node: int, port: int) -> list[str]:
    return [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]


def _two_agents_c10d(node: int, port: int) -> list[str]:
    # Explicit, since both agents are on the host that the endpoint names.
    return [*c10d(port), f"--rdzv-conf=is_host={int(node == 0)}", f"--local-addr=127.0.0.{node + 1}"]


def c10d(port: int) -> list[str]:
    return ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]


def start_agent(arguments: list[str], folder: Path, *options: str, cold: bool = False) -> subprocess.Popen:
    """Start one agent of a job with its own arguments and the ``options`` of ``restart_job.py``."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    return start_command([*torchrun, *arguments, restart_job.__file__, *options], folder, cold=cold)


@dataclass(frozen=True)
class Mode:
    """One way to start a job of two ranks: how many agents, and the arguments of each, given its number and a free port."""

    agents: int
    arguments: Callable[[int, int], list[str]]


MODES = {
    "static": Mode(1, lambda node, port: [f"--master-port={port}"]),
    "standalone": Mode(1, lambda node, port: ["--standalone"]),
    "static, two agents": Mode(2, _two_agents),
    "c10d, two agents": Mode(2, _two_agents_c10d),
}


def start_job(name: str, port: int, folder: Path, *options: str, cold: bool = False) -> list[subprocess.Popen]:
    """Start a job in one of the :data:`MODES`; returns its agents."""
    mode = MODES[name]
    common = [f"--nnodes={mode.agents}", f"--nproc-per-node={2 // mode.agents}", "--max-restarts=3", "--rdzv-id=the-run"]
    return [start_agent([*common, *mode.arguments(node, port)], folder, *options, cold=cold) for node in range(mode.agents)]


def finish_job(agents: list[subprocess.Popen], timeout: float) -> list[Run]:
    """Wait for all agents of a job at once, so that none stands still with a full pipe."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda agent: finish(agent, timeout), agents))


class Journal:
    """What a job has written down so far."""

    def __init__(self, folder: Path) -> None:
        self.lines = restart_job.read(folder)

    def of(self, what: str, rank: int | None = None) -> list[dict]:
        """The lines of one kind, of one rank or of all."""
        return [line for line in self.lines if line["what"] == what and rank in (None, line["rank"])]
