"""The examples of docs/sweeps.md: its Python runs, its YAML builds, its commands are those of the examples."""

import re
import shlex
import sys

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tests.ranks import run_ranks
from tests.scripts import ROOT, finish, start_command
from tests.snippets import blocks_of, run_blocks

PAGE = (ROOT / "docs" / "sweeps.md").read_text()
COMMANDS = [shlex.split(line) for line in re.findall(r"^\$ python (.*)$", PAGE, re.MULTILINE)]


def test_the_example_in_python(tmp_path):
    blocks = blocks_of("docs/sweeps.md")
    assert len(blocks) == 1
    assert run_ranks(lambda rank: len(run_blocks([f"{blocks[0]}\nassert well and best == 0.9\n"], tmp_path))) == [1, 1]


def test_the_configuration_and_the_choices_on_the_command_lines():
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert instantiate(OmegaConf.create(text))._config.policy_names == ("on_error", "per_trainer")
    choices = 0
    with initialize_config_dir(str(ROOT / "examples" / "hydra" / "conf"), version_base="1.3"):
        for script, *overrides in COMMANDS:
            assert (ROOT / script).exists()
            for override in overrides:
                if not override.startswith(("-", "hydra")):
                    name, values = override.split("=")
                    for value in values.split(","):
                        instantiate(compose("config", [f"{name}={value}"])[name.partition(".")[0]])
                        choices += 1
    assert choices == 8


@pytest.mark.scripts
@pytest.mark.timeout(200)
def test_the_example_sweeps_over_policies(tmp_path):
    """Shortened to one epoch, and to one learning rate."""
    (sweep,) = [command for command in COMMANDS if "--multirun" in command and any("strategy=" in word for word in command)]
    words = [str(ROOT / sweep[0]), *[word.split(",")[0] if "lr" in word else word for word in sweep[1:]]]
    done = finish(start_command([sys.executable, *words, "trainer.max_epochs=1"], tmp_path), timeout=170)
    assert done.code == 0, done.err
    said = re.findall(r"accuracy \S+ on (\d) ranks with .*strategy=(\w+)", done.out)
    assert said == [("2", "per_trainer"), ("2", "on_teardown")]
    assert "generation 3: destroyed because on_teardown: the stage ended" in done.out
