"""The doctor's ranks, seen from the doctor: started, told what to do, watched with a deadline, and gone at the end.

The doctor itself needs neither torch nor a network, so that nothing that is broken can stop it.
"""

import contextlib
import errno
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lightning_pgroup.doctor_rank import EXIT

Answer = dict[str, Any]

_GRACE = 5.0
_STACK_TIMEOUT = 2.0
_POLL = 0.1
_END = 5.0
_CALLS = 13
_START = (
    "import json, sys; path, *rest = json.loads(sys.argv[1]); sys.path[:] = path;"
    " from lightning_pgroup.doctor_rank import main; main(*rest)"
)


@dataclass(slots=True)
class Outcome:
    """What became of one step on all ranks.

    Attributes:
        answers: By rank, of those that did it.
        errors: By rank, of those that raised.
        died: By rank, how those ended that did not live to answer, in words.
        hung: By rank, the stacks of those that did not answer in time and were killed.
        waited: For how long.
    """

    answers: dict[int, Answer] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    died: dict[int, str] = field(default_factory=dict)
    hung: dict[int, str] = field(default_factory=dict)
    waited: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether all did it."""
        return not (self.errors or self.died or self.hung)

    @property
    def is_over(self) -> bool:
        """Whether a rank is gone, so that nothing more can be done together."""
        return bool(self.died or self.hung)


class Ranks:
    """Processes of the doctor. A context manager: none is left when the block ends, however it ends.

    Args:
        size: How many.
        backend: The backend to check.
        environ: Their environment.
        patience: Bound of each wait of one rank for another, in seconds.

    Raises:
        OSError: On entry: the system does not start so many.
    """

    def __init__(self, size: int, backend: str, environ: Mapping[str, str], patience: float) -> None:
        self._arguments = [(rank, size, backend, patience) for rank in range(size)]
        self._environ = dict(environ)
        self._ranks: list[_Rank] = []
        self._heard: queue.SimpleQueue[tuple[int, Answer | None]] = queue.SimpleQueue()
        self._gone: set[int] = set()

    def __enter__(self) -> "Ranks":
        try:
            for number, arguments in enumerate(self._arguments):
                self._ranks.append(_Rank(number, arguments, self._environ, self._heard))
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *args: object) -> None:
        self.kill()

    def tell(self, step: str, *, to: Sequence[int] | None = None, given: object = None) -> None:
        """Tell ranks what to do. Does not wait.

        Args:
            step: A method of the rank's steps.
            to: The ranks; by default all.
            given: Its argument, if it takes one.
        """
        for number in range(len(self._ranks)) if to is None else to:
            self._ranks[number].tell({"step": step, "given": given})

    def collect(self, timeout: float, *, of: Sequence[int] | None = None) -> Outcome:
        """Wait for the answers of ranks to one step. When one has failed, the others have a few seconds more.

        Kills all if one has died or hangs.

        Args:
            timeout: How long to wait.
            of: The ranks; by default all.
        """
        outcome, start = Outcome(), time.monotonic()
        until, waiting = start + timeout, set(range(len(self._ranks)) if of is None else of)
        while waiting:
            for number in waiting & self._gone:
                outcome.died[number] = self._ranks[number].describe_end()
                waiting.discard(number)
            if not waiting:
                break
            if not outcome.is_good:
                until = min(until, time.monotonic() + _GRACE)
            try:
                number, answer = self._heard.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if answer is None:
                self._gone.add(number)
            elif number in waiting:
                waiting.discard(number)
                kind = outcome.errors if "error" in answer else outcome.answers
                kind[number] = answer.get("error", answer)
        outcome.waited = time.monotonic() - start
        outcome.hung = {number: self._ranks[number].stacks() for number in sorted(waiting)}
        if outcome.is_over:
            self.kill()
        return outcome

    def finish(self, timeout: float) -> tuple[Outcome, dict[int, str]]:
        """Let all ranks exit, and wait for that.

        Returns:
            The outcome, and by rank what was printed meanwhile. A rank that has left a process behind counts as one that died.
        """
        printed_before = [len(rank.printed()) for rank in self._ranks]
        self.tell(EXIT)
        outcome, start = Outcome(), time.monotonic()
        for number, rank in enumerate(self._ranks):
            rank.join(max(0.0, start + timeout - time.monotonic()))
            if rank.process.returncode is None:
                outcome.hung[number] = rank.stacks()
            elif rank.process.returncode != 0:
                outcome.died[number] = rank.describe_end()
            elif left := _session(rank.process.pid):
                outcome.died[number] = f"left processes behind: {', '.join(map(str, left))}"
            else:
                outcome.answers[number] = {}
        outcome.waited = time.monotonic() - start
        self.kill()
        texts = {number: rank.printed()[printed_before[number] :].strip() for number, rank in enumerate(self._ranks)}
        return outcome, {number: text for number, text in texts.items() if text}

    def kill(self) -> None:
        """End what still runs. May be called again."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.close()


