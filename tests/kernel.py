"""A program that runs cells in a kernel of its own, as a notebook does: ``python -m tests.kernel cells.json done.json``.

``cells.json`` is a list of cells: ``source``, and for one that is to be interrupted ``interrupt``, which is ``group`` or
``kernel``, and ``when``, the file whose appearance says that it is time. ``done.json`` gets the outputs of each.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

DEADLINE = 60
"""Seconds that one cell may take."""


def main(source: str, target: str) -> None:
    wanted = json.loads(Path(source).read_text())
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell["source"]) for cell in wanted])
    client = NotebookClient(notebook, timeout=DEADLINE, allow_errors=True, kernel_name="python3")
    with client.setup_kernel():
        for index, (cell, run) in enumerate(zip(wanted, notebook.cells, strict=True)):
            if "interrupt" in cell:
                arguments = (client, cell["interrupt"], Path(cell["when"]))
                threading.Thread(target=_interrupt, args=arguments, daemon=True).start()
            client.execute_cell(run, index)
    Path(target).write_text(json.dumps([cell.outputs for cell in notebook.cells]))


def _interrupt(client: NotebookClient, how: str, when: Path) -> None:
    until, pause = time.monotonic() + DEADLINE, threading.Event()
    while not when.exists():
        if time.monotonic() > until:
            return
        pause.wait(0.02)
    process = client.km.provisioner.process
    if how == "group":  # Jupyter's own way: the kernel, and all that it has started
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(process.pid, signal.SIGINT)


if __name__ == "__main__":
    main(*sys.argv[1:])
