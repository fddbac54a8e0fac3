"""Ends groups that are not in our custody: a sub-group, or the default group of other code. Bounded, then aborted."""

import logging
from collections.abc import Iterable
from datetime import timedelta

from torch.distributed import ProcessGroup

from lightning_pgroup import c10d, transport
from lightning_pgroup.saves import finish_saves

logger = logging.getLogger(__name__)


def end_foreign(timeout: timedelta) -> None:
    """End the default group of other code and all its sub-groups. Not collective; waits at most ``timeout``, then aborts."""
    unfinished, rest = finish_saves(timeout)
    groups, backends = c10d.all_groups(), c10d.backends_in_use()
    addresses, used = _addresses(groups), _addresses(filter(c10d.was_used, groups))
    groups.clear()
    _end(c10d.take_all_groups(), backends, addresses, used, rest, "the process group", unfinished)


def end_sub_group(group: ProcessGroup, timeout: timedelta) -> tuple[bytes, ...]:
    """End one sub-group, and leave all others alone. Not collective; waits at most ``timeout``, then aborts.

    Checkpoints that other threads are writing are waited for first, within the same bound.

    Args:
        group: One that torch knows.
        timeout: How long an orderly destroy may take.

    Returns:
        The addresses of connections that were left open, because another member may still be at making them.
    """
    unfinished, rest = finish_saves(timeout)
    backends, addresses = c10d.backends_of(group), _addresses([group])
    used = addresses if c10d.was_used(group) else ()
    c10d.take_group(group)
    _end([group], backends, addresses, used, rest, "a sub-group", unfinished)
    return () if used else addresses


def _addresses(groups: Iterable[ProcessGroup]) -> tuple[bytes, ...]:
    return transport.read_addresses([c10d.own_address_keys(group) for group in groups if group.size() > 1])


def _end(
    groups: list[ProcessGroup],
    backends: Iterable[str],
    addresses: tuple[bytes, ...],
    used: tuple[bytes, ...],
    timeout: timedelta,
    what: str,
    problem: str,
) -> None:
    """End groups that were taken out of torch's bookkeeping; whoever still holds one can not talk over ``used`` any more."""
    try:
        if not problem and not transport.shut_down(groups, timeout):
            problem = f"it took more than {timeout.total_seconds():g} s"
    except Exception as error:
        problem = f"the backend's shutdown raised {type(error).__name__}: {error}"
    if problem:
        logger.warning("%s was aborted instead of destroyed: %s", what, problem)
        transport.abort(groups, backends, addresses)
    else:
        transport.cut(backends, used)
