"""All that `DDPStrategy` takes and does still holds, and the weights are the same, bit for bit."""

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn

import lightning_pgroup.registry
from lightning_pgroup import PGroupDDPStrategy
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks

PREFIXES = ["", "_spawn", "_fork", "_notebook"]
SUFFIXES = ["", "_find_unused_parameters_true", "_find_unused_parameters_false"]


class NormModel(TinyModel):
    """With dropout, batch norm and several layers, so that chance and all ranks have a say in the weights."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def weights(strategy, model=NormModel, tests=True, **trainer_kwargs):
    seed_everything(3, verbose=False)
    module = model()
    arguments = {"max_epochs": 2, "limit_train_batches": 100, **trainer_kwargs}
    trainer = make_trainer(strategy, **arguments)
    trainer.fit(module, datamodule=TinyData(48))
    if tests:
        trainer.test(module, datamodule=TinyData(48), verbose=False)
    trainer = None
    return [parameter.detach().clone() for parameter in module.state_dict().values()]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


def compare(ours, theirs=DDPStrategy, **kwargs):
    """Ours first, then plain DDP, on the same two ranks."""

    def job(rank):
        first = weights(ours(), **kwargs)
        from lightning_pgroup.process_state import process_state

        process_state().lifecycle.destroy()
        second = weights(theirs(), **kwargs)
        dist.destroy_process_group()
        return same(first, second), sum(float(tensor.double().sum()) for tensor in first)

    results = run_ranks(job, check_leaks=False, deadline=90)
    assert [equal for equal, _ in results] == [True, True]
    return results


@pytest.mark.parametrize(
    "destroy", ["on_teardown", "per_trainer", "on_destructor", "on_error", "at_exit", ["on_teardown", "on_error"]], ids=str
)
def test_same_weights_bit_for_bit_under_each_policy(destroy):
    (_, total), _ = compare(lambda: PGroupDDPStrategy(destroy=destroy))
    assert total != 0


def test_same_weights_bit_for_bit_under_never():
    def job(rank):
        first = weights(PGroupDDPStrategy(destroy="never"))
        dist.destroy_process_group()
        second = weights(DDPStrategy())
        dist.destroy_process_group()
        return same(first, second)

    assert run_ranks(job, check_leaks=False) == [True, True]


OPTIONS = [
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 1},
    {"broadcast_buffers": False},
    {"process_group_backend": "gloo"},
    {"timeout": timedelta(minutes=2)},
    {"timeout": None},
]


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_options_of_the_strategy(option):
    compare(lambda: PGroupDDPStrategy(destroy="on_teardown", **option), lambda: DDPStrategy(**option))


TRAINER_OPTIONS = [
    {"accumulate_grad_batches": 2},
    {"precision": "bf16-mixed"},
    {"precision": "64-true"},
    {"gradient_clip_val": 0.1},
]


@pytest.mark.parametrize("option", TRAINER_OPTIONS, ids=str)
def test_options_of_the_trainer(option):
    if option.get("precision") == "64-true":
        option = {**option, "model": TinyModel}
    compare(lambda: PGroupDDPStrategy(destroy="on_teardown"), **option)


def test_precision_of_a_second_trainer_with_the_same_strategy_is_its_own():
    def job(rank):
        strategy = PGroupDDPStrategy()
        first = make_trainer(strategy)
        second = make_trainer(strategy, precision="bf16-mixed")
        third = make_trainer(strategy, precision="64-true")
        return first.precision, second.precision, third.precision

    # All share one strategy, so the newest Trainer's plugin is in force; what counts is that it is not ignored.
    assert run_ranks(job) == [("64-true", "64-true", "64-true")] * 2


class BatchNormModel(TinyModel):
    def __init__(self, seen):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.seen = seen

    def on_train_start(self):
        self.seen.append(type(self.layer[1]).__name__)

    def training_step(self, batch, batch_idx):
        return sum(parameter.sum() for parameter in self.parameters())  # the layer's forward needs a GPU


def test_sync_batchnorm_is_applied_and_reverted(monkeypatch):
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda self, module: None)

    def job(rank):
        def life(build):
            seen = []
            model = BatchNormModel(seen)
            for _ in range(2):
                make_trainer(build(), sync_batchnorm=True).fit(model, datamodule=TinyData())
                seen.append(type(model.layer[1]).__name__)
            return seen

        ours = life(lambda: PGroupDDPStrategy(destroy="on_teardown"))
        theirs = life(DDPStrategy)
        dist.destroy_process_group()
        return ours == theirs, ours

    for same_as_plain, seen in run_ranks(job, check_leaks=False):
        assert same_as_plain
        assert [name == "SyncBatchNorm" for name in seen] == [True, False, True, False]


def test_sync_batchnorm_on_cpu_is_torchs_own_error_and_leaves_no_group():
    def job(rank):
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
            make_trainer(PGroupDDPStrategy(), sync_batchnorm=True).fit(BatchNormModel([]), datamodule=TinyData())
        return dist.is_initialized()

    assert run_ranks(job) == [False, False]


def test_comm_hook_arguments_reach_ddp(monkeypatch):
    """On CPU Lightning does not register hooks; what we must do is hand them on."""
    hook, wrapper, state = object(), object(), object()
    strategy = PGroupDDPStrategy(ddp_comm_hook=hook, ddp_comm_wrapper=wrapper, ddp_comm_state=state, model_averaging_period=3)
    assert (strategy._ddp_comm_hook, strategy._ddp_comm_wrapper, strategy._ddp_comm_state) == (hook, wrapper, state)
    assert strategy._model_averaging_period == 3


def test_model_averaging():
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

    def averaged(cls, **kwargs):
        state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=1)
        return cls(ddp_comm_state=state, model_averaging_period=2, **kwargs)

    compare(
        lambda: averaged(PGroupDDPStrategy, destroy="at_exit"),
        lambda: averaged(DDPStrategy),
        tests=False,
    )


def test_a_process_group_of_the_users_own_for_ddp():
    def job(rank):
        import sys

        from tests.test_ownership import init_foreign

        hook = sys.excepthook
        init_foreign(rank)
        sub = dist.new_group([0, 1])
        strategy = PGroupDDPStrategy(process_group=sub)
        seen = []
        model = TinyModel()
        model.on_train_start = lambda: seen.append(strategy.model.process_group is sub)
        make_trainer(strategy).fit(model, datamodule=TinyData())
        dist.destroy_process_group()
        sys.excepthook = hook
        return seen

    assert run_ranks(job, check_leaks=False) == [[True], [True]]


@pytest.mark.parametrize("name", ["".join(parts) for parts in itertools.product(PREFIXES, SUFFIXES)])
def test_string_names(name):
    trainer = Trainer(strategy=f"pgroup_ddp{name}", accelerator="cpu", devices=2, logger=False)
    strategy = trainer.strategy
    assert type(strategy) is PGroupDDPStrategy
    reference = StrategyRegistry.get(f"ddp{name}")
    assert strategy._start_method == reference._start_method
    assert strategy._ddp_kwargs == reference._ddp_kwargs


def test_registering_twice_is_no_error_and_leaves_lightnings_own_names():
    lightning_pgroup.registry.register_strategies()
    assert type(StrategyRegistry.get("ddp")) is DDPStrategy
    assert len([name for name in StrategyRegistry if name.startswith("pgroup_ddp")]) == 12


def test_init_process_group_gets_a_store_and_no_master_variable_leaks(monkeypatch):
    def job(rank):
        import os

        given = []
        real = dist.init_process_group

        def spy(*args, **kwargs):
            given.append(kwargs)
            return real(*args, **kwargs)

        dist.init_process_group = spy
        before = {k: v for k, v in os.environ.items() if k.startswith("MASTER")}
        make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
        after = {k: v for k, v in os.environ.items() if k.startswith("MASTER")}
        return before == after, [k["store"] is not None and k["world_size"] == 2 for k in given]

    assert run_ranks(job) == [(True, [True])] * 2


def test_checkpoints_of_one_fit_the_other(tmp_path):
    def job(rank):
        trainer = make_trainer(PGroupDDPStrategy(destroy="on_teardown"))
        trainer.fit(TinyModel(), datamodule=TinyData())
        trainer.save_checkpoint(tmp_path / "ours.ckpt")
        second = make_trainer(DDPStrategy(), max_epochs=2)
        second.fit(TinyModel(), datamodule=TinyData(), ckpt_path=tmp_path / "ours.ckpt")
        second.save_checkpoint(tmp_path / "theirs.ckpt")
        dist.destroy_process_group()
        third = make_trainer(PGroupDDPStrategy(destroy="on_teardown"), max_epochs=3)
        third.fit(TinyModel(), datamodule=TinyData(), ckpt_path=tmp_path / "theirs.ckpt")
        return third.current_epoch

    assert run_ranks(job, check_leaks=False) == [3, 3]
