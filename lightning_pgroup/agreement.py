"""Reuse or re-create: what the ranks decide together, as a pure function of what each of them has and wants.

No network, no torch. :mod:`lightning_pgroup.rounds` carries the reports to the rank that decides and its decision back.
"""

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from lightning_pgroup import payload
from lightning_pgroup.policy import OnMismatch

REUSE = "reuse"
CREATE = "create"
ADOPT = "adopt"
REFUSE = "refuse"

_STRICTNESS = (OnMismatch.ERROR, OnMismatch.RECREATE, OnMismatch.REUSE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one rank has and wants at the start of a stage. Equal on most ranks, most of the time, so not whose it is.

    Attributes:
        generation: The living generation that it owns, 0 without one.
        highest: The highest generation that it ever had.
        fresh: Why it must not reuse what it has; empty if it may.
        differences: In what the living group differs from the one wanted.
        on_mismatch: What to do about these differences.
        resized: Whether the differences make a reuse impossible: the group has another size or order of ranks.
        foreign: Whether a group of other code is there instead.
        stage: What it is about to run.
        held: The names of the named groups that its objects hold.
        groups: The named groups that it knows: what they are, by name.
        wanted: The fields of the wanted signature that all ranks must share.
    """

    generation: int
    highest: int
    fresh: str = ""
    differences: tuple[str, ...] = ()
    on_mismatch: str = OnMismatch.RECREATE.value
    resized: bool = False
    foreign: bool = False
    stage: str = ""
    held: tuple[str, ...] = ()
    groups: dict[str, Any] = field(default_factory=dict)
    wanted: dict[str, Any] = field(default_factory=dict)

    def to_payload(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return {name: getattr(self, name) for name in _REPORTED}

    @classmethod
    def from_payload(cls, said: dict[str, Any], key: str = "rank/<k>") -> "Report":
        """Rebuild a report that came through the store, under ``key``.

        Raises:
            GarbledStoreError: It is none.
        """
        report = payload.fill(said, key, cls)
        if report.on_mismatch not in [one.value for one in OnMismatch]:
            raise payload.garbled(key, "a choice of `on_mismatch`", report.on_mismatch)
        return report


_REPORTED = tuple(one.name for one in fields(Report))


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What all ranks do: ``REUSE``, ``CREATE``, ``ADOPT`` a foreign group, or ``REFUSE`` with an error on each rank.

    Attributes:
        action: One of the four.
        generation: The generation to reuse or to create; 0 otherwise.
        why: The reason, in words.
        mismatch: Whether the refusal is about differences to a living group, not between the ranks.
        held: The named groups that any rank's objects hold: their members make them anew, unless they live.
    """

    action: str
    generation: int
    why: str
    mismatch: bool = False
    held: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The decision as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    @functools.lru_cache(maxsize=16)  # stage after stage it is the same
    def from_json(cls, text: str) -> "Decision":
        """Rebuild a decision that came through the store.

        Raises:
            GarbledStoreError: It is none.
        """
        key = "round/<r>/outcome"
        decision = payload.read(text, key, cls)
        if decision.action not in (REUSE, CREATE, ADOPT, REFUSE) or (decision.action == CREATE and decision.generation == 0):
            raise payload.garbled(key, "a decision of the ranks", text)
        return decision


def reports_of(said: Sequence[dict[str, Any]]) -> list[Report]:
    """Rebuild what all ranks have said, in rank order. Ranks that share an object share their report.

    Raises:
        GarbledStoreError: One of them is no report.
    """
    reports: dict[int, Report] = {}
    for rank, one in enumerate(said):
        if id(one) not in reports:
            reports[id(one)] = Report.from_payload(one, f"rank/{rank}")
    return [reports[id(one)] for one in said]


def decide(reports: Sequence[Report]) -> Decision:
    """Decide for all ranks what to do at the start of a stage.

    Args:
        reports: One report of every rank, in rank order. Ranks that say the same may share one object, which is looked at once.

    Returns:
        The decision. Reuse needs the same living generation on all ranks, the wanted signature, and nobody who asks for a
        fresh group; all else leads to a new generation, one above the highest that any rank ever had.
    """
    distinct = list({id(report): report for report in reports}.values())
    held = {name for report in distinct for name in report.held}
    # A member that does not know it, or knows another one, would let the others wait.
    known = [name for name in sorted(held) if all(name in report.groups for report in distinct)]
    same = [name for name in known if len({json.dumps(report.groups[name]) for report in distinct}) == 1]
    return replace(_decide(reports, distinct), held=tuple(same))


def _decide(reports: Sequence[Report], distinct: Sequence[Report]) -> Decision:
    disagreement = _disagreement(reports, distinct)
    if disagreement:
        return Decision(action=REFUSE, generation=0, why=disagreement)
    if all(report.foreign for report in distinct):
        return Decision(action=ADOPT, generation=0, why="the group was there before and belongs to other code")
    new = max(report.highest for report in distinct) + 1
    living = {report.generation for report in distinct}
    if living == {0}:
        return Decision(action=CREATE, generation=new, why=_first_fresh(reports) or "there was no group")
    if len(living) > 1:
        holders = _by_value(
            (rank, f"generation {one.generation}" if one.generation else "no group") for rank, one in enumerate(reports)
        )
        return Decision(action=CREATE, generation=new, why=f"the ranks do not have the same group: {holders}")
    fresh = _first_fresh(reports)
    if fresh:
        return Decision(action=CREATE, generation=new, why=fresh)
    if any(report.differences for report in distinct):
        return _decide_mismatch(reports, distinct, living.pop(), new)
    return Decision(action=REUSE, generation=living.pop(), why="all ranks have it and it is what the stage asks for")


def _decide_mismatch(reports: Sequence[Report], distinct: Sequence[Report], living: int, new: int) -> Decision:
    named = _by_value((rank, ", ".join(one.differences)) for rank, one in enumerate(reports) if one.differences)
    wishes = {OnMismatch(report.on_mismatch) for report in distinct}
    strictest = next(wish for wish in _STRICTNESS if wish in wishes)
    if strictest is OnMismatch.ERROR:
        why = f"the living group differs from what the stage asks for ({named}) and on_mismatch='error'"
        return Decision(action=REFUSE, generation=0, why=why, mismatch=True)
    if any(report.resized for report in distinct):
        return Decision(action=CREATE, generation=new, why=f"the group has another size or order of ranks ({named})")
    if strictest is OnMismatch.REUSE:
        return Decision(action=REUSE, generation=living, why=f"on_mismatch='reuse', although it differs ({named})")
    return Decision(action=CREATE, generation=new, why=f"the stage asks for another group ({named})")


def _disagreement(reports: Sequence[Report], distinct: Sequence[Report]) -> str:
    """Name what the ranks must share but do not; empty if all is well."""
    found = []
    foreign = {report.foreign for report in distinct}
    if len(foreign) > 1:
        holders = ((rank, "a group of other code" if one.foreign else "none of that kind") for rank, one in enumerate(reports))
        found.append(f"the default group ({_by_value(holders)})")
    if len({report.stage for report in distinct}) > 1:
        found.append(f"stage ({_by_value((rank, repr(one.stage)) for rank, one in enumerate(reports))})")
    for name in reports[0].wanted:
        if len({json.dumps(report.wanted.get(name)) for report in distinct}) > 1:
            found.append(f"{name} ({_by_value((rank, repr(one.wanted.get(name))) for rank, one in enumerate(reports))})")
    return f"the ranks differ in {'; '.join(found)}" if found else ""


def _first_fresh(reports: Sequence[Report]) -> str:
    return next((report.fresh for report in reports if report.fresh), "")


def _by_value(pairs: Iterable[tuple[int, str]]) -> str:
    """Group ranks by what they say: ``rank 0: a; ranks 1, 2: b``."""
    groups: dict[str, list[int]] = {}
    for rank, value in pairs:
        groups.setdefault(value, []).append(rank)
    parts = []
    for value, ranks in groups.items():
        noun = "rank" if len(ranks) == 1 else "ranks"
        parts.append(f"{noun} {_ranks(ranks)}: {value}")
    return "; ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
