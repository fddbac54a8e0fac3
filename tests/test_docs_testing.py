"""The examples of docs/testing.md run as they stand, with the plugin."""

import re

from lightning_pgroup import context, forked_ranks, leak_guard, pytest_plugin  # noqa: F401  (or a run would forget them)
from tests.scripts import ROOT
from tests.test_pytest_plugin import LEAK, PLAIN

pytest_plugins = ["pytester"]

PAGE = (ROOT / "docs" / "testing.md").read_text()


def test_the_test_file(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    pytester.makepyfile(block)
    result = pytester.runpytest_inprocess("-p", "lightning_pgroup.pytest_plugin", "--pgroup=error")
    result.assert_outcomes(passed=3)


def test_the_ini_file_the_command_line_and_the_message(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (ini,) = re.findall(r"```ini\n(.*?)```", PAGE, re.DOTALL)
    (option,) = re.findall(r"\$ pytest (--pgroup=\w+)$", PAGE, re.MULTILINE)
    (message,) = re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL)
    pytester.makeini(ini)
    folder = pytester.mkdir("tests")
    (folder / "test_model.py").write_text((PLAIN + LEAK).replace("test_leak", "test_fit"))
    result = pytester.runpytest_inprocess("-p", "lightning_pgroup.pytest_plugin")
    result.assert_outcomes(passed=2)
    assert message in result.outlines
    pytester.runpytest_inprocess("-p", "lightning_pgroup.pytest_plugin", option).assert_outcomes(passed=2, errors=1)
