"""Each private name of Lightning that we use, so that a release that moves one says which."""

import inspect
import threading
from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies import DDPStrategy

from lightning_pgroup import lightning_private
from lightning_pgroup.multiprocessing_launcher import PGroupMultiProcessingLauncher
from lightning_pgroup.strategy import PGroupDDPStrategy
from lightning_pgroup.subprocess_launcher import PGroupSubprocessLauncher
from tests.models import make_trainer


@pytest.mark.parametrize("name", lightning_private.__all__)
def test_name_is_there(name):
    assert callable(getattr(lightning_private, name))


@pytest.mark.parametrize(
    ("ours", "theirs", "method"),
    [
        (PGroupSubprocessLauncher, lightning_private.SubprocessScriptLauncher, "_call_children_scripts"),
        (PGroupSubprocessLauncher, lightning_private.SubprocessScriptLauncher, "launch"),
        (PGroupMultiProcessingLauncher, lightning_private.MultiProcessingLauncher, "_wrapping_function"),
        (PGroupMultiProcessingLauncher, lightning_private.MultiProcessingLauncher, "_collect_rank_zero_results"),
        (PGroupMultiProcessingLauncher, lightning_private.MultiProcessingLauncher, "launch"),
        (PGroupDDPStrategy, DDPStrategy, "setup_distributed"),
        (PGroupDDPStrategy, DDPStrategy, "_configure_launcher"),
        (PGroupDDPStrategy, DDPStrategy, "set_world_ranks"),
    ],
)
def test_a_method_that_we_override_is_there(ours, theirs, method):
    assert method in vars(ours)
    assert hasattr(theirs, method), f"Lightning has moved {theirs.__name__}.{method}"


def test_attributes_that_we_read():
    launcher = lightning_private.SubprocessScriptLauncher(None, 1, 1)
    assert launcher.procs == []
    strategy = PGroupDDPStrategy()
    for name in ("_process_group_backend", "_timeout", "_start_method", "_launcher"):
        assert hasattr(strategy, name), name
    assert callable(lightning_private.subprocess_script._hydra_subprocess_cmd)
    assert "_call_children_scripts" in inspect.getsource(lightning_private.SubprocessScriptLauncher.launch)


def test_the_thread_that_watches_child_processes_can_be_dismissed():
    looked, failed, killed = threading.Event(), threading.Event(), []
    child = SimpleNamespace(poll=lambda: (looked.set(), failed.wait(10)), returncode=1, pid=0)
    observer = lightning_private.ChildProcessObserver(main_pid=0, child_processes=[child], sleep_period=0)
    observer._terminate_all = lambda: killed.append(child)
    observer.start()
    assert looked.wait(10)
    lightning_private.dismiss_process_observers()
    failed.set()
    observer.join(10)
    assert not observer.is_alive()
    assert killed == []


def test_requested_devices():
    assert lightning_private.requested_devices(make_trainer(devices=3)) == 3


def test_ours_takes_all_arguments_of_lightnings_in_their_order():
    ours = list(inspect.signature(PGroupDDPStrategy.__init__).parameters)
    theirs = [p for p in inspect.signature(DDPStrategy.__init__).parameters if p != "kwargs"]
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_a_patient_thread_kills_only_who_does_not_notice_a_failed_rank_in_time(patience):
    child = SimpleNamespace(poll=lambda: 1, returncode=1, pid=0)
    observer, killed = lightning_private.PatientObserver([child], patience), []
    observer._terminate_all = lambda: killed.append(child)
    assert observer._run() is (patience == 0.0)
    assert bool(killed) is (patience == 0.0)
    child.poll, child.returncode = lambda: 0, 0
    assert lightning_private.PatientObserver([child], patience)._run() is True
