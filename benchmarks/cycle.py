"""What it takes to create a group, use it and end it, again and again: ours against plain ``torch.distributed``.

Both run in the same forked ranks, with the same ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. A cycle of plain
torch is ``init_process_group("gloo", init_method="env://")``, an ``all_reduce``, ``destroy_process_group()``. Ours is the same
``all_reduce`` inside ``with lightning_pgroup.process_group("gloo")``: with the agreement of the ranks, the bounds, and the end
of the connections, as a stage of the strategy has them too. Plain and ours take turns, each in fresh processes; the first cycle
of these counts for itself, since it makes the store, in plain torch as in every cycle.

Plain torch fails now and then: a fast rank reaches the old store of rank 0 before that closes. So each of its runs goes on
until it fails, or has done what it was asked for. At last ours does as many cycles as one wants, in the same processes::

    python benchmarks/cycle.py --sizes 2 4 8 16 --cycles 10000
"""

import ctypes
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import Job, Ranks, RanksFailedError, be_quiet
from report import Aim, Report, Spread, Table, parse, parser, publish, settings, shown

from lightning_pgroup import process_group

QUICK = {"sizes": [2], "rounds": 1, "limit": 4, "cycles": 6}
TIMEOUT = timedelta(seconds=10)
PARTS = ("create", "collective", "destroy", "cycle")
OURS, PLAIN = "process_group()", "torch.distributed"
AT_MOST = 0.4
"""Of plain torch's time, at :data:`AIM_SIZE` ranks."""
AIM_SIZE = 2


class Mark:
    """Notes the time of each part of each cycle where the parent finds it, whatever becomes of this process."""

    def __init__(self, size: int, limit: int) -> None:
        self._limit = limit
        self._times = multiprocessing.RawArray(ctypes.c_double, size * limit * len(PARTS))
        self._done = multiprocessing.RawArray(ctypes.c_long, size)

    def note(self, rank: int, *times: float) -> None:
        """A cycle of a rank is over."""
        first = (rank * self._limit + self._done[rank]) * len(PARTS)
        self._times[first : first + len(PARTS)] = times
        self._done[rank] += 1

    def cycles(self) -> list[tuple[float, ...]]:
        """Of each cycle that all ranks have done, the times of its parts, each that of the slowest rank."""
        found = []
        for cycle in range(min(self._done)):
            firsts = [(rank * self._limit + cycle) * len(PARTS) for rank in range(len(self._done))]
            found.append(tuple(max(self._times[first + part] for first in firsts) for part in range(len(PARTS))))
        return found


def plain_cycle(use: Callable[[], bool]) -> tuple[bool, tuple[float, ...]]:
    """One cycle of plain torch."""
    start = time.perf_counter()
    dist.init_process_group("gloo", init_method="env://", timeout=TIMEOUT)
    created = time.perf_counter()
    more = use()
    used = time.perf_counter()
    dist.destroy_process_group()
    end = time.perf_counter()
    return more, (created - start, used - created, end - used, end - start)


def our_cycle(use: Callable[[], bool]) -> tuple[bool, tuple[float, ...]]:
    """One cycle of ours."""
    start = time.perf_counter()
    with process_group("gloo", timeout=TIMEOUT):
        created = time.perf_counter()
        more = use()
        used = time.perf_counter()
    end = time.perf_counter()
    return more, (created - start, used - created, end - used, end - start)


CYCLES = {PLAIN: plain_cycle, OURS: our_cycle}


@dataclass(frozen=True)
class Outcome:
    """What a run has done.

    Attributes:
        cycles: The times of the parts of each cycle, in seconds.
        failed: Why it has failed, or ``None``.
    """

    cycles: list[tuple[float, ...]]
    failed: str | None


def run(way: str, size: int, limit: int, seconds: float) -> Outcome:
    """Do ``limit`` cycles in fresh ranks, or as many as are begun within ``seconds``, or until one fails."""
    mark = Mark(size, limit)

    def serve(rank: int) -> Job:
        def do() -> None:
            until = time.monotonic() + seconds

            def use() -> bool:
                # The collective says too whether all go on: a rank alone could not decide that.
                tensor = torch.tensor([1.0, float(time.monotonic() > until)])
                dist.all_reduce(tensor)
                if tensor[0] != size:
                    raise RuntimeError(f"the sum over {size} ranks is {tensor[0]}")
                return not tensor[1]

            for _ in range(limit):
                more, times = CYCLES[way](use)
                mark.note(rank, *times)
                if not more:
                    return

        return do

    with Ranks(size, serve, invited=False) as ranks:
        try:
            ranks.do(within=seconds + 3 * TIMEOUT.total_seconds())
        except RanksFailedError as error:
            ranks.kill()
            return Outcome(mark.cycles(), str(error).strip().splitlines()[-1])
    return Outcome(mark.cycles(), None)


