"""Metrics at the end of a stage: computed while all ranks are there, so that their values stay right without the group (F13).

Before the end of a stage the ranks see whether all of them have metrics (:mod:`lightning_pgroup.show_of_hands`), gather what
these hold (:mod:`lightning_pgroup.metric_gather`), and then each computes for itself. A ``compute`` that raises on one rank, or
that is slower there, so lets nobody wait. Nothing in here makes a stage fail: what can not be computed is reported, and warns
when it is asked for its value.
"""

import contextlib
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Trainer
from torchmetrics import Metric

from lightning_pgroup.bounded import run_bounded
from lightning_pgroup.claim import Stage
from lightning_pgroup.common_ground import CommonGround
from lightning_pgroup.errors import PGroupError
from lightning_pgroup.exceptions import describe
from lightning_pgroup.lifecycle import Lifecycle
from lightning_pgroup.metric_gather import Offer, Told, gather, offer, tell
from lightning_pgroup.metric_leaves import Leaf, States, find_leaves, merge
from lightning_pgroup.metric_marks import is_local, lift, mark_complete, mark_local, put_states
from lightning_pgroup.records import logger

WORD_TIMEOUT = timedelta(seconds=0.5)
"""How long a rank that can not come tries to tell those that wait for it here."""

_NO_UPDATE = re.compile(r"The ``compute`` method of metric \w+ was called before the ``update`` method")


def compute_before_the_end(lifecycle: Lifecycle, stage: Stage, trainer: Trainer, device: torch.device) -> None:
    """Compute the metrics of a stage whose function has returned, so that their values count for all ranks.

    Called on each rank, on the main thread, while the stage has its group. Collective among the ranks that have metrics; waits
    for slower ones at most the group's timeout. A rank without any waits for nobody.
    """
    roots = _roots(trainer)
    around = lifecycle.stage_around(stage)
    if around is not None:  # the group lives on until that one ends
        around.guests.append(roots)
        return
    ground = lifecycle.common_ground(stage)
    if ground is None:
        return
    leaves: list[Leaf] = []
    try:
        leaves = _leaves(roots, stage)
        refusal = _all_are_ready(ground, leaves)
        if refusal:
            if leaves and ground.has_failed():
                lifecycle.discard(stage, refusal)
            _miss(leaves, ground, refusal)
        elif leaves:
            _compute(leaves, ground, device, _later(stage))
    except Exception as error:
        # Others may wait in a collective for this rank, and the group may be in the middle of one.
        why = f"the ranks could not exchange their metrics: {describe(error)}"
        _keep_down(ground, why)
        lifecycle.discard(stage, why)
        _miss(leaves, ground, why)


def after_failure(ground: CommonGround | None, stage: Stage, trainer: Trainer, why: str) -> None:
    """Let the metrics of a stage that was broken off know that they have missed their computation. Local, waits at most 0.5 s.

    Args:
        ground: From :meth:`Lifecycle.common_ground`, before the stage has ended.
        stage: The stage.
        trainer: Its Trainer.
        why: What happened to it, in words.
    """
    if ground is None:
        return
    try:
        mark_local(_leaves(_roots(trainer), stage), f"{stage.name!r} {why}, before it was computed over all ranks")
    except Exception as problem:  # a user's objects may hold anything
        logger.debug("the metrics could not be marked: %s", problem)
    if not stage.failure:  # else a rank that waits here sees the record of it
        _keep_down(ground, f"does not come: {stage.name!r} {why}")


def _roots(trainer: Trainer) -> dict[str, Any]:
    """The objects of a Trainer that may hold metrics. Callbacks by their classes: one that only rank 0 has moves no other."""
    roots: dict[str, Any] = {"model": trainer.lightning_module}
    seen: Counter[str] = Counter()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        roots[f"{name}[{seen[name]}]" if seen[name] else name] = callback
        seen[name] += 1
    return roots


def _leaves(roots: Mapping[str, Any], stage: Stage) -> list[Leaf]:
    inner = {f"nested[{index}].{name}": root for index, guest in enumerate(stage.guests) for name, root in guest.items()}
    return [leaf for leaf in find_leaves({**roots, **inner}) if leaf.may_sync]


def _all_are_ready(ground: CommonGround, leaves: list[Leaf]) -> str:
    """Why there is no exchange, most likely since a rank does not come to it; empty if all do."""
    if ground.group is None:
        ground.team.hands.keep_down(ground.number, "has lost its process group")
        return "the process group has ended before"
    if not leaves:
        ground.team.hands.keep_down(ground.number, "has no metrics")
        return "there are none"
    updated = any(leaf.updates for leaf in leaves)
    return ground.team.hands.raise_hand(ground.number, updated, ground.timeout, ground.check)


def _keep_down(ground: CommonGround, why: str) -> None:
    """Let no rank wait for this one, as far as the store can be reached; it may be what has failed."""

    def say() -> None:
        with contextlib.suppress(Exception):
            ground.team.hands.keep_down(ground.number, why)

    run_bounded(say, WORD_TIMEOUT, "hands")


def _later(stage: Stage) -> str:
    return f"it was updated after {stage.name!r} had ended, and there is no process group in which to ask the other ranks"


