"""Checkpoints that are still being written when the group is to end: they finish first, and only as long as there is time."""

import gc
import inspect
import logging
import os
import re
import signal
import threading
import time
import weakref
from concurrent.futures import Future
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor

import lightning_pgroup.destroy
import lightning_pgroup.group
from lightning_pgroup import PGroupDDPStrategy, saves, transport
from lightning_pgroup.bounded import wait_until
from lightning_pgroup.interrupts import run_shielded
from lightning_pgroup.saves import finish_saves
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks
from tests.writers import PipeWriter

BOUND = timedelta(seconds=30)


class SlowWriter(FileSystemWriter):
    """Waits for an event between two collectives of its save, on each rank."""

    def __init__(self, path, begun, release):
        super().__init__(path)
        self._begun, self._release = begun, release

    def write_data(self, plan, planner):
        self._begun.set()
        self._release.wait()
        return super().write_data(plan, planner)


class Saves(Callback):
    """Begins a save in the last hook of a fit."""

    writer = SlowWriter

    def __init__(self, folder, group=None):
        self.path, self.begun, self.release, self.future = folder, threading.Event(), threading.Event(), None
        self._group = group

    def teardown(self, trainer, pl_module, stage):
        group = None if self._group is None else trainer.strategy.group(self._group)
        writer = self.writer(self.path, self.begun, self.release)
        self.future = dcp.async_save({"weights": pl_module.state_dict()}, storage_writer=writer, process_group=group)


class Watch:
    """Lets saves go on once the end of a group waits for them, and looks whether they are done when the group goes."""

    def __init__(self, monkeypatch, saving):
        self._context, self._saving, self.seen = monkeypatch.context(), saving, []

    def __enter__(self):
        finish, shut_down = finish_saves, transport.shut_down
        patch = self._context.__enter__()

        def finish_and_release(timeout):
            self._release()
            return finish(timeout)

        def look_and_shut_down(*args, **kwargs):
            self.seen.append(all(one.future.done() for one in self._saving))
            self._release()
            return shut_down(*args, **kwargs)

        for module in (lightning_pgroup.group, lightning_pgroup.destroy):
            patch.setattr(module, "finish_saves", finish_and_release)
        patch.setattr(transport, "shut_down", look_and_shut_down)
        return self

    def __exit__(self, *error):
        return self._context.__exit__(*error)

    def _release(self):
        for one in self._saving:
            one.release.set()


def loaded(path):
    state = {"weights": TinyModel().state_dict()}
    dcp.load(state, checkpoint_id=path)
    return state["weights"]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def fit_and_save(strategy, folder):
    """Fit with a save that is in flight when the stage ends; returns the callback and the model."""
    callback, model = Saves(folder), TinyModel()
    make_trainer(strategy, callbacks=[callback]).fit(model, datamodule=TinyData())
    return callback, model


ENDS = {
    "on_teardown": None,
    "per_trainer": lambda strategy: make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData()),
    "at_exit": lambda strategy: strategy.destroy_process_group(),
    "on_destructor": lambda strategy: strategy.close(),
}


def test_an_async_save_finishes_before_the_group_goes_wherever_that_is(tmp_path, monkeypatch):
    def job(rank):
        right = []
        for destroy, end in ENDS.items():
            callback = Saves(tmp_path / destroy)
            with Watch(monkeypatch, [callback]) as watch:
                strategy, model = PGroupDDPStrategy(destroy=destroy), TinyModel()
                make_trainer(strategy, callbacks=[callback]).fit(model, datamodule=TinyData())
                if end is not None:
                    assert watch.seen == [], "the group lives on"
                    assert not callback.future.done(), "and so the stage waits for nothing"
                    end(strategy)
                assert watch.seen == [True], destroy
            assert callback.future.exception() is None
            right.append(same(loaded(callback.path), model.state_dict()))
            assert [event.what for event in strategy.events] == ["created", "destroyed"]
            strategy.destroy_process_group()
        return right

    assert run_ranks(job) == [[True] * len(ENDS)] * 2


