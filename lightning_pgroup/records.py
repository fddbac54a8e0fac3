"""Records of what was done with the group and why: one frozen record and one log line each."""

import logging
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_pgroup import payload

logger = logging.getLogger("lightning_pgroup")

CREATED = "created"
REUSED = "reused"
ADOPTED = "adopted"
DESTROYED = "destroyed"
ABORTED = "aborted"
LOST = "lost"

_LEFT = "records/<rank>"
_LEFT_LIMIT = 1 << 23
_LEVELS = {ABORTED: logging.WARNING, LOST: logging.WARNING, REUSED: logging.DEBUG}


def prefix(run: str, attempt: int | None, rank: int, world_size: int, generation: int) -> str:
    """What a line of the log begins with. Run and attempt stand there only when a launcher has named and counted them."""
    launched = "" if attempt is None else f"run {run} attempt {attempt} "
    return f"[{launched}rank {rank}/{world_size} gen {generation}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class LifecycleEvent:
    """One thing that was done with the group of this process.

    Attributes:
        what: ``"created"``, ``"reused"``, ``"adopted"`` (a group of other code is used), ``"destroyed"``, ``"aborted"``
            or ``"lost"`` (other code ended our group).
        why: The reason, in words.
        generation: Number of the generation, agreed by all ranks; 0 for a group that is not ours.
        policy: The names of the policies in force, sorted.
        stage: ``"fit"``, ``"validate"``, ``"test"``, ``"predict"``, the name of a collective that was called between stages,
            or ``""`` outside of all.
        rank: This process's rank in the group.
        world_size: Number of ranks of the group.
        backend: Name of the group's backend.
        start: When it began, seconds since the epoch on this host's clock.
        duration: How long it took, seconds.
        run: Name of the run, as its launcher gave it (torchrun's run id) or a fresh one; empty for a group of other code.
        attempt: How often the launcher has restarted the ranks, as rank 0 was told; ``None`` if it does not count that.
        trainer: Number of the Trainer, counted by this script from 1: the one whose stage got the group, or the one that used
            it last before it ended; ``None`` without one.
    """

    what: str
    why: str
    generation: int
    policy: tuple[str, ...]
    stage: str
    rank: int
    world_size: int
    backend: str
    start: float
    duration: float
    run: str
    attempt: int | None
    trainer: int | None = None

    def to_payload(self) -> dict[str, Any]:
        """The record as plain JSON types."""
        return asdict(self)

    @classmethod
    def all_from_json(cls, text: str) -> "list[LifecycleEvent]":
        """Rebuild the records that a worker has left, as far as they can be read."""
        listed = payload.if_readable(lambda: payload.parse(text, _LEFT, _LEFT_LIMIT))
        each = listed if isinstance(listed, list) else []
        found = [payload.if_readable(lambda one=one: payload.fill(one, _LEFT, cls)) for one in each]  # type: ignore[misc]
        return [record for record in found if record is not None]

    def log(self) -> None:
        """Write the record's one log line."""
        level = _LEVELS.get(self.what, logging.INFO)
        if not logger.isEnabledFor(level):
            return
        logger.log(
            level,
            "%s process group (%s) %s%s in %.1f ms: %s",
            prefix(self.run, self.attempt, self.rank, self.world_size, self.generation),
            self.backend,
            self.what,
            f" for {self.stage}" if self.stage else "",
            self.duration * 1e3,
            self.why,
        )


@dataclass(slots=True)
class Tally:
    """How often each thing was done with the group, and how long that took in all.

    Attributes:
        counts: How often, by :attr:`LifecycleEvent.what`.
        seconds: How long in all, seconds.
    """

    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """How many records."""
        return self.counts.total()

    def add(self, event: LifecycleEvent) -> None:
        """Count one more."""
        self.counts[event.what] += 1
        self.seconds[event.what] = self.seconds.get(event.what, 0.0) + event.duration
