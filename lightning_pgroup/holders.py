"""What holds a process group in a user's objects, and how each kind of holder takes another one.

A module, a callback, a data module, a dictionary or a list takes it in the place of the old. Of other objects only those of the
kinds below do: nobody knows what else one of an unknown kind has derived from its group.
"""

import functools
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_pgroup import c10d
from lightning_pgroup.places import Node, place_of, replace, visit

_ENTERED = (Module, dict, list, tuple)
_NO_HOLDERS = (type, ModuleType, logging.Logger)

_ATTRIBUTES = {
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook.PostLocalSGDState": ("process_group", "subgroup"),
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState": ("process_group",),
    "torch.distributed.algorithms.model_averaging.averagers.ModelAverager": ("process_group",),
    "torch.distributed.algorithms.model_averaging.hierarchical_model_averager.HierarchicalModelAverager": ("process_group",),
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": ("process_group",),
}
"""The attributes in which objects of these kinds hold a group. By name, since a kind that was never imported has no objects."""

_INNER = {
    "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer": "averager",
    "lightning.pytorch.core.optimizer.LightningOptimizer": "_optimizer",
}
"""The attributes in which objects of these kinds have an object of another kind."""


class UnsuitableError(Exception):
    """A holder can not take a group. The message says why, and what to do."""


@dataclass(slots=True)
class Holding:
    """One place that holds a group.

    Attributes:
        place: Where it is.
        held: What it holds.
        put: Puts another group there; raises :class:`UnsuitableError` where that is not safe.
    """

    place: str
    held: ProcessGroup | DeviceMesh
    put: Callable[[ProcessGroup], None]

    def has_ended(self) -> bool:
        """Whether what it holds was destroyed."""
        return not (c10d.is_alive_mesh(self.held) if isinstance(self.held, DeviceMesh) else c10d.is_alive(self.held))


def find_holdings(start: Iterable[Node], comm_state: object | None) -> list[Holding]:
    """All places that hold a group or a ``DeviceMesh``, dead or alive. Local.

    Args:
        start: The nodes to start from, see :func:`~lightning_pgroup.places.visit`.
        comm_state: The state of a communication hook. It is re-pointed whatever its kind, as that is what it is for.
    """
    found: list[Holding] = []
    seen: set[int] = set()
    for node in visit(start):
        one = node[0]
        if isinstance(one, (ProcessGroup, DeviceMesh)):
            found.append(Holding(place_of(node), one, _putter(node)))
        elif not isinstance(one, _ENTERED) and node[1] is not None and id(one) not in seen:
            seen.add(id(one))
            found += _of_object(node, one is comm_state)
    return found


def _of_object(node: Node, is_comm_state: bool) -> Iterator[Holding]:
    one = node[0]
    if isinstance(one, _NO_HOLDERS) or inspect.isroutine(one):
        return
    names, inner, put = _kind(type(one))  # type: ignore[arg-type]  # a class can be hashed
    if inner:
        yield from _of_object((getattr(one, inner, None), node, inner), False)
        return
    put = put or (_put_attribute if names or is_comm_state else _refuse_unknown)
    for name, value in ((name, getattr(one, name, None)) for name in names) if names else _attributes(one):
        if isinstance(value, (ProcessGroup, DeviceMesh)):
            yield Holding(f"{place_of(node)}.{name}", value, functools.partial(put, one, name))


@functools.lru_cache(maxsize=256)
def _kind(kind: type) -> tuple[tuple[str, ...], str, Callable[[Any, str, ProcessGroup], None] | None]:
    """The attributes of a known kind that hold a group, the one that holds an inner object, and how it takes a group."""
    for base in kind.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in _INNER:
            return (), _INNER[name], None
        if name in _ATTRIBUTES:
            return _ATTRIBUTES[name], "", _PUT.get(base.__name__)
    return (), "", None


def _attributes(one: object) -> Iterator[tuple[str, Any]]:
    """The attributes that ``one`` itself has. Asks no property, since that may do anything."""
    yield from list(getattr(one, "__dict__", {}).items())  # a thread of its own may change them meanwhile
    for base in type(one).__mro__:
        for name, slot in vars(base).items():
            if inspect.ismemberdescriptor(slot):
                yield name, getattr(one, name, None)


def _putter(node: Node) -> Callable[[ProcessGroup], None]:
    """Puts a group into the place of a node; does not hold the group that is there now."""
    _, holder, where = node
    empty: Node = (None, holder, where)

    def put(group: ProcessGroup) -> None:
        outer = None if holder is None else holder[0]
        if isinstance(outer, DistributedDataParallel) or type(outer).__module__.startswith("torch.distributed."):
            raise UnsuitableError(f"{type(outer).__name__} holds its group in other places too: build it anew")
        try:
            replace(empty, group)
        except (TypeError, AttributeError) as error:
            raise UnsuitableError(f"it can not be replaced there ({error}): put it into an attribute") from error

    return put


def _put_attribute(holder: Any, name: str, group: ProcessGroup) -> None:
    setattr(holder, name, group)


def _put_sharded(holder: Any, name: str, group: ProcessGroup) -> None:
    """``ZeroRedundancyOptimizer``: its shards belong to a rank and a number of ranks."""
    _check_rank(holder, getattr(holder, name), group)
    setattr(holder, name, group)
    holder.global_rank = dist.get_global_rank(group, holder.rank)


def _put_hierarchy(holder: Any, name: str, group: ProcessGroup) -> None:
    """``HierarchicalModelAverager``: the groups of its lower levels are made anew when it first averages over them.

    That is where all ranks meet for sure: making them takes all ranks.
    """
    old = getattr(holder, name)
    _check_rank(holder, old, group)
    if group is not c10d.default_group():
        raise UnsuitableError("the groups of its levels can be made for the default group only: build it anew")
    levels = holder.period_process_group_dict
    sizes = levels.sizes if isinstance(levels, _Levels) else {period: level.size() for period, level in levels.items()}
    holder.period_process_group_dict = _Levels(group, sizes)
    setattr(holder, name, group)


def _check_rank(holder: object, old: ProcessGroup, new: ProcessGroup) -> None:
    if (old.size(), old.rank()) != (new.size(), new.rank()):
        raise UnsuitableError(
            f"{type(holder).__name__} was made for rank {old.rank()} of {old.size()}, and this is now rank {new.rank()} of"
            f" {new.size()}: build it anew"
        )


class _Levels(OrderedDict[int, Any]):
    """The groups of a ``HierarchicalModelAverager`` by their periods, made on first use; collective then."""

    def __init__(self, whole: ProcessGroup, sizes: dict[int, int]) -> None:
        super().__init__({period: whole for period, size in sizes.items() if size == whole.size()})
        self.sizes = sizes

    def __missing__(self, period: int) -> Any:
        self[period], _ = dist.new_subgroups(group_size=self.sizes[period])  # type: ignore[no-untyped-call]
        return self[period]


_PUT: dict[str, Callable[[Any, str, ProcessGroup], None]] = {
    "ZeroRedundancyOptimizer": _put_sharded,
    "HierarchicalModelAverager": _put_hierarchy,
}


def _refuse_unknown(holder: Any, name: str, group: ProcessGroup) -> None:
    raise UnsuitableError(f"what a {type(holder).__name__} derives from its group is not known: set it in a hook `setup`")
