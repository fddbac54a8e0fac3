"""The examples of docs/metrics.md run as they stand, on two ranks."""

import re

from tests.ranks import run_ranks
from tests.snippets import blocks_of, run_blocks, shown

BLOCKS = blocks_of("docs/metrics.md")


def test_examples_run_one_after_the_other(tmp_path):
    def job(rank):
        return [re.findall(r"\d+ rows.*", printed) for printed in run_blocks(BLOCKS, tmp_path)]  # and not the progress bars

    first, second = run_ranks(job)
    assert len(BLOCKS) == 3
    for block, lines in zip(BLOCKS, first, strict=True):
        assert lines == shown(block)
    assert second == [[]] * len(BLOCKS)
