"""What stays allocated after a stage has ended, with each policy, and when it goes.

For each policy fresh forked ranks fit a model for two steps. Each rank counts what it holds before that, after the stage, after
Trainer and strategy were garbage-collected, and after ``lightning_pgroup.destroy_process_group()`` (torch's own with plain
``DDPStrategy``). The model was trained on one device before, without a group, so that what the first training of a process
allocates is not counted.

With GPUs the group is NCCL's, with one rank for each of at most two GPUs, and the script reports the memory of the device too,
as torch's allocator and as the driver see it, and the number of NCCL communicators::

    python benchmarks/memory.py
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from ranks import Job, Ranks, be_quiet
from report import Report, Table, parse, parser, publish, settings
from resources import forget_parent, on_device, sample
from workload import RANKS, Perceptron, batches, quiet_trainer

from lightning_pgroup import PGroupDDPStrategy, destroy_process_group
from lightning_pgroup.policy import DestroyPolicy

QUICK = {"width": 8, "policies": ["on_teardown"]}
PLAIN, GONE = "DDPStrategy", "on_teardown"
POLICIES = [policy.value for policy in DestroyPolicy]
MOMENTS = ("stage", "collected", "destroyed")
SHOWN = {
    "anonymous": "memory, MB",
    "threads": "threads",
    "sockets": "sockets",
    "descriptors": "descriptors",
    "hooks": "hooks",
    "cuda_allocated": "torch.cuda allocated, MB",
    "cuda_reserved": "torch.cuda reserved, MB",
    "device_used": "device in use, MB",
    "communicators": "communicators",
    "nccl_threads": "NCCL threads",
}
"""What is counted, as it is called in the table."""


def serve(make: Callable[[], Strategy], end: Callable[[], None], width: int, size: int, *, cuda: bool) -> Callable[[int], Job]:
    """Ranks that fit once, and say what they hold at each moment, beyond what they held before."""

    def begin(rank: int) -> Job:
        forget_parent()
        where: dict[str, Any] = {"accelerator": "gpu" if cuda else "cpu", "max_steps": 2, "max_epochs": -1}

        def held() -> dict[str, int]:
            # The samples first: they collect garbage.
            return {**sample(), **on_device(rank if cuda else None)}

        def fit(model: Perceptron, strategy: Strategy, devices: Any) -> None:
            quiet_trainer(strategy, devices, **where).fit(model, batches(width, count=2))

        def run() -> list[dict[str, int]]:
            torch.manual_seed(1)
            model = Perceptron(width, 4)
            alone = SingleDeviceStrategy(torch.device("cuda", rank) if cuda else torch.device("cpu"))
            fit(model, alone, [rank] if cuda else 1)
            before = held()
            strategy = make()
            fit(model, strategy, size)
            found = [held()]
            del strategy
            found.append(held())
            end()
            found.append(held())
            return [{what: value - before[what] for what, value in one.items()} for one in found]

        return run

    return begin


def report(found: dict[str, list[list[dict[str, int]]]], told: dict[str, Any], where: str) -> Report:
    """Compare."""
    made = Report("memory", f"What stays after a stage: {where}", told)
    counted = [what for what in SHOWN if what in next(iter(found.values()))[0][0]]
    rows = []
    for policy, ranks in found.items():
        made.figures[policy] = [dict(zip(MOMENTS, moments, strict=True)) for moments in ranks]
        row = [policy]
        for what in counted:
            most = [max(moments[index][what] for moments in ranks) for index in range(len(MOMENTS))]
            row.append(" / ".join(_shown(what, value) for value in most))
        rows.append(row)
    title = "More than before: after the stage / when Trainer and strategy are collected / after destroy_process_group()"
    made.tables.append(Table(title, ["policy", *(SHOWN[what] for what in counted)], rows))
    made.figures["cuda"] = "cuda_allocated" in counted
    made.notes.append(
        "Of the rank that holds the most. The sockets that stay without a group are connections to the store, which lives as"
        " long as the process."
    )
    made.notes.append(
        "It ran on GPUs." if made.figures["cuda"] else "There was no GPU: NCCL and what a device keeps are not here."
    )
    return made


def _shown(what: str, value: int) -> str:
    return f"{value / 1e6:.1f}" if SHOWN[what].endswith("MB") else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    options = parser(__doc__)
    options.add_argument("--width", type=int, default=1024, help="width of each of the four layers of the model")
    options.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    options.add_argument("--accelerator", choices=["auto", "cpu"], default="auto", help="'cpu': also where there are GPUs")
    told = parse(options, arguments, QUICK)
    be_quiet()
    os.environ.setdefault("NCCL_SET_THREAD_NAME", "1")
    cuda = told.accelerator == "auto" and torch.cuda.device_count() > 0
    size = min(RANKS, torch.cuda.device_count()) if cuda else RANKS
    ways: dict[str, tuple[Callable[[], Strategy], Callable[[], None]]] = {PLAIN: (DDPStrategy, dist.destroy_process_group)}
    for policy in told.policies:
        ways[policy] = (partial(PGroupDDPStrategy, destroy=policy), destroy_process_group)
    found = {}
    for name, (make, end) in ways.items():
        with Ranks(size, serve(make, end, told.width, size, cuda=cuda)) as ranks:
            found[name] = ranks.do(within=120)
    count = sum(parameter.numel() for parameter in Perceptron(told.width, 4).parameters())
    where = f"{size} ranks, {'NCCL' if cuda else 'gloo'}, {count:,} parameters"
    publish(report(found, settings(told), where), told)


if __name__ == "__main__":
    sys.exit(main())
