"""The examples of docs/records.md run as they stand, on two ranks."""

import contextlib
import csv
import io
import os
import re

from tests.models import TinyData, TinyModel
from tests.ranks import run_ranks
from tests.scripts import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "records.md").read_text(), re.DOTALL)


def test_examples_run_one_after_the_other(tmp_path):
    def job(rank):
        os.chdir(tmp_path)
        namespace, printed = {"model": TinyModel(), "digits": TinyData()}, []
        for block in BLOCKS:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(block, namespace)
            printed.append(re.findall(r"^\d .*", out.getvalue(), re.MULTILINE))
        return printed

    first, _ = run_ranks(job)
    assert len(BLOCKS) == 2
    for block, lines in zip(BLOCKS, first, strict=True):
        assert lines == re.findall(r"^# (.*)$", block, re.MULTILINE)
    (log,) = (tmp_path / "logs").glob("lightning_logs/*/metrics.csv")
    row = list(csv.DictReader(log.open()))[-1]
    assert [float(row[f"pgroup/{what}"]) for what in ("created", "reused", "destroyed", "aborted")] == [1, 0, 1, 0]
