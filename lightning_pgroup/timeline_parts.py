"""The parts of a timeline: generations, stages and failures of processes. Pure.

Times are seconds since 1970, each by the clock of its own host.
"""

import math
from dataclasses import dataclass, field

OPEN = "open"
"""How a generation ended of whose end there is no record."""


@dataclass(kw_only=True, slots=True)
class Generation:
    """One group in one process.

    Attributes:
        number: Of the generation; 0 for a group of other code.
        start: When its creation began.
        ending: When its end began; ``None`` if no record says so.
        end: When it was gone; ``None`` if no record says so.
        drawn_end: Where a picture lets it end.
        outcome: ``"destroyed"``, ``"aborted"``, ``"lost"`` or :data:`OPEN`.
        began: What was done first with it here: ``"created"``, ``"adopted"``, or ``"reused"`` if older records are missing.
        why_began: The reason for that.
        why_ended: The reason of its end.
        duration: How long its creation took, seconds.
        backend: Name of its backend.
        world_size: Number of its ranks.
    """

    number: int
    start: float
    ending: float | None = None
    end: float | None = None
    drawn_end: float = 0.0
    outcome: str = OPEN
    began: str
    why_began: str
    why_ended: str = ""
    duration: float
    backend: str
    world_size: int


@dataclass(kw_only=True, slots=True)
class StageSpan:
    """One stage in one process, from when it asked for its group.

    Attributes:
        name: ``"fit"`` for example.
        trainer: Number of the Trainer; ``None`` without one.
        generation: The one that it got.
        start: When it began to ask for it.
        end: When it ended; ``None`` if no record says so.
        drawn_end: Where a picture lets it end.
        depth: How many other stages it lay in.
    """

    name: str
    trainer: int | None
    generation: int
    start: float
    end: float | None = None
    drawn_end: float = 0.0
    depth: int = 0


@dataclass(kw_only=True, slots=True)
class Process:
    """What one process did, in one attempt of one run.

    Attributes:
        host: Its host.
        pid: Its number there.
        run: Name of the run; empty if it only used groups of other code.
        attempt: How often the launcher had restarted the ranks.
        rank: Its rank in the largest group that it had.
        generations: In order; no two overlap.
        stages: In order of their beginning; each lies inside, or apart from, any other.
        last: When its last record was written.
    """

    host: str
    pid: int
    run: str
    attempt: int | None
    rank: int = 0
    generations: list[Generation] = field(default_factory=list)
    stages: list[StageSpan] = field(default_factory=list)
    last: float = 0.0

    @property
    def start(self) -> float:
        """When its first generation or stage began."""
        return min([one.start for one in self.generations] + [one.start for one in self.stages])

    @property
    def drawn_end(self) -> float:
        """Where a picture lets it end."""
        return max([one.drawn_end for one in self.generations] + [one.drawn_end for one in self.stages])


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A generation that was aborted or lost on some rank.

    Attributes:
        number: Counted from 1 in the order of their times.
        generation: Which one.
        attempt: Of which attempt.
        time: When it first ended so.
        rank: On which rank that was.
        host: On which host.
        outcome: ``"aborted"`` or ``"lost"``.
        why: The reason there.
        others: On how many other ranks it ended so too.
        missing: The ranks that have no record of its end.
    """

    number: int
    generation: int
    attempt: int | None
    time: float
    rank: int
    host: str
    outcome: str
    why: str
    others: int
    missing: tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class Timeline:
    """All that records say.

    Attributes:
        processes: Sorted by rank, then by time.
        failures: In order of their times.
        start: The first time that is known.
        end: The last one.
    """

    processes: list[Process]
    failures: list[Failure]
    start: float
    end: float

    @property
    def hosts(self) -> list[str]:
        """The hosts, sorted."""
        return sorted({process.host for process in self.processes})

    @property
    def launches(self) -> list[tuple[str, int | None, float]]:
        """Each attempt of each run, with its first time, in order."""
        first: dict[tuple[str, int | None], float] = {}
        for process in self.processes:
            key = (process.run, process.attempt)
            if process.run:
                first[key] = min(first.get(key, math.inf), process.start)
        return sorted(((run, attempt, time) for (run, attempt), time in first.items()), key=lambda one: one[2])
