"""The pytest plugin, on small test files of its own: what it finds, whom it blames, and what it leaves alone."""

import os
import sys
import textwrap
import tomllib

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

import lightning_pgroup.context
import lightning_pgroup.leak_guard
import lightning_pgroup.pytest_plugin  # noqa: F401  (what a run imports itself, it forgets afterwards)
from tests.scripts import ROOT

pytest_plugins = ["pytester"]

PLAIN = """
import os, sys
import pytest
import torch.distributed as dist

def create():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
LEAK = """
def test_leak():
    create()

def test_after():
    assert not dist.is_initialized()
"""
OF_OURS = """
def test_leak():
    from lightning_pgroup import PGroupDDPStrategy
    from tests.models import TinyData, TinyModel, make_trainer
    make_trainer(PGroupDDPStrategy(destroy="never"), devices=1).fit(TinyModel(), datamodule=TinyData())
    assert dist.is_initialized()

def test_after():
    assert not dist.is_initialized()
"""
SUB_GROUP = """
@pytest.fixture(scope="module")
def group():
    create()
    yield dist.group.WORLD
    dist.destroy_process_group()

def test_leak(group):
    dist.new_group([0])

def test_after(group):
    dist.barrier()
    assert dist.group.WORLD is group
"""
LEAKS = {
    "plain": (LEAK, "the default group (cpu:gloo,cuda:gloo, 1 rank)"),
    "ours": (OF_OURS, "the default group (cpu:gloo,cuda:gloo, 1 rank)"),
    "a sub-group": (SUB_GROUP, "a sub-group (cpu:gloo,cuda:gloo, 1 rank)"),
}
SHARED = """
@pytest.fixture(scope="module")
def group():
    create()
    os.environ["OF_THE_FIXTURE"] = "1"
    yield dist.group.WORLD
    dist.destroy_process_group()
    del os.environ["OF_THE_FIXTURE"]

@pytest.mark.parametrize("number", [1, 2])
def test_has_it(number, {first}):
    group = {get}
    assert dist.group.WORLD is group
    assert os.environ["OF_THE_FIXTURE"] == "1"
"""
SHARED_LEAK = """
@pytest.fixture(scope="class")
def group():
    create()

class TestOne:
    def test_first(self, group):
        assert dist.is_initialized()

    def test_second(self, group):
        assert dist.is_initialized()

def test_after():
    assert not dist.is_initialized()
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run a test file with the plugin, and no other that is installed; in this process, unless told ``apart``."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run_file(code, *args, apart=False):
        pytester.makepyfile(test_it=PLAIN + textwrap.dedent(code))
        start = pytester.runpytest_subprocess if apart else pytester.runpytest_inprocess
        return start("-p", "lightning_pgroup.pytest_plugin", *args)

    return run_file


def test_off_unless_asked_for(run):
    code = """
    def test_leak():
        create()
        os.environ["LEFT"] = "1"

    def test_after():
        assert dist.is_initialized()
        del os.environ["LEFT"]
        dist.destroy_process_group()
        sys.excepthook = sys.__excepthook__
    """
    hook = sys.excepthook
    try:
        result = run(code)
    finally:
        sys.excepthook = hook
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*process group*")


@pytest.mark.parametrize("leak", LEAKS)
def test_destroy_ends_it_and_names_the_test(run, leak):
    code, what = LEAKS[leak]
    result = run(code, "--pgroup=destroy")
    result.assert_outcomes(passed=2)
    line = f"test_it.py::test_leak has left a process group alive: {what}. It was destroyed."
    assert [one for one in result.outlines if "has left" in one] == [line]
    assert any(one.strip("= ") == "process groups that tests have left" for one in result.outlines)