class _Rank:
    """One process, in a session of its own, so that Ctrl-C reaches only the doctor, which then ends all of it."""

    def __init__(
        self, number: int, arguments: tuple[object, ...], environ: dict[str, str], heard: "queue.SimpleQueue[Any]"
    ) -> None:
        self._number, self._heard, self._text = number, heard, bytearray()
        given = json.dumps([[os.path.abspath(entry) for entry in sys.path], *arguments])
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
        self._threads: list[threading.Thread] = []
        try:
            for work in (self._read_answers, self._read_errors):
                thread = threading.Thread(target=work, daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException as error:
            self.kill()
            self.close()
            if isinstance(error, RuntimeError):  # so Python says that the system starts no more threads
                raise OSError(errno.EAGAIN, str(error)) from error
            raise

    def tell(self, command: Answer) -> None:
        with contextlib.suppress(OSError):  # it has died, which its other pipe says
            self._pipe(self.process.stdin).write(json.dumps(command).encode() + b"\n")
            self._pipe(self.process.stdin).flush()

    def printed(self) -> str:
        """What it has printed, its own stacks too."""
        return bytes(self._text).decode(errors="replace")

    def join(self, timeout: float) -> None:
        """Wait for its end, and for all that it has printed."""
        until = time.monotonic() + timeout
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
            for thread in self._threads:
                thread.join(max(0.0, min(_END, until - time.monotonic())))

    def describe_end(self) -> str:
        """How it has ended, with the end of what it has printed."""
        self.join(_END)
        code = self.process.returncode
        text = "closed its output, and lives" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                text = f"was ended by {signal.Signals(-code).name}"
        last = [line for line in self.printed().strip().splitlines() if line.strip()][-1:]
        return text + (f" ({last[0].strip()})" if last else "")

    def stacks(self) -> str:
        """The stacks of all its threads, the innermost call first; it is to be killed after that."""
        if not hasattr(signal, "SIGUSR1") or self.process.poll() is not None:
            return ""
        before = len(self._text)
        self.process.send_signal(signal.SIGUSR1)
        until, pause, size = time.monotonic() + _STACK_TIMEOUT, threading.Event(), -1
        while time.monotonic() < until and not size == len(self._text) > before:
            size = len(self._text)
            pause.wait(_POLL)
        return _clipped(bytes(self._text[before:]).decode(errors="replace"))

    def kill(self) -> None:
        if self.process.returncode is None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if hasattr(os, "killpg"):
                    os.killpg(self.process.pid, signal.SIGKILL)
                else:
                    self.process.kill()
        for left in _session(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)

    def close(self) -> None:
        self.process.wait()
        for thread in self._threads:
            thread.join(_END)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):
                self._pipe(pipe).close()

    def _read_answers(self) -> None:
        for line in self._pipe(self.process.stdout):
            with contextlib.suppress(ValueError):
                self._heard.put((self._number, json.loads(line)))
        self._heard.put((self._number, None))

    def _read_errors(self) -> None:
        while chunk := os.read(self._pipe(self.process.stderr).fileno(), 65536):
            self._text += chunk

    @staticmethod
    def _pipe(pipe: Any) -> BinaryIO:
        assert pipe is not None
        return pipe  # type: ignore[no-any-return]


def _clipped(stacks: str) -> str:
    """The innermost calls of each thread, without those of Python's own machinery for imports, and without our own thread."""
    lines: list[str] = []
    for block in stacks.partition("\n[")[0].strip().split("\n\n"):
        if "in _listen" in block:
            continue
        calls = [line for line in block.splitlines() if "<frozen importlib" not in line]
        lines += [*calls[:_CALLS], *(["  ..."] if len(calls) > _CALLS else []), ""]
    return "\n".join(lines).rstrip()


def _session(leader: int) -> list[int]:
    """The other processes of a rank's session, which it has started and left. Linux only; elsewhere none are known."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # no more descriptors, perhaps
        for folder in Path("/proc").glob("[0-9]*") if sys.platform.startswith("linux") else ():
            with contextlib.suppress(OSError, ValueError):
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and int(folder.name) != leader and state != "Z":
                    found.append(int(folder.name))
    return found
