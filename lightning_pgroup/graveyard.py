"""Where ended groups rest until nothing but Python holds them.

A ``DistributedDataParallel`` wrapper holds its group in C++ too, through its reducer. If the reducer is the last to let go,
it runs the group's destructor with Python's lock held; that destructor joins gloo's threads, one of which may wait for the
very lock to release a finished collective. The process then stands still, deaf to everything. So a group that has ended is kept
until its wrappers have lost their reducers, and is then released by Python, which gives its lock away meanwhile.
"""

import weakref
from collections.abc import Iterable
from datetime import timedelta

from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from lightning_pgroup import transport
from lightning_pgroup.release import Releases

Wrapper = weakref.ref[DistributedDataParallel]

_HOLDERS = ("reducer", "logger")
"""The attributes of a wrapper that hold its group in C++."""


class Graveyard:
    """The ended groups of this process that a wrapper may still hold, and the release of those that are free."""

    def __init__(self) -> None:
        self._graves: list[tuple[list[ProcessGroup], list[Wrapper]]] = []
        self._releases = Releases()
        self._connections: list[tuple[frozenset[str], tuple[bytes, ...]]] = []

    def bury(self, groups: list[ProcessGroup], wrappers: Iterable[Wrapper]) -> None:
        """Take ended groups over from the caller, whose list is empty afterwards. Never waits."""
        grave = (list(groups), [wrapper for wrapper in wrappers if wrapper() is not None])
        groups.clear()
        if grave[1]:
            self._graves.append(grave)
        else:
            self._releases.start(grave[0])

    def clear(self) -> None:
        """Release all groups. Their wrappers lose their reducers: they have nothing to reduce over any more. Never waits.

        To be called only when no Trainer works with these wrappers any more.
        """
        graves, self._graves = self._graves, []
        for groups, wrappers in graves:
            detach(wrappers)
            self._releases.start(groups)

    def leave_connections(self, backends: Iterable[str], addresses: tuple[bytes, ...]) -> None:
        """Take over connections that must not be cut yet, since another rank may still be at making them."""
        if addresses:
            self._connections.append((frozenset(backends), addresses))

    def cut_connections(self) -> None:
        """Cut them. To be called when all ranks have met again, and have no living group. Never waits."""
        while self._connections:
            transport.cut(*self._connections.pop())

    def drain(self, groups: list[ProcessGroup], timeout: timedelta) -> bool:
        """Let go of groups that no wrapper holds, and return as soon as nothing is pending in them, at most after ``timeout``.

        Returns:
            Whether that was so in time.
        """
        return self._releases.drain(groups, timeout)

    def finish(self, timeout: timedelta) -> None:
        """Wait, at most ``timeout``, for the destructors: the interpreter must not end, or fork, in the middle of one."""
        self._releases.finish(timeout)


def detach(wrappers: Iterable[Wrapper]) -> None:
    """Let wrappers whose group has ended let go of it."""
    for reference in wrappers:
        wrapper = reference()
        if wrapper is not None:
            for name in _HOLDERS:
                vars(wrapper).pop(name, None)
