"""Each fenced block on a page is run, or checked: what stands there works as it stands."""

import configparser
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
import yaml

from lightning_pgroup import PGroupDDPStrategy, command_line, pytest_plugin
from tests.ranks import run_ranks
from tests.scripts import ROOT
from tests.snippets import blocks_of, commands_of, fences, pages, run_blocks, shown

ON_TWO_RANKS = ("docs/errors.md", "docs/index.md", "docs/migration.md", "docs/policies.md")
"""Pages whose Python runs here, block after block, on two ranks."""

ELSEWHERE = {
    "README.md": "test_readme.test_examples_run_one_after_the_other",
    "docs/checkpoints.md": "test_docs.test_the_script_that_saves_in_the_background",
    "docs/configuration.md": "test_docs_configuration.test_the_script_with_its_configuration",
    "docs/groups.md": "test_docs_groups.test_examples_run_one_after_the_other",
    "docs/holders.md": "test_holders.test_the_example_of_the_page_runs_as_it_stands",
    "docs/metrics.md": "test_docs_metrics.test_examples_run_one_after_the_other",
    "docs/notebooks.md": "test_notebook.test_the_snippet_of_the_page_runs",
    "docs/records.md": "test_docs_records.test_examples_run_one_after_the_other",
    "docs/scripts.md": "test_docs.test_the_script_without_lightning",
    "docs/slurm.md": "test_docs.test_the_script_for_slurm",
    "docs/sweeps.md": "test_docs_sweeps.test_the_example_in_python",
    "docs/testing.md": "test_docs_testing.test_the_test_file",
    "docs/timeline.md": "test_timeline.test_the_example_and_the_commands_of_the_page_run",
    "docs/torchrun.md": "test_docs.test_the_script_for_torchrun",
}
"""Pages whose Python needs more than that, and the tests that run it."""

NOT_RUN = {
    ("docs/configuration.md", "needs a build of torch with NCCL"),
    ("docs/launchers.md", "needs ray"),
}
"""All blocks that do not run, and why. `tests/test_ray.py` runs what the second shows, where there is Ray."""

LANGUAGES = {"python", "console", "bash", "yaml", "ini", "toml", "json", "text"}


@pytest.mark.parametrize("page", ON_TWO_RANKS)
def test_examples_run_one_after_the_other(page, tmp_path):
    def job(rank):
        hook = sys.excepthook
        printed = [out.splitlines() for out in run_blocks(blocks_of(page), tmp_path)]
        sys.excepthook = hook  # a page may call `init_process_group` itself
        return printed

    first, second = run_ranks(job)
    for block, lines, others in zip(blocks_of(page), first, second, strict=True):
        expected = shown(block)
        assert [line for line in lines if line in expected] == expected, lines  # and not what Lightning says
        assert not set(expected) & set(others)


@pytest.mark.parametrize("page", pages())
def test_the_python_of_each_page_is_run(page):
    if not blocks_of(page):
        assert page not in ELSEWHERE
        return
    assert (page in ON_TWO_RANKS) != (page in ELSEWHERE), f"no test runs the examples of {page}: name one here"
    if page in ELSEWHERE:
        module, name = ELSEWHERE[page].split(".")
        module = importlib.import_module(f"tests.{module}")
        assert callable(getattr(module, name))
        assert re.search(rf"\b{re.escape(page.removeprefix('docs/').removesuffix('.md'))}\b", inspect.getsource(module))


def test_what_is_not_run_has_a_reason_and_is_known():
    marked = [(block.page, block.reason) for page in pages() for block in fences(page) if block.reason is not None]
    assert sorted(marked) == sorted(NOT_RUN)
    written = sum((ROOT / page).read_text().count("<!-- not run:") for page in pages())
    assert written == len(marked), "a comment is not right before a block"


@pytest.mark.parametrize("page", pages())
def test_languages_are_named_and_configurations_can_be_read(page):
    for block in fences(page):
        assert block.language in LANGUAGES, f"a block of {page} is in {block.language or 'no language'}:\n{block.text}"
        if block.language == "yaml":
            _build_strategies(yaml.safe_load(block.text))
        elif block.language == "ini":
            configparser.ConfigParser().read_string(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "bash":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, timeout=30)


