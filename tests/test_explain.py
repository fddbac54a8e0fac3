"""`lightning-pgroup explain` says what the policy table does, in each cell, and refuses what a strategy refuses."""

import importlib
import inspect
import itertools
import os
import re
import subprocess
import sys
import tomllib

import pytest

from lightning_pgroup import PGroupDDPStrategy, __version__
from lightning_pgroup.command_line import COMMANDS, main
from lightning_pgroup.explain import ACTIONS, GONE, WORDS, explain
from lightning_pgroup.policy import (
    Action,
    DestroyPolicy,
    Event,
    OnError,
    Ownership,
    action_for,
    parse_policies,
)
from tests.scripts import ROOT
from tests.test_policy import COMBINATIONS

PAGE = (ROOT / "docs" / "policies.md").read_text()


def table(lines):
    """The cells of the table, by what stands in its first column."""
    start = next(number for number, line in enumerate(lines) if line.startswith("when "))
    rows = [re.split(r"\s{2,}", line) for line in lines[start + 2 : lines.index("", start)]]
    return {row[0]: tuple(row[1:]) for row in rows}


def allowed():
    for names, on_error in itertools.product(COMBINATIONS, OnError):
        if not (on_error is OnError.KEEP and "on_error" in names):
            yield parse_policies(sorted(names)), on_error


def test_each_cell_is_what_the_policy_table_says():
    for policies, on_error in allowed():
        cells = table(explain(policies, on_error))
        assert list(cells) == [WORDS[event] for event in Event]
        ways = [(Ownership.OWNED, False), (Ownership.OWNED, True), (Ownership.FOREIGN, False)]
        for event, (column, (ownership, in_use)) in itertools.product(Event, enumerate(ways)):
            want = action_for(event, policies, on_error, ownership, in_use=in_use)
            found = cells[WORDS[event]][column]
            if event is Event.ERROR_HANDLED and found == GONE:
                assert action_for(Event.STAGE_ERROR, policies, on_error, ownership, in_use=in_use) is not Action.KEEP
                continue
            assert found == ACTIONS[want], (event, policies, on_error, ownership, in_use)


def test_the_words_say_the_same_as_the_table():
    for policies, on_error in allowed():
        lines = explain(policies, on_error)
        cells = table(lines)
        subjects = {"A group that a strategy": 0, "One that a stage": 1, "A group that other code": 2}
        said, column, outcome = {}, None, ""
        for line in lines[2 : next(number for number, line in enumerate(lines) if line.startswith("when "))]:
            column = next((found for start, found in subjects.items() if line.startswith(start)), column)
            always = re.search(r" is always (.*)\.$", line)
            when = re.search(r" is (.*) when$", line)
            if always:
                said |= {(words, column): always.group(1) for words in cells}
            elif when:
                outcome = when.group(1)
            elif line:
                said[line.removeprefix("- "), column] = outcome
        assert said == {(words, column): row[column] for words, row in cells.items() for column in range(3)}


def test_what_is_left_out_is_as_in_the_strategy(capsys):
    default = inspect.signature(PGroupDDPStrategy).parameters["destroy"].default
    assert main(["explain"]) == 0
    assert capsys.readouterr().out.splitlines() == explain(frozenset({DestroyPolicy(default)}), OnError.ABORT)
    assert main(["explain", "--destroy", "never"]) == 0
    assert 'destroy="never", on_error="keep"' in capsys.readouterr().out
    assert main(["explain", "--on-error", "destroy", "--destroy", "on_error", "at_exit"]) == 0
    assert 'destroy=["on_error", "at_exit"], on_error="destroy"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--destroy", "sometimes"], "`destroy` must be one of 'on_teardown', 'per_trainer', "),
        (["--destroy", "never", "at_exit"], "'never'` stands alone"),
        (["--on-error", "explode"], "`on_error` must be one of 'abort', 'destroy', 'keep', got 'explode'"),
        (["--destroy", "on_error", "--on-error", "keep"], "Use `on_error='abort'` or `on_error='destroy'`"),
        (["--destroy"], "expected at least one argument"),
        (["--explode"], "unrecognized arguments"),
    ],
)
def test_wrong_values_say_what_is_right_and_end_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["explain", *arguments])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_help_names_each_command_and_each_choice(capsys):
    for arguments in (["--help"], ["explain", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in [*COMMANDS, *DestroyPolicy, *OnError]:
        assert name in text
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--version"])
    assert __version__ in capsys.readouterr().out


def test_the_script_entry_point_is_the_same():
    (target,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values()
    module, _, name = target.partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_python_m_needs_no_torch(tmp_path, capsys):
    """With modules in the way that fail when they are imported."""
    for name in ("torch", "lightning", "torchmetrics"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not needed here')")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def run(*arguments):
        command = [sys.executable, "-m", "lightning_pgroup", "explain", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)

    done = run("--destroy", "on_teardown")
    assert main(["explain", "--destroy", "on_teardown"]) == 0
    assert (done.returncode, done.stdout, done.stderr) == (0, capsys.readouterr().out, "")
    assert run("--destroy", "x").returncode == 2


def test_a_reader_that_goes_before_the_end_is_no_error_to_speak_of():
    reader, writer = os.pipe()
    os.close(reader)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lightning_pgroup", "explain"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, env=environ)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_table_in_the_docs_is_what_it_prints(capsys):
    (command, shown), *others = re.findall(r"```console\n\$ lightning-pgroup (explain .*?)\n(.*?)```", PAGE, re.DOTALL)
    assert others == []
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    assert shown in printed, "an excerpt, as it is"
    assert shown.startswith("when ")
