"""Whether anything grows over many stages: descriptors, threads, memory, keys in the store, wrappers of ``sys.excepthook``.

Two forked ranks validate one batch again and again, with ``destroy="on_teardown"``, so that each stage makes and ends a group
of its own: the cheapest stage there is. Every so often each rank counts what it holds. A straight line is fitted to the samples
after the first hundred stages; its slope is told with its standard error. Next to it the same with plain ``DDPStrategy``, in
which nothing is made or ended, shows what Lightning itself leaves behind in a stage::

    python benchmarks/leaks.py --stages 10000
"""

import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, Strategy
from ranks import Job, Ranks, be_quiet
from report import Aim, Report, Table, parse, parser, publish, settings, shown
from resources import forget_parent, sample
from workload import RANKS, Perceptron, batches, quiet_trainer

from lightning_pgroup import PGroupDDPStrategy

QUICK = {"stages": 8, "plain_stages": 8, "every": 2, "skip": 2}
OURS, PLAIN = "on_teardown", "DDPStrategy"
STRATEGIES: dict[str, Callable[[], Strategy]] = {OURS: partial(PGroupDDPStrategy, destroy="on_teardown"), PLAIN: DDPStrategy}
COUNTED = ("descriptors", "threads", "keys", "hooks")
"""Of these none may be left over."""
MEMORY = ("resident", "anonymous")
ENOUGH = 2.0
"""A slope of less than so many standard errors is none."""


def serve(make: Callable[[], Strategy]) -> Callable[[int], Job]:
    """Ranks that run stages, and then say what they hold."""

    def begin(rank: int) -> Job:
        forget_parent()
        trainer, model, loader = quiet_trainer(make(), limit_val_batches=1), Perceptron(), batches()

        def run(count: int) -> dict[str, int]:
            for _ in range(count):
                trainer.validate(model, loader, verbose=False)
            return sample()

        return run

    return begin


def follow(ranks: Ranks, stages: int, every: int, seconds: float) -> list[list[dict[str, Any]]]:
    """The samples of each rank, as long as time allows."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(RANKS)]
    start = time.monotonic()
    for done in range(every, stages + 1, every):
        for rank, one in enumerate(ranks.do(every)):
            found[rank].append({"stage": done, **one})
        if time.monotonic() - start > seconds:
            break
    return found


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The slope of the straight line through points by least squares, and its standard error. Needs three points.

    Memory comes in steps, so that a sample is like the one before, and there are fewer independent ones than samples. The error
    is made larger accordingly, by the correlation of neighbours.
    """
    count = len(points)
    x_mean, y_mean = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    square = sum((x - x_mean) ** 2 for x, _ in points)
    rise = sum((x - x_mean) * (y - y_mean) for x, y in points) / square
    rest = [y - y_mean - rise * (x - x_mean) for x, y in points]
    squares = sum(one**2 for one in rest)
    if squares == 0:
        return rise, 0.0
    alike = min(0.95, max(0.0, sum(one * other for one, other in itertools.pairwise(rest)) / squares))
    return rise, math.sqrt(squares / (count - 2) / square * (1 + alike) / (1 - alike))


def report(found: dict[str, list[list[dict[str, Any]]]], told: dict[str, Any]) -> Report:
    """Fit the lines."""
    made = Report("leaks", f"What {RANKS} ranks hold after many stages, gloo", told)
    rows = []
    grows: dict[str, list[str]] = {"counts": [], "memory": []}
    slopes: dict[str, Any] = {}
    for name, ranks in found.items():
        slopes[name] = []
        for rank, samples in enumerate(ranks):
            late = [one for one in samples if one["stage"] > told["skip"]]
            half = late[-max(3, len(late) // 2) :]
            fitted = {what: (_fit(late, what), _fit(half, what)) for what in (*COUNTED, *MEMORY)}
            slopes[name].append(
                {
                    what: {"per_stage": rise, "error": error, "second_half": {"per_stage": later[0], "error": later[1]}}
                    for what, ((rise, error), later) in fitted.items()
                }
            )
            for what, (line, later) in fitted.items():
                values = [one[what] / _unit(what)[1] for one in late]
                first, last, most = (shown(value, 0) for value in (values[0], values[-1], max(values)))
                label = f"{name}, rank {rank}, {what}{', kB' if what in MEMORY else ''}"
                rows.append([label, first, last, most, _in_words(what, line), _in_words(what, later)])
                if name == OURS and abs(line[0]) > ENOUGH * line[1]:
                    grown = f"{what} on rank {rank}: {_in_words(what, line)}{_unit(what)[0]} per 1,000"
                    grows["memory" if what in MEMORY else "counts"].append(grown)
    done = found[OURS][0][-1]["stage"]
    columns = {
        name: [{what: [one[what] for one in samples] for what in ("stage", *COUNTED, *MEMORY)} for samples in ranks]
        for name, ranks in found.items()
    }
    made.figures = {"stages": done, "slopes": slopes, "samples": columns}
    where = f"over {done:,} stages"
    for kind, what in (("counts", ", ".join(COUNTED)), ("memory", "memory")):
        value = f"{where}, " + ("no slope" if not grows[kind] else "; ".join(grows[kind]))
        made.aims.append(Aim(what, f"a slope of 0 within {ENOUGH:g} standard errors", value, not grows[kind]))
    made.aims.append(Aim("stages", f"{told['stages']:,} without a failure", f"{done:,}", done == told["stages"]))
    title = f"Samples after the first {told['skip']} stages; slope by least squares, per 1,000 stages"
    made.tables.append(Table(title, ["what", "first", "last", "most", "slope ± standard error", "of the second half"], rows))
    made.notes.append(
        "The line of DDPStrategy, which makes and ends no group, is what Lightning and torch leave behind by themselves."
    )
    return made


def _fit(samples: Sequence[dict[str, Any]], what: str) -> tuple[float, float]:
    return slope([(one["stage"], one[what]) for one in samples])


def _unit(what: str) -> tuple[str, float]:
    return (" kB", 1e3) if what in MEMORY else ("", 1.0)


def _in_words(what: str, line: tuple[float, float]) -> str:
    digits = 1 if what in MEMORY else 3
    rise, error = (1e3 * one / _unit(what)[1] for one in line)
    return f"{rise:,.{digits}f} ± {error:,.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    options = parser(__doc__)
    options.add_argument("--stages", type=int, default=10_000, help="stages with a group of their own")
    options.add_argument("--plain-stages", type=int, default=2_000, help="stages of DDPStrategy")
    options.add_argument("--every", type=int, default=100, help="stages from one sample to the next")
    options.add_argument("--skip", type=int, default=100, help="stages at the beginning that do not count")
    options.add_argument("--seconds", type=float, default=360.0, help="after this time no more stages begin")
    told = parse(options, arguments, QUICK)
    be_quiet()
    counts = {OURS: told.stages, PLAIN: told.plain_stages}
    found = {}
    with ExitStack() as stack:
        for name, make in STRATEGIES.items():
            ranks = stack.enter_context(Ranks(RANKS, serve(make)))
            found[name] = follow(ranks, counts[name], told.every, told.seconds)
    publish(report(found, settings(told)), told)


if __name__ == "__main__":
    sys.exit(main())
