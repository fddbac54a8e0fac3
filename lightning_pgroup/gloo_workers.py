"""The threads on which gloo runs the collectives of a group: in its destructor they leave as soon as nothing is pending.

That is before its destructor waits for gloo's event loop, and nothing else tells that moment. Torch names these threads
(``ProcessGroupGloo::runLoop``), and Linux shows the names.
"""

import os
from collections.abc import Iterable

from torch.distributed import ProcessGroup

from lightning_pgroup import c10d

_TASKS = "/proc/self/task"
_NAME = b"pt_gloo_runloop"[:15]  # as much as Linux keeps of it


class GlooWorkers:
    """The threads for some groups, counted before these are let go of.

    Args:
        groups: All of which are about to be destructed.
    """

    def __init__(self, groups: Iterable[ProcessGroup]) -> None:
        counts = [c10d.gloo_workers(group) for group in groups]
        self._threads = _workers_of_this_process()
        # No thread tells whose it is. If there are more than these groups have, whoever leaves may belong to another group: one
        # that ended before and is held by somebody, or the second one in each that `TORCH_DISTRIBUTED_DEBUG=DETAIL` makes.
        self._known = None not in counts and 0 < sum(count or 0 for count in counts) == len(self._threads)

    def have_left(self) -> bool:
        """Whether all of them are gone, so that nothing is pending in the groups. ``False`` also where that can not be told."""
        # Looked at without a descriptor, of which none may be free.
        return self._known and not any(os.path.exists(f"{_TASKS}/{thread}") for thread in self._threads)


def _workers_of_this_process() -> tuple[str, ...]:
    try:
        return tuple(task for task in os.listdir(_TASKS) if _name_of(task) == _NAME)
    except OSError:
        return ()


def _name_of(task: str) -> bytes:
    try:
        with open(f"{_TASKS}/{task}/comm", "rb", buffering=0) as file:
            return file.read(32).strip()
    except OSError:  # it has ended meanwhile, or there are no more descriptors
        return b""
