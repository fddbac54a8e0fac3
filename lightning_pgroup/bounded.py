"""Calls into code that may never return, with a bound on how long we wait for it."""

import threading
from collections.abc import Callable
from datetime import timedelta


def run_bounded(function: Callable[[], None], timeout: timedelta, name: str) -> bool:
    """Run ``function`` on a daemon thread and wait for it at most ``timeout``.

    Args:
        function: What to run. It goes on running if it takes longer; nothing can stop it. While the interpreter exits, a
            Python that starts no thread any more (3.12) runs it right here, without the bound.
        timeout: The bound.
        name: Name of the thread, shown in a dump of all stacks.

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
        if not done.wait(timeout.total_seconds()):
            return False
        thread.join()
    if problem:
        raise problem[0]
    return True
