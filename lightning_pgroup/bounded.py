"""Calls into code that may never return, with a bound on the wait; and calls that no interrupt may stop midway."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

_hurry = threading.Event()
_SLICE = 0.05


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
    problem: list[BaseException] = []
    done = threading.Event()

    def target() -> None:
        try:
            function()
        except BaseException as error:
            problem.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=target, name=f"lightning-pgroup-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # Python 3.12 starts no thread any more once the interpreter has begun to exit.
        target()
    else:
        if not (_wait_impatiently(done, timeout) if impatient else done.wait(timeout.total_seconds())):
            return False
        thread.join()
    if problem:
        raise problem[0]
    return True


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
    problem: list[BaseException] = []
    interrupts: list[BaseException] = []
    claimed, done = threading.Lock(), threading.Event()
    _hurry.clear()

    def target() -> None:
        if not claimed.acquire(blocking=False):
            return
        try:
            function()
        except BaseException as error:
            problem.append(error)
        finally:
            done.set()

    while not done.is_set():
        try:
            thread = threading.Thread(target=target, name=f"lightning-pgroup-{name}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                target()  # Python 3.12 starts no thread any more once the interpreter has begun to exit
            done.wait()
            thread.join()
        except BaseException as interrupt:
            interrupts.append(interrupt)
            _hurry.set()
    if interrupts:
        raise interrupts[0]
    if problem:
        raise problem[0]