@pytest.mark.parametrize("leak", LEAKS)
def test_error_ends_it_and_fails_the_test(run, leak):
    code, what = LEAKS[leak]
    result = run(code, "--pgroup=error")
    result.assert_outcomes(passed=2, errors=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (line,) = [one for one in result.outlines if one.startswith("test_it.py::test_leak has left")]
    assert f"{what}. It was destroyed. Let the test end what it creates" in line
    assert "ERROR at teardown of test_leak" in result.stdout.str()


def test_environment_and_excepthook_are_put_back(run):
    code = """
    HOOK = sys.excepthook

    def test_change():
        create()
        dist.destroy_process_group()  # which leaves the hook of torch
        assert sys.excepthook is not HOOK
        os.environ.update(MASTER_PORT="1", PATH="/")
        del os.environ["HOME"]

    def test_after():
        assert sys.excepthook is HOOK
        assert "MASTER_PORT" not in os.environ
        assert os.environ["PATH"] != "/"
        assert "HOME" in os.environ
        assert os.environ["PYTEST_CURRENT_TEST"].endswith("test_after (call)")
    """
    run(code, "--pgroup=destroy").assert_outcomes(passed=2)


@pytest.mark.parametrize("mode", ["destroy", "error"])
@pytest.mark.parametrize("how", ["asked for by name", "asked for in the test"])
def test_a_group_that_tests_share_lives_as_long_as_they_need_it(run, mode, how):
    by_name = how == "asked for by name"
    code = SHARED.format(
        first="group" if by_name else "request", get="group" if by_name else "request.getfixturevalue('group')"
    )
    result = run(code, f"--pgroup={mode}")
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*has left*")


@pytest.mark.parametrize("mode", ["destroy", "error"])
def test_a_shared_fixture_that_leaves_it_is_named_with_the_test_that_has_set_it_up(run, mode):
    result = run(SHARED_LEAK, f"--pgroup={mode}")
    result.assert_outcomes(passed=3, errors=int(mode == "error"))
    want = "test_it.py::TestOne::test_first has created by the fixture 'group' (class), which has left a process group alive"
    assert len([one for one in result.outlines if one.startswith(want)]) == 1
    if mode == "error":
        assert "ERROR at teardown of TestOne.test_second" in result.stdout.str()


def test_a_group_from_before_the_first_test_is_left_alone(run):
    code = """
    def test_uses_it():
        dist.barrier()
    """
    hook = sys.excepthook
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    try:
        run(code, "--pgroup=error").assert_outcomes(passed=1)
        assert dist.group.WORLD is group
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@pytest.mark.parametrize("mode", ["destroy", "error"])
def test_a_block_that_is_left_open_fails_the_test_in_both_modes(run, mode):
    code = """
    from lightning_pgroup import process_group
    BLOCK = process_group(rank=0, world_size=1)

    def test_leak():
        BLOCK.__enter__()

    def test_after():
        assert dist.is_initialized()

    def test_the_end():
        BLOCK.__exit__(None, None, None)
    """
    result = run(code, f"--pgroup={mode}")
    result.assert_outcomes(passed=3, errors=1)
    (line,) = [one for one in result.outlines if one.startswith("test_it.py::test_leak has left")]
    assert "It could not be destroyed: 'process_group' is running." in line


def test_the_ini_option_and_what_overrides_it(run, pytester):
    pytester.makeini("[pytest]\npgroup = error")
    run(LEAK).assert_outcomes(passed=2, errors=1)
    run(LEAK, "--pgroup=destroy").assert_outcomes(passed=2)
    run("def test_one(): pass", "--pgroup=off").assert_outcomes(passed=1)


def test_wrong_values_name_the_choices(run, pytester):
    result = run(LEAK, "--pgroup=sometimes")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--pgroup: invalid choice: 'sometimes'" in result.stderr.str()
    pytester.makeini("[pytest]\npgroup = sometimes")
    result = run(LEAK)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: The ini option `pgroup` must be one of 'off', 'destroy', 'error', got 'sometimes'."])


def test_a_conftest_may_ask_for_the_plugin(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest('pytest_plugins = ["lightning_pgroup.pytest_plugin"]')
    pytester.makeini("[pytest]\npgroup = error")
    pytester.makepyfile(test_it=PLAIN + LEAK)
    pytester.runpytest_inprocess().assert_outcomes(passed=2, errors=1)


def test_fixtures_of_a_conftest_run_inside_the_guard(run, pytester):
    pytester.makeconftest(
        PLAIN
        + textwrap.dedent("""
        @pytest.fixture(autouse=True)
        def group():
            create()
            yield
            os.environ["LEFT"] = "1"
        """)
    )
    code = """
    @pytest.mark.parametrize("number", [1, 2])
    def test_leak(number):
        assert "LEFT" not in os.environ
    """
    run(code, "--pgroup=error").assert_outcomes(passed=2, errors=2)
    assert "LEFT" not in os.environ


def test_process_group_is_a_group_of_one_rank_that_ends_with_the_test(run, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    code = """
    import torch

    @pytest.mark.parametrize("number", [1, 2])
    def test_uses_it(process_group, number):
        assert process_group is dist.group.WORLD
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        tensor = torch.tensor([float(number)])
        dist.all_reduce(tensor)
        assert tensor.item() == number

    def test_after():
        assert not dist.is_initialized()
    """
    result = run(code, "--pgroup=error")
    result.assert_outcomes(passed=3)


@pytest.mark.scripts
def test_with_xdist_the_workers_tell_what_they_have_found(run):
    code = """
    @pytest.mark.parametrize("number", [1, 2, 3, 4])
    def test_leak(number):
        assert os.environ["PYTEST_XDIST_WORKER"] in ("gw0", "gw1")
        create()
    """
    result = run(code, "-p", "xdist", "-n", "2", "--pgroup=destroy", apart=True)
    result.assert_outcomes(passed=4)
    found = sorted(line.split()[0] for line in result.outlines if "has left a process group alive" in line)
    assert found == [f"test_it.py::test_leak[{number}]" for number in (1, 2, 3, 4)]


@pytest.mark.scripts
def test_an_installed_plugin_is_found_and_imports_no_torch(pytester, monkeypatch):
    """As an installer would write the entry point, from what pyproject.toml says."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    site = pytester.mkdir("site")
    info = site / "lightning_pgroup_as_installed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-pgroup-as-installed\nVersion: 1.0\n")
    lines = [f"{name} = {module}" for name, module in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT)]))
    pytester.makepyfile("""
        import sys

        def test_it(pytestconfig):
            assert pytestconfig.pluginmanager.has_plugin("lightning_pgroup")
            assert "lightning_pgroup.pytest_plugin" in sys.modules
            assert not {"torch", "lightning"} & set(sys.modules)
            assert not pytestconfig.pluginmanager.has_plugin("lightning_pgroup_guard")
    """)
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
    result = pytester.runpytest_subprocess("--fixtures")
    result.stdout.fnmatch_lines(["process_group -- *lightning_pgroup/pytest_plugin.py:*", "ranks -- *pytest_plugin.py:*"])