def test_a_save_of_a_module_that_was_imported_in_the_middle_of_the_stage_finishes_too(tmp_path, monkeypatch):
    """It was not there to be wrapped when the stage began."""

    def job(rank):
        monkeypatch.setattr(saves, "_STARTERS", ())
        executor = "torch.distributed.checkpoint._async_thread_executor._ThreadBasedAsyncCheckpointExecutor.execute_save"
        monkeypatch.setattr(executor, inspect.unwrap(_ThreadBasedAsyncCheckpointExecutor.execute_save))
        callback = Saves(tmp_path)
        with Watch(monkeypatch, [callback]) as watch:
            make_trainer(PGroupDDPStrategy(destroy="on_teardown"), callbacks=[callback]).fit(TinyModel(), datamodule=TinyData())
        return watch.seen, callback.future.exception(), saves._saves

    assert run_ranks(job) == [([True], None, [])] * 2


def test_a_named_group_does_not_end_under_its_save(tmp_path, monkeypatch):
    def job(rank):
        seen = []
        strategy = PGroupDDPStrategy(groups={"saves": [[0, 1]]}, destroy=["on_teardown", "per_trainer"])
        keeps = PGroupDDPStrategy(groups={"saves": [[0, 1]]}, destroy="at_exit")
        for end, one in ((None, strategy), (lambda: keeps.destroy_group("saves"), keeps)):
            callback = Saves(tmp_path / str(len(seen)), "saves")
            with Watch(monkeypatch, [callback]) as watch:
                make_trainer(one, callbacks=[callback]).fit(TinyModel(), datamodule=TinyData())
                if end is not None:
                    end()
            seen.append((watch.seen, callback.future.exception(), one.generation))
        return seen

    assert run_ranks(job) == [[([True], None, None), ([True], None, 2)]] * 2


def test_plain_destroy_ends_the_group_under_an_async_save(tmp_path):
    def job(rank):
        callback, _ = fit_and_save(DDPStrategy(), tmp_path)
        callback.begun.wait()
        dist.destroy_process_group()
        callback.release.set()
        return callback.future.exception() is not None

    assert run_ranks(job, check_leaks=False) == [True, True]


def test_a_save_that_takes_longer_than_destroy_timeout_is_named_and_given_up(tmp_path, caplog):
    def job(rank):
        caplog.clear()
        strategy = PGroupDDPStrategy(destroy="on_teardown", destroy_timeout=0.3)
        start = time.monotonic()
        callback, _ = fit_and_save(strategy, tmp_path)
        took = time.monotonic() - start
        waiting = not callback.future.done()
        callback.release.set()
        failed = callback.future.exception(timeout=20) is not None
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        make_trainer(PGroupDDPStrategy(destroy="on_teardown")).fit(TinyModel(), datamodule=TinyData())
        return waiting, failed, took, strategy.events[-1], warnings

    for waiting, failed, took, event, warnings in run_ranks(job):
        assert (waiting, failed, event.what) == (True, True, "aborted")
        assert 0.3 <= event.duration <= took < 15
        (warning,) = warnings
        assert re.search(
            rf"checkpoint '{tmp_path}' was still being written after \d+\.\d s of the 0\.3 s that a destroy", warning
        )


def test_a_save_ends_at_once_when_a_rank_fails(tmp_path):
    """The failing rank waits for no save; the other one waits, in the save's collective, and is freed."""

    class Raises(Saves):
        def teardown(self, trainer, pl_module, stage):
            if self.future is None:
                super().teardown(trainer, pl_module, stage)
                self.begun.wait()
                if trainer.global_rank == 1:
                    raise ValueError("boom")
                self.release.set()

    def job(rank):
        callback, strategy = Raises(tmp_path), PGroupDDPStrategy(destroy="on_teardown", timeout=60, destroy_timeout=60)
        start = time.monotonic()
        try:
            make_trainer(strategy, callbacks=[callback]).fit(TinyModel(), datamodule=TinyData())
        except ValueError:
            callback.release.set()
        failed = callback.future.exception(timeout=20) is not None
        took = time.monotonic() - start
        make_trainer(PGroupDDPStrategy(destroy="on_teardown")).fit(TinyModel(), datamodule=TinyData())
        return failed, strategy.events[-1].what, took < 20

    assert run_ranks(job) == [(True, "destroyed", True), (True, "aborted", True)]


