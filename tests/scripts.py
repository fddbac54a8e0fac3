"""Runs of whole scripts, as users start them: in a session of its own, with a deadline, and no process left behind.

All processes of a run have its mark in their environment, since torchrun gives each of its workers a session of its own, and
one whose agent was killed has no parent that would lead to it.

Scripts start warm, from a Python that has imported torch and Lightning (`zygote.py`), unless ``cold`` says that the start
itself matters, or what the process is to its parent. LIGHTNING_PGROUP_TESTS_COLD=1 starts all of them cold.
"""

import contextlib
import os
import select
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests import warm
from tests.zygote import MARK, WHOLE_END

ROOT = Path(__file__).parent.parent

PREAMBLE = """
import logging, os, sys, warnings
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import torch, torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning_pgroup import *
from tests.models import TinyData, TinyModel, make_trainer, whats

def say(*words):
    print(" ".join(["SAY", os.environ.get("LOCAL_RANK", "-"), *map(str, words)]) + "\\n", end="", flush=True)

def main():
"""

EPILOGUE = """
if __name__ == "__main__":
    main()
"""


@dataclass
class Run:
    code: int
    out: str
    err: str

    def said(self, rank: object = None) -> list[str]:
        """What the ranks said, sorted by rank; or what one of them said, without its number."""
        lines = [line[4:] for line in self.out.splitlines() if line.startswith("SAY ")]
        if rank is None:
            return sorted(lines)
        return [line.split(" ", 1)[1] for line in lines if line.startswith(f"{rank} ")]


def start(
    body: str, folder: Path, *, launcher: list[str] | None = None, cold: bool = False, whole_end: bool = False
) -> subprocess.Popen:
    """Start a script whose ``main`` has ``body``. What it means to start ``cold`` and to end as a whole, `zygote.py` says."""
    path = folder / "script.py"
    path.write_text(PREAMBLE + textwrap.indent(textwrap.dedent(body), "    ") + EPILOGUE)
    return start_command([*(launcher or [sys.executable]), str(path)], folder, cold=cold, whole_end=whole_end)


def start_command(command: list[str], folder: Path, *, cold: bool = False, whole_end: bool = False) -> subprocess.Popen:
    """Start a command as a user's shell would, in a session of its own."""
    if not cold:
        command = [warm.python() if word == sys.executable else word for word in command]
    environ = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: uuid.uuid4().hex}
    environ |= {WHOLE_END: "1"} if whole_end else {}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=folder, start_new_session=True
    )
    process.mark = environ[MARK]
    return process


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
LAUNCHERS = {"python": None, "torchrun": TORCHRUN}


def listen(process: subprocess.Popen, word: str, count: int = 2, timeout: float = 60) -> dict[str, list[str]]:
    """Wait until ``count`` ranks have said a line that starts with ``word``; returns the rest of that line, by rank."""
    until, found = time.monotonic() + timeout, {}
    while len(found) < count:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
        chunk = os.read(process.stdout.fileno(), 65536) if ready else b""
        if not chunk:
            kill(process)
            raise AssertionError(f"{word!r} was not said by {count} ranks: {_heard(process)}\n{process.communicate()}")
        process.heard = _heard(process) + chunk.decode()
        for line in _heard(process).splitlines():
            if line.startswith("SAY ") and line.split()[2:3] == [word]:
                found[line.split()[1]] = line.split()[3:]
    return found


def _heard(process: subprocess.Popen) -> str:
    return getattr(process, "heard", "")


def finish(process: subprocess.Popen, timeout: float = 90) -> Run:
    """Wait for a script; all its processes are killed when it takes too long, or leaves one behind."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as expired:
        kill(process)
        out, err = process.communicate()
        raise AssertionError(f"the script hung for {timeout} s:\n{out}\n{err}") from expired
    left = _left_of(process)
    kill(process)
    assert not left, f"the script has left processes: {left}\n{out}\n{err}"
    return Run(process.returncode, _heard(process) + out, err)


def run(body: str, folder: Path, *, timeout: float = 90, **kwargs) -> Run:
    """Start a script and wait for it."""
    return finish(start(body, folder, **kwargs), timeout)


def kill(process: subprocess.Popen) -> None:
    """Kill all processes of a script, those that an agent starts meanwhile too."""
    while left := processes_of(process):
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(left, timeout=5)


def processes_of(process: subprocess.Popen) -> list[psutil.Process]:
    """All processes of a script that live, whatever their session and their parent."""
    found, sessions = {}, {process.pid}
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if one.status() != psutil.STATUS_ZOMBIE:
                found[one] = (os.getsid(one.pid), one.environ().get(MARK) == process.mark)
    sessions |= {session for session, marked in found.values() if marked}
    return [one for one, (session, marked) in found.items() if marked or session in sessions]


def _left_of(process: subprocess.Popen) -> list[psutil.Process]:
    """The processes of a script that go on, not those that were about to end with their parent."""
    until, pause = time.monotonic() + 2.0, threading.Event()
    while (left := processes_of(process)) and time.monotonic() < until:
        pause.wait(0.05)
    return left
