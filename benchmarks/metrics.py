"""What it costs to compute metrics before a stage ends: from the last hook to the return of `fit`, with gloo.

Compares ``metrics="keep"`` and ``metrics="compute"``, for models with and without metrics, and with what ``torchmetrics``
itself takes to compute the same within the stage. Medians over some stages, on rank 0::

    python benchmarks/metrics.py --stages 20
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from ranks import Job, Ranks, be_quiet
from report import Report, Spread, Table, parse, parser, publish, settings, shown
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC
from workload import RANKS, quiet_trainer

from lightning_pgroup import PGroupDDPStrategy

QUICK = {"stages": 1, "cases": ["1 metric"]}
MANY = 16
CASES = {
    "no metric": (0, 0),
    "1 metric, reset": (1, 0),
    "1 metric": (1, 1),
    f"{2 * MANY} metrics, half with lists": (2 * MANY, 2),
}
"""How many metrics, and how often they are updated."""
WAYS = {"keep": ("keep", False), "compute": ("compute", False), "asked in the stage": ("keep", True)}
"""What the strategy does with metrics, and whether they are computed in the last hook."""


class Model(LightningModule):
    """A model with some metrics, every second one with list states."""

    def __init__(self, count: int, updates: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.updates = updates
        self.metrics = torch.nn.ModuleList([BinaryAUROC() if index % 2 else MeanMetric() for index in range(count)])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Feed the metrics."""
        for metric in self.metrics:
            for _ in range(self.updates):
                if isinstance(metric, MeanMetric):
                    metric.update(batch[0])
                else:
                    metric.update(batch[0][:, 0].sigmoid(), (batch[0][:, 1] > 0).int())


class Clock(Callback):
    """Lets the ranks meet in the last hook, and notes when; or times the metrics there."""

    def __init__(self, asks: bool) -> None:
        self.asks, self.start, self.asked = asks, 0.0, 0.0

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The last hook of a stage."""
        trainer.strategy.barrier()
        self.start = time.perf_counter()
        if self.asks:
            for metric in pl_module.metrics:
                metric.compute()
            self.asked = time.perf_counter() - self.start


def serve(rank: int) -> Job:
    """Ranks that run stages with metrics."""

    def measure(stages: int, case: tuple[int, int], metrics: str, asks: bool) -> list[float]:
        clock, times = Clock(asks), []
        strategy = PGroupDDPStrategy(destroy="at_exit", metrics=metrics)
        loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=16)
        for _ in range(stages + 2):
            trainer = quiet_trainer(strategy, callbacks=[clock], use_distributed_sampler=True)
            trainer.validate(Model(*case), dataloaders=loader, verbose=False)
            times.append(clock.asked if asks else time.perf_counter() - clock.start)
        return times[2:]

    return measure


def report(found: dict[str, dict[str, list[float]]], told: dict[str, Any]) -> Report:
    """Compare."""
    made = Report("metrics", f"From the last hook to the return of a stage, {RANKS} ranks, gloo", told)
    rows = []
    for name, ways in found.items():
        made.figures[name] = {way: Spread.of(times, 1e3) for way, times in ways.items()}
        spreads = [made.figures[name].get(way) for way in WAYS]
        rows.append([name, *("-" if spread is None else shown(spread.median) for spread in spreads)])
    made.tables.append(Table("Median, ms", ["model", *WAYS], rows))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    options = parser(__doc__)
    options.add_argument("--stages", type=int, default=20, help="stages of each kind that count")
    options.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    told = parse(options, arguments, QUICK)
    be_quiet()
    found: dict[str, dict[str, list[float]]] = {}
    with Ranks(RANKS, serve) as ranks:
        for name in told.cases:
            found[name] = {}
            for way, (metrics, asks) in WAYS.items():
                if not asks or all(CASES[name]):
                    found[name][way] = ranks.do(told.stages, CASES[name], metrics, asks)[0]
    publish(report(found, settings(told)), told)


if __name__ == "__main__":
    sys.exit(main())
