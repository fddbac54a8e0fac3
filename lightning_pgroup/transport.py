"""Ends groups, with a bound: an orderly shutdown that is given up on time, and an abort that waits for nobody."""

import contextlib
import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta

from torch.distributed import ProcessGroup, Store

from lightning_pgroup import c10d
from lightning_pgroup.backends import transports
from lightning_pgroup.bounded import run_bounded

logger = logging.getLogger(__name__)

ABORT_TIMEOUT = timedelta(seconds=5)
"""How long an abort may take; backends are expected to return from it at once."""


_READ_TIMEOUT = timedelta(seconds=0.5)


def read_addresses(sources: Iterable[tuple[Store, list[list[str]]]]) -> tuple[bytes, ...]:
    """What groups have left in their stores, as far as it can be read. Never raises; waits at most 0.5 s.

    Args:
        sources: Stores, and lists of keys in them; a list of which not all keys are there is left out. Two operations for each.
    """
    found: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(Exception):  # the host of the store may be the rank that has died
            for store, keys in sources:
                for one in keys:
                    found.extend(values(store, one))

    run_bounded(read, _READ_TIMEOUT, "addresses")
    return tuple(found)


def values(store: Store, keys: list[str]) -> list[bytes]:
    """The values of some keys if all of them are there, else nothing. Two operations.

    Raises:
        Exception: What torch's stores raise when they can not be reached.
    """
    if not store.check(keys):
        return []
    at_once = store.has_extended_api()  # type: ignore[attr-defined]
    return list(store.multi_get(keys)) if at_once else [store.get(key) for key in keys]


def shut_down(groups: list[ProcessGroup], timeout: timedelta) -> bool:
    """Shut groups down in the given order. Not collective; does not wait for other ranks.

    Args:
        groups: Taken out of torch's bookkeeping before.
        timeout: How long to wait for all of them together; an interrupt ends the wait.

    Returns:
        Whether all ended in time.

    Raises:
        Exception: What a backend's shutdown raised.
    """

    def run() -> None:
        problems = [problem for group in groups if (problem := _shut_down_one(group)) is not None]
        if problems:
            raise problems[0]

    return run_bounded(run, timeout, "shutdown", impatient=True)


def settle(group: ProcessGroup, backends: Iterable[str]) -> None:
    """Return once no member is in the creation of ``group`` any more. Collective, bounded by the group's timeout.

    Raises:
        Exception: What the backend raised; another rank has failed, most likely.
    """
    for transport in transports(backends):
        transport.settle(group)


def count_peers(backends: Iterable[str], addresses: Sequence[bytes]) -> int:
    """How many connections to other ranks a group has, as far as its backends can tell. Never waits.

    Args:
        backends: Its backends, as torch names them.
        addresses: The values that it has in the store.
    """
    return sum(transport.count_peers(addresses) or 0 for transport in transports(backends))


def cut(backends: Iterable[str], addresses: Sequence[bytes]) -> None:
    """Cut the connections of all groups, and leave the groups themselves as they are. Not collective; waits for nobody.

    Args:
        backends: Their backends, as torch names them.
        addresses: The values that they have in the store.
    """
    for transport in transports(backends):
        transport.cut(addresses)


def abort(groups: list[ProcessGroup], backends: Iterable[str], addresses: Sequence[bytes]) -> bool:
    """Cut the connections of groups and abort them. Not collective; waits at most :data:`ABORT_TIMEOUT`.

    Args:
        groups: All groups of this process, the youngest first.
        backends: Their backends, as torch names them.
        addresses: The values that they have in the store.

    Returns:
        Whether the backends returned in time.
    """
    doomed, names = list(groups), list(backends)

    def run() -> None:
        cut(names, addresses)
        for problem in c10d.abort_groups(doomed):
            logger.debug("abort of a group: %s", problem)
        doomed.clear()

    return run_bounded(run, ABORT_TIMEOUT, "abort")


def _shut_down_one(group: ProcessGroup) -> Exception | None:
    try:
        c10d.finish_hooks(group)
        group.shutdown()
    except Exception as error:
        return error
    return None
