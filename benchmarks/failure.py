"""How fast a failure of one rank reaches the others, and the next run begins, against plain ``DDPStrategy``.

On each of some world sizes the last rank raises in the middle of a fit, in which the others wait for it. Prints, as medians
over some repetitions, the time from the raise to the exception on the last peer, and to the first step of the next fit. Plain
DDP has a timeout of its own here, which is all that ends the wait there; it recovers in no run at all::

    python benchmarks/failure.py --sizes 2 4 --repeat 5 --timeout 20
"""

import argparse
import logging
import multiprocessing
import os
import platform
import socket
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from ranks import become_rank, prepare
from torch.utils.data import DataLoader, TensorDataset

from lightning_pgroup import PGroupDDPStrategy, __version__
from lightning_pgroup.process_state import process_state
from lightning_pgroup.team import Invitation


class Model(LightningModule):
    """As little as Lightning takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """One step."""
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


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
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=size,
        max_epochs=1,
        callbacks=[fault],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(size * 8, 4)), batch_size=4))
    except (RuntimeError, ValueError):
        failed = True
    return fault, time.monotonic(), failed


def run_rank(
    rank: int, size: int, make: Callable[[], Strategy], invitation: Invitation, listener: socket.socket, results: Connection
) -> None:
    """Be one rank, as Lightning's popen launcher would have started it: one failing fit, and the next."""
    become_rank(rank, invitation, listener)
    fit(make(), size, False)
    fault, over, _ = fit(make(), size, rank == size - 1)
    again, _, failed = fit(make(), size, False)
    results.send((fault.raised, over, 0.0 if failed else again.stepped))
    process_state().end()
    os._exit(0)


def once(size: int, make: Callable[[], Strategy]) -> tuple[float, float | None]:
    """One failure: seconds to the last peer's exception, and to the next fit's first step on the last rank."""
    invitation, listener = prepare(size)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=run_rank, args=(rank, size, make, invitation, listener, pipes[rank][1])) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    listener.close()
    outcomes = [receive.recv() for receive, _ in pipes]
    for process in ranks:
        process.join()
    raised = max(outcome[0] for outcome in outcomes)
    steps = [outcome[2] for outcome in outcomes]
    return max(outcome[1] for outcome in outcomes) - raised, None if 0.0 in steps else max(steps) - raised


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeat", type=int, default=5, help="repetitions for ours (plain DDP runs once per size)")
    parser.add_argument("--timeout", type=float, default=20.0, help="timeout of the groups, seconds")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_pgroup"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    print(f"lightning-pgroup {__version__}, torch {torch.__version__}, lightning {lightning.__version__}, ", end="")
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}, gloo")
    print(f"{'ranks':>5}  {'strategy':18}{'to the last peer':>18}{'to the next step':>18}")
    timeout = timedelta(seconds=arguments.timeout)
    for size in arguments.sizes:
        for name, make, repeat in (
            ("PGroupDDPStrategy", lambda: PGroupDDPStrategy(timeout=timeout), arguments.repeat),
            ("DDPStrategy", lambda: DDPStrategy(timeout=timeout), 1),
        ):
            runs = [once(size, make) for _ in range(repeat)]
            peer = f"{1e3 * statistics.median(run[0] for run in runs):.0f} ms"
            steps = [run[1] for run in runs if run[1] is not None]
            step = f"{1e3 * statistics.median(steps):.0f} ms" if len(steps) == len(runs) else "never"
            print(f"{size:5}  {name:18}{peer:>18}{step:>18}", flush=True)


if __name__ == "__main__":
    main()
