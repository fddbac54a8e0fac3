"""What the ownership of the group costs per stage: what ``fit`` and ``test`` of one batch take beyond that batch.

One set of two forked ranks for each policy, and two for plain ``DDPStrategy``, which keeps one group for ever. They take turns
in small blocks, in an order that changes. One Trainer runs all stages, but where a row says that each stage has a new one::

    python benchmarks/stage.py --rounds 20
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from ranks import Job, Ranks, be_quiet, in_turn
from report import Aim, Report, Spread, Table, parse, parser, publish, settings, shown
from workload import RANKS, Perceptron, batches, quiet_trainer

from lightning_pgroup import PGroupDDPStrategy

QUICK = {"rounds": 2, "block": 1}
STAGES = ("fit", "test")


@dataclass(frozen=True)
class Way:
    """A strategy, and whether each stage has a Trainer of its own.

    Attributes:
        make: Makes the strategy.
        renews: Whether each stage has a new Trainer; made before its time counts.
        most: How many milliseconds more than plain it may cost, if there is an aim.
    """

    make: Callable[[], Strategy]
    renews: bool = False
    most: float | None = None


PLAIN, AGAIN = "DDPStrategy", "DDPStrategy again"
WAYS: dict[str, Way] = {
    PLAIN: Way(DDPStrategy),
    AGAIN: Way(DDPStrategy),
    "at_exit": Way(partial(PGroupDDPStrategy, destroy="at_exit"), most=1),
    "per_trainer": Way(partial(PGroupDDPStrategy, destroy="per_trainer"), most=1),
    "on_destructor": Way(partial(PGroupDDPStrategy, destroy="on_destructor"), most=1),
    "on_error": Way(partial(PGroupDDPStrategy, destroy="on_error"), most=1),
    "never": Way(partial(PGroupDDPStrategy, destroy="never"), most=1),
    "on_teardown": Way(partial(PGroupDDPStrategy, destroy="on_teardown"), most=10),
    "per_trainer, each stage a new one": Way(partial(PGroupDDPStrategy, destroy="per_trainer"), renews=True),
}


class BatchClock(Callback):
    """Times the batch of a stage."""

    def __init__(self) -> None:
        self._start = 0.0
        self._batches: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """The batch begins."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """The batch is over."""
        self._batches.append(time.perf_counter() - self._start)

    def take(self) -> float:
        """How long the batch took. There must have been one, and no more."""
        (batch,) = self._batches
        self._batches.clear()
        return batch

    on_test_batch_start, on_test_batch_end = on_train_batch_start, on_train_batch_end


def serve(way: Way) -> Callable[[int], Job]:
    """Ranks that run stages of one strategy."""

    def begin(rank: int) -> Job:
        clock, model, loader = BatchClock(), Perceptron(), batches()

        def new_trainer() -> Trainer:
            return quiet_trainer(way.make(), callbacks=[clock], max_epochs=0)

        trainer = new_trainer()

        def run(stage: str, count: int) -> list[float]:
            nonlocal trainer
            times = []
            for _ in range(count):
                if way.renews:
                    trainer = new_trainer()
                if stage == "fit":
                    trainer.fit_loop.max_epochs = trainer.current_epoch + 1
                start = time.perf_counter()
                if stage == "fit":
                    trainer.fit(model, loader)
                else:
                    trainer.test(model, loader, verbose=False)
                times.append(time.perf_counter() - start - clock.take())
            return times

        return run

    return begin


def measure(rounds: int, block: int) -> dict[str, dict[str, list[list[float]]]]:
    """Times beyond the batch on rank 0, in seconds: by stage and way, a list for each turn."""
    found: dict[str, dict[str, list[list[float]]]] = {stage: {name: [] for name in WAYS} for stage in STAGES}
    names = list(WAYS)
    with ExitStack() as stack:
        teams = {name: stack.enter_context(Ranks(RANKS, serve(way))) for name, way in WAYS.items()}
        for stage in STAGES:
            for team in teams.values():
                team.do(stage, max(2, block))
            for order in in_turn(len(names), rounds):
                for index in order:
                    found[stage][names[index]].append(teams[names[index]].do(stage, block)[0])
    return found


def report(found: dict[str, dict[str, list[list[float]]]], told: dict[str, Any]) -> Report:
    """Compare."""
    made = Report("stage", f"What a stage takes beyond its batch, {RANKS} ranks, gloo", told)
    for stage, ways in found.items():
        rows, figures = [], {}
        plain = ways[PLAIN]
        for name, turns in ways.items():
            spread = Spread.of([value for turn in turns for value in turn], 1e3)
            # Turn against turn of the same round, so that what the machine did in that round is in both.
            pairs = [(Spread.of(mine).median, Spread.of(other).median) for mine, other in zip(turns, plain, strict=True)]
            more = Spread.of([mine - other for mine, other in pairs], 1e3)
            ratio = Spread.of([mine / other for mine, other in pairs])
            figures[name] = {"ms": spread, "more_ms": more, "ratio": ratio}
            rows.append(
                [name, shown(spread.median), spread.quartiles(), shown(more.median), more.quartiles(), shown(ratio.median)]
            )
        made.figures[stage] = figures
        columns = ["policy", "median", "quartiles", "more", "quartiles", "ratio"]
        made.tables.append(Table(f"{stage} of one batch, ms", columns, rows))
        made.aims += _aims(stage, figures)
    made.notes.append("More: median of the differences to the turn of DDPStrategy in the same round.")
    return made


def _aims(stage: str, figures: dict[str, Any]) -> list[Aim]:
    """For each aim the policy that costs the most."""
    aims = []
    for limit in sorted({way.most for way in WAYS.values() if way.most is not None}):
        names = [name for name, way in WAYS.items() if way.most == limit]
        worst = max(names, key=lambda name: figures[name]["more_ms"].median)
        more = figures[worst]["more_ms"]
        noise = figures[AGAIN]["more_ms"]
        value = f"{more.median:.2f} ms ({more.quartiles()}), `{worst}`; a second DDPStrategy: {noise.median:.2f} ms"
        what = f"`{stage}` of one batch, {', '.join(f'`{name}`' for name in names)}"
        aims.append(Aim(what, f"at most {limit:g} ms more than DDPStrategy", value, more.median <= limit))
    return aims


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=20, help="turns of each strategy, for fit and for test")
    options.add_argument("--block", type=int, default=5, help="stages of a turn")
    told = parse(options, arguments, QUICK)
    be_quiet()
    publish(report(measure(told.rounds, told.block), settings(told)), told)


if __name__ == "__main__":
    sys.exit(main())
