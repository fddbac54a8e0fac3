"""The example notebook: its cells, its stored outputs, and what may differ from run to run in them.

``python -m tests.notebook`` runs it in a kernel and stores the outputs anew, with names instead of what differs.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat

from tests.scripts import ROOT, Run, finish, start_command

PATH = ROOT / "examples" / "notebook.ipynb"
NAMES = (
    (r"\x1b\[[0-9;]*m", ""),
    (r'/[^"\s]*/site-packages/', "…/"),
    (r'/[^"\s]*/ipykernel_\d+/\d+\.py', "<cell>"),
    (r'"/[^"\s]*/lightning_pgroup/', '"…/lightning_pgroup/'),
    (r"\(pid \d+ on \S+\) at \d\d:\d\d:\d\d", "(pid … on …) at …"),
    (r"127\.0\.0\.1\]:\d+", "127.0.0.1]:…"),
    (r"\[/\S*/gloo/transport/\S+\]", "[gloo]"),
    (r"in \d+\.\d ms", "in … ms"),
    (r"W\d{4} [\d:.]+ \d+ torch/multiprocessing/spawn.py:\d+\]", "W… torch/multiprocessing/spawn.py]"),
    (r"process \d{2,}", "process …"),
)


def run_cells(cells: list[dict[str, Any]], folder: Path, timeout: float = 110) -> tuple[list[list[dict[str, Any]]], Run]:
    """Run cells (see :mod:`tests.kernel`) in one kernel; returns the outputs of each. No process may be left behind."""
    (folder / "cells.json").write_text(json.dumps(cells))
    command = [sys.executable, "-m", "tests.kernel", "cells.json", "done.json"]
    # Lightning finds out when it is imported whether it is in a notebook, so not in a process that has it already.
    done = finish(start_command(command, folder, cold=True), timeout)
    assert done.code == 0, f"{done.out}\n{done.err}"
    return json.loads((folder / "done.json").read_text()), done


def sources() -> list[str]:
    """What stands in the code cells of the example."""
    return [cell.source for cell in _code(nbformat.read(PATH, as_version=4))]


def stored() -> list[list[dict[str, Any]]]:
    """The outputs that the example shows."""
    return [cell.outputs for cell in _code(nbformat.read(PATH, as_version=4))]


def without_differences(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Outputs with names for what differs from run to run, each stream in one piece, and the lines of several ranks sorted."""
    streams: dict[str, str] = {}
    rest = []
    for output in outputs:
        if output["output_type"] == "stream":
            streams[output["name"]] = streams.get(output["name"], "") + output["text"]
        else:
            rest.append({key: _named(value) for key, value in output.items()})
    lines = {name: [line for line in _named(text).splitlines() if line] for name, text in streams.items()}
    if "stderr" in lines:
        lines["stderr"].sort()
    pieces = [{"output_type": "stream", "name": name, "text": "\n".join(said) + "\n"} for name, said in sorted(lines.items())]
    return [*pieces, *rest]


def said(outputs: list[dict[str, Any]], name: str = "stdout") -> str:
    """What a cell has printed."""
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream" and output["name"] == name)


def error_of(outputs: list[dict[str, Any]]) -> tuple[str, str]:
    """Type and message of the exception that a cell has raised; empty without one."""
    found = [(output["ename"], output["evalue"]) for output in outputs if output["output_type"] == "error"]
    return found[0] if found else ("", "")


def _code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _named(value: Any) -> Any:
    if isinstance(value, list):
        return [_named(one) for one in value]
    if isinstance(value, str):
        for pattern, name in NAMES:
            value = re.sub(pattern, name, value)
    return value


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        outputs, _ = run_cells([{"source": source} for source in sources()], Path(folder))
    notebook = nbformat.read(PATH, as_version=4)
    for number, (cell, out) in enumerate(zip(_code(notebook), outputs, strict=True), start=1):
        cell.outputs = [nbformat.from_dict(output) for output in without_differences(out)]
        cell.execution_count = number
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = number
    nbformat.validate(notebook)
    nbformat.write(notebook, PATH)


if __name__ == "__main__":
    main()
