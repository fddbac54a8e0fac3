"""What all benchmarks share: what they ran on, medians and quartiles, tables, and the file that they leave.

A benchmark makes one :class:`Report`, prints it, and with ``--json FILE`` writes it for :mod:`benchmarks.run`. All times are in
milliseconds unless a name says otherwise. What could not be measured is ``None``, never a number that is none.
"""

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch
import torchmetrics

from lightning_pgroup import __version__


def versions() -> dict[str, str]:
    """The versions that figures depend on."""
    return {
        "lightning-pgroup": __version__,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "torchmetrics": torchmetrics.__version__,
        "Python": platform.python_version(),
    }


def hardware() -> dict[str, Any]:
    """The machine that figures depend on, and how busy it was."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load": f"{os.getloadavg()[0]:.2f}",
    }
    if torch.cuda.device_count():
        found["gpu"] = f"{torch.cuda.device_count()} x {_gpu()}"
    return found


def _gpu() -> str:
    # Torch would open the device, and a process that has one open can not be forked.
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "GPU"
    asked = subprocess.run([tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
    return (asked.stdout.splitlines() or ["GPU"])[0].strip()


def _processor() -> str:
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def one_line() -> str:
    """Versions and hardware in one line, for tables on a terminal."""
    machine = hardware()
    named = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"{named}, {machine['cores']} cores, {machine['processor']}"


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values and their quartiles."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float], scale: float = 1.0) -> "Spread":
        """Of at least one value, each times ``scale``."""
        found = sorted(scale * value for value in values)
        if len(found) == 1:
            return cls(found[0], found[0], found[0], 1)
        low, median, high = statistics.quantiles(found, n=4, method="inclusive")
        return cls(median, low, high, len(found))

    @property
    def iqr(self) -> float:
        """The width of the middle half."""
        return self.high - self.low

    def quartiles(self, digits: int = 2) -> str:
        """The quartiles in words."""
        return f"{self.low:,.{digits}f} to {self.high:,.{digits}f}"


def shown(value: float | None, digits: int = 2) -> str:
    """A number for a table; ``None`` is a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of words: the first column to the left, the others to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """For a terminal."""
        rows = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        # The first column to the left.
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        return "\n".join([self.title, *lines])

    def markdown(self) -> str:
        """For a page."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.columns, rule, *self.rows))


@dataclass(frozen=True, slots=True)
class Aim:
    """What was to be reached, and what was.

    Attributes:
        what: In words.
        limit: The aim in words.
        value: What was measured, in words.
        met: Whether that is within the aim.
    """

    what: str
    limit: str
    value: str
    met: bool


@dataclass(slots=True)
class Report:
    """The outcome of one benchmark.

    Attributes:
        name: The name of its file.
        title: What it measures, in a few words.
        settings: What it was told, with what size.
        tables: For people.
        figures: For programs: the numbers behind the tables.
        aims: What was to be reached.
        notes: What one has to know to read the tables.
    """

    name: str
    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    aims: list[Aim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """For a terminal."""
        aims = [f"{'met' if aim.met else 'NOT MET'}: {aim.what}: {aim.value} (aim: {aim.limit})" for aim in self.aims]
        return "\n\n".join([self.title, *(table.text() for table in self.tables), "\n".join([*self.notes, *aims])]).strip()

    def as_json(self) -> dict[str, Any]:
        """For a file.

        Raises:
            ValueError: A figure is not a finite number.
        """
        found = json.loads(json.dumps(asdict(self)))
        check_finite(found, self.name)
        return found


def check_finite(value: Any, where: str) -> None:
    """Raise when there is a number in ``value``, however deep, that is not finite.

    Raises:
        ValueError: With the place of the number.
    """
    if isinstance(value, dict):
        for key, one in value.items():
            check_finite(one, f"{where}.{key}")
    elif isinstance(value, list):
        for index, one in enumerate(value):
            check_finite(one, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, which is no finite number")


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    found.add_argument("--quick", action="store_true", help="sizes so small that the figures mean nothing, to try it out")
    return found


def parse(options: argparse.ArgumentParser, arguments: Sequence[str] | None, quick: dict[str, Any]) -> argparse.Namespace:
    """Read the command line; with ``--quick``, ``quick`` has the defaults."""
    if options.parse_args(arguments).quick:
        options.set_defaults(**quick)
    return options.parse_args(arguments)


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a benchmark was told, for its report."""
    return {name: value for name, value in vars(arguments).items() if name not in ("json", "quick")}


def publish(report: Report, arguments: argparse.Namespace, say: Callable[[str], None] = print) -> None:
    """Print a report, and write it where ``--json`` says."""
    found = report.as_json()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found))
    say(f"{one_line()}\n\n{report.text()}")