def test_fences_are_all_found():
    for page in pages():
        assert 2 * len(fences(page)) == len(re.findall(r"^ *```", (ROOT / page).read_text(), re.MULTILINE)), page


def _build_strategies(value):
    """Build each strategy of ours that a configuration for jsonargparse or Hydra names."""
    if isinstance(value, list):
        for one in value:
            _build_strategies(one)
    if not isinstance(value, dict):
        return
    if value.get("class_path") == "lightning_pgroup.PGroupDDPStrategy":
        PGroupDDPStrategy(**value.get("init_args", {}))
    if value.get("_target_") == "lightning_pgroup.PGroupDDPStrategy":
        PGroupDDPStrategy(**{name: given for name, given in value.items() if not name.startswith("_")})
    for one in value.values():
        _build_strategies(one)


@pytest.mark.parametrize("page", pages())
def test_commands_can_be_given(page, monkeypatch, capsys):
    for command in commands_of(page):
        program, *words = command.words
        assert program in PROGRAMS, f"say in tests/test_snippets.py how to check {shlex.join(command.words)!r}"
        PROGRAMS[program](page, words, command.output, monkeypatch, capsys)


def _make(page, words, output, *_):
    (target,) = words
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def _pip(page, words, output, *_):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    for wanted in re.findall(r"\[(.*?)\]", " ".join(words)):
        assert set(wanted.split(",")) <= set(extras), wanted


def _python(page, words, *rest):
    if words[0] == "-m":
        if words[1] == "lightning_pgroup":
            _ours(page, words[2:], *rest)
        assert importlib.util.find_spec(words[1]), words
    elif words[0] == "train.py":
        assert any('if __name__ == "__main__":' in block for block in blocks_of(page)), "the page has no script"
        if words[1:]:
            assert page == "docs/configuration.md", "say here how to check the arguments"
    else:
        assert (ROOT / words[0]).exists(), words[0]


def _torchrun(page, words, *_):
    from torch.distributed.run import get_args_parser

    arguments = get_args_parser().parse_args(words)
    _python(page, [arguments.training_script, *arguments.training_script_args])


def _pytest(page, words, *_):
    for word in words:
        name, _, value = word.partition("=")
        assert name == "--pgroup"
        assert value in pytest_plugin._CHOICES


def _ours(page, words, output, monkeypatch, capsys):
    """Runs what is done in a moment, and else looks whether the arguments are right."""
    with monkeypatch.context() as patched:
        if words[0] != "explain":
            patched.setattr(command_line.COMMANDS[words[0]], "run", lambda arguments, say: 0)
        assert command_line.main(words) == 0
    printed = capsys.readouterr().out
    if words[0] == "explain" and output:
        assert output in printed


PROGRAMS = {
    "make": _make,
    "pip": _pip,
    "python": _python,
    "torchrun": _torchrun,
    "pytest": _pytest,
    "lightning-pgroup": _ours,
}


def test_the_commands_with_a_configuration_are_understood(tmp_path):
    """All of docs/configuration.md, up to where the stage would begin; another test runs one of them to its end."""
    pytest.importorskip("typeshed_client", reason="needs jsonargparse[signatures]")
    page = "docs/configuration.md"
    commands = [command.words[2:] for command in commands_of(page) if command.words[:2] == ("python", "train.py")]
    assert len(commands) == 6
    (config,) = [block.text for block in fences(page, "yaml") if "trainer:" in block.text]
    (tmp_path / "config.yaml").write_text(config)

    def job(rank):
        from lightning.pytorch.cli import LightningCLI

        began, sys.path = [], [str(ROOT / "examples"), *sys.path]
        LightningCLI._run_subcommand = lambda cli, name: began.append((name, type(cli.trainer.strategy).__name__))
        for words in commands:
            sys.argv = ["train.py", *words]
            try:
                run_blocks(blocks_of(page), tmp_path)
            except SystemExit as end:
                began.append(end.code)
        return began

    (began,) = run_ranks(job, size=1, bare=True, check_leaks=False)  # scikit-learn leaves variables
    assert began == [("fit", "PGroupDDPStrategy")] * 4 + [0, 0]
