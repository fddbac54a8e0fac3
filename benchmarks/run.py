"""Runs all benchmarks, one after the other, and writes what they found: ``results.md``, ``results.json`` and ``results.png``.

Each runs in a process of its own, forked from this one, which has imported torch and Lightning and done nothing else, and is
killed with all its ranks when it does not end in time. What failed is said in the results too, and makes the exit code 1::

    python benchmarks/run.py
    python benchmarks/run.py --only step stage --into /tmp/results
    python benchmarks/run.py --quick --into /tmp/results
"""

import argparse
import contextlib
import datetime
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report

HERE = Path(__file__).parent
ROOT = HERE.parent
BEGIN, END = "<!-- benchmark table -->", "<!-- end of benchmark table -->"
"""Between these two lines of the README stands the short table."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One of the files here.

    Attributes:
        name: Of the file.
        deadline: After how many seconds it is killed.
        arguments: What it is told, unless it is to be quick.
    """

    name: str
    deadline: float
    arguments: tuple[str, ...] = ()


BENCHMARKS = (
    Benchmark("step", 300),
    Benchmark("stage", 240),
    Benchmark("cycle", 480),
    Benchmark("agreement", 240),
    Benchmark("failure", 240, ("--timeout", "10")),
    Benchmark("leaks", 480),
    Benchmark("memory", 120),
    Benchmark("metrics", 120),
)


def available() -> list[Benchmark]:
    """Those whose file is there."""
    return [one for one in BENCHMARKS if (HERE / f"{one.name}.py").exists()]