def _compute(leaves: list[Leaf], ground: CommonGround, device: torch.device, later: str) -> None:
    size = ground.team.size
    offers = {one.told.place: one for one in (offer(leaf, size) for leaf in leaves)}
    told = tell(list(offers.values()), size, device)
    reasons = {place: _unfit(place, told) for place in offers}
    for one in offers.values():
        if reasons[one.told.place]:
            _miss([one.leaf], ground, reasons[one.told.place])
    chosen = [offers[place] for place in told[0] if place in offers and not reasons[place] and _is_needed(place, told)]
    for one in chosen:
        lift(one.leaf)
    ours = [one for one in chosen if not one.told.own_way]
    if ours:
        _compute_gathered(ours, gather(ours, told, device), told, ground, later)
    for one in chosen:
        if one.told.own_way:
            _compute_own_way(one.leaf, ground, device)
    for place, one in offers.items():
        complete = one.leaf.is_cached and not is_local(one.leaf) and not one.leaf.is_kept
        if complete and not reasons[place] and any(of_rank[place].updates for of_rank in told):
            mark_complete(one.leaf, later)


def _unfit(place: str, told: list[dict[str, Told]]) -> str:
    """Why a metric can not be computed over all ranks; empty if it can."""
    without = [rank for rank, of_rank in enumerate(told) if place not in of_rank]
    if without:
        return f"rank {', '.join(map(str, without))} does not have it"
    each = [of_rank[place] for of_rank in told]
    for rank, one in enumerate(each):
        if one.problem:
            return f"on rank {rank}, {one.problem}"
        if (one.kind, one.own_way, one.states.keys()) != (each[0].kind, each[0].own_way, each[0].states.keys()):
            return f"rank {rank} has another metric there, a {one.kind}, than rank 0, a {each[0].kind}"
        if one.own_way and one.amounts != each[0].amounts:
            return f"its own synchronisation can not be trusted with states of another form on rank {rank} than on rank 0"
    return ""


def _is_needed(place: str, told: list[dict[str, Told]]) -> bool:
    each = [of_rank[place] for of_rank in told]
    return any(one.updates for one in each) and not all(one.cached for one in each)


def _compute_gathered(
    offers: list[Offer], gathered: list[dict[str, States]], told: list[dict[str, Told]], ground: CommonGround, later: str
) -> None:
    """Compute each metric from the states of all ranks. Local: each rank may take its time, or fail, for itself."""
    served = []
    for one in offers:
        by_rank = [gathered[rank][one.told.place] for rank in one.members]
        parts = [part for rank, part in zip(one.members, by_rank, strict=True) if told[rank][one.told.place].data] or by_rank
        if parts:  # none where the metric has a group that this rank is not in
            one.leaf.metric._sync_dist = _service(one, parts)  # type: ignore[method-assign]
            served.append((one.leaf, parts))
    try:
        for leaf, _ in served:
            if not leaf.is_kept:
                _attempt(leaf, ground, lambda leaf=leaf: _compute_one(leaf.metric))  # type: ignore[misc]
    finally:
        for leaf, _ in served:
            vars(leaf.metric).pop("_sync_dist", None)
    for leaf, parts in served:
        if leaf.is_kept:
            _attempt(leaf, ground, lambda leaf=leaf, parts=parts: mark_complete(leaf, later, merge(leaf.metric, parts)))  # type: ignore[misc]


def _service(offer: Offer, parts: list[States]) -> Callable[..., None]:
    """What stands in for the synchronisation of a metric while it computes."""

    def serve(*_: Any, **__: Any) -> None:
        if offer.leaf.running is None and not offer.leaf.is_unchanged_since(offer.references):
            raise PGroupError("its states change while it, or a metric around it, computes")
        put_states(offer.leaf.metric, merge(offer.leaf.metric, parts))

    return serve


def _compute_own_way(leaf: Leaf, ground: CommonGround, device: torch.device) -> None:
    """Compute a metric that talks to the other ranks itself. Collective, as its user has written it.

    Raises:
        Exception: Its synchronisation failed, so that other ranks may wait in it.
    """
    if not leaf.members(ground.team.size):
        return
    before = leaf.metric.device
    leaf.metric.to(device)  # Lightning has taken it to the CPU, from where not every backend sends
    try:
        _attempt(leaf, ground, lambda: _compute_one(leaf.metric), passes=lambda: leaf.metric._cache is not None)
    finally:
        leaf.metric.to(before)


def _attempt(leaf: Leaf, ground: CommonGround, compute: Callable[[], None], passes: Callable[[], bool] = lambda: False) -> None:
    try:
        compute()
    except BaseException as error:
        passed = passes() and not leaf.metric._is_synced
        leaf.forget_sync()
        if passed or not isinstance(error, Exception):
            raise
        _miss([leaf], ground, f"its `compute` raised {describe(error)}")


def _compute_one(metric: Metric) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NO_UPDATE.pattern)  # another rank has updated it
        metric._computed = None
        metric.compute()


def _miss(leaves: list[Leaf], ground: CommonGround, why: str) -> None:
    """Report metrics that were not computed over all ranks, and let them say so when they are asked."""
    missed = [leaf for leaf in leaves if leaf.updates and (is_local(leaf) or not leaf.is_cached)]
    for leaf in missed:
        logger.warning("%s %s was not computed over all ranks: %s", ground.log_prefix, leaf.place, why)
    mark_local(missed, f"it was not computed over all ranks before the stage ended ({why})")
