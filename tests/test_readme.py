"""README's examples run as they stand, and its tables name what there is."""

import re
from pathlib import Path

from lightning_pgroup.policy import DestroyPolicy, OnError, OnMismatch
from tests.ranks import run_ranks
from tests.snippets import blocks_of, run_blocks, shown

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = blocks_of("README.md")


def test_examples_run_one_after_the_other(tmp_path):
    def job(rank):
        return [printed.splitlines() for printed in run_blocks(BLOCKS, tmp_path)]

    first, second = run_ranks(job)
    for block, lines, others in zip(BLOCKS, first, second, strict=True):
        if shown(block):
            assert (lines, others) == (shown(block), [])


def test_every_argument_is_in_the_table():
    import inspect

    from lightning_pgroup import PGroupDDPStrategy

    for name, parameter in inspect.signature(PGroupDDPStrategy.__init__).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            row = re.search(rf"^\| `{name}` \| (.*?) \|", README, re.MULTILINE)
            assert row, name
            if parameter.default is not None:
                assert repr(parameter.default).replace("'", '"') in row.group(1), name


def test_the_page_on_the_architecture_names_each_file_and_no_other():
    root = Path(__file__).parent.parent
    named = re.findall(r"`(\w+\.py)`", (root / "docs" / "architecture.md").read_text())
    assert set(named) == {path.name for path in (root / "lightning_pgroup").iterdir() if path.suffix == ".py"}


def test_there_are_examples():
    assert len(BLOCKS) == 4


def test_every_choice_is_explained():
    for kind in (DestroyPolicy, OnError, OnMismatch):
        for member in kind:
            assert f'"{member.value}"' in README, member


def test_the_two_commands_and_no_other():
    assert sorted(set(re.findall(r"make \w+", README))) == ["make demo", "make test"]
