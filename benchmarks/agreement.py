"""What it costs the ranks to agree before each stage: store operations, and time per round, for 2 to 512 ranks.

Each rank is a light process with one client of a store that this process hosts, and nothing else to do. Compared with torch's
own barrier over the store, which tells the ranks nothing. The CPU time of the host's one thread is what bounds a round once the
ranks have processors of their own, so that is what the projection to larger jobs is made from::

    python benchmarks/agreement.py --sizes 2 8 32 128 512
"""

import multiprocessing
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import report as frame
from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d

from lightning_pgroup import agreement
from lightning_pgroup.agreement import Report
from lightning_pgroup.rounds import Rounds
from lightning_pgroup.store import LOOPBACK, host_store, listen

TIMEOUT = timedelta(seconds=120)
WARM_UP = 3
PROJECTED = (1024, 4096, 16384)
QUICK = {"sizes": [2, 4], "rounds": 4, "projected": [8]}


class CountingStore:
    """A store that counts what is asked of it, by operation."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        """The operation of the same name, counted."""
        operation = getattr(self._store, name)
        if name == "clone":
            return lambda: CountingStore(operation(), self._counts)

        def counted(*args: Any) -> Any:
            if name != "has_extended_api":
                self._counts[name] += 1
            return operation(*args)

        return counted


def report() -> dict[str, Any]:
    """What a rank says that has a living group, as all others have."""
    wanted = {"backend": "gloo", "world_size": 2, "timeout": 1800.0, "init_method": ""}
    return Report(generation=7, highest=7, stage="fit", wanted=wanted).to_payload()


def answer(said: list[dict[str, Any]]) -> str:
    """What the last rank to come decides for all, as at the start of a stage."""
    return agreement.decide(agreement.reports_of(said)).to_json()


def ours(store: Store, rank: int, size: int) -> Callable[[], object]:
    """One round of ours."""
    rounds, said = Rounds(store, rank, size), report()
    return lambda: rounds.run(said, answer, TIMEOUT)


def torchs(store: Store, rank: int, size: int) -> Callable[[], object]:
    """One barrier of torch's, each under a name of its own, as torch has it."""
    names = iter(range(1 << 30))
    return lambda: distributed_c10d._store_based_barrier(rank, store, str(next(names)), size, TIMEOUT)


KINDS = {"lightning-pgroup": ours, "torch": torchs}


def run_rank(kind: str, rank: int, size: int, port: int, rounds: int, results: Connection) -> None:
    """Be one rank: some rounds that do not count, then ``rounds`` that do."""
    store = TCPStore(LOOPBACK, port, None, False, TIMEOUT, wait_for_workers=False)
    meet = KINDS[kind](PrefixStore(f"{kind}-{size}", store), rank, size)
    for _ in range(WARM_UP):
        meet()
    times = []
    results.send("ready")
    for _ in range(rounds):
        start = time.perf_counter()
        meet()
        times.append(time.perf_counter() - start)
    results.send(times)
    results.recv()  # the others may still need what this process says


def measure(kind: str, size: int, rounds: int) -> tuple[list[float], float]:
    """Time rounds of ``size`` ranks.

    Returns:
        Seconds of each round, the median of the ranks; and CPU seconds of the host's thread per round.
    """
    store = host_store(listen(LOOPBACK), TIMEOUT)
    context = multiprocessing.get_context("fork")
    pipes, ranks = [], []
    for rank in range(size):
        mine, its = context.Pipe()
        process = context.Process(target=run_rank, args=(kind, rank, size, store.port, rounds, its))
        process.start()
        its.close()
        pipes.append(mine)
        ranks.append(process)
    for pipe in pipes:
        pipe.recv()
    cpu = time.process_time()  # this process only hosts the store from here on
    times = [pipe.recv() for pipe in pipes[:1]]
    cpu = (time.process_time() - cpu) / rounds
    times += [pipe.recv() for pipe in pipes[1:]]
    for pipe in pipes:
        pipe.send("over")
    for process in ranks:
        process.join()
    return [statistics.median(one) for one in zip(*times, strict=True)], cpu


