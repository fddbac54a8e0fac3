"""What scripts and modular code call that use no strategy, or not only one."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_pgroup import c10d
from lightning_pgroup.config import Duration, parse_duration
from lightning_pgroup.process_state import process_state

DESTROY_TIMEOUT = timedelta(seconds=30)
"""How long an orderly destroy of a sub-group may take, unless the caller says otherwise."""


def destroy_process_group(group: ProcessGroup | None = None, timeout: Duration | None = None, *, foreign: bool = False) -> None:
    """Destroy a process group, at any time and as often as one likes: what is gone already is left alone.

    To be called on each rank that has the group; not collective, waits for no other rank. A destroy that takes longer than
    ``timeout`` is given up, and the group aborted with a warning.

    Args:
        group: A sub-group, which alone is destroyed; or ``None`` or the default group: everything. A sub-group to which this
            rank does not belong is left alone.
        timeout: How long the destroy may take, seconds, a ``timedelta`` or its text; by default the ``destroy_timeout`` of the
            strategy that used the group last, else 30 s.
        foreign: Whether a default group that other code has created may be destroyed too.

    Raises:
        PGroupError: A stage is running in the default group, or trains with the sub-group; or other code has created the
            default group and ``foreign`` is not set.
        TypeError: Something else than a group, such as the name of one.
        ValueError: A timeout that is none.
    """
    limit = None if timeout is None else parse_duration("timeout", timeout)
    if not isinstance(group, ProcessGroup) and group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
        raise TypeError(
            f"`group` must be a process group or None, got {group!r}. A named group is ended by `strategy.destroy_group(name)`."
        )
    if group is not None and group is not c10d.default_group():
        if isinstance(group, ProcessGroup) and c10d.is_alive(group):
            process_state().lifecycle.destroy_sub_group(group, limit or DESTROY_TIMEOUT)
        return
    if dist.is_available() and dist.is_initialized():
        process_state().lifecycle.destroy(limit, foreign=foreign)
