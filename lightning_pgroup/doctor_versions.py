"""The doctor's look at versions, by what is installed: nothing is imported for it."""

import platform
import re
import sys
from collections.abc import Callable
from importlib import metadata

from lightning_pgroup.__about__ import __version__
from lightning_pgroup.doctor_report import Finding, Result

CHECK = "versions"

MINIMUM = {"torch": "2.6", "lightning": "2.5", "torchmetrics": "1.9"}
"""The lowest versions that this package works with, as in ``pyproject.toml``."""

COMPROMISED = {"lightning": ("2.6.2", "2.6.3")}
"""Releases that were published with malicious code in them."""

PYTHON = (3, 11)


def check_versions(
    version_of: Callable[[str], str] = metadata.version, python: tuple[int, ...] = sys.version_info[:2]
) -> Finding:
    """Compare what is installed with what this package needs. Local.

    Args:
        version_of: Gives the version of a distribution, or raises ``PackageNotFoundError``.
        python: The version of Python.
    """
    found, advice = [f"lightning_pgroup {__version__}", f"Python {platform.python_version()}"], []
    if python < PYTHON:
        advice.append(f"Python {'.'.join(map(str, PYTHON))} or newer is needed.")
    for name, minimum in MINIMUM.items():
        try:
            version = version_of(name)
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
            advice.append(f"Install it into the environment of {sys.executable}: pip install '{name}>={minimum}'.")
            continue
        found.append(f"{name} {version}")
        if version in COMPROMISED.get(name, ()):
            found[-1] += " (compromised)"
            advice.append(
                f"{name} {version} was published with malicious code in it. Remove it (pip uninstall {name}), install another"
                " release, and replace all passwords, keys and tokens that this machine could read."
            )
        elif _numbers(version) < _numbers(minimum):
            advice.append(f"{name} {version} is older than {minimum}: pip install --upgrade '{name}>={minimum}'.")
    return Finding(CHECK, Result.FAILED if advice else Result.OK, ", ".join(found), tuple(advice))


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
