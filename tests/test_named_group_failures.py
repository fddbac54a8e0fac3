"""A rank that fails frees those who wait for it in a named group, or in its creation. And DDP over a named group."""

import sys
import threading

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_pgroup import PGroupDDPStrategy, PGroupError, RendezvousTimeoutError
from tests.backends import BLOCKING, BlockingGroup, register_blocking_backend
from tests.faults import PATIENCE, Boom, attempt, fit, same, weights_of_a_fresh_process
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks

PAIRS = {"pairs": [[0, 1], [2, 3]], "all": [0, 1, 2, 3]}


def collective(strategy):
    dist.all_reduce(torch.ones(1), group=strategy.group("pairs"))


class Uses(Callback):
    """Fails on one rank before, or after, it has come to a named group; the others go on, whatever they wait for then."""

    def __init__(self, rank, failing, where):
        self.fails, self.where = rank == failing, where

    def on_train_batch_start(self, trainer, *args):
        strategy = trainer.strategy
        if self.where == "collective":
            strategy.group("pairs"), strategy.group("all")
        if self.where == "after the creation" and self.fails:
            strategy.group("pairs")
        if self.fails:
            raise Boom("not in this group")
        if self.where == "creation of all":
            strategy.group("all")
        collective(strategy)
        dist.all_reduce(torch.ones(1), group=strategy.group("all"))


@pytest.mark.parametrize("where", ["collective", "creation", "creation of all", "after the creation"])
def test_a_rank_fails_while_others_wait_in_a_named_group(where):
    def job(rank):
        found = []
        for failing in (1, 2):
            ended = attempt(PGroupDDPStrategy(groups=PAIRS), devices=4, callbacks=[Uses(rank, failing, where)])
            again = attempt(PGroupDDPStrategy(groups=PAIRS), devices=4, callbacks=[Uses(rank, None, where)])
            found.append((failing, ended, again["kind"], again["text"], dist.is_initialized()))
        return found

    for row in zip(*run_ranks(job, size=4, deadline=40), strict=True):
        failing, first = row[0][0], row[row[0][0]][1]
        assert first["kind"] == "Boom"
        for rank, (_, ended, kind, text, alive) in enumerate(row):
            assert ended["kind"] is not None, f"rank {rank} went on"
            assert abs(ended["at"] - first["at"]) < PATIENCE, f"rank {rank} was late"
            assert rank == failing or f"rank {failing}" in " ".join([ended["text"], *ended["notes"]])
            assert (kind, alive) == (None, True), f"the next fit of rank {rank} ended with {kind}: {text}"


def test_a_group_of_a_backend_whose_peers_do_not_notice_is_watched():
    """The default group's do; so nobody would watch, and a rank would wait in the group's barrier for ever."""

    def job(rank):
        register_blocking_backend()

        class Blocks(Callback):
            def on_train_batch_start(self, trainer, *args):
                group = trainer.strategy.new_group("blocking", [0, 1], backend=BLOCKING)
                dist.barrier(group=group)
                BlockingGroup.armed.set()
                if rank == 1:
                    raise Boom("not in this barrier")
                dist.barrier(group=group)

        ended = attempt(PGroupDDPStrategy(), callbacks=[Blocks()])
        watching = [thread for thread in threading.enumerate() if thread.name == "lightning-pgroup-monitor"]
        return ended, len(watching), BlockingGroup.calls

    (zero, left, calls), (one, _, _) = run_ranks(job, deadline=30)
    assert one["kind"] == "Boom"
    assert zero["text"] == "the collective was aborted"
    assert "Boom: not in this barrier" in zero["notes"][0]
    assert abs(zero["at"] - one["at"]) < PATIENCE
    assert left == 0
    assert "abort" in calls


