"""The scripts of docs/ run as they stand, under the launcher that they are for."""

import re
import sys

import pytest

from tests.ranks import free_port
from tests.scripts import LAUNCHERS, ROOT, finish, start_command
from tests.test_cluster_environments import free_job, slurm

pytestmark = pytest.mark.scripts

PAGES = sorted((ROOT / "docs").glob("*.md"))


def script_of(page, folder):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    (folder / "train.py").write_text(block)
    (folder / "digits.py").write_text((ROOT / "examples" / "digits.py").read_text())
    return "train.py"


def test_the_script_for_torchrun(tmp_path):
    done = finish(start_command([*LAUNCHERS["torchrun"], script_of("torchrun", tmp_path)], tmp_path), timeout=90)
    assert done.code == 0, done.err
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_the_script_for_slurm(tmp_path):
    """The variables that `srun` sets, on two processes of this machine."""
    script, job = script_of("slurm", tmp_path), free_job(10**4, 15000)
    ranks = []
    for rank in range(2):
        variables = {**slurm(rank, 0, job), "SLURM_NTASKS_PER_NODE": 2, "SLURM_NNODES": 1}
        settings = [f"{name}={value}" for name, value in variables.items() if value is not None]
        ranks.append(start_command(["env", *settings, sys.executable, script], tmp_path))
    for done in [finish(rank, timeout=90) for rank in ranks]:
        assert done.code == 0, done.err
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_the_script_that_saves_in_the_background(tmp_path):
    done = finish(start_command([sys.executable, script_of("checkpoints", tmp_path)], tmp_path), timeout=90)
    assert done.code == 0, done.err
    assert len(re.findall(r"accuracy[\s│]+[01]\.\d", done.out)) == 1, "only rank 0 tests"
    assert not re.search(r"process group|still being written", done.err)
    for epoch in range(2):
        assert (tmp_path / "sharded" / str(epoch) / ".metadata").exists()


@pytest.mark.parametrize("way", ["torchrun", "by hand"])
def test_the_script_without_lightning(way, tmp_path):
    script, ranks = script_of("scripts", tmp_path), []
    if way == "by hand":
        with free_port() as port:
            settings = ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}", "WORLD_SIZE=2"]
            for rank in range(2):
                ranks.append(start_command(["env", *settings, f"RANK={rank}", sys.executable, script], tmp_path))
    else:
        ranks.append(start_command([*LAUNCHERS["torchrun"], script], tmp_path))
    said = ""
    for done in [finish(rank, timeout=90) for rank in ranks]:
        assert done.code == 0, done.err
        said += done.out
    # Not by lines: the end of a line is written for itself, so that another rank's words may come before it.
    assert sorted(re.findall(r"learning rate (\S+): the loss is not finite", said)) == ["1e+30"] * 2
    losses = sorted(re.findall(r"learning rate (\S+): loss (\d+\.\d{3})", said))
    assert [rate for rate, _ in losses] == ["0.01"] * 2 + ["0.1"] * 2
    assert len(set(losses)) == 2, "the ranks have the same loss"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