def compare(size: int, rounds: int, limit: int, seconds: float) -> dict[str, list[Outcome]]:
    """Runs of both ways in turn."""
    found: dict[str, list[Outcome]] = {way: [] for way in CYCLES}
    for number in range(rounds):
        for way in list(CYCLES)[:: -1 if number % 2 else 1]:
            found[way].append(run(way, size, limit, seconds))
    return found


def _spreads(cycles: Sequence[tuple[float, ...]]) -> dict[str, Spread]:
    return {part: Spread.of([times[index] for times in cycles], 1e3) for index, part in enumerate(PARTS)}


def report(sizes: dict[int, dict[str, list[Outcome]]], long: Outcome | None, told: dict[str, Any]) -> Report:
    """Compare."""
    made = Report("cycle", "Create a group, one all_reduce, end it: gloo, env://", told)
    rows, failures, reasons = [], [], set()
    for size, found in sizes.items():
        figures: dict[str, Any] = {}
        for way, outcomes in found.items():
            later = [cycle for outcome in outcomes for cycle in outcome.cycles[1:]]
            first = [outcome.cycles[0] for outcome in outcomes if outcome.cycles]
            failed = [len(outcome.cycles) for outcome in outcomes if outcome.failed]
            reasons.update((way, outcome.failed) for outcome in outcomes if outcome.failed)
            figures[way] = {
                "ms": _spreads(later) if later else None,
                "first_ms": _spreads(first) if first else None,
                "runs": len(outcomes),
                "cycles": [len(outcome.cycles) for outcome in outcomes],
                "cycles_before_failure": failed,
            }
            before = f"{min(failed)} to {max(failed)}" if failed else "-"
            done = str(sum(figures[way]["cycles"]))
            failures.append([f"{size} ranks, {way}", str(len(outcomes)), done, str(len(failed)), before])
        both = [figures[way]["ms"] for way in (OURS, PLAIN)]
        ratio = both[0]["cycle"].median / both[1]["cycle"].median if all(both) else None
        figures["ratio"] = ratio
        made.figures[str(size)] = figures
        for way in CYCLES:
            spreads = figures[way]["ms"]
            if spreads is not None:
                parts = [shown(spreads[part].median) for part in PARTS]
                compared = shown(ratio) if way == OURS else "1"
                rows.append([f"{size} ranks, {way}", *parts, spreads["cycle"].quartiles(), compared])
        if size == AIM_SIZE and ratio is not None:
            what = f"a cycle at {AIM_SIZE} ranks"
            made.aims.append(Aim(what, f"at most {AT_MOST} of plain torch's time", f"{ratio:.2f}", ratio <= AT_MOST))
    made.tables.append(Table("Median of a cycle and its parts, ms", ["ranks", *PARTS, "quartiles", "ratio"], rows))
    columns = ["ranks", "fresh runs", "cycles in all", "runs that failed", "cycles before that"]
    made.tables.append(Table(f"Failures, runs of at most {told['limit']} cycles", columns, failures))
    if long is not None:
        plain = [outcome for found in sizes.values() for outcome in found[PLAIN]]
        lost = [len(outcome.cycles) for outcome in plain if outcome.failed]
        spread = _spreads(long.cycles[1:])["cycle"] if len(long.cycles) > 1 else None
        made.figures["long"] = {"cycles": len(long.cycles), "failed": long.failed, "ms": spread}
        value = f"{len(long.cycles):,} cycles" + (f", then {long.failed}" if long.failed else "")
        value += f"; of plain torch's {len(plain)} runs {len(lost)} failed"
        value += f", after {min(lost)} to {max(lost)} cycles" if lost else ""
        good = long.failed is None and len(long.cycles) == told["cycles"]
        made.aims.append(Aim("one long run of ours", f"{told['cycles']:,} cycles without a failure", value, good))
    made.notes += [f"{way} failed with: {reason}" for way, reason in sorted(reasons)]
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    options = parser(__doc__)
    options.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 16], help="numbers of ranks")
    options.add_argument("--rounds", type=int, default=4, help="fresh runs of each way and size")
    options.add_argument("--limit", type=int, default=100, help="cycles of a fresh run")
    options.add_argument("--seconds", type=float, default=6.0, help="after this time a fresh run begins no more cycles")
    options.add_argument("--cycles", type=int, default=10_000, help="cycles of the one long run of ours, with two ranks")
    options.add_argument("--long-seconds", type=float, default=240.0, help="after this time it begins no more cycles")
    told = parse(options, arguments, QUICK)
    be_quiet()
    sizes = {size: compare(size, told.rounds, told.limit, told.seconds) for size in told.sizes}
    long = run(OURS, AIM_SIZE, told.cycles, told.long_seconds) if told.cycles else None
    publish(report(sizes, long, settings(told)), told)


if __name__ == "__main__":
    sys.exit(main())
