"""Where a stage starts and truly ends, on real ranks (F8 to F10 of the design)."""

import signal

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_pgroup import PGroupDDPStrategy, WorldSizeError
from lightning_pgroup.lightning_private import TunerExitException
from tests.models import TinyData, TinyModel, make_trainer, whats
from tests.ranks import run_ranks

LATE_HOOKS = ("on_fit_end", "teardown")


def rank_sum(rank: int) -> float:
    """A collective of the user's own: 0 + 1 + … over all ranks."""
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    return tensor.item()


class Late(Callback):
    """Runs collectives in the hooks that Lightning calls after `strategy.teardown()`."""

    def __init__(self, rank):
        self.rank, self.seen = rank, []

    def _late(self, trainer, hook):
        gathered = trainer.strategy.all_gather(torch.tensor(float(self.rank)))
        trainer.strategy.barrier(hook)
        self.seen.append((hook, rank_sum(self.rank), gathered.tolist()))

    def on_fit_end(self, trainer, pl_module):
        self._late(trainer, "callback.on_fit_end")

    def teardown(self, trainer, pl_module, stage):
        self._late(trainer, "callback.teardown")


class LateModel(TinyModel):
    def __init__(self, rank, seen):
        super().__init__()
        self.rank, self.seen = rank, seen

    def on_fit_end(self):
        self.seen.append(("module.on_fit_end", rank_sum(self.rank), None))

    def teardown(self, stage):
        self.seen.append(("module.teardown", rank_sum(self.rank), None))


class LateData(TinyData):
    def __init__(self, rank, seen):
        super().__init__()
        self.rank, self.seen = rank, seen

    def teardown(self, stage):
        self.seen.append(("datamodule.teardown", rank_sum(self.rank), None))


@pytest.mark.parametrize("destroy", ["on_teardown", "per_trainer", "at_exit", "on_error", "on_destructor"])
def test_f08_the_group_lives_in_all_late_hooks_and_is_gone_after_them(destroy):
    def job(rank):
        late = Late(rank)
        strategy = PGroupDDPStrategy(destroy=destroy)
        trainer = make_trainer(strategy, callbacks=[late])
        trainer.fit(LateModel(rank, late.seen), datamodule=LateData(rank, late.seen))
        alive = dist.is_initialized()
        strategy.close()
        return late.seen, alive

    for seen, alive in run_ranks(job):
        assert [hook for hook, _, _ in seen] == [
            "callback.on_fit_end",
            "module.on_fit_end",
            "datamodule.teardown",
            "callback.teardown",
            "module.teardown",
        ]
        assert {total for _, total, _ in seen} == {1.0}
        assert all(gathered in (None, [0.0, 1.0]) for _, _, gathered in seen)
        assert alive == (destroy != "on_teardown")


def test_f08_a_destroy_in_strategy_teardown_would_be_too_early():
    """The fault: in a plain strategy that destroys in `teardown`, late collectives are silently local."""

    class Early(DDPStrategy):
        def teardown(self):
            super().teardown()
            if dist.is_initialized():
                dist.destroy_process_group()

    def job(rank):
        seen = []

        class Gather(Callback):
            def on_fit_end(self, trainer, pl_module):
                seen.append(trainer.strategy.all_gather(torch.tensor(float(rank))).tolist())

        make_trainer(Early(), callbacks=[Gather()]).fit(TinyModel(), datamodule=TinyData())
        return seen

    assert run_ranks(job, check_leaks=False) == [[0.0], [1.0]]


class Raises(Callback):
    def __init__(self, hook, error):
        self.error = error
        setattr(self, hook, self._raise)

    def _raise(self, *args, **kwargs):
        raise self.error


