"""Which groups of this process come from us, and under which name: what holds one of a dead generation can then get its heir.

A group that is missing here is a user's own or another library's: nobody but its maker knows what should replace it.
"""

import weakref

from torch.distributed import ProcessGroup

_names: "weakref.WeakKeyDictionary[ProcessGroup, str | None]" = weakref.WeakKeyDictionary()


def remember(group: ProcessGroup, name: str | None) -> None:
    """Note that we have created ``group``, as long as anything holds it. Local; called by whoever creates one, on each rank.

    Args:
        group: The group, alive.
        name: The name under which a strategy knows it; ``None`` for the default group.
    """
    _names[group] = name


def known(group: ProcessGroup) -> bool:
    """Whether we have created ``group``, in this process or in the one that it was forked from. Also when it has ended."""
    return group in _names


def name_of(group: ProcessGroup) -> str | None:
    """The name under which a strategy knows ``group``; ``None`` for the default group, and for one that is not ours."""
    return _names.get(group)
