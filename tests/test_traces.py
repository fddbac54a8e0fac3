"""Nothing stays behind: over a thousand stages, in the environment, in `sys.excepthook`, after a fork (F11, F12)."""

import atexit
import gc
import os
import sys
import threading

import psutil
import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_pgroup import PGroupDDPStrategy
from lightning_pgroup.process_state import existing_process_state, process_state
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import open_descriptors, run_ranks

STAGES = 1000


def hook_depth() -> int:
    """How many functions of torch are wrapped around the first `sys.excepthook`."""
    hook, depth = sys.excepthook, 0
    while getattr(hook, "__closure__", None):
        inner = [c.cell_contents for c in hook.__closure__ if callable(c.cell_contents)]
        if not inner:
            break
        hook, depth = inner[0], depth + 1
    return depth


def threads() -> int:
    """The threads of this process. One that was joined may still be seen for a moment, until the kernel has taken it down."""
    pause, counts = threading.Event(), []
    for _ in range(20):
        counts.append(len(os.listdir("/proc/self/task")))
        pause.wait(0.01)
    return min(counts)


@pytest.mark.timeout(300)
def test_a_thousand_stages_leave_no_trace():
    def job(rank):
        gc.freeze()  # all that this process was forked with is not looked at a hundred times
        environ, marks, model, data = {}, {}, TinyModel(), TinyData()
        for number in range(1, STAGES + 1):
            # A new Trainer and strategy each time, as a sweep has.
            make_trainer(PGroupDDPStrategy(destroy="on_teardown")).fit(model, datamodule=data)
            if number % 10 == 0:
                gc.collect()  # Trainers are circles: how many of the dead are there at a time would be up to chance
            if number in (10, STAGES // 2, STAGES):
                process_state().lifecycle.finish_releases()  # the last group is still at closing its connections
                hosted = process_state().membership._hosted
                marks[number] = {
                    "descriptors": open_descriptors(),
                    "threads": threads(),
                    "python threads": threading.active_count(),
                    "keys": hosted.num_keys() if hosted else 0,
                    "excepthook": hook_depth(),
                    "atexit": atexit._ncallbacks(),
                    "memory": psutil.Process().memory_info().rss,
                }
                environ[number] = dict(os.environ)
        return marks, environ[10] == environ[STAGES]

    for marks, same_environ in run_ranks(job, deadline=280):
        assert same_environ
        first, half, last = marks[10], marks[STAGES // 2], marks[STAGES]
        for name in first:
            if name not in ("memory", "keys"):
                assert last[name] <= first[name], (name, marks)
        assert last["keys"] <= first["keys"] + 2, marks  # the peer may have gone on to the next round by one or two keys
        # The allocator settles in the first stages; what a leak of one group per stage would cost is 100 times as much.
        assert last["memory"] - half["memory"] < 2 << 20, marks
        assert last["memory"] - first["memory"] < 8 << 20, marks


def test_f11_excepthook_is_not_wrapped_again_and_again():
    def job(rank):
        before, strategy = sys.excepthook, PGroupDDPStrategy(destroy="at_exit")
        depths = []
        for _ in range(5):
            make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
            depths.append(hook_depth())
            strategy.destroy_process_group()
        return depths, sys.excepthook is before

    assert run_ranks(job) == [([1] * 5, True)] * 2


def test_f11_a_hook_that_somebody_installed_meanwhile_stays():
    def job(rank):
        before, strategy = sys.excepthook, PGroupDDPStrategy(destroy="at_exit")
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        mine = lambda *args: None  # noqa: E731
        sys.excepthook = mine
        for _ in range(3):
            strategy.destroy_process_group()
            make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        strategy.destroy_process_group()
        stays = sys.excepthook is mine
        sys.excepthook = before
        return stays

    assert run_ranks(job) == [True, True]


def test_f11_torch_wraps_it_at_each_init():
    def job(rank):
        from torch.distributed import HashStore

        for _ in range(5):
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            dist.destroy_process_group()
        return hook_depth()

    assert run_ranks(job, size=1, check_leaks=False) == [5]


def test_f12_one_exit_handler_for_any_number_of_groups():
    def job(rank):
        counts = []
        for _ in range(5):
            make_trainer(PGroupDDPStrategy(destroy="on_teardown")).fit(TinyModel(), datamodule=TinyData())
            counts.append(atexit._ncallbacks())
        return counts[-1] - counts[0]

    assert run_ranks(job) == [0, 0]


def test_f12_plain_lightning_registers_one_for_each_nccl_group(monkeypatch):
    from lightning.fabric.utilities import distributed

    registered = []
    monkeypatch.setattr(distributed.atexit, "register", registered.append)
    monkeypatch.setattr(distributed.torch.distributed, "init_process_group", lambda *a, **k: None)
    environment = type("E", (), {"main_address": "127.0.0.1", "main_port": 1, "global_rank": None, "world_size": None})
    monkeypatch.setitem(os.environ, "MASTER_ADDR", "x")
    monkeypatch.setitem(os.environ, "MASTER_PORT", "1")
    for _ in range(3):
        distributed._init_dist_connection(environment, "nccl", global_rank=0, world_size=1)
    assert len(registered) == 3


def test_f35_lightnings_own_exit_handler_is_not_used():
    """It sets SIGINT to the default, and fails off the main thread."""
    import signal

    def job(rank):
        mine = lambda *args: None  # noqa: E731
        before = signal.signal(signal.SIGINT, mine)
        strategy = PGroupDDPStrategy(destroy="at_exit")
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        thread = threading.Thread(target=process_state().end)
        thread.start()
        thread.join()
        stays = signal.getsignal(signal.SIGINT) is mine
        signal.signal(signal.SIGINT, before)
        return stays, dist.is_initialized()

    assert run_ranks(job) == [(True, False)] * 2


def test_f35_lightnings_own_changes_sigint():
    import signal

    from lightning.fabric.utilities.distributed import _destroy_dist_connection

    def job(rank):
        before = signal.signal(signal.SIGINT, lambda *args: None)
        _destroy_dist_connection()
        changed = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        signal.signal(signal.SIGINT, before)
        with pytest.raises(ValueError, match="main thread"):
            raise_in_thread(_destroy_dist_connection)
        return changed

    assert run_ranks(job, size=1) == [True]


def raise_in_thread(function):
    problems = []

    def target():
        try:
            function()
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    raise problems[0]


def test_a_forked_child_starts_clean_and_leaves_the_parents_group_alone():
    def job(rank):
        strategy = PGroupDDPStrategy(destroy="at_exit")
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        child = os.fork()
        if child == 0:
            # A data loader's worker asks torch for its rank; our state is gone, and its end touches nothing.
            fine = existing_process_state() is None and dist.get_rank() == rank and strategy.generation is None
            process_state().end()
            os._exit(0 if fine and dist.is_initialized() else 1)
        status = os.waitpid(child, 0)[1]
        strategy.barrier()
        return os.waitstatus_to_exitcode(status), strategy.generation

    assert run_ranks(job) == [(0, 1)] * 2


def test_a_forked_child_can_train_on_its_own():
    def job(rank):
        make_trainer(PGroupDDPStrategy(destroy="at_exit"), devices=1).fit(TinyModel(), datamodule=TinyData())
        child = os.fork()
        if child == 0:
            code = 1
            try:
                strategy = PGroupDDPStrategy(destroy="on_teardown")
                make_trainer(strategy, devices=1).fit(TinyModel(), datamodule=TinyData())
                code = 0 if [e.what for e in strategy.events] == ["created", "destroyed"] else 2
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run_ranks(job, size=1) == [0]


@pytest.mark.scripts
def test_importing_and_building_change_nothing():
    import subprocess

    code = """if True:
        import lightning.pytorch, torch.distributed, torchmetrics, os, sys, threading, signal, atexit
        import torch.distributed.nn.functional
        def state():
            return (dict(os.environ), sys.excepthook, threading.active_count(), atexit._ncallbacks(),
                    signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), len(os.listdir("/proc/self/fd")))
        before = state()
        import lightning_pgroup
        lightning_pgroup.PGroupDDPStrategy(destroy=["on_teardown", "on_error"])
        print(state() == before)
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert run.stdout.strip() == "True", run.stdout + run.stderr


def test_plain_ddp_leaves_the_group_behind():
    def job(rank):
        make_trainer(DDPStrategy()).fit(TinyModel(), datamodule=TinyData())
        return dist.is_initialized()

    assert run_ranks(job, check_leaks=False) == [True, True]