class OnException(Callback):
    """Notes what is there in `on_exception`, and reaches a barrier (F9)."""

    def __init__(self):
        self.seen = None

    def on_exception(self, trainer, pl_module, exception):
        alive = dist.is_initialized()
        trainer.strategy.barrier("on_exception")
        gathered = trainer.strategy.all_gather(torch.ones(1))
        self.seen = alive, trainer.strategy.broadcast("mine"), gathered.tolist(), trainer.strategy.reduce(torch.ones(1)).item()


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_batch_end", "on_train_end", "on_fit_end", "teardown"])
@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_f09_the_group_is_gone_before_on_exception_and_its_hooks_do_not_hang(hook, error):
    def job(rank):
        watch = OnException()
        strategy = PGroupDDPStrategy(destroy="at_exit", timeout=8)
        callbacks = [watch, Raises(hook, error)] if rank == 0 or hook == "setup" else [watch]
        trainer = make_trainer(strategy, callbacks=callbacks)
        try:
            trainer.fit(TinyModel(), datamodule=TinyData())
        except BaseException as caught:
            kind = type(caught).__name__
        else:
            kind = None
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning leaves it ignored after a KeyboardInterrupt
        return kind, watch.seen, [event.what for event in strategy.events]

    results = run_ranks(job)
    kind, seen, events = results[0]
    # Lightning itself turns a KeyboardInterrupt into sys.exit(1).
    assert kind == ("SystemExit" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
    assert seen == (False, "mine", [1.0], 1.0)
    assert events == ["created", "aborted"]


def test_f09_plain_ddp_has_the_group_in_on_exception():
    def job(rank):
        seen = []

        class Watch(Callback):
            def on_exception(self, trainer, pl_module, exception):
                seen.append(dist.is_initialized())

        trainer = make_trainer(DDPStrategy(), callbacks=[Watch(), Raises("on_fit_start", ValueError("boom"))])
        with pytest.raises(ValueError, match="boom"):
            trainer.fit(TinyModel(), datamodule=TinyData())
        dist.destroy_process_group()
        return seen

    assert run_ranks(job, check_leaks=False) == [[True], [True]]


@pytest.mark.parametrize(
    ("on_error", "in_hook", "after", "what"),
    [("abort", False, False, "aborted"), ("destroy", False, False, "destroyed"), ("keep", True, False, "destroyed")],
)
def test_on_error_in_its_three_forms(on_error, in_hook, after, what):
    """With "keep" the hooks for errors have the group; "on_teardown" ends it after them all the same."""

    def job(rank):
        seen = []

        class Watch(Callback):
            def on_exception(self, trainer, pl_module, exception):
                seen.append(dist.is_initialized())

        strategy = PGroupDDPStrategy(destroy="on_teardown", on_error=on_error)
        trainer = make_trainer(strategy, callbacks=[Watch(), Raises("on_fit_start", ValueError("boom"))])
        with pytest.raises(ValueError, match="boom"):
            trainer.fit(TinyModel(), datamodule=TinyData())
        return seen, dist.is_initialized(), [(e.what, e.why) for e in strategy.events]

    for seen, alive, events in run_ranks(job):
        assert (seen, alive) == ([in_hook], after)
        assert events[-1][0] == what
        assert ("torn down" in events[-1][1]) if on_error == "keep" else ("ValueError: boom" in events[-1][1])


def test_keep_without_on_teardown_keeps_the_group():
    def job(rank):
        strategy = PGroupDDPStrategy(destroy="at_exit", on_error="keep")
        trainer = make_trainer(strategy, callbacks=[Raises("on_fit_end", ValueError("boom"))])
        with pytest.raises(ValueError, match="boom"):
            trainer.fit(TinyModel(), datamodule=TinyData())
        first = rank_sum(rank)
        make_trainer(PGroupDDPStrategy(destroy="at_exit")).fit(TinyModel(), datamodule=TinyData())
        return first, strategy.generation

    assert run_ranks(job) == [(1.0, 1), (1.0, 1)]


def test_f10_lr_find_is_no_error_and_its_teardown_hooks_have_the_group():
    def job(rank):
        late = Late(rank)
        strategy = PGroupDDPStrategy(destroy="on_teardown")
        trainer = make_trainer(strategy, callbacks=[late], max_epochs=1, limit_train_batches=2)
        model = TinyModel()
        model.lr = 0.1
        model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=model.lr)
        with torch.random.fork_rng():
            found = Tuner(trainer).lr_find(model, datamodule=TinyData(), num_training=3, early_stop_threshold=None)
        alive = dist.is_initialized()
        trainer.fit(model, datamodule=TinyData())
        return found is not None, alive, late.seen, whats(strategy)

    for found, alive, seen, events in run_ranks(job):
        assert found
        assert not alive
        assert [hook for hook, _, _ in seen] == ["callback.teardown", "callback.on_fit_end", "callback.teardown"]
        assert {total for _, total, _ in seen} == {1.0}
        assert events == [("fit", "created", 1), ("fit", "destroyed", 1), ("fit", "created", 2), ("fit", "destroyed", 2)]


