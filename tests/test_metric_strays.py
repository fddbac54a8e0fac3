"""Metrics off the beaten track: ranks that want different things, stages in stages and in blocks, odd places and odd states."""

import gc
import os
import time
import weakref

import pytest
import torch
from lightning.pytorch import Callback
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, SumMetric
from torchmetrics.regression import PearsonCorrCoef

from lightning_pgroup import process_group
from tests.faults import PATIENCE, Boom
from tests.metric_fits import fit, model_with, reports, warns
from tests.models import TinyModel
from tests.ranks import LOOPBACK, run_ranks

HALF = (torch.tensor(0.5), False)


KEEPS = {"keep": {"metrics": "keep"}, "keep_all": {"metrics": "keep", "on_error": "keep"}, "never": {"destroy": "never"}}


@pytest.mark.parametrize("other", KEEPS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_leaves_its_metrics_alone_lets_nobody_wait(other, fails):
    def job(rank):
        model = model_with(mean=MeanMetric())

        class Last(Callback):
            def teardown(self, trainer, pl_module, stage):
                if fails and rank:
                    raise Boom("at the very end")

        start, raised = time.monotonic(), False
        with reports() as found:
            try:
                fit(model, lambda model: model.mean.update(float(rank)), callbacks=[Last()], **(KEEPS[other] if rank else {}))
            except Boom:
                raised = True
        return found, time.monotonic() - start, raised

    (found, took, _), (second, _, raised) = run_ranks(job, check_leaks=False)
    assert raised is fails
    assert took < PATIENCE + 5
    assert second == []
    assert len(found) == 1
    if not fails:
        assert "rank 1 leaves its metrics alone" in found[0]


def meet(rank):
    """Where a block of two ranks meets."""
    return {"rank": rank, "world_size": 2, "init_method": f"tcp://{LOOPBACK}:{os.environ['MASTER_PORT']}"}


@pytest.mark.parametrize("fails", [False, True])
def test_metrics_of_stages_in_a_block_are_computed_before_that_ends(fails):
    def job(rank):
        model, again = model_with(mean=MeanMetric()), model_with(mean=MeanMetric())
        with reports() as found:
            try:
                with process_group(**meet(rank)), process_group():
                    fit(model, lambda model: model.mean.update(float(rank)))
                    fit(again, lambda model: model.mean.update(float(rank)))
                    again.mean.update(2.0 + rank)
                    if fails:
                        raise Boom("in the block")
            except Boom:
                pass
        return found, warns(model.mean), warns(again.mean)

    for rank, (found, first, second) in enumerate(run_ranks(job)):
        assert found == []
        assert first == ((torch.tensor(float(rank)), True) if fails else HALF)
        assert second == ((torch.tensor(1.0 + rank), True) if fails else (torch.tensor(1.5), False))


class Nests(Callback):
    """Fits another model inside the stage; nothing that is looked at holds that."""

    def __init__(self, rank, model, **arguments):
        self._run = lambda: fit(model, lambda model: model.mean.update(float(rank)), **arguments)

    def on_train_epoch_end(self, trainer, pl_module):
        self._run()


class Survives(Nests):
    def on_train_epoch_end(self, trainer, pl_module):
        with pytest.raises(Boom):
            self._run()


class Fails(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        raise Boom("inside")


def test_metrics_of_stages_in_stages():
    def job(rank):
        deep, middle, caught = (model_with(mean=MeanMetric()) for _ in range(3))
        callbacks = [
            Nests(rank, middle, callbacks=[Nests(rank, deep)]),
            Survives(rank, caught, callbacks=[Fails()], on_error="keep"),
        ]
        own = model_with(mean=MeanMetric())
        with reports() as found:
            fit(own, lambda model: model.mean.update(float(rank)), callbacks=callbacks, metrics="keep")
        return found, [warns(one.mean) for one in (deep, middle, caught)], warns(own.mean)

    for rank, (found, inner, own) in enumerate(run_ranks(job)):
        assert found == []
        assert inner == [HALF] * 3
        assert own == (torch.tensor(float(rank)), False)  # as its user wants it


def test_a_stage_holds_no_more_of_those_inside_than_their_metrics():
    def job(rank):
        left = []

        class NestsMany(Callback):
            def on_train_epoch_end(self, trainer, pl_module):
                for _ in range(2):
                    model = model_with(mean=MeanMetric())
                    left.append(weakref.ref(model))
                    fit(model, lambda model: model.mean.update(float(rank)))
                    del model
                gc.collect()
                left[:] = [one() is not None for one in left]

        fit(TinyModel(), lambda model: None, callbacks=[NestsMany()])
        return left

    assert run_ranks(job) == [[False, False]] * 2


class Around(Metric):
    """Asks the metric inside it, twice."""

    def __init__(self, inner):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.inner = inner

    def update(self, value):
        self.total += value.sum()
        self.inner.update(value)

    def compute(self):
        return self.total + self.inner.compute().sum() + self.inner.compute().sum()


def test_metrics_that_others_ask_are_right_themselves():
    def job(rank):
        names = ("listed", "plain", "uncached", "deep")
        parts = (CatMetric(), SumMetric(), CatMetric(compute_with_cache=False), Around(CatMetric()))
        model = model_with(**{name: Around(part) for name, part in zip(names, parts, strict=True)})
        with reports() as found:
            fit(model, lambda model: [getattr(model, name).update(torch.ones(2 + rank)) for name in names])
        whole = [getattr(model, name) for name in names]
        inner = [warns(one.inner) for one in whole]
        return (
            found,
            [one.compute().item() for one in whole],
            [value.sum().item() for value, _ in inner],
            any(one[1] for one in inner),
        )

    assert run_ranks(job) == [([], [15.0, 15.0, 15.0, 35.0], [5.0, 5.0, 5.0, 15.0], False)] * 2


def test_a_metric_without_a_device_is_in_nobody_s_way():
    def job(rank):
        model = model_with(mean=MeanMetric())
        model.nowhere = [SumMetric().to("meta" if rank == 0 else "cpu")]

        def feed(model):
            model.mean.update(float(rank))
            model.nowhere[0]._update_count = 1

        with reports() as found:
            fit(model, feed)
        return found, warns(model.mean)

    for found, said in run_ranks(job):
        assert said == HALF
        assert len(found) == 1
        assert "on rank 0, ValueError: a state is on the device `meta`" in found[0]


class Same:
    def __repr__(self):
        return "same"


def test_keys_that_have_no_name_of_their_own():
    def job(rank):
        model = TinyModel()
        model.found = {Same(): SumMetric(), Same(): SumMetric(), object(): SumMetric(), object(): MaxMetric()}

        def feed(model):
            for number, one in enumerate(model.found.values()):
                one.update(float(number + rank))

        with reports() as found:
            fit(model, feed)
        return found, [warns(one) for one in model.found.values()]

    assert run_ranks(job) == [([], [(torch.tensor(value), False) for value in (1.0, 3.0, 5.0, 4.0)])] * 2


class Stacked(Metric):
    """Counts on a dimension for the ranks once it is synchronised, as `torchmetrics` promises."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(3), dist_reduce_fx=None)
        self.add_state("twice", torch.tensor(0.0), dist_reduce_fx=lambda stacked: 2 * stacked.sum(0))

    def update(self, values):
        self.total = self.total + values
        self.twice = self.twice + values.sum()

    def compute(self):
        return (self.total.sum(0) if self._is_synced else self.total), self.twice


def test_states_of_the_only_rank_with_data_are_reduced_all_the_same():
    make = torch.Generator().manual_seed(1)
    data = [torch.randn(5, 2, generator=make), torch.randn(5, 2, generator=make)]
    wanted = PearsonCorrCoef(num_outputs=2)
    wanted.update(*data)

    def job(rank):
        model = model_with(stacked=Stacked(), pearson=PearsonCorrCoef(num_outputs=2))

        def feed(model):
            if rank:
                model.stacked.update(torch.ones(3))
                model.pearson.update(*data)

        fit(model, feed)
        return *model.stacked.compute(), model.pearson.compute()

    for total, twice, correlation in run_ranks(job):
        assert torch.equal(total, torch.ones(3))
        assert twice == 6.0
        assert torch.allclose(correlation, wanted.compute())


def test_a_metric_that_one_rank_of_many_makes_is_named_with_those_that_lack_it():
    def job(rank):
        model = model_with(mean=MeanMetric())

        def feed(model):
            model.mean.update(float(rank))
            if rank == 1:
                model.lazy = SumMetric()
                model.lazy.update(1.0)

        with reports() as found:
            fit(model, feed, devices=4)
        return [line.split("ranks: ")[1] for line in found], warns(model.mean)

    said = run_ranks(job, size=4)
    assert [one for _, one in said] == [(torch.tensor(1.5), False)] * 4
    assert [found for found, _ in said] == [[], ["ranks 0, 2, 3 do not have it"], [], []]