def count_operations(kind: str, size: int, rounds: int = 10) -> dict[str, float]:
    """Operations on the store per rank and round, by name, the mean of all ranks; of rounds in which they know each other."""
    store = host_store(listen(LOOPBACK), TIMEOUT)
    counts: Counter[str] = Counter()
    meets = [KINDS[kind](CountingStore(store.clone(), counts), rank, size) for rank in range(size)]
    for number in range(rounds + 1):
        if number == 1:
            counts.clear()
        threads = [threading.Thread(target=meet) for meet in meets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {name: count / rounds / size for name, count in sorted(counts.items())}


def time_of_the_last(size: int) -> float:
    """Seconds that the last rank to come needs to read what ``size`` ranks have said, and to decide; all of it is real."""
    store = host_store(listen(LOOPBACK), TIMEOUT)
    client = TCPStore(LOOPBACK, store.port, None, False, TIMEOUT, wait_for_workers=False)
    rounds = Rounds(client, size - 1, size)
    for rank in range(size):
        other = Rounds(store, rank, size)
        other.number = 1
        other._say(report())
    times = []
    for _ in range(3):
        client.delete_key("round/1/outcome")
        start = time.perf_counter()
        rounds._close(1, "round/1/outcome", answer)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def project(sizes: list[int], measured: dict[str, Any]) -> list[dict[str, float]]:
    """Milliseconds of a round in larger jobs, as the host of the store bounds it.

    Assumes that each rank has a processor of its own, that the network is not what they wait for, and that the host's thread
    needs as long for each rank as it does in the largest job that was measured.
    """
    largest = max(measured, key=int)
    projected = []
    for size in sizes:
        host = {kind: 1e3 * measured[largest][kind]["host_cpu_s"] / int(largest) * size for kind in KINDS}
        last = 1e3 * time_of_the_last(size)
        projected.append({"ranks": size, "host_ms": host["lightning-pgroup"], "last_ms": last, "torch_host_ms": host["torch"]})
    return projected


def run(sizes: list[int], rounds: int, projected: list[int]) -> dict[str, Any]:
    """All figures of this benchmark, as plain JSON types; times in seconds where a name ends in ``_s``."""
    measured: dict[str, Any] = {}
    for size in sizes:
        measured[str(size)] = {}
        for kind in KINDS:
            times, cpu = measure(kind, size, max(5, rounds * 2 // size))
            low, median, high = statistics.quantiles(times, n=4)
            measured[str(size)][kind] = {"median_s": median, "quartiles_s": [low, high], "host_cpu_s": cpu}
    operations = {kind: {str(size): count_operations(kind, size) for size in (2, 8, 32)} for kind in KINDS}
    return {"operations": operations, "rounds": measured, "projection": project(projected, measured)}


def make_report(figures: dict[str, Any], told: dict[str, Any]) -> frame.Report:
    """The tables of this benchmark."""
    made = frame.Report(
        "agreement", "How the ranks agree: rounds over one store, against torch's own barrier", told, figures=figures
    )
    rows = [
        [
            kind,
            size,
            frame.shown(sum(counts.values())),
            ", ".join(f"{name} {frame.shown(count)}" for name, count in counts.items()),
        ]
        for kind, by_size in figures["operations"].items()
        for size, counts in by_size.items()
    ]
    made.tables.append(frame.Table("Store operations per rank and round", ["", "ranks", "in all", "which"], rows))
    rows = []
    for size, kinds in figures["rounds"].items():
        for kind, found in kinds.items():
            low, high = (1e3 * one for one in found["quartiles_s"])
            ratio = found["median_s"] / kinds["torch"]["median_s"]
            times = [frame.shown(1e3 * found["median_s"]), f"{low:,.2f} to {high:,.2f}", frame.shown(ratio)]
            rows.append([f"{size} ranks, {kind}", *times, frame.shown(1e3 * found["host_cpu_s"])])
    columns = ["", "round, ms", "quartiles", "ratio to torch", "CPU time of the store, ms"]
    made.tables.append(frame.Table("Time of a round", columns, rows))
    rows = [
        [f"{one['ranks']:,} ranks", *(frame.shown(one[what], 0) for what in ("host_ms", "last_ms", "torch_host_ms"))]
        for one in figures["projection"]
    ]
    columns = ["", "store, ms", "last rank, ms", "store with torch's barrier, ms"]
    made.tables.append(frame.Table("Projection: a processor for each rank, and a network that nobody waits for", columns, rows))
    totals = [sum(counts.values()) for counts in figures["operations"]["lightning-pgroup"].values()]
    value = ", ".join(f"{total:.2f}" for total in totals) + f" for {', '.join(figures['operations']['lightning-pgroup'])} ranks"
    # Whoever is the last to come asks once more for the others; a rank's share of that falls with their number.
    constant = max(totals) - min(totals) <= 1
    made.aims.append(
        frame.Aim("store operations per rank and round", "the same for any number of ranks, within one", value, constant)
    )
    sizes = [int(size) for size in figures["rounds"]]
    if len(sizes) > 1:
        first, last = (figures["rounds"][str(size)]["lightning-pgroup"]["median_s"] for size in (min(sizes), max(sizes)))
        value = f"{last / first:.1f} times for {max(sizes) / min(sizes):g} times the ranks"
        grows = last / first <= max(sizes) / min(sizes)
        made.aims.append(frame.Aim("time of a round", "grows no faster than the number of ranks", value, grows))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    options = frame.parser(__doc__)
    options.add_argument("--sizes", type=int, nargs="+", default=[2, 8, 32, 128, 512])
    options.add_argument("--rounds", type=int, default=1000, help="how many rounds two ranks do; more ranks do fewer")
    options.add_argument("--projected", type=int, nargs="*", default=list(PROJECTED))
    told = frame.parse(options, arguments, QUICK)
    figures = run(told.sizes, told.rounds, list(told.projected))
    frame.publish(make_report(figures, frame.settings(told)), told)


if __name__ == "__main__":
    sys.exit(main())
