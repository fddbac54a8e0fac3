"""Gives what holds a group of a dead generation the group that has taken its place, at the start of each stage.

A group that a strategy made is known by its name (:mod:`lightning_pgroup.lineage`): what held the default group gets the new
one, and what held a named one gets the one of that name. All else is left as it is, with a warning that names its place.

A named group is made by all its members together. Which of them hold one may differ, so the ranks tell each other in the round
of the stage (:mod:`lightning_pgroup.agreement`).
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_pgroup import c10d, lineage, records
from lightning_pgroup.claim import Stage
from lightning_pgroup.errors import NotInGroupError, WorldSizeError
from lightning_pgroup.holders import Holding, UnsuitableError, find_holdings
from lightning_pgroup.places import Node
from lightning_pgroup.process_state import process_state

if TYPE_CHECKING:
    from lightning_pgroup.strategy import PGroupDDPStrategy

_served: "weakref.WeakSet[ProcessGroup]" = weakref.WeakSet()
"""The default groups that stages have run with, also those of other code."""


@contextlib.contextmanager
def holders_follow(strategy: "PGroupDDPStrategy") -> Iterator[None]:
    """Encloses the moment in which a stage gets its group: what its Trainer works with holds living groups afterwards.

    Called by the strategy on each rank. Local, except that named groups which any rank holds are made anew; that is collective
    among their members, and blocks at most the timeout of such a group.

    Raises:
        Exception: What torch raised when a named group could not be made.
    """
    lifecycle, claim = process_state().lifecycle, strategy.claim()
    if not claim.running:
        yield
        return
    stage = lifecycle.running_stage(claim)
    stage.groups = {name: one.fingerprint() for name, one in strategy.defined_groups.items()}
    holdings: list[Holding] | None = None
    if lineage.names():
        holdings = _holdings(strategy, stage)
        stage.held = held_names(holdings)
    yield
    default = c10d.default_group()
    if default is None:
        return
    _served.add(default)
    named, problems = _make_anew(strategy, stage)
    if holdings is None and _may_be_held():
        holdings = _holdings(strategy, stage)
    if holdings:
        left, ended = repoint(holdings, default, named, problems)
        lifecycle.release(ended)
        if left:
            _warn(left, stage.name, lifecycle.generation or 0)


def held_names(holdings: Sequence[Holding]) -> tuple[str, ...]:
    """The names of the named groups, dead or alive, that are held somewhere."""
    names = {lineage.name_of(one.held) for one in holdings if isinstance(one.held, ProcessGroup)}
    return tuple(sorted(name for name in names if name is not None))


def repoint(
    holdings: list[Holding], default: ProcessGroup, named: dict[str, ProcessGroup], problems: dict[str, str]
) -> tuple[list[str], list[ProcessGroup]]:
    """Give each holder of a dead group its heir. Local; ``holdings`` is empty afterwards.

    Args:
        holdings: What holds a group.
        default: The default group.
        named: The living groups that have a name.
        problems: Why there is none of that name.

    Returns:
        What holds a dead group still, each with the reason; and the groups that were replaced, which the caller has to release.
    """
    left: list[str] = []
    ended: list[ProcessGroup] = []
    while holdings:
        holding = holdings.pop(0)
        if not holding.has_ended():
            continue
        try:
            if isinstance(holding.held, DeviceMesh):
                raise UnsuitableError("a DeviceMesh belongs to its groups for good: build it anew in a hook `setup`")
            holding.put(_heir(holding.held, default, named, problems))
            ended.append(holding.held)
        except UnsuitableError as error:
            left.append(f"{holding.place}: {error}")
    return left, ended


def _heir(group: ProcessGroup, default: ProcessGroup, named: dict[str, ProcessGroup], problems: dict[str, str]) -> ProcessGroup:
    name = lineage.name_of(group)
    if name is not None:
        if name in named:
            return named[name]
        raise UnsuitableError(
            problems.get(name, f"the ranks did not make {name!r} anew: use `strategy.group({name!r})` on all of its members")
        )
    if lineage.known(group) or group in _served:
        return default
    raise UnsuitableError(
        "the group was made by other code, such as `torch.distributed.new_group`, which has to make it anew;"
        " `PGroupDDPStrategy(groups=…)` makes groups that follow"
    )


def _may_be_held() -> bool:
    """Whether anything may hold a group that has ended: if not, nobody need look for it."""
    return c10d.may_be_held() or not all(map(c10d.is_alive, (*lineage.groups(), *_served)))


def _make_anew(strategy: "PGroupDDPStrategy", stage: Stage) -> tuple[dict[str, ProcessGroup], dict[str, str]]:
    """The living groups that have a name, with those that the ranks have agreed to make anew; and why others are missing."""
    living = [(lineage.name_of(group), group) for group in c10d.all_groups()]
    named = {name: group for name, group in living if name is not None}
    unknown = [name for name in stage.held if name not in stage.groups]
    problems = {name: f"this strategy has no group {name!r}: give it `groups={{{name!r}: …}}`" for name in unknown}
    for name in stage.renewed:
        try:
            named[name] = strategy.group(name)
        except (NotInGroupError, WorldSizeError) as error:  # any other ends the stage, and frees those that wait
            problems[name] = str(error)
    return named, problems


def _holdings(strategy: "PGroupDDPStrategy", stage: Stage) -> list[Holding]:
    """What holds a group among all that a stage works with."""
    trainer: Any = None if stage.trainer is None else stage.trainer()
    callbacks = getattr(trainer, "callbacks", ())
    own: Node = (strategy, None, "strategy")
    state = strategy._ddp_comm_state
    start: list[Node] = [
        (strategy.lightning_module, None, "model"),
        *((callback, None, type(callback).__name__) for callback in callbacks),
        (getattr(trainer, "datamodule", None), None, "datamodule"),
        (state, own, "_ddp_comm_state"),
        (strategy._model_averager, own, "_model_averager"),
        (strategy._ddp_kwargs, own, "_ddp_kwargs"),
        (strategy.optimizers, own, "optimizers"),
    ]
    return find_holdings(start, state)


def _warn(left: Sequence[str], stage: str, generation: int) -> None:
    records.logger.warning(
        "%s %s starts with objects that hold a process group which has ended, and which can not be given the present one. A"
        " collective with them will fail:\n%s",
        records.prefix("", None, dist.get_rank(), dist.get_world_size(), generation),
        stage,
        "\n".join(f"- {one}" for one in left),
    )
