"""What the ownership of the group adds to a step: steps per second against ``DDPStrategy``, and how far that can be told.

Three sets of two forked ranks take turns, in an order that changes: ``DDPStrategy``, ``DDPStrategy`` once more, and
``PGroupDDPStrategy``. In each turn they fit for some steps, of which the first do not count. The ratio of the two equal ones
(A/A) shows what this machine can not tell apart; the ratio of the third to the first (B/A) is to be read beside it::

    python benchmarks/step.py --rounds 15
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from ranks import Job, Ranks, be_quiet, in_turn
from report import Aim, Report, Spread, Table, parse, parser, publish, settings, shown
from workload import RANKS, Perceptron, batches, quiet_trainer

from lightning_pgroup import PGroupDDPStrategy

QUICK = {"rounds": 2, "small_steps": 8, "large_steps": 4, "skip": 2, "large_width": 16}
COMPETITORS: dict[str, Callable[[], Strategy]] = {
    "DDPStrategy": DDPStrategy,
    "DDPStrategy again": DDPStrategy,
    "PGroupDDPStrategy": PGroupDDPStrategy,
}
PLAIN, AGAIN, OURS = COMPETITORS


class Clock(Callback):
    """Notes when the first steps, which do not count, are over, and when all are."""

    def __init__(self, skip: int) -> None:
        self.skip, self.start, self.stop = skip, 0.0, 0.0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """After each step."""
        self.stop = time.perf_counter()
        if trainer.global_step == self.skip:
            self.start = self.stop


def serve(make: Callable[[], Strategy], skip: int) -> Callable[[int], Job]:
    """Ranks that fit a model as often as they are told."""

    def fit(width: int, depth: int, steps: int) -> float:
        torch.manual_seed(1)
        clock = Clock(skip)
        trainer = quiet_trainer(make(), callbacks=[clock])
        trainer.fit(Perceptron(width, depth), batches(width, 16, skip + steps))
        return steps / (clock.stop - clock.start)

    return lambda rank: fit


def measure(rounds: int, skip: int, sizes: dict[str, tuple[int, int, int]]) -> dict[str, dict[str, list[float]]]:
    """Steps per second of each model and competitor, one figure for each turn."""
    found: dict[str, dict[str, list[float]]] = {size: {name: [] for name in COMPETITORS} for size in sizes}
    with ExitStack() as stack:
        teams = {name: stack.enter_context(Ranks(RANKS, serve(make, skip))) for name, make in COMPETITORS.items()}
        names = list(COMPETITORS)
        for model, size in sizes.items():
            for team in teams.values():
                team.do(*size)
            for order in in_turn(len(names), rounds):
                for index in order:
                    found[model][names[index]].append(teams[names[index]].do(*size)[0])
    return found


def report(rates: dict[str, dict[str, list[float]]], told: dict[str, Any], models: dict[str, str]) -> Report:
    """Compare."""
    made = Report("step", f"Steps per second, {RANKS} ranks, gloo", told)
    rows, columns = [], ["model", "strategy", "steps/s", "quartiles", "ratio to DDPStrategy", "quartiles"]
    for model, found in rates.items():
        ratios = {
            name: Spread.of([mine / plain for mine, plain in zip(found[name], found[PLAIN], strict=True)])
            for name in (AGAIN, OURS)
        }
        speeds = {name: Spread.of(values) for name, values in found.items()}
        made.figures[model] = {"steps_per_second": speeds, "ratio": ratios}
        for name, speed in speeds.items():
            ratio = ratios.get(name)
            told_ratio = ["1", ""] if ratio is None else [shown(ratio.median, 3), ratio.quartiles(3)]
            rows.append([models[model], name, shown(speed.median, 1), speed.quartiles(1), *told_ratio])
        noise, ours = ratios[AGAIN], ratios[OURS]
        # Faster is as good as equal: a ratio above 1 is nothing that was added.
        within = noise.low <= ours.median <= noise.high or ours.median >= 1
        value = f"{ours.median:.3f}; two runs of DDPStrategy: {noise.median:.3f} ({noise.quartiles(3)})"
        made.aims.append(Aim(f"steps per second, {model} model", "1.00 within the noise of DDPStrategy", value, within))
    made.tables.append(Table("Steps per second", columns, rows))
    made.notes.append(
        "Each ratio is of two turns of the same round; more than 1 is faster. The second DDPStrategy shows the noise."
    )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=15, help="turns of each competitor and model")
    options.add_argument("--small-steps", type=int, default=300, help="steps of a turn with the small model")
    options.add_argument("--large-steps", type=int, default=20, help="steps of a turn with the large model")
    options.add_argument("--large-width", type=int, default=1024, help="width of each of the four layers of the large model")
    options.add_argument("--skip", type=int, default=5, help="steps of each turn that do not count")
    told = parse(options, arguments, QUICK)
    be_quiet()
    sizes = {"small": (16, 1, told.small_steps), "large": (told.large_width, 4, told.large_steps)}
    rates = measure(told.rounds, told.skip, sizes)
    models = {}
    for model, (width, depth, _) in sizes.items():
        count = sum(parameter.numel() for parameter in Perceptron(width, depth).parameters())
        models[model] = f"{model}, {count:,} parameters"
    publish(report(rates, settings(told), models), told)


if __name__ == "__main__":
    sys.exit(main())
