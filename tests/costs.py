"""Counts what a create, a reuse and a destroy ask of the store and of the system. Not how long it takes."""

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

OPERATIONS = (
    "set",
    "get",
    "add",
    "wait",
    "compare_set",
    "delete_key",
    "multi_get",
    "multi_set",
    "append",
    "num_keys",
    "list_keys",
    "clone",
)
"""Not ``check``, by which a rank that waits looks for failures now and then: how often depends on how long it waits."""


class Costs:
    """What this process has cost since :meth:`begin`."""

    def __init__(self) -> None:
        self.store: Counter[str] = Counter()
        self.threads = 0
        self._patch = pytest.MonkeyPatch()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is asked of any store, and the threads that Python starts."""
        for kind in (TCPStore, PrefixStore):
            for name in OPERATIONS:
                if hasattr(kind, name):
                    self._patch.setattr(kind, name, self._counting(name, getattr(kind, name)))
        start = threading.Thread.start

        def start_counted(thread):
            self.threads += 1
            start(thread)

        self._patch.setattr(threading.Thread, "start", start_counted)
        try:
            yield
        finally:
            self._patch.undo()

    def _counting(self, name, operation):
        def counted(store, *args):
            self.store[name] += 1
            return operation(store, *args)

        return counted

    def take(self) -> dict[str, int]:
        """What was counted since the last call, with the sockets and threads that are there now."""
        costs = dict(sorted(self.store.items())) | {"threads started": self.threads}
        self.store.clear()
        self.threads = 0
        return costs | {"sockets": sockets(), "threads": len(os.listdir("/proc/self/task"))}


def sockets() -> int:
    """How many sockets this process has open."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
        except OSError:  # the descriptor of the listing itself
            continue
    return found


CALLS = ("socket", "bind", "listen", "connect", "accept4", "clone", "clone3", "fork", "vfork", "execve", "fsync", "fdatasync")
"""System calls that connect, start or wait for a disk; those of a wait, whose number depends on time, are not among them."""


class Trace:
    """The system calls of this process, counted by ``strace`` between :meth:`mark` and the next one.

    Raises:
        OSError: There is no ``strace``, or it may not trace.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        traced = f"trace={','.join((*CALLS, 'faccessat', 'access', 'faccessat2'))}"
        command = ["strace", "-f", "-qq", "-e", traced, "-e", "signal=none", "-o", str(file), "-p", str(os.getpid())]
        self._strace = subprocess.Popen(command, stderr=subprocess.PIPE)
        until, pause = time.monotonic() + 10, threading.Event()
        while "/pgroup/attached" not in (file.read_text() if file.exists() else ""):
            if self._strace.poll() is not None or time.monotonic() > until:
                self._strace.kill()
                raise OSError(f"strace can not trace this process: {self._strace.communicate()[1]!r}")
            os.access("/pgroup/attached", os.F_OK)
            pause.wait(0.01)

    def mark(self, phase: str) -> None:
        """A phase begins."""
        os.access(f"/pgroup/phase/{phase}", os.F_OK)

    def stop(self) -> dict[str, dict[str, int]]:
        """End it; returns the number of calls by phase and name."""
        self._strace.send_signal(signal.SIGINT)
        self._strace.communicate(timeout=10)
        counts: dict[str, Counter[str]] = {}
        phase = ""
        for line in self._file.read_text().splitlines():
            call = line.split(maxsplit=1)[1]
            if "/pgroup/phase/" in call:
                phase = call.split("/pgroup/phase/")[1].split('"')[0]
                counts[phase] = Counter()
            elif phase and "(" in call and (name := call.split("(")[0]) in CALLS:
                counts[phase][name] += 1
        return {name: dict(sorted(one.items())) for name, one in counts.items()}
