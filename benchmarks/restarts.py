"""Restarts by torchrun after a rank has died, with ``PGroupDDPStrategy`` and with plain ``DDPStrategy``.

Each job trains on two ranks, of which one is killed in the first attempt and raises in the second; torchrun may restart it
three times. Prints, for each way to start torchrun, how many jobs have gone on from their last checkpoint both times and
finished, and the median time from a death to the first step after it. From the root of the repository::

    python -m benchmarks.restarts --jobs 10 --plain 10 --at-once 1
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.report import one_line
from tests.ranks import free_port
from tests.scripts import kill
from tests.torchrun import MODES, Journal, start_job

NAMES = {False: "PGroupDDPStrategy", True: "DDPStrategy"}


class Result:
    """What became of one job.

    Attributes:
        recovered: Whether it resumed from its last checkpoint after each death, and finished.
        times: Seconds from each death to the first step after it, as far as there was one.
        differ: Whether its agents counted the restarts differently.
    """

    def __init__(self, journal: Journal, codes: list[int | None]) -> None:
        deaths = [line["time"] for line in journal.of("death")]
        steps = [line["time"] for line in journal.of("step", 0)]
        ends = [line["step"] for line in journal.of("end")]
        resumed = [line["step"] for line in journal.of("resumed", 0)]
        self.recovered = not any(codes) and ends == [6, 6] and resumed == [0, 2, 4]
        bounds = zip(deaths, [*deaths[1:], float("inf")], strict=True)
        self.times = [min(found) - death for death, end in bounds if (found := [at for at in steps if death < at < end])]
        self.differ = len({line["count"] for line in journal.of("end")}) > 1


def run_job(mode: str, plain: bool, timeout: float, limit: float) -> Result:
    """Run one job, at most ``limit`` seconds."""
    deadline = time.monotonic() + limit

    def wait(agent: subprocess.Popen[str]) -> int | None:
        try:
            agent.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return 1
        return agent.returncode

    with free_port() as port, tempfile.TemporaryDirectory() as folder:
        options = [f"--timeout={timeout}", *(["--plain"] if plain else []), "--deaths", "kill", "raise"]
        agents = start_job(mode, port, Path(folder), *options)
        try:
            with ThreadPoolExecutor() as pool:
                codes = list(pool.map(wait, agents))
        finally:
            for agent in agents:
                kill(agent)
        result = Result(Journal(Path(folder)), codes)
    times = " ".join(f"{one:.1f}" for one in result.times)
    print(f"  {mode:20}{NAMES[plain]:20}{'recovered' if result.recovered else 'lost':10}{times}", flush=True)
    return result


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10, help="jobs of each mode with PGroupDDPStrategy")
    parser.add_argument("--plain", type=int, default=10, help="jobs of each mode with DDPStrategy")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--at-once", type=int, default=1, help="how many jobs run at the same time")
    parser.add_argument("--timeout", type=float, default=20.0, help="timeout of the groups, seconds")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which a job counts as lost")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no more jobs after this time")
    arguments = parser.parse_args()
    over = time.monotonic() + 60 * arguments.minutes
    jobs = [
        (mode, plain)
        for number in range(max(arguments.jobs, arguments.plain))
        for mode in arguments.modes
        for plain in (False, True)
        if number < (arguments.plain if plain else arguments.jobs)
    ]

    def run(job: tuple[str, bool]) -> Result | None:
        return run_job(*job, arguments.timeout, arguments.limit) if time.monotonic() < over else None

    with ThreadPoolExecutor(arguments.at_once) as pool:
        results = [(job, result) for job, result in zip(jobs, pool.map(run, jobs), strict=True) if result is not None]
    print(f"{one_line()}, gloo, ", end="")
    print(f"{arguments.at_once} jobs at once, timeout {arguments.timeout:.0f} s, limit {arguments.limit:.0f} s")
    print(f"{'mode':20}{'strategy':20}{'recovered':>10}{'to the next step':>18}{'counts differ':>15}")
    for mode in arguments.modes:
        medians = []
        for plain, name in NAMES.items():
            mine = [result for job, result in results if job == (mode, plain)]
            times = [one for result in mine for one in result.times]
            medians.append(statistics.median(times) if times else float("nan"))
            recovered = f"{sum(result.recovered for result in mine)} of {len(mine)}"
            differ = sum(result.differ for result in mine)
            print(f"{mode:20}{name:20}{recovered:>10}{medians[-1]:>16.1f} s{differ:>15}")
        print(f"{'':20}{'ratio, ours to plain':30}{medians[0] / medians[1]:>16.2f}")


if __name__ == "__main__":
    main()
