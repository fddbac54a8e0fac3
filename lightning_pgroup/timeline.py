"""``lightning-pgroup timeline``: draws what records on disk say, as a picture, a page or a trace."""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from lightning_pgroup import timeline_html, timeline_png, timeline_trace
from lightning_pgroup.record_file import read_records
from lightning_pgroup.timeline_model import build
from lightning_pgroup.timeline_parts import Timeline
from lightning_pgroup.timeline_words import title_of

HELP = "Draw who had which process group when, per rank, from the records that `record=` has written."

_RENDERERS: dict[str, Callable[[Timeline], bytes]] = {
    ".png": timeline_png.render,
    ".html": timeline_html.render,
    ".json": timeline_trace.render,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "records", nargs="+", metavar="RECORDS", help="folders or files that `PGroupDDPStrategy(record=...)` has written"
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="a .png (needs matplotlib), a .html (one page that needs nothing else),"
        " or a .json (Chrome's trace format, for ui.perfetto.dev)",
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Draw the records that were given.

    Raises:
        ValueError: They can not be read, or are none; or the output can not be written.
    """
    output = Path(arguments.output)
    render = _RENDERERS.get(output.suffix.lower())
    if render is None:
        raise ValueError(f"the output must end in {', '.join(_RENDERERS)}, got {arguments.output!r}")
    if not output.parent.is_dir():
        raise ValueError(f"the folder of the output is not there: {output.parent}")
    inputs = [Path(path) for path in dict.fromkeys(arguments.records)]
    for path in inputs:
        if path.resolve() == output.resolve():
            raise ValueError(f"the output would overwrite the records in {path}: choose another name")
    found = []
    for path in inputs:
        try:
            found += read_records(path)
        except OSError as error:
            raise ValueError(f"records can not be read from {path}: {error.strerror or error}") from error
    try:
        timeline = build(found)
    except ValueError as error:
        raise ValueError(
            f"{error} in {', '.join(map(str, inputs))}: give the folder, or the files, that PGroupDDPStrategy(record=...) wrote"
        ) from error
    _write(output, render(timeline))
    say(f"{output}: {title_of(timeline)}")
    return 0


def _write(output: Path, content: bytes) -> None:
    """Write the whole file or nothing."""
    part = None
    try:
        with tempfile.NamedTemporaryFile(dir=output.parent, prefix=f".{output.name}.", delete=False) as part:
            part.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(part.name, 0o666 & ~mask)
        os.replace(part.name, output)
    except OSError as error:
        if part is not None:
            os.unlink(part.name)
        raise ValueError(f"{output} can not be written: {error.strerror or error}") from error
