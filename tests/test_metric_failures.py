"""What stands in the way of computing metrics over all ranks: nobody waits for ever, nothing is silent, the rest is right."""

import contextlib
import copy
import multiprocessing
import os
import pickle
import signal
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torchmetrics import CatMetric, MeanMetric, Metric, SumMetric
from torchmetrics.aggregation import RunningSum
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_pgroup import PGroupDDPStrategy
from lightning_pgroup.lightning_private import TunerExitException
from lightning_pgroup.process_state import process_state
from tests.faults import PATIENCE, Boom
from tests.metric_fits import Feeds, Hook, fit, model_with, reports, warns
from tests.models import CountingModel, TinyData, TinyModel, make_trainer, whats
from tests.ranks import run_ranks


class RaisesOn(MeanMetric):
    def __init__(self, raises):
        super().__init__()
        self.raises = raises

    def compute(self):
        if self.raises:
            raise Boom("no value")
        return super().compute()


class Unsendable(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("found", [], dist_reduce_fx=None)

    def update(self, value):
        self.found.append(lambda: value)

    def compute(self):
        return len(self.found)


class Only(Callback):
    """A callback that not all ranks have."""

    def __init__(self):
        self.metric = SumMetric()
        self.metric.update(1.0)


def test_what_can_not_be_computed_is_reported_and_the_rest_is_right():
    def job(rank):
        model = model_with(
            before=MeanMetric(),
            raising=RaisesOn(rank == 1),
            other=MeanMetric() if rank else SumMetric(),
            cached=MeanMetric(),
            computed=MeanMetric(),
            uneven=CatMetric(dist_sync_fn=gather_all_tensors),
            after=MeanMetric(),
        )
        model.unsendable = [Unsendable()]
        model.named = MeanMetric(process_group="pairs")
        names = ("before", "raising", "other", "cached", "after")

        def feed(model):
            for name in names:
                getattr(model, name).update(float(rank))
            model.unsendable[0].update(1)
            model.named.update(1.0)
            if rank == 1:
                model.uneven.update(torch.tensor([1, 2]))
            if rank == 0:
                model.cached._computed = torch.tensor(99.0)  # as if the other rank had been updated since

            model.computed.update(float(rank))
            model.computed.compute()
            if rank == 0:
                del model.computed  # the other rank has its value all the same

        with reports() as found:
            fit(model, feed, callbacks=[Only()] if rank == 0 else [])
        model.raising.raises = False
        said = {name: warns(getattr(model, name)) for name in names}
        return found, said, warns(model.unsendable[0])

    for rank, (found, said, unsendable) in enumerate(run_ranks(job)):
        assert {name: said[name] for name in ("before", "cached", "after")} == dict.fromkeys(
            ("before", "cached", "after"), (torch.tensor(0.5), False)
        )
        assert unsendable == (1, True)
        assert said["other"] == (torch.tensor(float(rank)), True)
        reported = {line.split("] ", 1)[1].split(" was not")[0]: line for line in found}
        assert "rank 1 has another metric there" in reported["model.other"]
        assert "on rank 0, ValueError: a state has a function, which can not be sent" in reported["model.unsendable[0]"]
        assert "TypeError: its `process_group` is the text 'pairs' and no group: give it `strategy" in reported["model.named"]
        assert said["raising"] == ((torch.tensor(1.0), True) if rank else (torch.tensor(0.5), False))
        if rank == 0:
            assert reported.keys() == {"model.other", "model.unsendable[0]", "model.named", "Only.metric"}
            assert "rank 1 does not have it" in reported["Only.metric"]
        else:
            assert reported.keys() == {"model.other", "model.unsendable[0]", "model.named", "model.raising", "model.uneven"}
            assert "its own synchronisation can not be trusted" in reported["model.uneven"]
            assert "its `compute` raised Boom: no value" in reported["model.raising"]


def test_a_synchronisation_that_raises_on_one_rank_frees_the_others():
    """It is the user's own code that talks to the others, so that they wait in it; the stage itself has not failed."""

    def job(rank):
        def raises(tensor, group):
            raise Boom("no gathering")

        sync = raises if rank == 0 else gather_all_tensors
        model = model_with(first=MeanMetric(), own=MeanMetric(dist_sync_fn=sync))
        start = time.monotonic()
        with reports() as found:
            strategy = PGroupDDPStrategy(destroy="at_exit")

            def feed(model):
                model.first.update(float(rank))
                model.own.update(float(rank))

            trainer = make_trainer(strategy, callbacks=[Feeds(feed)])
            trainer.fit(model, datamodule=TinyData())
            waited, alive = time.monotonic() - start, dist.is_initialized()
        said = [warns(model.first), warns(model.own)]
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        return found, said, waited, alive, whats(strategy)

    for rank, (found, said, waited, alive, events) in enumerate(run_ranks(job)):
        assert waited < PATIENCE + 1
        assert not alive
        assert any("the ranks could not exchange their metrics" in line for line in found)
        assert said == [(torch.tensor(0.5), False), (torch.tensor(float(rank)), True)]
        assert [event for event in events if event[1] != "reused"] == [
            ("fit", "created", 1),
            ("fit", "aborted", 1),
            ("fit", "created", 2),
        ]


def test_after_an_abort_values_warn_until_reset_or_until_there_is_a_group_again():
    def job(rank):
        names = ("mean", "cached", "untouched", "reset", "again", "running")
        model = model_with(**{name: MeanMetric() for name in names[:-1]}, running=RunningSum(window=2))

        def feed(model):
            for name in names:
                if name != "untouched":
                    getattr(model, name).update(float(rank))
            model.cached.compute()
            if rank == 1:
                raise Boom("in the middle")

        with pytest.raises(Boom) if rank else contextlib.suppress(RuntimeError):  # rank 0 may have been at the end by then
            fit(model, feed, destroy="per_trainer")
        assert not dist.is_initialized()
        one, two = pickle.loads(pickle.dumps(model.mean)), copy.deepcopy(model.mean)
        said = {"copies": [warns(one), warns(two)], "cached": warns(model.cached), "untouched": warns(model.untouched)[1]}
        said["mean"], said["once"] = warns(model.mean), warns(model.mean)
        model.mean.update(float(rank))
        model.mean(float(rank))
        said["still"] = warns(model.mean)
        model.reset.reset()
        model.reset.update(7.0)
        said["reset"] = warns(model.reset)
        said["running"] = warns(model.running), warns(model.running)
        inside = []

        class Asks(Callback):
            def on_train_end(self, trainer, pl_module):
                inside.append((*warns(model.again), "_sync_dist" in vars(model.again)))

        fit(model, lambda model: None, callbacks=[Asks()])
        return said, inside[0], [warns(model.again), warns(model.mean), warns(model.running)]

    for rank, (said, inside, later) in enumerate(run_ranks(job)):
        own = torch.tensor(float(rank))
        assert said["copies"] == [(own, True)] * 2
        assert said["cached"] == (torch.tensor(0.5), False)
        assert not said["untouched"]
        assert (said["mean"], said["once"]) == ((own, True), (own, False))  # then torchmetrics has it in its cache
        assert said["still"] == (own, True)
        assert said["reset"] == (torch.tensor(7.0), False)
        assert said["running"] == ((own, True), (own, True))
        assert inside == (torch.tensor(0.5), False, False)  # and nothing of ours is left on it
        assert later == [(torch.tensor(0.5), False), (torch.tensor(0.5), False), (torch.tensor(1.0), False)]


def test_an_update_after_the_stage_is_missing_in_no_silence():
    """The orderly destroy that comes after it is no collective, so that nothing can be computed there."""

    def job(rank):
        model = model_with(
            mean=MeanMetric(),
            cached=MeanMetric(),
            running=RunningSum(window=2),
            uncached=MeanMetric(compute_with_cache=False),
            own=MeanMetric(dist_sync_fn=gather_all_tensors),
            alone=MeanMetric(sync_on_compute=False),
            asked=MeanMetric(),
            reset=MeanMetric(),
            first=MeanMetric(),
        )
        names = ("mean", "cached", "running", "uncached", "own", "alone")

        def update(model):
            for name in names:
                getattr(model, name).update(float(rank))

        def feed(model):
            update(model)
            model.asked.update(1.0)
            model.reset.update(1.0)
            model.cached.compute()

        strategy = PGroupDDPStrategy()
        trainer = make_trainer(strategy, callbacks=[Feeds(feed)])
        trainer.fit(model, datamodule=TinyData())
        after = {name: warns(getattr(model, name)) for name in (*names, "reset")}
        update(model)
        model.reset.reset()
        for metric in (model.reset, model.first):
            metric.update(4.0)
        model.asked.update(2.0 * rank)
        with_a_group = warns(model.asked)
        strategy.destroy_process_group()
        without = {name: warns(getattr(model, name)) for name in (*names, "asked", "reset", "first")}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pickle.loads(pickle.dumps(model.running)).compute()
        trainer.test(CountingModel(), datamodule=TinyData(), verbose=False)
        return after, with_a_group, without, [str(one.message) for one in caught], warns(model.running)

    for rank, (after, with_a_group, without, texts, again) in enumerate(run_ranks(job)):
        own = torch.tensor(float(rank))
        assert not any(warned for _, warned in after.values())
        assert with_a_group == without["asked"] == (torch.tensor(1.0), False)
        silent = {"alone", "asked", "reset", "first"}
        assert {name: warned for name, (_, warned) in without.items()} == {name: name not in silent for name in without}
        assert [without[name][0] for name in ("mean", "cached", "own", "uncached")] == [own] * 4
        assert without["running"][0] == 2 * own
        assert texts[0].startswith("`compute()` of model.running gives the value of this rank only: it was updated after 'fit'")
        assert again == (torch.tensor(2.0), False)


def test_a_rank_without_metrics_waits_for_nobody():
    returned = multiprocessing.get_context("fork").Event()

    def job(rank):
        model = model_with(mean=MeanMetric()) if rank else TinyModel()

        def feed(model):
            if rank:
                model.mean.update(1.0)

        def last():
            assert returned.wait(20)

        with reports() as found:
            fit(model, feed, callbacks=[Hook(last)] if rank else [])
        returned.set()
        return found

    first, second = run_ranks(job)
    assert first == []
    assert len(second) == 1
    assert "model.mean was not computed over all ranks: rank 0 has no metrics" in second[0]


@pytest.mark.parametrize("on_error", ["abort", "keep"])
def test_a_rank_that_fails_meanwhile_lets_nobody_wait(on_error):
    def job(rank):
        model, strategy = model_with(mean=MeanMetric()), PGroupDDPStrategy(destroy="at_exit", on_error=on_error)
        times = []

        def last():
            times.append(time.monotonic())
            if rank:
                raise Boom("at the very end")

        callbacks = [Feeds(lambda model: model.mean.update(float(rank))), Hook(last)]
        error = ""
        with reports() as found:
            try:
                make_trainer(strategy, callbacks=callbacks).fit(model, datamodule=TinyData())
            except Boom as boom:
                error = type(boom).__name__
            took = time.monotonic() - times[0]
        said = None if on_error == "keep" else warns(model.mean)
        fit(model_with(mean=MeanMetric()), lambda model: model.mean.update(1.0), destroy="at_exit", on_error=on_error)
        return error, found, said, took

    first, second = run_ranks(job)
    assert (first[0], second[0]) == ("", "Boom")
    assert first[3] < PATIENCE
    assert second[3] < PATIENCE
    assert len(first[1]) == 1
    assert "Boom" in first[1][0]
    if on_error == "abort":
        assert (first[2], second[2]) == ((torch.tensor(0.0), True), (torch.tensor(1.0), True))


def test_a_rank_that_is_late_is_named_and_finds_that_nobody_waits_for_it():
    returned = multiprocessing.get_context("fork").Event()

    def job(rank):
        model = model_with(mean=MeanMetric())

        def last():
            assert returned.wait(20)

        start = time.monotonic()
        with reports() as found:
            callbacks = [Hook(last)] if rank else []
            fit(model, lambda model: model.mean.update(1.0), callbacks=callbacks, timeout=1.0, rendezvous_timeout=20.0)
        took = time.monotonic() - start
        returned.set()
        fit(model, lambda model: None, rendezvous_timeout=20.0)
        return found, took, warns(model.mean)

    for found, took, said in run_ranks(job):
        assert 1.0 <= took < 1.0 + PATIENCE + 1
        assert len(found) == 1
        assert "rank 0 gave up" in found[0]
        assert "of 1.0 s for rank 1 to end the stage" in found[0]
        assert said == (torch.tensor(1.0), False)


@pytest.mark.parametrize(("size", "killed"), [(2, 1), (4, 2), (2, 0)])
def test_a_rank_that_is_killed_while_the_others_wait_for_it_frees_them(size, killed):
    """It leaves no word, and no launcher watches it here. The last one hosts the store, and takes that along."""

    def job(rank):
        model, pause = model_with(mean=MeanMetric()), threading.Event()

        def last():
            if rank == killed:
                team = process_state().lifecycle._notices.team
                raised = [f"hands/{team.rounds.number}/raised/{other}" for other in range(size) if other != killed]
                while not team.store.check(raised):
                    pause.wait(0.01)
                os.kill(os.getpid(), signal.SIGKILL)

        with reports() as found:
            fit(model, lambda model: model.mean.update(1.0), devices=size, callbacks=[Hook(last)], timeout=60)
        return time.monotonic(), found, warns(model.mean), dist.is_initialized()

    begin = time.monotonic()
    for rank, result in enumerate(run_ranks(job, size, deadline=30, check_leaks=False, expect_death={killed})):
        if rank != killed:
            at, found, said, alive = result
            assert at - begin < 5 + PATIENCE
            assert len(found) == 1
            assert "a connection of the process group has broken" in found[0] or killed == 0, found
            assert said == (torch.tensor(1.0), True)
            assert not alive


def test_garbage_in_the_store_frees_all_and_leaves_the_stage_whole():
    def job(rank):
        model, strategy = model_with(mean=MeanMetric()), PGroupDDPStrategy(destroy="at_exit")

        def last():
            if rank == 0:
                team = process_state().lifecycle._notices.team
                team.store.set(f"hands/{team.rounds.number}/outcome", "[" * 100)
            dist.barrier()

        callbacks = [Feeds(lambda model: model.mean.update(float(rank))), Hook(last)]
        with reports() as found:
            make_trainer(strategy, callbacks=callbacks).fit(model, datamodule=TinyData())
        alive = dist.is_initialized()
        fit(model, lambda model: None)
        return found, alive, warns(model.mean)

    for found, alive, said in run_ranks(job):
        assert len(found) == 1
        assert "GarbledStoreError" in found[0]
        assert not alive
        assert said == (torch.tensor(0.5), False)


def test_a_tuner_that_leaves_a_stage_is_no_silent_end():
    def job(rank):
        model = model_with(mean=MeanMetric())

        class Tunes(Callback):
            def on_train_end(self, trainer, pl_module):
                raise TunerExitException

        with reports() as found:
            fit(model, lambda model: model.mean.update(float(rank)), callbacks=[Tunes()])
        return found, warns(model.mean)

    assert run_ranks(job) == [([], (torch.tensor(float(rank)), True)) for rank in range(2)]


@pytest.mark.parametrize("losers", [{0}, {0, 1}])
def test_a_group_that_was_destroyed_in_the_stage_is_no_silent_end(losers):
    def job(rank):
        model = model_with(mean=MeanMetric())
        with reports() as found:
            callbacks = [Hook(dist.destroy_process_group)] if rank in losers else []
            fit(model, lambda model: model.mean.update(float(rank)), callbacks=callbacks)
        return found, warns(model.mean)

    for rank, (found, said) in enumerate(run_ranks(job)):
        assert said == (torch.tensor(float(rank)), True)
        assert len(found) == 1
        assert ("has ended before" in found[0]) if rank in losers else ("rank 0 has lost its process group" in found[0])
