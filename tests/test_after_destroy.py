"""After a destroy: a strategy's collectives work or raise, metrics keep what they computed, a second destroy is nothing."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torchmetrics import MeanMetric

from lightning_pgroup import PGroupDDPStrategy, PGroupError, StrategyClosedError
from lightning_pgroup.process_state import process_state
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks


def call_everything(strategy, trainer, rank, path):
    strategy.barrier("between")
    trainer.save_checkpoint(path)
    reduced = strategy.reduce(torch.tensor([float(rank)]), reduce_op="sum").item()
    return [
        strategy.broadcast({"from": rank}),
        strategy.broadcast(rank, src=1),
        reduced,
        strategy.all_gather(torch.tensor([float(rank)])).flatten().tolist(),
        strategy.reduce_boolean_decision(rank == 0, all=True),
        strategy.reduce_boolean_decision(rank == 0, all=False),
    ]


RIGHT = [{"from": 0}, 1, 1.0, [0.0, 1.0], False, True]


@pytest.mark.parametrize("destroy", ["on_teardown", "per_trainer", "at_exit"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_f15_collectives_between_stages_work(destroy, by_hand, tmp_path):
    def job(rank):
        strategy = PGroupDDPStrategy(destroy=destroy)
        trainer = make_trainer(strategy)
        trainer.fit(TinyModel(), datamodule=TinyData())
        seen = []
        for _ in range(2):
            if by_hand:
                strategy.destroy_process_group()
            seen.append(call_everything(strategy, trainer, rank, tmp_path / "checkpoint.ckpt"))
        alive = dist.is_initialized()
        trainer.fit(TinyModel(), datamodule=TinyData(), ckpt_path=None)
        return seen, alive

    for seen, alive in run_ranks(job):
        assert seen == [RIGHT, RIGHT]
        assert alive == (destroy != "on_teardown")
    assert torch.load(tmp_path / "checkpoint.ckpt", weights_only=False)["state_dict"]


def test_f15_plain_ddp_is_silently_local_after_a_destroy():
    def job(rank):
        strategy = DDPStrategy()
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        dist.destroy_process_group()
        return strategy.broadcast(rank, src=1), strategy.reduce(torch.tensor([float(rank)]), reduce_op="sum").item()

    assert run_ranks(job, check_leaks=False) == [(0, 0.0), (1, 1.0)]


@pytest.mark.parametrize("name", ["barrier", "broadcast", "reduce", "all_gather", "reduce_boolean_decision"])
def test_f15_after_close_a_collective_raises_saying_so(name, tmp_path):
    def job(rank):
        strategy = PGroupDDPStrategy()
        trainer = make_trainer(strategy)
        trainer.fit(TinyModel(), datamodule=TinyData())
        strategy.close()
        arguments = {"barrier": (), "reduce_boolean_decision": (True,)}.get(name, (torch.ones(1),))
        with pytest.raises(StrategyClosedError, match="closed strategy"):
            getattr(strategy, name)(*arguments)
        with pytest.raises(StrategyClosedError, match="can not run 'fit'"):
            trainer.fit(TinyModel(), datamodule=TinyData())
        with pytest.raises(StrategyClosedError):
            trainer.save_checkpoint(tmp_path / "x.ckpt")
        return list(tmp_path.iterdir())

    assert run_ranks(job) == [[], []]


def test_before_the_first_stage_a_collective_is_local_as_in_plain_ddp():
    def job(rank):
        strategy = PGroupDDPStrategy()
        make_trainer(strategy)
        strategy.barrier()
        return strategy.broadcast(rank), dist.is_initialized()

    assert run_ranks(job) == [(0, False), (1, False)]


def test_f16_destroy_without_a_group_is_nothing():
    def job(rank):
        strategy = PGroupDDPStrategy()
        strategy.destroy_process_group()
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        for _ in range(3):
            strategy.destroy_process_group()
        strategy.close()
        strategy.destroy_process_group()
        return [event.what for event in strategy.events]

    assert run_ranks(job) == [["created", "destroyed"]] * 2


def test_f16_torch_raises():
    with pytest.raises(AssertionError):
        dist.destroy_process_group()


def test_destroy_in_the_middle_of_a_stage_is_refused():
    from lightning.pytorch import Callback

    def job(rank):
        class Destroys(Callback):
            def on_train_start(self, trainer, pl_module):
                with pytest.raises(PGroupError, match="'fit' is running"):
                    trainer.strategy.destroy_process_group()
                with pytest.raises(PGroupError, match="while one of its own stages is running"):
                    trainer.strategy.close()

        make_trainer(PGroupDDPStrategy(), callbacks=[Destroys()]).fit(TinyModel(), datamodule=TinyData())

    run_ranks(job)


def metric_job(strategy, compute_before):
    def job(rank):
        metric = MeanMetric()
        trainer = make_trainer(strategy())
        model = TinyModel()
        model.on_train_end = lambda: (metric.update(float(rank)), metric.compute() if compute_before else None)
        trainer.fit(model, datamodule=TinyData())
        if dist.is_initialized():
            dist.destroy_process_group()
        return metric.compute().item()

    return job


def test_f13_a_value_computed_while_the_group_lived_stays_right_after_the_destroy():
    assert run_ranks(metric_job(lambda: PGroupDDPStrategy(destroy="on_teardown"), True)) == [0.5, 0.5]


@pytest.mark.parametrize("strategy", [DDPStrategy, lambda: PGroupDDPStrategy(destroy="on_teardown")])
def test_f13_a_value_computed_after_the_destroy_is_local(strategy):
    """The fault itself, in plain DDP and here: compute before the stage ends."""
    assert run_ranks(metric_job(strategy, False), check_leaks=False) == [0.0, 1.0]


F20 = """if True:
    import gc, sys, weakref
    from datetime import timedelta
    import torch.distributed as dist
    from torch.distributed import HashStore

    if {ours}:
        from lightning_pgroup.gloo_interface import GlooInterface
        from lightning_pgroup.group import create_group
        from lightning_pgroup.graveyard import Graveyard
        from lightning_pgroup.signature import GroupSignature
    # Lightning has imported it by now, which is not for us to rely on.
    for name in [name for name in sys.modules if name.startswith("torch.distributed.nn")]:
        del sys.modules[name]
    if {ours}:
        signature = GroupSignature(
            backend="gloo", world_size=1, rank=0, timeout=9.0, device="cpu", pg_options="", init_method=""
        )
        owned = create_group(1, signature, HashStore(), None, None, interface=GlooInterface(1, None), run="", attempt=None)
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = weakref.ref(dist.group.WORLD)
    import torch.distributed.nn.functional
    owned.destroy(timedelta(seconds=9), Graveyard()) if {ours} else dist.destroy_process_group()
    gc.collect()
    print(group() is None)
"""


@pytest.mark.parametrize(("ours", "freed"), [(True, "True"), (False, "False")], ids=["ours", "plain"])
def test_f20_functional_collectives_do_not_hold_the_group(ours, freed):
    command = [sys.executable, "-c", F20.format(ours=ours)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.stdout.strip() == freed, done.stderr


def test_f17_what_a_destroy_and_a_create_cost_is_in_the_records():
    def job(rank):
        strategy = PGroupDDPStrategy(destroy="on_teardown")
        for _ in range(3):
            make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
            make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        return [(event.what, event.duration) for event in strategy.events]

    for events in run_ranks(job):
        assert all(0 < duration < 5 for _, duration in events)
        assert {what for what, _ in events} == {"created", "destroyed"}


def test_the_state_of_the_process_is_not_made_by_asking():
    from lightning_pgroup.process_state import existing_process_state

    strategy = PGroupDDPStrategy()
    strategy.destroy_process_group()
    assert strategy.generation is None
    assert strategy.events == []
    assert existing_process_state() is None
    assert process_state is not None
