"""Whether anything grows over many stages: descriptors, threads, memory, keys in the store, wrappers of ``sys.excepthook``.

Two forked ranks validate one batch again and again, with ``destroy="on_teardown"``, so that each stage makes and ends a group
of its own: the cheapest stage there is. Every so often each rank counts what it holds. A straight line is fitted to the samples
after the first hundred stages; its slope is told with its standard error.

Two others stand beside it. Stages with plain ``DDPStrategy``, in which nothing is made or ended, show what Lightning itself
leaves behind. Groups of plain ``torch.distributed`` that are made in a store that lives on, used once and destroyed show what
torch itself leaves behind, such as the entries of its flight recorder, of which it keeps the last 2,000::

    python benchmarks/leaks.py --stages 10000
"""

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from ranks import Job, Ranks, be_quiet
from report import Aim, Report, Table, parse, parser, publish, settings, shown
from resources import forget_parent, sample
from workload import RANKS, Perceptron, batches, quiet_trainer

from lightning_pgroup import PGroupDDPStrategy

QUICK = {"stages": 8, "plain_stages": 8, "groups": 8, "every": 2, "skip": 2}
OURS, PLAIN, TORCH = "on_teardown", "DDPStrategy", "torch.distributed"
COUNTED = ("descriptors", "threads", "keys", "hooks")
"""Of these none may be left over."""
MEMORY = ("resident", "anonymous")
ENOUGH = 2.0
"""A slope of less than so many standard errors is none."""


def serve(make: Callable[[], Strategy]) -> Callable[[int], Job]:
    """Ranks that run stages, and then say what they hold."""

    def begin(rank: int) -> Job:
        forget_parent()
        strategy = make()
        trainer, model, loader = quiet_trainer(strategy, limit_val_batches=1), Perceptron(), batches()

        def run(count: int) -> dict[str, int]:
            for _ in range(count):
                trainer.validate(model, loader, verbose=False)
            if isinstance(strategy, PGroupDDPStrategy):
                # It keeps its last 10,000 records for the user, which is no leak, but would look like one before they are full.
                strategy.claim().events.clear()
            return sample()

        return run

    return begin


def serve_torch(rank: int) -> Job:
    """Ranks that make groups of plain torch, use each once and end it, in a store that lives on."""
    forget_parent()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, None, rank == 0, wait_for_workers=False)
    hook, number = sys.excepthook, 0

    def run(count: int) -> dict[str, int]:
        nonlocal number
        for _ in range(count):
            number += 1
            below = dist.PrefixStore(str(number), store)
            dist.init_process_group("gloo", store=below, rank=rank, world_size=RANKS)
            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
            sys.excepthook = hook
            if rank == 0 and hasattr(below, "list_keys"):
                # The group was used, so that nobody needs its keys any more.
                for key in below.list_keys():
                    below.delete_key(key)
        return sample()

    return run


SERVES: dict[str, Callable[[int], Job]] = {
    OURS: serve(partial(PGroupDDPStrategy, destroy="on_teardown")),
    PLAIN: serve(DDPStrategy),
    TORCH: serve_torch,
}


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
        if kind == "memory":
            value += f"; in the second half {_later(slopes, OURS)}, and of torch alone {_later(slopes, TORCH)}"
        made.aims.append(Aim(what, f"a slope of 0 within {ENOUGH:g} standard errors", value, not grows[kind]))
    made.aims.append(Aim("stages", f"{told['stages']:,} without a failure", f"{done:,}", done == told["stages"]))
    title = f"Samples after the first {told['skip']} stages; slope by least squares, per 1,000 stages"
    made.tables.append(Table(title, ["what", "first", "last", "most", "slope ± standard error", "of the second half"], rows))
    made.notes.append(
        "DDPStrategy makes and ends no group: its lines are what Lightning leaves behind. Those of torch.distributed are what"
        " torch leaves behind of each group that was used; rank 0 hosts its store there."
    )
    return made


def _fit(samples: Sequence[dict[str, Any]], what: str) -> tuple[float, float]:
    return slope([(one["stage"], one[what]) for one in samples])


def _later(slopes: dict[str, Any], name: str) -> str:
    lines = [rank["anonymous"]["second_half"] for rank in slopes[name]]
    return " and ".join(_in_words("anonymous", (line["per_stage"], line["error"])) for line in lines) + " kB per 1,000"


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
    options.add_argument("--groups", type=int, default=3_000, help="groups of plain torch")
    options.add_argument("--every", type=int, default=100, help="stages from one sample to the next")
    options.add_argument("--skip", type=int, default=100, help="stages at the beginning that do not count")
    options.add_argument("--seconds", type=float, default=360.0, help="after this time no more stages begin")
    told = parse(options, arguments, QUICK)
    be_quiet()
    counts = {OURS: told.stages, PLAIN: told.plain_stages, TORCH: told.groups}
    found = {}
    with ExitStack() as stack:
        for name, begin in SERVES.items():
            ranks = stack.enter_context(Ranks(RANKS, begin, invited=name != TORCH))
            found[name] = follow(ranks, counts[name], told.every, told.seconds)
    publish(report(found, settings(told)), told)


if __name__ == "__main__":
    sys.exit(main())