def test_f10_a_tuner_exit_whose_teardown_hook_raises_leaves_nothing_over():
    """Lightning does not call `strategy.teardown` then; the next stage ends what was left."""

    def job(rank):
        strategy = PGroupDDPStrategy(destroy="on_teardown")
        callbacks = [Raises("on_fit_start", TunerExitException()), Raises("teardown", ValueError("late"))]
        with pytest.raises(ValueError, match="late"):
            make_trainer(strategy, callbacks=callbacks).fit(TinyModel(), datamodule=TinyData())
        other = PGroupDDPStrategy(destroy="on_teardown")
        make_trainer(other).fit(TinyModel(), datamodule=TinyData())
        return whats(strategy), whats(other), dist.is_initialized()

    for first, second, alive in run_ranks(job):
        assert first == [("fit", "created", 1), ("fit", "destroyed", 1)]
        assert second == [("fit", "created", 2), ("fit", "destroyed", 2)]
        assert not alive


def test_scale_batch_size_is_refused_by_lightning_before_anything_starts():
    def job(rank):
        strategy = PGroupDDPStrategy(destroy="on_teardown")
        with pytest.raises(ValueError, match="not supported with distributed strategies"):
            Tuner(make_trainer(strategy)).scale_batch_size(TinyModel(), datamodule=TinyData())
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        return whats(strategy)

    assert run_ranks(job) == [[("fit", "created", 1), ("fit", "destroyed", 1)]] * 2


@pytest.mark.parametrize("destroy", ["on_teardown", "per_trainer"])
def test_fit_twice_then_all_other_stages_on_one_trainer(destroy):
    def job(rank):
        strategy = PGroupDDPStrategy(destroy=destroy)
        trainer, model, data = make_trainer(strategy), TinyModel(), TinyData()
        for stage in (trainer.fit, trainer.fit, trainer.validate, trainer.test):
            stage(model, datamodule=data)
        trainer.predict(model, datamodule=data, return_predictions=True)
        return whats(strategy)

    stages = ["fit", "fit", "validate", "test", "predict"]
    if destroy == "on_teardown":
        want = [(s, what, g) for g, s in enumerate(stages, 1) for what in ("created", "destroyed")]
    else:
        want = [(s, "reused" if g else "created", 1) for g, s in enumerate(stages)]
    assert run_ranks(job) == [want] * 2


def test_fast_dev_run():
    def job(rank):
        strategy = PGroupDDPStrategy(destroy="on_teardown")
        make_trainer(strategy, fast_dev_run=True).fit(TinyModel(), datamodule=TinyData())
        return whats(strategy)

    assert run_ranks(job) == [[("fit", "created", 1), ("fit", "destroyed", 1)]] * 2


class Inner(Callback):
    """Starts a stage of another Trainer inside a hook."""

    def __init__(self, strategy, **kwargs):
        self.strategy, self.kwargs, self.problem = strategy, kwargs, None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        inner = make_trainer(self.strategy, **self.kwargs)
        try:
            inner.validate(TinyModel(), dataloaders=DataLoader(TinyData().rows, batch_size=4), verbose=False)
        except Exception as error:
            self.problem = error


