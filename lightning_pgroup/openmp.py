"""The threads of GNU OpenMP, which a fork does not copy.

Torch computes on them as soon as a tensor is large enough. The pool lives as long as the thread that has used it; a forked
process inherits the list of its threads, but not the threads, and waits for them for ever in its first computation on more than
one. LLVM's and Intel's OpenMP look after forks themselves.
"""

import ctypes
import logging
from pathlib import Path

_LIBRARY = "libgomp"
_HARD = 2  # omp_pause_hard of the standard
_MAPS = Path("/proc/self/maps")

logger = logging.getLogger(__name__)


def let_threads_go() -> None:
    """End the threads on which the calling thread has computed, so that a process forked from it makes its own. Never raises.

    The next computation here makes new ones, within microseconds. To be called by the thread that forks, right before it does,
    outside of all computations. Local; returns at once. Nothing happens where there is no ``/proc``.
    """
    try:
        for path in _loaded():
            _pause(path)
    except Exception as error:
        logger.debug("the threads of OpenMP are not let go before a fork: %s", error)


def _pause(path: str) -> None:
    library = ctypes.CDLL(path)
    # Not `omp_pause_resource_all`, which would also look for accelerators.
    if library.omp_pause_resource(_HARD, library.omp_get_initial_device()) != 0:
        logger.debug("%s has not let its threads go before a fork: a computation is running", path)


def _loaded() -> set[str]:
    """Each copy of the library in this process: torch and scikit-learn, for example, bring one each."""
    if not _MAPS.exists():
        return set()
    paths = (line.split(maxsplit=5)[5].strip() for line in _MAPS.read_text().splitlines() if _LIBRARY in line)
    return {path for path in paths if Path(path).exists()}
