"""Real ranks for tests: processes forked from this warm one, with a hard deadline and the stacks of those that hang."""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_pgroup.process_state import process_state
from lightning_pgroup.store import LOOPBACK, Endpoint, listen
from lightning_pgroup.team import ENVIRONMENT_VARIABLE, Invitation

DEADLINE = 60.0


class RankFailure(AssertionError):
    """A rank raised, died or hung."""


@dataclass
class RankResult:
    value: Any = None
    error: str | None = None
    exit_code: int | None = None
    stack: str | None = None
    leaks: list[str] = field(default_factory=list)


def run_ranks(
    function: Callable[[int], Any],
    size: int = 2,
    *,
    deadline: float = DEADLINE,
    check_leaks: bool = True,
    expect_death: frozenset[int] | set[int] = frozenset(),
    bare: bool = False,
) -> list[Any]:
    """Run ``function(rank)`` on forked ranks, as Lightning's popen launcher would have started them.

    With ``bare`` the processes are no ranks of anything, but as a user's shell would have started them.

    Returns the values in rank order. Raises :class:`RankFailure` with the traceback or the stack of each rank that failed.
    """
    listener = listen(LOOPBACK)
    endpoint = Endpoint(*listener.getsockname()[:2])
    invitation = Invitation.to(endpoint, size, 0)
    with free_port() as port, tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(
                target=_rank_main, args=(function, rank, size, invitation, listener, port, folder, check_leaks, bare)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        listener.close()
        results = _collect(processes, Path(folder), time.monotonic() + deadline)
    problems = []
    for rank, result in enumerate(results):
        if rank in expect_death:
            continue
        if result.stack is not None:
            problems.append(f"rank {rank} hung for {deadline} s:\n{result.stack}")
        elif result.error is not None:
            problems.append(f"rank {rank} raised:\n{result.error}")
        elif result.exit_code != 0:
            problems.append(f"rank {rank} died with exit code {result.exit_code}")
        elif result.leaks:
            problems.append(f"rank {rank} leaked: {'; '.join(result.leaks)}")
    if problems:
        raise RankFailure("\n".join(problems))
    return [result.value for result in results]


@contextlib.contextmanager
def free_port() -> Any:
    """A port for plain ``torch.distributed``, chosen by the system; ours needs none."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    yield port


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _rank_main(function, rank, size, invitation, listener, port, folder, check_leaks, bare) -> None:
    path = Path(folder)
    stacks = (path / f"{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    if not bare:
        os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR=LOOPBACK, MASTER_PORT=str(port))
    torch.set_num_threads(1)
    result = RankResult()
    hook, before = sys.excepthook, dict(os.environ)
    handlers = _handlers()
    try:
        if bare or rank != 0:
            listener.close()
        if not bare and rank != 0:
            os.environ[ENVIRONMENT_VARIABLE] = invitation.to_environment()
        if not bare and rank == 0:
            process_state().membership.host(listener)
            process_state().membership.join(invitation)
        result.value = function(rank)
        process_state().end()
        if check_leaks:
            result.leaks = _leaks(hook, before, handlers)
    except BaseException:
        result.error = traceback.format_exc()
    (path / f"{rank}.part").write_bytes(pickle.dumps(result))
    (path / f"{rank}.part").rename(path / f"{rank}.result")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


def _leaks(hook, before, handlers) -> list[str]:
    found = []
    if dist.is_initialized():
        found.append("a process group is alive")
    if sys.excepthook is not hook:
        found.append(f"sys.excepthook is {sys.excepthook}")
    # WORLD_SIZE is Lightning's own to delete (`LightningEnvironment.teardown`); OMP_NUM_THREADS its own to set.
    ignored = {"WORLD_SIZE", "OMP_NUM_THREADS", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", ENVIRONMENT_VARIABLE}
    now = dict(os.environ)
    changed = {k for k in before.keys() | now.keys() if k not in ignored and before.get(k) != now.get(k)}
    if changed:
        found.append(f"os.environ: {sorted(changed)}")
    threads = [thread.name for thread in threading.enumerate() if "lightning-pgroup" in thread.name]
    if threads:
        found.append(f"threads: {threads}")
    if _handlers() != handlers:
        found.append("signal handlers")
    return found


def _collect(processes, folder: Path, deadline: float) -> list[RankResult]:
    results = []
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        results.append(RankResult(exit_code=process.exitcode))
    hung = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for rank in hung:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGUSR1)
    for rank in hung:
        _wait_for_stack(folder / f"{rank}.stack")
        processes[rank].kill()
        processes[rank].join()
        results[rank].stack = (folder / f"{rank}.stack").read_text() or "no stack"
    for rank in range(len(processes)):
        if (folder / f"{rank}.result").exists():
            exit_code, stack = results[rank].exit_code, results[rank].stack
            results[rank] = pickle.loads((folder / f"{rank}.result").read_bytes())
            results[rank].exit_code, results[rank].stack = exit_code, stack
    return results


def _wait_for_stack(path: Path) -> None:
    until = time.monotonic() + 2.0
    pause = threading.Event()
    while path.stat().st_size == 0 and time.monotonic() < until:
        pause.wait(0.05)
