"""What the doctor has found, and how it is shown: a line for each check as it ends, a table, and what to do; or JSON."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from lightning_pgroup.__about__ import __version__

SCHEMA = 1
"""Version of the JSON document."""

_DOTS = 22
_GAP = "  "


class Result(StrEnum):
    """How a check came out. Only what failed makes the exit code 1."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "FAILED"
    SKIPPED = "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found.

    Attributes:
        check: Its name.
        result: How it came out.
        found: What was found, in words.
        advice: What to do about it, one sentence or more each.
        seconds: How long it took, or how long what it measures took.
        details: More lines, such as the stacks of a rank that hung.
    """

    check: str
    result: Result
    found: str
    advice: tuple[str, ...] = ()
    seconds: float | None = None
    details: str = ""


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if a check failed, else 0: a warning is no failure."""
    return int(any(one.result in (Result.FAILED, Result.SKIPPED) for one in findings))


def progress(finding: Finding) -> str:
    """The line that is shown as soon as a check has ended."""
    line = f"{finding.check} ".ljust(_DOTS, ".") + f" {finding.result.value}"
    return line if finding.seconds is None else f"{line} ({duration(finding.seconds)})"


def duration(seconds: float) -> str:
    """A time span for people."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"


def report(findings: Sequence[Finding], width: int) -> list[str]:
    """The table, then what to do for each failure and warning, then what hung where.

    Args:
        findings: All of them.
        width: How many columns the terminal has.
    """
    checks, results = max(len(one.check) for one in findings), max(len(one.result.value) for one in findings)
    room = max(20, width - checks - results - 2 * len(_GAP))
    lines = ["check".ljust(checks) + _GAP + "result".ljust(results) + _GAP + "found"]
    lines.append(_GAP.join("-" * size for size in (checks, results, min(room, 40))))
    for one in findings:
        first, *others = textwrap.wrap(one.found, room) or [""]
        lines.append((one.check.ljust(checks) + _GAP + one.result.value.ljust(results) + _GAP + first).rstrip())
        lines += [" " * (checks + results + 2 * len(_GAP)) + line for line in others]
    advised = [one for one in findings if one.advice]
    if advised:
        lines += ["", "What to do:"]
    for one in advised:
        for sentence in dict.fromkeys(one.advice):
            lines += textwrap.wrap(f"- {one.check}: {sentence}", max(40, width), subsequent_indent="  ", break_on_hyphens=False)
    for one in findings:
        if one.details:
            lines += ["", *one.details.rstrip().splitlines()]
    return [*lines, "", _verdict(findings)]


def to_json(findings: Sequence[Finding]) -> str:
    """All findings as one JSON document."""
    document = {
        "schema": SCHEMA,
        "version": __version__,
        "exit_code": exit_code(findings),
        "checks": [{**asdict(one), "result": one.result.name.lower()} for one in findings],
    }
    return json.dumps(document, indent=2)


def _verdict(findings: Sequence[Finding]) -> str:
    failed = sum(one.result is Result.FAILED for one in findings)
    skipped = sum(one.result is Result.SKIPPED for one in findings)
    warned = sum(one.result is Result.WARNING for one in findings)
    if not failed and not skipped:
        return "All is well." if not warned else f"All works. Warnings: {warned}."
    return f"Failed: {failed}. Not checked: {skipped}. Warnings: {warned}."
