"""How fast a failure of one rank reaches the others, and the next run begins, against plain ``DDPStrategy``.

On each of some world sizes the last rank raises in the middle of a fit, in which the others wait for it. Measures, as medians
over some repetitions, the time from the raise to the exception on the last peer, and to the first step of the next fit. Plain
DDP has a timeout of its own here, which is all that ends the wait there; it recovers in no run at all::

    python benchmarks/failure.py --sizes 2 4 --repeat 5 --timeout 20
"""

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, Strategy
from ranks import Job, Ranks, be_quiet
from report import Aim, Report, Spread, Table, parse, parser, publish, settings, shown
from workload import Perceptron, batches, quiet_trainer

from lightning_pgroup import PGroupDDPStrategy

QUICK = {"sizes": [2], "repeat": 2, "timeout": 2.0}
OURS, PLAIN = "PGroupDDPStrategy", "DDPStrategy"
STRATEGIES: dict[str, Callable[..., Strategy]] = {OURS: PGroupDDPStrategy, PLAIN: DDPStrategy}


class Fault(Callback):
    """Raises on one rank, and notes when, on a clock that all processes share."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.raised, self.stepped = fails, 0.0, 0.0

    def on_train_batch_start(self, *_: object) -> None:
        """Raise, or note the first step."""
        self.stepped = self.stepped or time.monotonic()
        if self.fails:
            self.raised = time.monotonic()
            raise ValueError("the fault")


def fit(strategy: Strategy, size: int, fails: bool) -> tuple[Fault, float, bool]:
    """Fit once; returns the callback, when the fit was over, and whether it raised."""
    fault, failed = Fault(fails), False
    trainer = quiet_trainer(strategy, size, callbacks=[fault])
    try:
        trainer.fit(Perceptron(), batches(count=2))
    except (RuntimeError, ValueError):
        failed = True
    return fault, time.monotonic(), failed


def once(size: int, make: Callable[[], Strategy], within: float) -> tuple[float, float | None]:
    """One failure: seconds to the last peer's exception, and to the next fit's first step on the last rank."""

    def serve(rank: int) -> Job:
        def do() -> tuple[float, float, float | None]:
            fit(make(), size, False)
            fault, over, _ = fit(make(), size, rank == size - 1)
            again, _, failed = fit(make(), size, False)
            return fault.raised, over, None if failed else again.stepped

        return do

    with Ranks(size, serve) as ranks:
        outcomes = ranks.do(within=within)
    raised = max(outcome[0] for outcome in outcomes)
    steps = [outcome[2] for outcome in outcomes if outcome[2] is not None]
    return max(outcome[1] for outcome in outcomes) - raised, max(steps) - raised if len(steps) == size else None


def report(found: dict[int, dict[str, list[tuple[float, float | None]]]], told: dict[str, Any]) -> Report:
    """Compare."""
    made = Report("failure", f"From the raise on one rank, gloo, a timeout of {told['timeout']:g} s", told)
    rows = []
    for size, strategies in found.items():
        figures: dict[str, Any] = {}
        for name, runs in strategies.items():
            steps = [step for _, step in runs if step is not None]
            peer = Spread.of([one for one, _ in runs], 1e3)
            step = Spread.of(steps, 1e3) if steps else None
            figures[name] = {"peer_ms": peer, "step_ms": step, "runs": len(runs), "recovered": len(steps)}
            shown_step = "never" if step is None else shown(step.median, 0)
            quartiles = "" if step is None else step.quartiles(0)
            recovered = f"{len(steps)} of {len(runs)}"
            rows.append([f"{size} ranks, {name}", shown(peer.median, 0), peer.quartiles(0), shown_step, quartiles, recovered])
        made.figures[str(size)] = figures
    columns = ["ranks", "to the last peer, ms", "quartiles", "to the next step, ms", "quartiles", "recovered"]
    made.tables.append(Table("Failure", columns, rows))
    ours = [figures[OURS] for figures in made.figures.values()]
    good, runs = sum(one["recovered"] for one in ours), sum(one["runs"] for one in ours)
    times = ", ".join(shown(one["peer_ms"].median, 0) for one in ours)
    what = f"a failure at {', '.join(made.figures)} ranks"
    value = f"in {good} of {runs}; to the exception on the last peer {times} ms"
    made.aims.append(Aim(what, "the next fit trains", value, good == runs))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    options = parser(__doc__)
    options.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 16], help="numbers of ranks")
    options.add_argument("--repeat", type=int, default=5, help="repetitions for ours (plain DDP runs once per size)")
    options.add_argument("--timeout", type=float, default=20.0, help="timeout of the groups, seconds")
    told = parse(options, arguments, QUICK)
    be_quiet()
    timeout = timedelta(seconds=told.timeout)
    found = {
        size: {
            name: [
                once(size, partial(strategy, timeout=timeout), 120 + 3 * told.timeout)
                for _ in range(told.repeat if name == OURS else 1)
            ]
            for name, strategy in STRATEGIES.items()
        }
        for size in told.sizes
    }
    publish(report(found, settings(told)), told)


if __name__ == "__main__":
    sys.exit(main())
