"""The examples of docs/records.md run as they stand, on two ranks."""

import csv
import re

from tests.ranks import run_ranks
from tests.snippets import blocks_of, run_blocks, shown

BLOCKS = blocks_of("docs/records.md")


def test_examples_run_one_after_the_other(tmp_path):
    def job(rank):
        return [re.findall(r"^\d .*", printed, re.MULTILINE) for printed in run_blocks(BLOCKS, tmp_path)]

    first, _ = run_ranks(job)
    assert len(BLOCKS) == 2
    for block, lines in zip(BLOCKS, first, strict=True):
        assert lines == shown(block)
    (log,) = (tmp_path / "logs").glob("lightning_logs/*/metrics.csv")
    row = list(csv.DictReader(log.open()))[-1]
    assert [float(row[f"pgroup/{what}"]) for what in ("created", "reused", "destroyed", "aborted")] == [1, 0, 1, 0]