@pytest.mark.parametrize("destroy", ["on_teardown", "per_trainer", "on_destructor"])
def test_a_stage_inside_another_uses_its_group_and_does_not_end_it(destroy):
    def job(rank):
        outer, inner = PGroupDDPStrategy(destroy=destroy), PGroupDDPStrategy(destroy="on_teardown")
        callback = Inner(inner, limit_val_batches=1)
        trainer = make_trainer(outer, callbacks=[callback], limit_train_batches=2, max_epochs=2)
        trainer.fit(TinyModel(), datamodule=TinyData())
        assert callback.problem is None
        return whats(outer)[:1], whats(inner)[:4], trainer.global_step

    for outer, inner, steps in run_ranks(job):
        assert outer == [("fit", "created", 1)]
        assert inner == [("validate", "reused", 1)] * 4
        assert steps == 4


def test_an_inner_stage_that_raises_leaves_the_outer_group_alone():
    def job(rank):
        outer, inner = PGroupDDPStrategy(destroy="on_teardown"), PGroupDDPStrategy()
        callback = Inner(inner, callbacks=[Raises("on_validation_start", ValueError("inner"))], limit_val_batches=1)
        trainer = make_trainer(outer, callbacks=[callback], limit_train_batches=2)
        trainer.fit(TinyModel(), datamodule=TinyData())
        return str(callback.problem), trainer.global_step, whats(outer)

    assert run_ranks(job) == [("inner", 2, [("fit", "created", 1), ("fit", "destroyed", 1)])] * 2


def test_an_inner_stage_of_another_size_is_refused():
    def job(rank):
        callback = Inner(PGroupDDPStrategy(), devices=1, limit_val_batches=1)
        trainer = make_trainer(PGroupDDPStrategy(destroy="on_teardown"), callbacks=[callback])
        trainer.fit(TinyModel(), datamodule=TinyData())
        return type(callback.problem), str(callback.problem)

    for kind, text in run_ranks(job):
        assert kind is WorldSizeError
        assert "asks for 1 ranks inside a stage that runs with 2" in text


def test_one_device_needs_no_other_rank():
    def job(rank):
        strategy = PGroupDDPStrategy(destroy="on_teardown")
        trainer = make_trainer(strategy, devices=1)
        trainer.fit(TinyModel(), datamodule=TinyData())
        return whats(strategy), strategy.events[0].world_size, trainer.world_size

    assert run_ranks(job, size=1) == [([("fit", "created", 1), ("fit", "destroyed", 1)], 1, 1)]


def test_the_same_strategy_in_two_trainers():
    def job(rank):
        strategy = PGroupDDPStrategy()
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        return whats(strategy)

    want = [("fit", "created", 1), ("fit", "destroyed", 1), ("fit", "created", 2)]
    assert run_ranks(job) == [want] * 2


def test_the_same_strategy_asked_for_other_devices_is_refused():
    def job(rank):
        strategy = PGroupDDPStrategy()
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        trainer = make_trainer(strategy, devices=3)
        with pytest.raises(WorldSizeError, match="asks for 3 devices, but its strategy object was set up for 2"):
            trainer.fit(TinyModel(), datamodule=TinyData())

    run_ranks(job)


@pytest.mark.parametrize("devices", [3, 4])
def test_f27_another_number_of_ranks_than_processes_is_refused_on_all_at_once(devices):
    def job(rank):
        make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
        with pytest.raises(WorldSizeError, match=f"asks for {devices} ranks, but this run has 2 processes"):
            make_trainer(PGroupDDPStrategy(), devices=devices).fit(TinyModel(), datamodule=TinyData())
        make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())

    run_ranks(job, deadline=20)


def test_f27_a_stage_of_one_rank_among_two_processes_runs_whole_in_each():
    def job(rank):
        make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
        single = make_trainer(PGroupDDPStrategy(), devices=1, limit_train_batches=100)
        model = TinyModel()
        single.fit(model, datamodule=TinyData(rows=16))
        make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
        return single.global_step, single.world_size, single.global_rank, single.is_global_zero

    assert run_ranks(job) == [(4, 1, 0, True)] * 2
