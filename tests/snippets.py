"""The fenced blocks of a page; the Python among them runs as it stands."""

import contextlib
import io
import os
import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.models import TinyData, TinyModel
from tests.scripts import ROOT

FENCE = re.compile(r"(?:<!-- not run: (?P<reason>[^\n]*?) -->\n)?^ *```(?P<language>\S*)\n(?P<text>.*?)^ *```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block, without its indentation; ``reason`` is why it is not run, from a comment right before it."""

    page: str
    language: str
    text: str
    reason: str | None


@dataclass(frozen=True)
class Command:
    """A line of a console that begins with ``$``: its words without variables and what is not part of it; what it prints."""

    words: tuple[str, ...]
    output: str


def pages() -> list[str]:
    """README and all pages of the site, as paths from the root of the repository."""
    return ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def fences(page: str, *languages: str) -> list[Block]:
    """The blocks of a page in these languages, or all of them."""
    found = [
        Block(page, one["language"], textwrap.dedent(one["text"]), one["reason"])
        for one in FENCE.finditer((ROOT / page).read_text())
    ]
    return [block for block in found if not languages or block.language in languages]


def blocks_of(page: str) -> list[str]:
    """The Python examples of a page, but for those that are marked as not to be run."""
    return [block.text for block in fences(page, "python") if block.reason is None]


def commands_of(page: str) -> list[Command]:
    """What the consoles on a page are given to do."""
    found = []
    for block in fences(page, "console"):
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            line, _, output = part.replace("\\\n", " ").partition("\n")
            words = shlex.split(line, comments=True)
            while re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            found.append(Command(tuple(word for word in words if word != "&"), output))
    return found


def shown(block: str) -> list[str]:
    """What an example says that it prints, in comments of its own lines."""
    return re.findall(r"^# (.*)$", block, re.MULTILINE)


def run_blocks(blocks: list[str], folder: Path) -> list[str]:
    """Run examples one after the other, with a small model and data at hand; returns what each has printed.

    To be called in a process of its own, which then stands in ``folder``.
    """
    os.chdir(folder)
    namespace, printed = {"__name__": "__main__", "model": TinyModel(), "digits": TinyData()}, []
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(block, namespace)
        printed.append(out.getvalue())
    return printed
