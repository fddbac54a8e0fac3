"""The examples of docs/metrics.md run as they stand, on two ranks."""

import contextlib
import io
import os
import re

from tests.models import TinyData, TinyModel
from tests.ranks import run_ranks
from tests.scripts import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "metrics.md").read_text(), re.DOTALL)


def test_examples_run_one_after_the_other(tmp_path):
    def job(rank):
        os.chdir(tmp_path)
        namespace, printed = {"model": TinyModel(), "digits": TinyData()}, []
        for block in BLOCKS:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(block, namespace)
            printed.append(re.findall(r"\d+ rows.*", out.getvalue()))  # and not the progress bars
        return printed

    first, second = run_ranks(job)
    assert len(BLOCKS) == 3
    for block, lines in zip(BLOCKS, first, strict=True):
        assert lines == re.findall(r"^# (.*)$", block, re.MULTILINE)
    assert second == [[]] * len(BLOCKS)
