"""The Python examples of a page, run as they stand."""

import contextlib
import io
import os
import re
from pathlib import Path

from tests.models import TinyData, TinyModel
from tests.scripts import ROOT


def blocks_of(page: str) -> list[str]:
    """The examples of a page, given by its path from the root of the repository."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def shown(block: str) -> list[str]:
    """What an example says that it prints, in comments of its own lines."""
    return re.findall(r"^# (.*)$", block, re.MULTILINE)


def run_blocks(blocks: list[str], folder: Path) -> list[str]:
    """Run examples one after the other, with a small model and data at hand; returns what each has printed.

    To be called in a process of its own, which then stands in ``folder``.
    """
    os.chdir(folder)
    namespace, printed = {"model": TinyModel(), "digits": TinyData()}, []
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(block, namespace)
        printed.append(out.getvalue())
    return printed
