"""Ranks for tests: a function on forked processes, with a hard deadline, and the stacks of those that hang."""

import contextlib
import ctypes
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
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_pgroup.errors import PGroupError, RanksFailedError
from lightning_pgroup.process_state import existing_process_state, process_state
from lightning_pgroup.store import LOOPBACK, Endpoint, listen
from lightning_pgroup.team import Invitation

DEADLINE = 60.0
"""How many seconds the ranks have, unless the caller says otherwise."""

_DEATH_POLL = 0.5
_EXIT_TIMEOUT = 2.0
_STACK_TIMEOUT = 2.0
_STACK_POLL = 0.05
_OTHER_LAUNCHERS = ("SLURM_", "TORCHELASTIC_")
_PR_SET_PDEATHSIG = 1

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a rank says when its function is done, or what became of it instead, as words that follow "rank 0"."""

    value: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Setting:
    """What all ranks of one run are given."""

    size: int
    port: int
    listener: socket.socket
    invitation: Invitation
    folder: Path
    on_interrupt: Any


@dataclass(frozen=True, slots=True)
class _Rank:
    """One forked rank, seen from the process that has forked it."""

    process: ForkProcess
    answers: Connection
    stack: Path


class ForkedRanks:
    """Runs functions on forked ranks of this process, as a launcher would have started them.

    The ranks find ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` in their environment, and no
    process group: the function makes its own.

    Args:
        size: Number of ranks.
        deadline: How many seconds a run may take. Ranks that take longer are killed.

    Raises:
        ValueError: No ranks, or no time.
    """

    def __init__(self, size: int, *, deadline: float = DEADLINE) -> None:
        if size < 1 or not deadline > 0:
            raise ValueError(f"`ranks` needs at least 1 rank and more than 0 seconds, got {size} ranks and {deadline} s.")
        self._size = size
        self._deadline = deadline

    def __call__(self, function: Callable[[int], _T]) -> list[_T]:
        """Run ``function(rank)`` on each rank; blocks at most ``deadline`` and a few seconds for the stacks of those that hang.

        Returns:
            What the ranks returned, pickled, in the order of the ranks.

        Raises:
            RanksFailedError: With the traceback of each rank that raised, the stacks of each that hung, and the exit code of
                each that died.
            PGroupError: This process can not be forked into ranks: it has a process group, or uses CUDA.
        """
        if dist.is_available() and dist.is_initialized():
            raise PGroupError(
                "Ranks can not be forked from a process that has a process group: they would inherit it, without the threads"
                " that it needs. Destroy it first, or use `ranks` and a group in different tests."
            )
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise PGroupError("Ranks can not be forked from a process that uses CUDA. Let the ranks be the first to use it.")
        with _forked(function, self._size) as ranks:
            answers = self._collect(ranks)
        failed = [f"rank {number} {answer.error}" for number, answer in enumerate(answers) if answer.error]
        if failed:
            raise RanksFailedError("\n".join(failed))
        return [answer.value for answer in answers]

    def _collect(self, ranks: list[_Rank]) -> list[_Answer]:
        """What each rank says, or what became of it; those that hang are killed."""
        until = time.monotonic() + self._deadline
        answers: dict[int, _Answer] = {}
        while len(answers) < len(ranks) and time.monotonic() < until:
            waiting = {rank.answers: number for number, rank in enumerate(ranks) if number not in answers}
            ready = wait(list(waiting), min(_DEATH_POLL, max(0.0, until - time.monotonic())))
            for one, number in waiting.items():
                # A child of a rank that has died may still hold its end of the pipe.
                if one in ready or ranks[number].process.exitcode is not None:
                    answers[number] = _read(ranks[number])
        hung = [number for number in range(len(ranks)) if number not in answers]
        for number in hung:
            text = f"hung, and was killed after {self._deadline:g} s. Its stacks, the innermost call first:\n"
            answers[number] = _Answer(error=text + _stacks(ranks[number]))
        for number in hung:
            ranks[number].process.kill()
        return [answers[number] for number in range(len(ranks))]


@contextlib.contextmanager
def _forked(function: Callable[[int], Any], size: int) -> Iterator[list[_Rank]]:
    """Fork the ranks. They live until the block ends, so that none misses a store that another one hosts."""
    context = multiprocessing.get_context("fork")
    ranks: list[_Rank] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        listener = stack.enter_context(contextlib.closing(listen(LOOPBACK)))
        setting = _Setting(
            size=size,
            port=stack.enter_context(_reserved_port()),
            listener=listener,
            invitation=Invitation.to(Endpoint(*listener.getsockname()[:2]), size, 0),
            folder=folder,
            on_interrupt=signal.getsignal(signal.SIGINT) or signal.default_int_handler,
        )
        released, release = os.pipe()
        try:
            with _uninterrupted(), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads
                for number in range(size):
                    receiver, sender = context.Pipe(duplex=False)
                    stack.callback(receiver.close)
                    with contextlib.closing(sender):
                        arguments = (function, number, setting, sender, (released, release))
                        process = context.Process(target=_rank_main, args=arguments, name=f"rank {number}")
                        process.start()
                    ranks.append(_Rank(process, receiver, folder / f"{number}.stack"))
            listener.close()  # else it would accept in the place of rank 0
            yield ranks
        except BaseException:
            for rank in ranks:
                rank.process.kill()
            raise
        finally:
            os.close(release)
            os.close(released)
            _end(ranks)


def _end(ranks: list[_Rank]) -> None:
    until = time.monotonic() + _EXIT_TIMEOUT
    for rank in ranks:
        rank.process.join(max(0.0, until - time.monotonic()))
        if rank.process.exitcode is None:
            rank.process.kill()
            rank.process.join()
        rank.process.close()


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that nobody else gets while the block lasts, and that a rank can listen on all the same.

    It is bound and not listened on. On Linux another socket may then bind it, if both say ``SO_REUSEADDR`` as torch's does.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        yield holder.getsockname()[1]


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the block ends, so that no process is forked that nobody knows of."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield  # Python handles no signal here
        return
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        signal.raise_signal(signal.SIGINT)


def _rank_main(
    function: Callable[[int], Any], rank: int, setting: _Setting, answers: Connection, pipe: tuple[int, int]
) -> None:
    released, release = pipe
    os.close(release)
    signal.signal(signal.SIGINT, setting.on_interrupt)
    _die_with_parent()
    stacks = (setting.folder / f"{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        _become_rank(rank, setting)
        value = function(rank)
        state = existing_process_state()
        if state is not None:
            state.end()
        message = pickle.dumps(_Answer(value=value))
    except BaseException as error:
        message = pickle.dumps(_Answer(error="raised:\n" + "".join(traceback.format_exception(error))))
        released = -1  # a peer that waits for this rank sees it end
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    answers.send_bytes(message)
    if released >= 0:
        os.read(released, 1)
    os._exit(0)  # nothing that the parent wants to do at its exit is to be done here


def _become_rank(rank: int, setting: _Setting) -> None:
    for name in [name for name in os.environ if name.startswith(_OTHER_LAUNCHERS)]:
        del os.environ[name]
    size = str(setting.size)
    os.environ.update(RANK=str(rank), WORLD_SIZE=size, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=size, NODE_RANK="0")
    os.environ.update(MASTER_ADDR=LOOPBACK, MASTER_PORT=str(setting.port))
    torch.set_num_threads(1)  # the threads that the parent's computations have used are not there
    membership = process_state().membership
    if rank == 0:
        membership.host(setting.listener)
    else:
        setting.listener.close()
    membership.join(setting.invitation)


def _die_with_parent() -> None:
    with contextlib.suppress(Exception):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _read(rank: _Rank) -> _Answer:
    """The answer of a rank that has given one, or has died."""
    message = b""
    if rank.answers.poll():
        with contextlib.suppress(EOFError, OSError):
            message = rank.answers.recv_bytes()
    if not message:
        rank.process.join(_EXIT_TIMEOUT)
        return _Answer(error=f"died with {_describe_exit(rank.process.exitcode)}")
    try:
        answer = pickle.loads(message)
    except Exception:
        return _Answer(error=f"returned what can not be unpickled:\n{traceback.format_exc()}")
    assert isinstance(answer, _Answer)
    return answer


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _stacks(rank: _Rank) -> str:
    """The stacks of all threads of a rank that hangs, as it writes them when it gets the signal for that."""
    assert rank.process.pid is not None
    os.kill(rank.process.pid, signal.SIGUSR1)
    text, pause, until = "", threading.Event(), time.monotonic() + _STACK_TIMEOUT
    while time.monotonic() < until:
        pause.wait(_STACK_POLL)
        before, text = text, rank.stack.read_text() if rank.stack.exists() else ""
        if text and text == before:
            break
    return text or "it gave no stack\n"
