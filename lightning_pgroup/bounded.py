"""Calls into code that may never return, with a bound on the wait."""

import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from lightning_pgroup.interrupts import attentively, in_a_hurry

_SLICE = 0.05
_PAUSE = 0.01
_SHORT_PAUSE = 0.0005


class Call:
    """A function that runs once, on the thread that comes to it first, and what it has raised.

    Its end is a flag and a lock, and no ``threading.Event``: a signal in the middle of that would leave the lock of the event
    locked for ever.

    Attributes:
        done: Whether it has ended.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self.done = False
        self._gate = threading.Lock()
        self._gate.acquire()
        self._function = function
        self._claimed = threading.Lock()
        self._problem: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def start(self, name: str) -> None:
        """Run it on a daemon thread; or right here, where Python 3.12 starts none any more, as the interpreter exits."""
        thread = threading.Thread(target=self._run, name=f"lightning-pgroup-{name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if "thread" not in str(error):  # a signal in the middle of Python's own wait, hidden by what came of that
                raise error.__context__ or error from None
            self._run()
        else:
            self._threads.append(thread)

    def wait(self, timeout: float) -> None:
        """Wait for its end at most ``timeout`` seconds, or not even that; ask :attr:`done` afterwards."""
        if not self.done:
            self._gate.acquire(timeout=min(timeout, threading.TIMEOUT_MAX))

    def wait_for_end(
        self,
        timeout: timedelta,
        *,
        impatient: bool = False,
        attentive: bool = False,
        enough: Callable[[], bool] | None = None,
    ) -> bool:
        """Wait for its end at most ``timeout``.

        Args:
            timeout: The bound.
            impatient: Whether it ends early where the work around it is :func:`~lightning_pgroup.interrupts.in_a_hurry`.
            attentive: Whether signals are heard meanwhile; see :func:`~lightning_pgroup.interrupts.attentively`.
            enough: Asked two thousand times a second; ends the wait as well when it holds.

        Returns:
            Whether it has ended, or ``enough`` holds.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        longest = _SLICE if enough is None else _SHORT_PAUSE
        while not self.done and not (enough is not None and enough()):
            left = deadline - time.monotonic()
            if left <= 0 or (impatient and in_a_hurry()):
                return False
            length = min(longest, left)  # in slices, since whoever else waits may have got hold of the gate
            if attentive:
                attentively(functools.partial(self.wait, length))
            else:
                self.wait(length)
        return True

    def finish(self) -> None:
        """Leave no thread of it behind, once it is done, and raise what it has raised."""
        for thread in self._threads:
            thread.join()
        if self._problem:
            raise self._problem[0]

    def _run(self) -> None:
        if not self._claimed.acquire(blocking=False):
            return
        try:
            self._function()
        except BaseException as error:
            self._problem.append(error)
        finally:
            self.done = True
            self._gate.release()


def run_bounded(
    function: Callable[[], None], timeout: timedelta, name: str, *, impatient: bool = False, attentive: bool = False
) -> bool:
    """Run ``function`` on a daemon thread and wait for it at most ``timeout``.

    Args:
        function: What to run. It goes on running if it takes longer; nothing can stop it. While the interpreter exits, a
            Python that starts no thread any more (3.12) runs it right here, without the bound.
        timeout: The bound.
        name: Name of the thread, shown in a dump of all stacks.
        impatient: Whether the wait ends early where the work around it is :func:`~lightning_pgroup.interrupts.in_a_hurry`.
        attentive: Whether signals are heard meanwhile; see :func:`~lightning_pgroup.interrupts.attentively`.

    Returns:
        Whether it ended in time.

    Raises:
        Exception: What ``function`` raised, if it ended in time.
    """
    call = Call(function)
    call.start(name)
    if not call.wait_for_end(timeout, impatient=impatient, attentive=attentive):
        return False
    call.finish()
    return True


def time_left(deadline: float) -> timedelta:
    """The time until ``deadline``, by the monotonic clock; nothing after it."""
    return timedelta(seconds=max(0.0, deadline - time.monotonic()))


def wait_until(condition: Callable[[], bool], timeout: timedelta) -> bool:
    """Ask until ``condition`` holds, a hundred times a second, at most ``timeout``.

    It ends early where the work around it is :func:`~lightning_pgroup.interrupts.in_a_hurry`.

    Returns:
        Whether it holds.
    """
    deadline, pause = time.monotonic() + timeout.total_seconds(), threading.Event()
    while not (holds := condition()):
        if in_a_hurry() or time.monotonic() >= deadline:
            break
        pause.wait(_PAUSE)
    return holds
