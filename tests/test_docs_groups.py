"""The examples of docs/groups.md run as they stand, on four ranks."""

import contextlib
import io
import os
import re

import pytest

from tests.models import TinyData, TinyModel
from tests.ranks import run_ranks
from tests.scripts import ROOT

PAGE = (ROOT / "docs" / "groups.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_examples_run_one_after_the_other(tmp_path):
    def job(rank):
        os.chdir(tmp_path)
        namespace, printed = {"model": TinyModel(), "digits": TinyData(32)}, []
        for block in BLOCKS:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(block, namespace)
            printed.append(re.findall(r"generation \d.*", out.getvalue()))  # and not the progress bars
        return printed

    first, *others = run_ranks(job, size=4)
    assert len(BLOCKS) == 3
    for block, lines in zip(BLOCKS, first, strict=True):
        assert lines == re.findall(r"^# (.*)$", block, re.MULTILINE)
    assert others == [[[]] * len(BLOCKS)] * 3


def test_the_yaml_is_what_the_page_says(tmp_path):
    pytest.importorskip("typeshed_client", reason="needs jsonargparse[signatures]")
    from lightning.pytorch.cli import LightningCLI

    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "config.yaml").write_text(block)
    cli = LightningCLI(TinyModel, run=False, save_config_callback=None, args=["--config", str(tmp_path / "config.yaml")])
    assert {name: one.lists for name, one in cli.trainer.strategy._groups.items()} == {
        "pairs": ((0, 1), (2, 3)),
        "leaders": ((0, 2),),
    }