def run(benchmark: Benchmark, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Run one in a process of its own; returns its report, or why there is none."""
    target = folder / f"{benchmark.name}.json"
    arguments = ["--json", str(target), *(["--quick"] if quick else benchmark.arguments)]
    start = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=_be_benchmark, args=(benchmark.name, arguments))
    process.start()
    try:
        process.join(benchmark.deadline)
        if process.is_alive():
            problem: str | None = f"did not end within {benchmark.deadline:g} s"
        elif process.exitcode != 0:
            problem = f"ended with exit code {process.exitcode}"
        else:
            problem = None if target.exists() else "has left no figures"
    finally:
        _kill(process)
    found = json.loads(target.read_text()) if problem is None else {"name": benchmark.name, "failed": problem}
    return {**found, "seconds": round(time.monotonic() - start, 1)}


def _be_benchmark(name: str, arguments: list[str]) -> None:
    os.setsid()  # so that it can be killed with all its ranks
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    code = 1
    try:
        importlib.import_module(name).main(arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _kill(process: multiprocessing.process.BaseProcess) -> None:
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def short_table(results: dict[str, Any]) -> str:
    """What was to be reached, and what was, as a Markdown table."""
    rows = []
    for name, found in results["benchmarks"].items():
        if "failed" in found:
            rows.append([f"`benchmarks/{name}.py`", "", found["failed"], "**no**"])
        for aim in found.get("aims", ()):
            rows.append([aim["what"], aim["limit"], aim["value"], "yes" if aim["met"] else "**no**"])
    return report.Table("", ["what", "aim", "measured", "met"], rows).markdown()


def markdown(results: dict[str, Any]) -> str:
    """The whole page."""
    machine = results["hardware"]
    parts = [
        "# Results of the benchmarks",
        "Written by `make bench`. What each benchmark does, and how to read it: [docs/benchmarks.md](../docs/benchmarks.md).",
        f"{results['date']}; " + ", ".join(f"{name} {version}" for name, version in results["versions"].items()) + ".",
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory']}, {machine['system']}"
        + (f", {machine['gpu']}" if "gpu" in machine else "")
        + f"; a load of {machine['load']} before the first benchmark; {results['seconds'] / 60:.1f} minutes in all.",
    ]
    if results["quick"]:
        parts.append("**A quick run, to try the benchmarks out: its figures mean nothing.**")
    if results["picture"]:
        parts.append(f"![The main figures]({results['picture']})")
    parts += ["## In short", short_table(results)]
    for name, found in results["benchmarks"].items():
        if "failed" in found:
            parts += [f"## {name}", f"**`benchmarks/{name}.py` {found['failed']}, after {found['seconds']:.0f} s.**"]
            continue
        parts += [f"## {found['title']}", f"`benchmarks/{name}.py`, {found['seconds']:.0f} s, {_told(found['settings'])}."]
        for table in found["tables"]:
            parts += [f"{table['title']}:", report.Table(**table).markdown()]
        parts += found["notes"]
    return "\n\n".join(parts) + "\n"


def _told(settings: dict[str, Any]) -> str:
    words = [
        f"{name.replace('_', ' ')} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in settings.items()
    ]
    return ", ".join(words) or "no settings"


def in_short(results: dict[str, Any], into: Path, folder: Path) -> str:
    """What a page in ``folder`` says: the short table, the picture, and where the rest is."""
    below = Path(os.path.relpath(into, folder))
    machine = results["hardware"]
    parts = [
        short_table(results),
        f"{machine['processor']}, {machine['cores']} cores, {results['date']}, "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        + f". All figures: [{below / 'results.md'}]({below / 'results.md'}).",
    ]
    if results["picture"]:
        parts.append(f"![The main figures]({below / results['picture']})")
    return "\n\n".join(parts)


def compact(text: str) -> str:
    """JSON with each list of numbers on one line."""
    return re.sub(r"\[[\s\d.,e+-]+\]", lambda found: re.sub(r"\s+", " ", found[0]), text)


def put_between(page: str, table: str) -> str:
    """The page with the table between the two marks, instead of what stood there.

    Raises:
        ValueError: The marks are not there, or not once each, in this order.
    """
    found = re.findall(f"{re.escape(BEGIN)}.*?{re.escape(END)}", page, re.DOTALL)
    if len(found) != 1 or page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page needs one {BEGIN} and, after it, one {END}")
    return page.replace(found[0], f"{BEGIN}\n\n{table}\n\n{END}")


def draw(results: dict[str, Any], folder: Path) -> str | None:
    """Draw the picture; returns its name, or ``None`` without matplotlib."""
    try:
        import plot
    except ImportError:
        print("no picture: it needs the extra `plot`", flush=True)
        return None
    plot.draw(results, folder / "results.png")
    return "results.png"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and write; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="sizes so small that the figures mean nothing, to try it out")
    options.add_argument("--only", nargs="+", choices=[one.name for one in available()], help="run these; none is kept")
    options.add_argument("--into", type=Path, default=None, help="folder for the results (default: where this file is)")
    options.add_argument("--readme", type=Path, default=None, help="put the short table between its two marks in this file")
    told = options.parse_args(arguments)
    if told.into is None and told.quick:
        options.error("a quick run needs --into, so that it does not replace real figures")
    into: Path = told.into or HERE
    into.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "quick": told.quick,
        "versions": report.versions(),
        "hardware": report.hardware(),
        "benchmarks": {},
    }
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for benchmark in available():
            if told.only and benchmark.name not in told.only:
                continue
            print(f"== {benchmark.name}", flush=True)
            found = run(benchmark, Path(folder), quick=told.quick)
            results["benchmarks"][benchmark.name] = found
            print(f"== {benchmark.name}: {found.get('failed') or 'done'}, {found['seconds']:.1f} s\n", flush=True)
    results["seconds"] = round(time.monotonic() - start, 1)
    results["picture"] = draw(results, into)
    report.check_finite(results, "results")
    (into / "results.json").write_text(compact(json.dumps(results, indent=1)) + "\n")
    (into / "results.md").write_text(markdown(results))
    if told.readme is not None:
        told.readme.write_text(put_between(told.readme.read_text(), in_short(results, into, told.readme.parent)))
    print(f"all of it took {results['seconds'] / 60:.1f} minutes; see {into / 'results.md'}", flush=True)
    return 1 if any("failed" in found for found in results["benchmarks"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
