"""The rows of a timeline: one for each rank, in which its processes follow each other, with three bands of bars. Pure."""

from collections import Counter
from dataclasses import dataclass, field

from lightning_pgroup.records import ABORTED, LOST
from lightning_pgroup.timeline_parts import Generation, Process, StageSpan, Timeline
from lightning_pgroup.timeline_style import style_of_generation, style_of_stage
from lightning_pgroup.timeline_words import clean, words_of_generation, words_of_stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A bar.

    Attributes:
        start: Where it begins, seconds since 1970.
        end: Where it ends.
        style: Name of its style.
        labels: What may stand on it, the longest first.
        words: All that is known of it.
        inner: Whether it lies on another bar of its band.
        cross: Whether a failure began with it.
        is_open: Whether its end is not known, and its style does not say so.
    """

    start: float
    end: float
    style: str
    labels: tuple[str, ...]
    words: str
    inner: bool = False
    cross: bool = False
    is_open: bool = False


@dataclass(kw_only=True, slots=True)
class Row:
    """What one rank did, in one process or in several that did not overlap."""

    name: str
    processes: list[Process]
    groups: list[Bar] = field(default_factory=list)
    stages: list[Bar] = field(default_factory=list)
    trainers: list[Bar] = field(default_factory=list)


def rows_of(timeline: Timeline, *, with_words: bool) -> list[Row]:
    """The rows, by rank. A process goes into the row of its rank if that is free by then, else into one of its own.

    The words of the bars are left out unless asked for, since they take most of the time.
    """
    rows: list[Row] = []
    for process in timeline.processes:
        row = next((row for row in reversed(rows) if _is_free(row, process)), None)
        if row is None:
            row = Row(name="", processes=[])
            rows.append(row)
        row.processes.append(process)
    often = Counter(row.processes[0].rank for row in rows)
    causes = {(failure.host, failure.rank, failure.time) for failure in timeline.failures}
    for row in rows:
        row.name = _name(row, often, len(timeline.hosts) > 1)
        for process in row.processes:
            row.groups += [_group(one, process, timeline.start, causes, with_words) for one in process.generations]
            row.stages += [_stage(span, process, timeline.start, with_words) for span in process.stages]
            row.trainers += _trainers(process)
    return rows


def _is_free(row: Row, process: Process) -> bool:
    last = row.processes[-1]
    return last.rank == process.rank and max(last.last, *(one.end or 0.0 for one in last.generations)) <= process.start


def _name(row: Row, often: Counter[int], many_hosts: bool) -> str:
    rank, hosts = row.processes[0].rank, {process.host for process in row.processes}
    name = f"rank {rank}"
    if many_hosts and len(hosts) == 1:
        name += f" {clean(hosts.pop())}"
    if often[rank] > 1 and len(row.processes) == 1:
        name += f" pid {row.processes[0].pid}"
    return name


def _group(one: Generation, process: Process, start: float, causes: set[tuple[str, int, float]], with_words: bool) -> Bar:
    labels = (f"gen {one.number}", str(one.number)) if one.number else ("other code",)
    is_cause = one.outcome in (ABORTED, LOST) and (process.host, process.rank, one.ending) in causes
    words = words_of_generation(one, process, start) if with_words else ""
    return Bar(
        start=one.start, end=one.drawn_end, style=style_of_generation(one), labels=labels, words=words, cross=is_cause
    )  # fmt: skip


def _stage(span: StageSpan, process: Process, start: float, with_words: bool) -> Bar:
    labels = (clean(span.name),) if span.name else ()
    words = words_of_stage(span, process, start) if with_words else ""
    style = style_of_stage(span)
    return Bar(
        start=span.start,
        end=span.drawn_end,
        style=style,
        labels=labels,
        words=words,
        inner=span.depth > 0,
        is_open=span.end is None,
    )


def _trainers(process: Process) -> list[Bar]:
    """A bar for each Trainer, over all its stages up to the first of another one."""
    bars: list[tuple[int, float, float]] = []
    for span in process.stages:
        if span.depth or span.trainer is None:
            continue
        if bars and bars[-1][0] == span.trainer:
            bars[-1] = (span.trainer, bars[-1][1], span.drawn_end)
        else:
            bars.append((span.trainer, span.start, span.drawn_end))
    return [
        Bar(
            start=start, end=end, style="trainer odd" if number % 2 else "trainer even",
            labels=(f"Trainer {number}", f"T{number}", str(number)), words=f"Trainer {number} on rank {process.rank}",
        )
        for number, start, end in bars
    ]  # fmt: skip
