"""Calls into code that may never return, with a bound on the wait; and calls that no interrupt may stop midway."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

_hurry = threading.Event()
_SLICE = 0.05
_PAUSE = 0.01


class _Call:
    """A function that runs once, on the thread that comes to it first, and what it has raised."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.done = threading.Event()
        self._function = function
        self._claimed = threading.Lock()
        self._problem: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def start(self, name: str) -> None:
        """Run it on a daemon thread; or right here, where Python 3.12 starts none any more, as the interpreter exits."""
        thread = threading.Thread(target=self._run, name=f"lightning-pgroup-{name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._run()
        else:
            self._threads.append(thread)

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
            self.done.set()


def run_bounded(function: Callable[[], None], timeout: timedelta, name: str, *, impatient: bool = False) -> bool:
    """Run ``function`` on a daemon thread and wait for it at most ``timeout``.

    Args:
        function: What to run. It goes on running if it takes longer; nothing can stop it. While the interpreter exits, a
            Python that starts no thread any more (3.12) runs it right here, without the bound.
        timeout: The bound.
        name: Name of the thread, shown in a dump of all stacks.
        impatient: Whether an interrupt of the shielded call around this one (:func:`run_shielded`) ends the wait.

    Returns:
        Whether it ended in time.

    Raises:
        Exception: What ``function`` raised, if it ended in time.
    """
    call = _Call(function)
    call.start(name)
    if not (_wait_impatiently(call.done, timeout) if impatient else call.done.wait(timeout.total_seconds())):
        return False
    call.finish()
    return True


def wait_until(condition: Callable[[], bool], timeout: timedelta) -> bool:
    """Ask until ``condition`` holds, a hundred times a second, at most ``timeout``.

    An interrupt of the shielded call around this one (:func:`run_shielded`) ends the wait.

    Returns:
        Whether it holds.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while not (holds := condition()):
        if time.monotonic() >= deadline or _hurry.wait(_PAUSE):
            break
    return holds


def _wait_impatiently(done: threading.Event, timeout: timedelta) -> bool:
    deadline = time.monotonic() + timeout.total_seconds()
    while not done.wait(max(0.0, min(_SLICE, deadline - time.monotonic()))):
        if _hurry.is_set() or time.monotonic() >= deadline:
            return False
    return True


def run_shielded(function: Callable[[], None], name: str) -> None:
    """Run ``function`` to its end, whatever signals arrive meanwhile; what their handlers raise is raised afterwards.

    Handlers run on the main thread, between any two steps of it. So the work is done on a thread of its own, and the main
    thread only waits: as long as ``function`` takes, which must be bounded.

    Args:
        function: What to run, once.
        name: Name of the thread, shown in a dump of all stacks.

    Raises:
        BaseException: What a handler raised meanwhile, else what ``function`` raised.
    """
    if threading.current_thread() is not threading.main_thread():
        function()
        return
    interrupts: list[BaseException] = []
    call = _Call(function)
    while not call.done.is_set():
        try:
            call.start(name)
            call.done.wait()
        except BaseException as interrupt:
            interrupts.append(interrupt)
            _hurry.set()
    _hurry.clear()  # or a later destroy, with no interrupt of its own, would not be waited for
    if interrupts:
        raise interrupts[0]
    call.finish()
