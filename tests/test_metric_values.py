"""Many metrics, uneven data, all policies, three generations: the values are those of a single process (F13 of the design)."""

import copy

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_pgroup import PGroupDDPStrategy
from lightning_pgroup.policy import DestroyPolicy
from lightning_pgroup.process_state import process_state
from tests import metric_table
from tests.metric_table import ONE_STATE_PER_ROW, alone, differing, feed, values
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks

SIZES = [[3, 5], [7, 2], [1, 9], [4, 4]]  # rows of the two batches of each rank
GENERATIONS = 3


class Measured(TinyModel):
    """Feeds metrics in a stage, and asks a third of them for their values there."""

    def __init__(self, rank, sizes, seed=0, asks=True):
        super().__init__()
        self.rank, self.sizes, self.seed = rank, sizes, seed
        self.metrics = metric_table.build()
        self.asked = [name for name in list(self.metrics)[seed::GENERATIONS] if name not in ONE_STATE_PER_ROW] if asks else []
        self.said = {}

    def on_train_batch_end(self, *_):
        feed(self.metrics, self.rank, self.sizes, self.seed)

    def on_train_epoch_end(self):
        self.said = values(self.metrics, self.asked) if self.asked else {}


def test_f13_after_a_destroy_each_rank_has_its_own_value():
    """The fault: with plain DDPStrategy, and a destroy after the stage, each rank says what it has seen itself."""

    wanted = alone(SIZES[:2])

    def job(rank):
        model = Measured(rank, SIZES[rank])
        make_trainer(DDPStrategy()).fit(model, datamodule=TinyData())
        dist.destroy_process_group()
        return differing(values(model.metrics), wanted), model.asked

    for wrong, asked in run_ranks(job, check_leaks=False):
        assert {"auroc", "mean", "mse", "f1", "map", "cat"} - set(asked) <= set(wrong)
        assert not set(wrong) & set(asked)


@pytest.mark.parametrize("size", [2, 4])
def test_f13_values_are_those_of_a_single_process(size):
    assert len(metric_table.TABLE) > 20

    wanted_of = [alone(SIZES[:size], seed) for seed in range(GENERATIONS)]

    def job(rank):
        wrong = []
        for destroy in DestroyPolicy:
            for seed in range(GENERATIONS):
                model, strategy = Measured(rank, SIZES[rank], seed), PGroupDDPStrategy(destroy=destroy.value)
                trainer = make_trainer(strategy, devices=size)
                trainer.fit(model, datamodule=TinyData())
                # Under "never" the group is there afterwards too, so that torchmetrics itself synchronises.
                names = [one for one in model.metrics if destroy is not DestroyPolicy.NEVER or one not in ONE_STATE_PER_ROW]
                found = {"during": model.said, "after": values(model.metrics, names)}
                trainer.validate(TinyModel(), datamodule=TinyData(), verbose=False)
                found["later"] = values(model.metrics, names)
                end(strategy, destroy)
                found["without a group"] = values(model.metrics, names)
                for when, one in found.items():
                    different = differing(one, wanted_of[seed])
                    wrong += [(destroy.value, seed, when, different)] if different else []
        return wrong, process_state().lifecycle.highest_generation

    for wrong, highest in run_ranks(job, size=size, deadline=100):
        assert wrong == []
        assert highest >= GENERATIONS * len(DestroyPolicy)


def end(strategy, destroy):
    """End a group that would live on, so that the next stage has one of its own."""
    if destroy is DestroyPolicy.NEVER:
        dist.destroy_process_group()  # as its user has to
    else:
        strategy.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize("destroy", ["on_teardown", "per_trainer"])
def test_what_is_counted_over_three_generations_is_that_of_a_single_process(destroy):
    """One model whose metrics nobody resets: each stage adds its data to what all ranks had before."""
    wanted, single = [], metric_table.build()
    for seed in range(GENERATIONS):
        for rank in range(2):
            feed(single, rank, SIZES[rank], seed)
        wanted.append(copy.deepcopy(values(single)))  # older torchmetrics returns a state itself

    def job(rank):
        model, wrong = Measured(rank, SIZES[rank], asks=False), []
        for seed in range(GENERATIONS):
            model.seed = seed
            strategy = PGroupDDPStrategy(destroy=destroy)
            make_trainer(strategy).fit(model, datamodule=TinyData())
            wrong += [(seed, "after", name) for name in differing(values(model.metrics), wanted[seed])]
            strategy.destroy_process_group()
            wrong += [(seed, "without a group", name) for name in differing(values(model.metrics), wanted[seed])]
        return wrong, process_state().lifecycle.highest_generation

    assert run_ranks(job) == [([], GENERATIONS)] * 2


def test_ranks_without_data_do_not_harm_the_others():
    """Torchmetrics itself aborts the process there: the pieces that the ranks send do not fit together."""
    sizes_of = [[], [6, 3, 2], [], [4]]
    wanted = alone(sizes_of)

    def job(rank):
        model = Measured(rank, sizes_of[rank], asks=False)
        make_trainer(PGroupDDPStrategy(destroy="on_teardown"), devices=4).fit(model, datamodule=TinyData())
        assert not dist.is_initialized()
        return differing(values(model.metrics), wanted)

    assert run_ranks(job, size=4) == [[]] * 4
