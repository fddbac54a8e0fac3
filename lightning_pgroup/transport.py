"""Ends groups, with a bound: an orderly shutdown that is given up on time, and an abort that waits for nobody."""

import logging
import threading
import time
from datetime import timedelta

from torch.distributed import ProcessGroup

from lightning_pgroup import c10d
from lightning_pgroup.bounded import run_bounded

logger = logging.getLogger(__name__)

ABORT_TIMEOUT = timedelta(seconds=5)
"""How long an abort may take; backends are expected to return from it at once."""

RELEASE_TIMEOUT = timedelta(seconds=1)
"""How long the end of a process waits for the destructors of aborted groups."""

_releasing: list[threading.Thread] = []


def shut_down(groups: list[ProcessGroup], timeout: timedelta) -> bool:
    """Shut groups down in the given order and release them. Not collective; does not wait for other ranks.

    The destructors of groups run in here too: gloo's waits for work that is still pending, so it needs the bound as well.

    Args:
        groups: Taken out of torch's bookkeeping before. The list is empty afterwards if all ended in time.
        timeout: How long to wait for all of them together.

    Returns:
        Whether all ended in time. If not, the list still holds them, for :func:`abort`.

    Raises:
        Exception: What a backend's shutdown raised.
    """

    def run() -> None:
        problems = [problem for group in groups if (problem := _shut_down_one(group)) is not None]
        # What still refers to a group from outside (a DDP wrapper, say) keeps it, and its sockets, until it goes too.
        groups.clear()
        if problems:
            raise problems[0]

    return run_bounded(run, timeout, "shutdown")


def abort(groups: list[ProcessGroup]) -> bool:
    """Abort groups and give them up. Not collective; waits at most :data:`ABORT_TIMEOUT`.

    Args:
        groups: Taken out of torch's bookkeeping before. The caller must not use them again.

    Returns:
        Whether the backends returned in time.
    """
    _releasing[:] = [thread for thread in _releasing if thread.is_alive()]
    doomed = list(groups)
    groups.clear()

    def run() -> None:
        for group in doomed:
            try:
                group.abort()
            except Exception as error:
                logger.debug("abort of group %s: %s", group.group_name, error)

    finished = run_bounded(run, ABORT_TIMEOUT, "abort")
    # A destructor may wait for work that never ends; whoever aborts must not wait for it.
    thread = threading.Thread(target=doomed.clear, name="lightning-pgroup-release", daemon=True)
    _releasing.append(thread)
    thread.start()
    return finished


def finish_releases(timeout: timedelta) -> None:
    """Wait, at most ``timeout``, for the destructors of aborted groups: the interpreter must not end in the middle of one."""
    deadline = time.monotonic() + timeout.total_seconds()
    while _releasing:
        _releasing.pop().join(max(0.0, deadline - time.monotonic()))


def _shut_down_one(group: ProcessGroup) -> Exception | None:
    try:
        c10d.finish_hooks(group)
        group.shutdown()
    except Exception as error:
        return error
    return None
