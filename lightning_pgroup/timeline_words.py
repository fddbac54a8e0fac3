"""The words of a timeline: times, bars and failures as short texts that any picture can show."""

import functools
import math
from datetime import UTC, datetime

from lightning_pgroup.timeline_parts import OPEN, Failure, Generation, Process, StageSpan, Timeline

_NARROW = frozenset("iljtfrI.,:;'|!()[]/ ")
_LONG = 600.0
_WIDE = frozenset("mwMW%@—…→")


def clean(text: str) -> str:
    """A text on one line, without what a font or a file can not show."""
    if text.isascii() and text.isprintable():
        return text
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


@functools.lru_cache(maxsize=10_000)
def width_of(text: str, size: float) -> float:
    """How wide a text is at most, for common fonts without serifs."""
    ems = 0.0
    for letter in text:
        ems += (
            0.42
            if letter in _NARROW
            else 1.0
            if letter in _WIDE or ord(letter) > 0x2FF
            else 0.72
            if letter.isupper()
            else 0.645
        )
    return ems * size


def cut(text: str, room: float, size: float) -> str:
    """As much of a text as fits, with an ellipsis if that is not all."""
    if width_of(text, size) <= room:
        return text
    while text and width_of(text + "…", size) > room:
        text = text[:-1]
    return text + "…" if text else ""


def ticks(length: float, most: int) -> list[tuple[float, str]]:
    """At most about ``most`` round times from 0 to ``length``, with their labels."""
    steps = [base * 10**power for power in range(-6, 2) for base in (1, 2, 5)]
    steps = [step for step in steps if step < 60] + [60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200]
    step = next((step for step in steps if length / step <= most), None)
    step = 86400 * math.ceil(length / most / 86400) if step is None else step
    return [(step * count, _tick(step * count, step)) for count in range(int(length / step + 1e-9) + 1)]


def _tick(time: float, step: float) -> str:
    if step < 60:
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return f"{time:.{decimals}f} s" if time < _LONG or step < 1 else _minutes(time)
    hours, minutes = divmod(round(time / 60), 60)
    return f"{hours} h" if step % 3600 == 0 else f"{hours}:{minutes:02d} h"


def _minutes(time: float) -> str:
    minutes, seconds = divmod(round(time), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} h"


def span_of(seconds: float) -> str:
    """How long something took."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.4g} s" if seconds < 9999.5 else f"{seconds:.0f} s"


def moment(seconds: float) -> str:
    """A time since the beginning, as the ticks show it."""
    if seconds < _LONG:
        return f"{seconds:.3f} s"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes // 60)}:{int(minutes % 60):02d}:{rest:05.2f} h"


def clock(time: float) -> str:
    """A time of day, in UTC."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def title_of(timeline: Timeline) -> str:
    """What the picture shows."""
    ranks = len({process.rank for process in timeline.processes})
    generations = len(
        {
            (process.run, process.attempt, one.number)
            for process in timeline.processes
            for one in process.generations
            if one.number
        }
    )
    failed = len(timeline.failures)
    counts = f"{_count(ranks, 'rank')}, {_count(generations, 'generation')}, {_count(failed, 'failure')}"
    return f"Process groups of {counts}; 0 s is {clock(timeline.start)}"


def note_of(timeline: Timeline) -> str:
    """What to know of the times, or nothing."""
    if len(timeline.hosts) < 2:
        return ""
    return f"Times are by the clocks of {len(timeline.hosts)} hosts, which may differ: what looks earlier on one may be later."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def words_of_generation(one: Generation, process: Process, start: float) -> str:
    """All that is known of a generation in a process."""
    name = f"Generation {one.number}" if one.number else "A group of other code"
    launched = "" if process.attempt is None else f", run {process.run} attempt {process.attempt}"
    began = f"{one.began} at {moment(one.start - start)}" + (f" in {span_of(one.duration)}" if one.duration else "")
    ended = "no end on record"
    if one.outcome != OPEN and one.ending is not None:
        ended = f"{one.outcome} at {moment(one.ending - start)}: {one.why_ended}"
    return clean(
        f"{name} on rank {process.rank}, {one.world_size} ranks, {one.backend}{launched}, {place_of(process)}."
        f" {began}: {one.why_began}. {ended}."
    )


def words_of_stage(span: StageSpan, process: Process, start: float) -> str:
    """All that is known of a stage."""
    trainer = "" if span.trainer is None else f" of Trainer {span.trainer}"
    name = span.name or "stage"
    if span.end is None:
        return clean(f"{name}{trainer} on rank {process.rank} from {moment(span.start - start)}, no end on record")
    return clean(
        f"{name}{trainer} on rank {process.rank} from {moment(span.start - start)} to {moment(span.end - start)},"
        f" {span_of(span.end - span.start)}"
    )


def place_of(process: Process) -> str:
    """Which process it is."""
    return f"pid {process.pid} on {process.host}"


def words_of_failure(failure: Failure, start: float, *, many_hosts: bool) -> str:
    """A failure in one line."""
    attempt = "" if failure.attempt is None else f", attempt {failure.attempt}"
    name = f"gen {failure.generation}" if failure.generation else "a group of other code"
    host = f" ({failure.host})" if many_hosts else ""
    after = f" (and {_count(failure.others, 'more rank')})" if failure.others else ""
    gone = ", ".join(map(str, failure.missing[:8])) + ("…" if len(failure.missing) > 8 else "")
    missing = f" [no end on record: rank {gone}]" if failure.missing else ""
    when = f"at {moment(failure.time - start)}, first on rank {failure.rank}{host}"
    return f"{failure.number}  " + clean(f"{name}{attempt} {failure.outcome} {when}{after}{missing}: {failure.why}")