def test_a_member_that_does_not_come_is_named_and_comes_to_the_next_attempt():
    def job(rank):
        heard = []

        class Waits(Callback):
            def on_train_start(self, trainer, pl_module):
                strategy = trainer.strategy
                if rank == 0:
                    with pytest.raises(RendezvousTimeoutError, match=r"for rank 1 of that group .*-pair-") as caught:
                        strategy.new_group("pair", [0, 1], timeout=0.5)
                    heard.append(str(caught.value))
                dist.barrier()
                if rank == 1:
                    with pytest.raises(RuntimeError, match="gave up") as late:
                        strategy.new_group("pair", [0, 1], timeout=0.5)
                    heard.append(str(late.value))
                dist.barrier()
                dist.all_reduce(torch.ones(1), group=strategy.group("pair"))

        fit(PGroupDDPStrategy(), callbacks=[Waits()])
        return heard

    (zero,), (one,) = run_ranks(job, deadline=30)
    assert "Rank 0 of 2 waited 0.5 s of 0.5 s" in zero
    assert "Rank 0 of 2 gave up" in one


class Gradients(TinyModel):
    def on_after_backward(self):
        self.gradient = self.layer.weight.grad.detach().clone()


def test_ddp_reduces_within_a_group_by_its_name():
    """Gradients and weights are those of two runs of two ranks each; by the next generation too, and with a kept wrapper."""

    def job(rank):
        found, kept = [], []
        strategy = PGroupDDPStrategy(groups=PAIRS, process_group="pairs", destroy="on_teardown")
        for seed in (1, 2):
            model = Gradients()
            torch.manual_seed(seed)
            torch.nn.init.normal_(model.layer.weight)

            class Keep(Callback):
                def on_train_end(self, trainer, pl_module):
                    kept.append(trainer.strategy.model)
                    with pytest.raises(RuntimeError, match=r"DistributedDataParallel.* in the stage that is running"):
                        trainer.strategy.destroy_group("pairs")

            make_trainer(strategy, devices=4, callbacks=[Keep()]).fit(model, datamodule=TinyData(32))
            found.append((model.gradient, model.layer.weight.detach().clone()))
        return found

    for generation in zip(*run_ranks(job, size=4, deadline=40), strict=True):
        for values in zip(*generation, strict=True):
            assert torch.equal(values[0], values[1])
            assert torch.equal(values[2], values[3])
            assert not torch.equal(values[0], values[2])


def test_ddps_own_group_is_ended_between_stages():
    """The wrapper's reducer must not be the last to hold it: the process would stand still."""

    def job(rank):
        kept = []
        strategy = PGroupDDPStrategy(groups={"all": [0, 1]}, process_group="all", destroy="at_exit")

        class Keep(Callback):
            def on_train_end(self, trainer, pl_module):
                kept.append(trainer.strategy.model)

        trainer = make_trainer(strategy, callbacks=[Keep()])
        for _ in range(3):
            trainer.fit(TinyModel(), datamodule=TinyData())
            group = strategy.group("all")
            strategy.destroy_group("all")
            assert group is not strategy.group("all")
            strategy.barrier()
            del group
            kept.clear()
        return strategy.generation

    assert run_ranks(job, deadline=30) == [1, 1]


def test_ddps_own_group_in_a_group_of_other_code(tmp_path):
    def job(rank):
        kept, errors = [], []
        strategy = PGroupDDPStrategy(groups={"all": [0, 1]}, process_group="all", timeout=20)

        class Ends(Callback):
            def on_train_batch_start(self, trainer, *args):
                kept.append(trainer.strategy.model)
                with pytest.raises(PGroupError, match=r"reduces gradients over the group .* Destroy it between stages"):
                    trainer.strategy.destroy_group("all")
                errors.append("refused")

        hook = sys.excepthook
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        sys.excepthook = hook
        for _ in range(2):
            make_trainer(strategy, callbacks=[Ends()]).fit(TinyModel(), datamodule=TinyData())
            strategy.destroy_group("all")
            kept.clear()
        dist.destroy_process_group()
        return errors

    assert run_ranks(job, deadline=30) == [["refused"] * 2] * 2


def test_a_group_of_all_ranks_trains_as_no_group_does():
    strategy = PGroupDDPStrategy(groups={"all": [0, 1]}, process_group="all")
    fresh = weights_of_a_fresh_process(PGroupDDPStrategy())
    for one, other in zip(weights_of_a_fresh_process(strategy), fresh, strict=True):
        assert same(one, other)
