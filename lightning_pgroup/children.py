"""The ranks that this process has started as further runs of its script, and how they have ended."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

Child = subprocess.Popen[bytes]


class Children:
    """The ranks that this process has started for its present run; those of earlier runs are remembered by their exit codes.

    Attributes:
        processes: Of local rank 1 and up, in their order.
        killed: Whether this process has ended them itself, with SIGKILL.
    """

    def __init__(self) -> None:
        self.processes: Sequence[Child] = ()
        self.killed = False
        self._codes: list[int] = []

    def __iter__(self) -> Iterator[Child]:
        return iter(self.processes)

    def __len__(self) -> int:
        return len(self.processes)

    def part(self, timeout: timedelta, patience: timedelta) -> list[str]:
        """Wait for all of them to end, at most ``timeout``, and forget them.

        Those that live then are terminated, and killed after ``patience`` more.

        Returns:
            Which ranks had to be ended.
        """
        deadline, ended_here = time.monotonic() + timeout.total_seconds(), []
        for rank, child in enumerate(self.processes, start=1):
            if not _ends(child, deadline - time.monotonic()):
                ended_here.append(f"local rank {rank} (process {child.pid})")
                child.terminate()
                if not _ends(child, patience.total_seconds()):
                    child.kill()
                    child.wait()
        self._codes += self._failures()
        self.processes, self.killed = (), False
        return ended_here

    def wait(self, timeout: timedelta) -> int:
        """Wait for them to end, at most ``timeout``.

        Returns:
            The exit code of the first that failed, those of earlier runs included, as a shell shows it (128 and the signal if
            one killed it); 0 if none did, or if they were killed by this process.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        for child in self.processes:
            _ends(child, deadline - time.monotonic())
        failed = [*self._codes, *self._failures()]
        return (128 - failed[0] if failed[0] < 0 else failed[0]) if failed else 0

    def _failures(self) -> list[int]:
        ignored = (0, None, -signal.SIGKILL) if self.killed else (0, None)
        return [child.returncode for child in self.processes if child.returncode not in ignored]


def _ends(child: Child, timeout: float) -> bool:
    """Wait for a process at most ``timeout`` seconds; returns whether it has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(max(0.0, timeout))
    return child.returncode is not None
