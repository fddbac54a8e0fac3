"""What the ownership of the group costs per stage, against plain ``DDPStrategy`` in the same run.

Runs ``validate`` with one batch on two forked CPU ranks, one strategy after the other, and prints the median time of a stage,
its quartiles, and the ratio to plain DDP, which keeps one group for ever::

    python benchmarks/stage.py --stages 100
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
from collections.abc import Callable
from multiprocessing.connection import Connection

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from ranks import become_rank, prepare
from torch.utils.data import DataLoader

from lightning_pgroup import PGroupDDPStrategy, __version__
from lightning_pgroup.process_state import process_state
from lightning_pgroup.team import Invitation

RANKS = 2

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "DDPStrategy": DDPStrategy,
    "at_exit": lambda: PGroupDDPStrategy(destroy="at_exit"),
    "per_trainer": lambda: PGroupDDPStrategy(destroy="per_trainer"),
    "on_teardown": lambda: PGroupDDPStrategy(destroy="on_teardown"),
}


class Model(LightningModule):
    """As little as Lightning takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """One batch."""
        self.layer(batch)


def measure(rank: int, stages: int) -> dict[str, list[float]]:
    """Time ``stages`` stages of each strategy, after five that do not count."""
    times: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    loader = DataLoader(torch.randn(8, 4), batch_size=4)
    model = Model()
    for name, make in STRATEGIES.items():
        trainer = Trainer(
            strategy=make(),
            accelerator="cpu",
            devices=RANKS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=1,
        )
        for _ in range(stages + 5):
            start = time.perf_counter()
            trainer.validate(model, dataloaders=loader, verbose=False)
            times[name].append(time.perf_counter() - start)
        del times[name][:5]
        if isinstance(trainer.strategy, PGroupDDPStrategy):
            trainer.strategy.close()
        else:
            dist.destroy_process_group()
    return times


def run_rank(rank: int, stages: int, invitation: Invitation, listener: socket.socket, results: Connection) -> None:
    """Be one rank, as Lightning's popen launcher would have started it."""
    become_rank(rank, invitation, listener)
    times = measure(rank, stages)
    if rank == 0:
        results.send(times)
    process_state().end()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=100)
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
    times = receive.recv()
    for process in ranks:
        process.join()

    print(f"lightning-pgroup {__version__}, torch {torch.__version__}, lightning {lightning.__version__}, ", end="")
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}, {RANKS} ranks, gloo")
    print(f"{'strategy':14}{'median ms':>11}{'quartiles ms':>18}{'ratio':>8}{'more ms':>10}")
    plain = statistics.median(times["DDPStrategy"])
    for name, values in times.items():
        low, median, high = (1e3 * value for value in statistics.quantiles(values, n=4))
        quartiles = f"{low:.1f} to {high:.1f}"
        print(f"{name:14}{median:11.2f}{quartiles:>18}{median / plain / 1e3:8.2f}{median - plain * 1e3:10.2f}")


if __name__ == "__main__":
    sys.exit(main())
