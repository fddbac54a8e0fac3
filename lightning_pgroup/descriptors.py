"""Room for the connections of strangers in the process that hosts a store.

Each connection to the store costs its host a descriptor, and the store can not turn one away. Under the usual soft limit of
1,024 a thousand silent connections would leave none for the host's own files and sockets.
"""

import contextlib
import logging
import sys

ROOM = 8192
"""The number of descriptors that the host of a store may have open, if the system lets it."""

logger = logging.getLogger(__name__)


def make_room() -> None:
    """Raise this process's soft limit of open descriptors to :data:`ROOM`, or to its hard limit. Local, never raises.

    A limit that is higher stays as it is. Called on the process that hosts a store, before it does.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ROOM if hard == resource.RLIM_INFINITY else min(ROOM, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(OSError, ValueError):  # a system may allow less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        logger.debug("this process hosts a store and may have %d descriptors open now, not %d", wanted, soft)
