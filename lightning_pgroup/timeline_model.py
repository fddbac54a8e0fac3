"""From records to intervals: which process had which generation, and ran which stage, from when to when. Pure.

Knows neither files nor pictures.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from lightning_pgroup.records import ABORTED, ADOPTED, CREATED, DESTROYED, LOST, REUSED
from lightning_pgroup.timeline_parts import OPEN, Failure, Generation, Process, StageSpan, Timeline

_BEGINS = (CREATED, REUSED, ADOPTED)
_ENDS = (DESTROYED, ABORTED, LOST)
_TEXTS = ("what", "why", "stage", "backend", "run", "host")
_NUMBERS = ("generation", "rank", "world_size", "pid")


def build(records: Iterable[dict[str, Any]]) -> Timeline:
    """Make intervals of records, in whatever order they come; those that lack a field or stand there twice are left out.

    Raises:
        ValueError: There is none.
    """
    known = _unique(record for record in records if _is_whole(record))
    if not known:
        raise ValueError("no records")
    processes = [_follow(process, lines) for process, lines in _by_process(known)]
    start = min(process.start for process in processes)
    end = max(process.last for process in processes)
    _close_open_ends(processes, end)
    processes.sort(key=lambda one: (one.rank, one.start, one.host, one.pid))
    return Timeline(processes=processes, failures=_failures(processes), start=start, end=end)


def _is_whole(record: dict[str, Any]) -> bool:
    def is_time(value: object) -> bool:
        return isinstance(value, (int, float)) and 0 <= value < 1e11

    return (
        all(isinstance(record.get(name), str) for name in _TEXTS)
        and all(isinstance(record.get(name), int) for name in _NUMBERS)
        and all(isinstance(record.get(name), (int, type(None))) for name in ("trainer", "attempt"))
        and is_time(record.get("start"))
        and is_time(record.get("duration"))
        and isinstance(record.get("ended", []), list)
        and all(is_time(one) for one in record.get("ended", []))
        and record["what"] in (*_BEGINS, *_ENDS)
    )


def _unique(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each event once, also if two strategies wrote it to two places, sorted by time."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        key = tuple(
            record[name] for name in ("host", "pid", "what", "generation", "rank", "start", "duration", "stage", "trainer")
        )
        ended = {*record.get("ended", ()), *(found[key]["ended"] if key in found else ())}
        found[key] = {**record, "ended": sorted(ended)}
    return sorted(found.values(), key=lambda record: float(record["start"]))


def _by_process(records: list[dict[str, Any]]) -> Iterator[tuple[Process, list[dict[str, Any]]]]:
    """The records of each process; the number of a process may come back in another run or attempt."""
    open_now: dict[tuple[str, int], tuple[Process, list[dict[str, Any]]]] = {}
    for record in records:
        key, run = (record["host"], record["pid"]), record["run"]
        process, lines = open_now.get(key, (None, []))
        if process is None or (run and process.run and (run, record["attempt"]) != (process.run, process.attempt)):
            if process is not None:
                yield process, lines
            process, lines = Process(host=key[0], pid=key[1], run=run, attempt=record["attempt"]), []
            open_now[key] = process, lines
        elif run and not process.run:
            process.run, process.attempt = run, record["attempt"]
        lines.append(record)
    yield from open_now.values()


def _follow(process: Process, records: list[dict[str, Any]]) -> Process:
    """Fill in what a process did."""
    largest = max(records, key=lambda record: int(record["world_size"]))
    process.rank = largest["rank"]
    process.last = max(max([record["start"] + record["duration"], *record["ended"]]) for record in records)
    running: list[StageSpan] = []
    living: Generation | None = None
    steps: list[tuple[float, int, dict[str, Any] | None]] = [(float(record["start"]), 1, record) for record in records]
    steps += [(float(end), 0, None) for record in records for end in record["ended"]]
    for time, _, record in sorted(steps, key=lambda step: step[:2]):
        if record is None:
            if running:
                running.pop().end = time
            continue
        number, what, until = record["generation"], record["what"], time + record["duration"]
        if living is None or living.number != number:
            living = Generation(
                number=number, start=time, began=what if what in _BEGINS else REUSED, why_began=record["why"],
                duration=record["duration"] if what == CREATED else 0.0,
                backend=record["backend"], world_size=record["world_size"],
            )  # fmt: skip
            if what in _ENDS:
                living.why_began = "the records of its beginning are missing"
            process.generations.append(living)
        if what in _BEGINS:
            span = StageSpan(name=record["stage"], trainer=record["trainer"], generation=number, start=time, depth=len(running))
            process.stages.append(span)
            running.append(span)
        else:
            living.ending, living.end, living.outcome, living.why_ended = time, until, what, record["why"]
            living = None
    return process


def _close_open_ends(processes: list[Process], end: float) -> None:
    """Say where pictures let an interval end that has no end: where the others ended that generation, or at the very end."""
    ended: dict[tuple[str, int | None, int], float] = {}
    for process in processes:
        for one in process.generations:
            if one.end is not None and one.number:
                key = (process.run, process.attempt, one.number)
                ended[key] = max(ended.get(key, 0.0), one.end)
    for process in processes:
        bounds = [following.start for following in process.generations[1:]] + [math.inf]
        for one, bound in zip(process.generations, bounds, strict=True):
            others = ended.get((process.run, process.attempt, one.number), end)
            one.drawn_end = max(one.start, min(bound, others if one.end is None else one.end))
        last = process.generations[-1].drawn_end
        around: list[StageSpan] = []
        for span in process.stages:
            del around[span.depth :]
            limit = around[-1].drawn_end if around else math.inf
            span.drawn_end = max(span.start, min(limit, last if span.end is None else span.end))
            around.append(span)


def _failures(processes: list[Process]) -> list[Failure]:
    together: dict[tuple[str, int | None, int, int], list[tuple[Process, Generation]]] = {}
    for place, process in enumerate(processes):
        for one in process.generations:
            alone = place + 1 if one.number == 0 else 0  # groups of other code have no number
            together.setdefault((process.run, process.attempt, one.number, alone), []).append((process, one))
    found = []
    for (_, attempt, number, _), members in together.items():
        bad = [(process, one) for process, one in members if one.outcome in (ABORTED, LOST)]
        if not bad:
            continue
        process, first = min(bad, key=lambda pair: pair[1].ending or 0.0)
        missing = sorted(other.rank for other, one in members if one.outcome == OPEN)
        found.append(
            Failure(
                number=0, generation=number, attempt=attempt, time=first.ending or first.start, rank=process.rank,
                host=process.host, outcome=first.outcome, why=first.why_ended, others=len(bad) - 1, missing=tuple(missing),
            )
        )  # fmt: skip
    found.sort(key=lambda failure: failure.time)
    return [replace(failure, number=count) for count, failure in enumerate(found, 1)]
