"""Which rank this process is, and where the ranks meet, in a script that makes its own group: by arguments or environment."""

import ipaddress
import os
from collections.abc import Callable
from datetime import timedelta
from urllib.parse import urlparse

import torch.distributed as dist

from lightning_pgroup.errors import PGroupError, StoreLostError
from lightning_pgroup.init_method import resolve
from lightning_pgroup.membership import Membership, Place

STARTER = "by MASTER_ADDR and MASTER_PORT"


def find_place(
    rank: int | None, size: int | None, init_method: str | None, timeout: timedelta, membership: Membership, *, foreign: bool
) -> Place:
    """Where this process stands among the ranks of a script. Reads the environment; touches no network.

    What the caller has not given is taken from a default group of other code, else from ``RANK`` and ``WORLD_SIZE``, else from
    the run of the strategy that has started this process, or that it has started; else the process is alone.

    Args:
        rank: This process's rank, if the caller has given it, together with ``size``.
        size: Number of ranks.
        init_method: As given by the caller.
        timeout: How long to wait for the other ranks.
        membership: The runs that this process is a rank of.
        foreign: Whether there is a default group of other code.

    Raises:
        PGroupError: The environment names half of it, or an ``init_method`` comes without ranks.
        StoreLostError: Nobody has said where the ranks meet.
    """
    told = _from_environment() if rank is None and not foreign else None
    invited, nodes = membership.invited_team, None
    if rank is not None and size is not None:
        found = (rank, size)
    elif foreign:
        found = (dist.get_rank(), dist.get_world_size())
    elif told is not None:
        found = told
    elif init_method is not None:
        raise PGroupError(
            f"`init_method={init_method!r}` says where the ranks meet, but not which one this process is. Give `rank` and"
            " `world_size`, or set RANK and WORLD_SIZE."
        )
    elif invited is not None:
        found = (invited.rank, invited.size)
    else:
        found = (0, 1)
    if invited is not None and invited.size == found[1]:
        nodes = 1  # only the ranks of one node are invited
    address = _meeting_point(*found)
    return Place(
        rank=found[0],
        size=found[1],
        nodes=nodes or _nodes(found[1], init_method or os.environ.get("MASTER_ADDR"), launched=found == told),
        init_method=init_method,
        default_init_method=address,
        starter=STARTER,
        timeout=timeout,
    )


def _from_environment() -> tuple[int, int] | None:
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None:
        return None  # Lightning sets WORLD_SIZE alone
    shown = f"RANK={rank}" + ("" if size is None else f" and WORLD_SIZE={size}")
    try:
        found = (int(rank), int(size or ""))
    except ValueError:
        found = (0, 0)
    if not 0 <= found[0] < found[1]:
        raise PGroupError(
            f"The environment has {shown}, which do not say which rank this process is, and of how many. Set both on each rank,"
            " as whole numbers, or unset both if an earlier run has left them; or give `rank` and `world_size`."
        )
    return found


def _meeting_point(rank: int, size: int) -> Callable[[], str]:
    def resolved() -> str:
        try:
            return resolve("env://")
        except StoreLostError:
            raise StoreLostError(
                f"Rank {rank} of {size} does not know where the ranks meet. Set MASTER_ADDR and MASTER_PORT to the same on all"
                " ranks, or give `init_method='tcp://host:port'` or 'file:///path'."
            ) from None

    return resolved


def _nodes(size: int, where: str | None, *, launched: bool) -> int:
    """Number of nodes, or the number of ranks if it is not known: then nothing may be taken to be on loopback.

    Args:
        size: Number of ranks.
        where: The address at which they meet, or an ``init_method``; ``None`` if they do not need one.
        launched: Whether a launcher has told the ranks by the environment.
    """
    if size == 1:
        return 1
    if launched:
        nodes, on_this_node = _number("GROUP_WORLD_SIZE"), _number("LOCAL_WORLD_SIZE")
        if nodes or on_this_node:
            return nodes or max(1, size // (on_this_node or size))
        if "KUBERNETES_PORT" in os.environ:
            return size  # the first pod has only "localhost" for its own address
    return 1 if where is not None and _is_loopback(where) else size


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _is_loopback(where: str) -> bool:
    """Whether an address is the same as "this host" on every host. A name for it is not: each host has its own."""
    if where.startswith("env://"):
        where = os.environ.get("MASTER_ADDR", "")
    host = urlparse(where).hostname if "://" in where else where
    if host is None or host == "localhost":
        return host is not None
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