class Slow:
    """Waits for an event while it is pickled."""

    release = threading.Event()

    def __reduce__(self):
        self.release.wait()
        return (Slow, ())


class AsyncSaves(Callback):
    """Saves before Lightning waits for its plugin, and then twice more, slowly, in the last hook."""

    release = Slow.release

    def __init__(self, folder):
        self._folder, self._slow = folder, False

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["slow"] = Slow() if self._slow else None

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self._folder / "during.ckpt")

    def teardown(self, trainer, pl_module, stage):
        assert (self._folder / "during.ckpt").exists() or not trainer.is_global_zero
        self._slow, self._is_writer = True, trainer.is_global_zero
        for name in ("one.ckpt", "two.ckpt"):
            trainer.save_checkpoint(self._folder / name)

    @property
    def future(self):
        """The part of a future that :class:`Watch` needs."""
        return self

    def done(self):
        there = all((self._folder / name).exists() for name in ("one.ckpt", "two.ckpt"))
        if self._is_writer:
            (self._folder / "there").write_text(str(there))
        return there


TAKES_SAVES_AFTER_ITS_TEARDOWN = hasattr(AsyncCheckpointIO, "_ensure_setup")


@pytest.mark.skipif(not TAKES_SAVES_AFTER_ITS_TEARDOWN, reason="before 2.6 Lightning's plugin takes no save after its teardown")
@pytest.mark.parametrize("start_method", ["popen", "fork"])
def test_async_checkpoint_io_has_written_all_when_the_group_goes(start_method, tmp_path, monkeypatch):
    def job(rank):
        strategy = PGroupDDPStrategy(destroy="at_exit" if start_method == "fork" else "on_teardown", start_method=start_method)
        callback = AsyncSaves(tmp_path)
        with Watch(monkeypatch, [callback]):
            trainer = make_trainer(strategy, callbacks=[callback], plugins=[AsyncCheckpointIO()])
            trainer.fit(TinyModel(), datamodule=TinyData())
        return [event.what for event in strategy.events]

    forked = start_method == "fork"
    results = run_ranks(job, size=1 if forked else 2, bare=forked)
    assert results == [["created", "destroyed"]] * len(results)
    assert (tmp_path / "there").read_text() == "True"
    for name in ("during.ckpt", "one.ckpt", "two.ckpt"):
        assert torch.load(tmp_path / name, weights_only=False)["state_dict"]


class SavesInProcess(Callback):
    """Begins a save in a process of its own, which waits until the other end of its pipe was opened."""

    def __init__(self, folder, rank):
        self.path, self._pipe, self.future = folder / "checkpoint", folder / f"pipe{rank}", None
        self.release = self
        os.mkfifo(self._pipe)

    def teardown(self, trainer, pl_module, stage):
        kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
        writer, state = PipeWriter(self.path, self._pipe), {"weights": pl_module.state_dict()}
        self.future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)

    def set(self):
        """The part of an event that :class:`Watch` needs."""
        if self._pipe.exists():
            with open(self._pipe, "w"):
                self._pipe.unlink()


@pytest.mark.scripts
def test_an_async_save_in_a_process_of_its_own_finishes_too(tmp_path, monkeypatch):
    def job(rank):
        callback, model = SavesInProcess(tmp_path, rank), TinyModel()
        with Watch(monkeypatch, [callback]) as watch:
            strategy = PGroupDDPStrategy(destroy="on_teardown", destroy_timeout=60)
            make_trainer(strategy, callbacks=[callback]).fit(model, datamodule=TinyData())
        callback.future.result(timeout=0)
        dcp._async_process_executor._CHECKPOINT_PROCESS = None  # ends the process
        return watch.seen, same(loaded(callback.path), model.state_dict())

    assert run_ranks(job, deadline=90) == [([True], True)] * 2


