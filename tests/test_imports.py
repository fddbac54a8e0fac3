"""What an import of the package brings with it, and how the names of the strategies come to Lightning without one."""

import os
import subprocess
import sys

import pytest

from tests.scripts import ROOT

OURS_AT_ONCE = {"lightning_pgroup", "lightning_pgroup.__about__", "lightning_pgroup.errors", "lightning_pgroup.registry"}


def run(code):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_needs_next_to_nothing_until_it_is_asked_for_more():
    imported = set(run("import sys, lightning_pgroup; print(*sys.modules)").split())
    assert {name for name in imported if name.startswith("lightning_pgroup")} == OURS_AT_ONCE
    others = {name.partition(".")[0] for name in imported - OURS_AT_ONCE - set(run("import sys; print(*sys.modules)").split())}
    assert others - sys.stdlib_module_names <= {"typing_extensions"}


@pytest.mark.scripts
def test_the_names_are_known_to_lightning_in_whatever_order_and_the_strategy_brings_only_our_own_modules():
    """Also where other finders of modules are of the old kind, and the package was imported twice."""
    said = run("""if True:
        import importlib.machinery, sys

        class OldFinder:
            def find_module(self, name, path=None):
                return None

        sys.meta_path.insert(0, OldFinder())
        before = list(sys.meta_path)
        import lightning_pgroup
        importlib.reload(lightning_pgroup)
        assert not {"torch", "lightning"} & set(sys.modules)
        from lightning.pytorch.strategies import StrategyRegistry, DDPStrategy
        import lightning.pytorch.strategies as module
        assert sys.meta_path == before
        assert module.__loader__ is module.__spec__.loader
        assert type(module.__loader__) is importlib.machinery.SourceFileLoader
        ours = [name for name in StrategyRegistry if name.startswith("pgroup_ddp")]
        print(len(ours))

        for name in ours:
            del StrategyRegistry[name]
        for name in [name for name in sys.modules if name.startswith("lightning_pgroup")]:
            del sys.modules[name]
        modules = set(sys.modules)
        import lightning_pgroup
        assert sys.meta_path == before
        assert ours == [name for name in StrategyRegistry if name.startswith("pgroup_ddp")]
        print(*set(sys.modules) - modules)
        strategy = StrategyRegistry.get("pgroup_ddp_fork_find_unused_parameters_true")
        assert type(strategy) is lightning_pgroup.PGroupDDPStrategy
        print(*set(sys.modules) - modules)
    """)
    number, at_once, then = (line.split() for line in said.splitlines())
    assert number == ["12"]
    assert set(at_once) == OURS_AT_ONCE
    assert "lightning_pgroup.strategy" in then
    assert {name.partition(".")[0] for name in then} - sys.stdlib_module_names == {"lightning_pgroup"}
