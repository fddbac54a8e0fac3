"""A timeline in Chrome's trace format, which Perfetto opens: for each process a track for its groups and one for its stages."""

import json
from typing import Any

from lightning_pgroup.timeline_parts import OPEN, Process, Timeline
from lightning_pgroup.timeline_words import clean, clock, note_of, place_of, words_of_failure

_TRACKS = ("process group", "stages")


def render(timeline: Timeline) -> bytes:
    """The JSON."""
    events: list[dict[str, Any]] = []
    places: dict[tuple[str, int], int] = {}
    for count, process in enumerate(timeline.processes, 1):
        # Numbers of its own: those of processes can be the same on two hosts. Of threads too, since Perfetto wants each once.
        number = 10 * count
        places.setdefault((process.host, process.rank), number)
        events += _names(process, number, count)
        events += _groups(process, number, timeline.start)
        events += _stages(process, number + 1, timeline.start)
    for failure in timeline.failures:
        words = words_of_failure(failure, timeline.start, many_hosts=len(timeline.hosts) > 1)
        number = places[failure.host, failure.rank]
        events.append(
            {"name": f"failure {failure.number}", "cat": "failure", "ph": "i", "s": "g", "pid": number, "tid": number,
             "ts": _micros(failure.time, timeline.start), "args": {"what": words}}
        )  # fmt: skip
    about = {
        "0 is": clock(timeline.start),
        "hosts": ", ".join(map(clean, timeline.hosts)),
        "clocks": note_of(timeline) or "one host",
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}).encode()


def _names(process: Process, number: int, place: int) -> list[dict[str, Any]]:
    launched = "" if process.attempt is None else f", attempt {process.attempt}"
    name = clean(f"rank {process.rank} ({place_of(process)}{launched})")
    named: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", number, {"name": name}),
        ("process_sort_index", number, {"sort_index": place}),
    ]
    for track, title in enumerate(_TRACKS):
        named.append(("thread_name", number + track, {"name": title}))
        named.append(("thread_sort_index", number + track, {"sort_index": track}))
    return [{"name": kind, "ph": "M", "pid": number, "tid": thread, "ts": 0, "args": args} for kind, thread, args in named]


def _groups(process: Process, number: int, start: float) -> list[dict[str, Any]]:
    events = []
    for one in process.generations:
        name = f"gen {one.number}" if one.number else "group of other code"
        args = {
            "generation": one.number, "rank": process.rank, "world_size": one.world_size, "backend": clean(one.backend),
            "run": clean(process.run), "attempt": process.attempt, "began": one.began, "why it began": clean(one.why_began),
            "ended": "no end on record" if one.outcome == OPEN else one.outcome, "why it ended": clean(one.why_ended),
        }  # fmt: skip
        if one.outcome != OPEN:
            name += "" if one.outcome == "destroyed" else f" {one.outcome}"
        else:
            name += ", no end on record"
        events.append(_slice(name, "group", number, number, (one.start, one.drawn_end), start, args))
        if one.duration:
            events.append(
                _slice("create", "group", number, number, (one.start, min(one.start + one.duration, one.drawn_end)), start, {})
            )
        if one.ending is not None and one.end is not None:
            verb = {"destroyed": "destroy", "aborted": "abort", "lost": "lost"}[one.outcome]
            if one.end > one.ending:
                events.append(_slice(verb, "group", number, number, (max(one.ending, one.start), one.drawn_end), start, {}))
            if one.outcome != "destroyed":
                events.append(
                    {"name": f"gen {one.number} {one.outcome}", "cat": one.outcome, "ph": "i", "s": "p", "pid": number,
                     "tid": number, "ts": _micros(one.ending, start), "args": {"why": clean(one.why_ended)}}
                )  # fmt: skip
    return events


def _stages(process: Process, track: int, start: float) -> list[dict[str, Any]]:
    events = []
    for span in process.stages:
        name = clean(span.name) or "stage"
        name += "" if span.trainer is None else f" (Trainer {span.trainer})"
        args = {"trainer": span.trainer, "generation": span.generation, "end on record": span.end is not None}
        events.append(_slice(name, "stage", track - 1, track, (span.start, span.drawn_end), start, args))
    return events


def _slice(
    name: str, kind: str, process: int, track: int, times: tuple[float, float], start: float, args: dict[str, Any]
) -> dict[str, Any]:
    begin, end = (_micros(time, start) for time in times)
    about = {"name": name, "cat": kind, "ph": "X", "pid": process, "tid": track}
    return {**about, "ts": begin, "dur": max(end - begin, 0), "args": args}


def _micros(time: float, start: float) -> int:
    return round((time - start) * 1e6)