def test_a_fork_does_not_inherit_what_its_parent_is_writing():
    class Executor:
        def execute_save(self, *args, **kwargs):
            return Future()

    saves._watched(Executor.execute_save)(Executor(), checkpoint_id="folder/last")
    try:
        unfinished, rest = finish_saves(timedelta(seconds=0.05))
        assert re.match(r"checkpoint 'folder/last' was still being written after \d+\.\d s of the 0\.05 s", unfinished)
        assert rest == timedelta(0)
        assert run_ranks(lambda rank: finish_saves(BOUND)[0], size=1, bare=True) == [""]
    finally:
        saves._saves.clear()


def test_the_collector_does_not_end_the_group_of_the_save_on_whose_thread_it_runs(tmp_path):
    class Collects(SlowWriter):
        def write_data(self, plan, planner):
            written = super().write_data(plan, planner)
            gc.collect()
            return written

    class CollectingSaves(Saves):
        writer = Collects

    def job(rank):
        gc.disable()
        callback = CollectingSaves(tmp_path)
        strategy = PGroupDDPStrategy(destroy="on_destructor")
        claim = weakref.ref(strategy)
        make_trainer(strategy, callbacks=[callback]).fit(TinyModel(), datamodule=TinyData())
        release, future, alive = callback.release, callback.future, claim() is not None
        del strategy, callback
        release.set()
        future.result(timeout=20)
        second = PGroupDDPStrategy(destroy="at_exit")
        seen = alive, claim() is None, dist.is_initialized()
        make_trainer(second).fit(TinyModel(), datamodule=TinyData())
        return seen, second.generation

    assert run_ranks(job) == [((True, True, True), 2)] * 2


def test_an_interrupt_ends_the_wait():
    asked = []

    def condition():
        if not asked:
            os.kill(os.getpid(), signal.SIGINT)
        asked.append(True)
        return False

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_shielded(lambda: asked.append(wait_until(condition, BOUND)))
    assert asked[-1] is False
    assert time.monotonic() - start < 10


def test_a_save_that_is_queued_behind_one_that_has_failed_is_waited_for():
    """The plugin raises what the first one has raised, but only after it has queued the second one."""
    begun, release, fail = threading.Event(), threading.Event(), threading.Event()

    class Disk(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            if path == "first":
                fail.wait()
                raise OSError("no space")
            begun.set()
            release.wait()

    saves.watch_saves()
    plugin = AsyncCheckpointIO(Disk())
    plugin.save_checkpoint({}, "first")
    fail.set()
    assert wait_until(lambda: plugin._error is not None, BOUND)
    with pytest.raises(OSError, match="no space"):
        plugin.save_checkpoint({}, "second")
    try:
        assert begun.wait(20)
        unfinished, _ = finish_saves(timedelta(seconds=0.1))
        assert "checkpoint 'second'" in unfinished
    finally:
        release.set()
    assert finish_saves(BOUND)[0] == ""
    with pytest.raises(OSError, match="no space"):
        plugin.teardown()


def test_a_save_that_is_not_taken_raises_what_lightning_raises():
    """As Lightning before 2.6 does after the plugin's teardown, and any at interpreter exit."""

    class Closed:
        def submit(self, *args, **kwargs):
            raise RuntimeError("cannot schedule new futures")

    saves.watch_saves()
    plugin = AsyncCheckpointIO(TorchCheckpointIO())
    plugin._executor = Closed()
    with pytest.raises(RuntimeError, match="cannot schedule new futures") as raised:
        plugin.save_checkpoint({}, "checkpoint.ckpt")
    assert raised.value.__context__ is None
    assert saves._in_flight() == []
