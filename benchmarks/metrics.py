"""What it costs to compute metrics before a stage ends: from the last hook to the return of `fit`, with gloo.

Compares ``metrics="keep"`` and ``metrics="compute"``, for models with and without metrics, and with what ``torchmetrics``
itself takes to compute the same within the stage. Medians over some stages, on rank 0::

    python benchmarks/metrics.py --stages 20
"""

import argparse
import logging
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import time
import warnings
from multiprocessing.connection import Connection

import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from ranks import become_rank, prepare
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC

from lightning_pgroup import PGroupDDPStrategy, __version__
from lightning_pgroup.process_state import process_state
from lightning_pgroup.team import Invitation

RANKS = 2
MANY = 16
CASES = {
    "no metric": (0, 0),
    "1 metric, reset": (1, 0),
    "1 metric": (1, 1),
    f"{2 * MANY} metrics, half with lists": (2 * MANY, 2),
}
"""How many metrics, and how often they are updated."""


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


def measure(stages: int, case: tuple[int, int], metrics: str, *, asks: bool = False) -> float:
    """The median time of one case, in milliseconds."""
    clock, times = Clock(asks), []
    strategy = PGroupDDPStrategy(destroy="at_exit", metrics=metrics)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=16)
    for _ in range(stages + 2):
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=RANKS, callbacks=[clock], **quiet)
        trainer.validate(Model(*case), dataloaders=loader, verbose=False)
        times.append(clock.asked if asks else time.perf_counter() - clock.start)
    return 1e3 * statistics.median(times[2:])


def run_rank(rank: int, stages: int, invitation: Invitation, listener: socket.socket, results: Connection) -> None:
    """Be one rank, as Lightning's popen launcher would have started it."""
    become_rank(rank, invitation, listener)
    found = {}
    for name, case in CASES.items():
        asked = measure(stages, case, "keep", asks=True) if all(case) else None
        found[name] = (measure(stages, case, "keep"), measure(stages, case, "compute"), asked)
    if rank == 0:
        results.send(found)
    process_state().end()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=20)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    invitation, listener = prepare(RANKS)
    receive, send = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=run_rank, args=(rank, arguments.stages, invitation, listener, send)) for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    found = receive.recv()
    for process in ranks:
        process.join()

    print(f"lightning-pgroup {__version__}, torch {torch.__version__}, torchmetrics {torchmetrics.__version__}, ", end="")
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}, {RANKS} ranks, gloo; median ms")
    print(f"{'model':36}{'keep':>9}{'compute':>9}{'asked in the stage':>20}")
    for name, (keep, compute, asked) in found.items():
        print(f"{name:36}{keep:9.2f}{compute:9.2f}{'' if asked is None else f'{asked:.2f}':>20}")


if __name__ == "__main__":
    sys.exit(main())
