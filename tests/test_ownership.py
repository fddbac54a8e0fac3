"""A group that was there before is used and never touched; ours is noticed when others destroy it; claims; the collector."""

import gc
import multiprocessing
import statistics
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.distributed import HashStore, PrefixStore

from lightning_pgroup import PGroupDDPStrategy, PGroupError, RanksDisagreeError, WorldSizeError
from lightning_pgroup.process_state import process_state
from tests.models import CountingModel, TinyData, TinyModel, make_trainer, whats
from tests.ranks import run_ranks
from tests.test_stage_boundaries import Raises, rank_sum

POLICIES = ["on_teardown", "per_trainer", "on_destructor", "on_error", "at_exit", "never", ["on_teardown", "on_error"]]


def init_foreign(rank, size=2, name="foreign"):
    """A group as other code makes it, over the store of the test."""
    team = process_state().membership._hosted or process_state().membership
    if not isinstance(team, dist.Store):
        from lightning_pgroup.store import Endpoint, connect_store

        invitation = team.invitation
        team = connect_store(Endpoint(invitation.host, invitation.port), timedelta(seconds=20))
    dist.init_process_group("gloo", store=PrefixStore(name, team), rank=rank, world_size=size)
    return dist.group.WORLD


@pytest.mark.parametrize("destroy", POLICIES, ids=str)
def test_a_foreign_group_is_used_and_survives_stages_errors_gc_and_close(destroy):
    def job(rank):
        hook = __import__("sys").excepthook
        foreign = init_foreign(rank)
        strategy = PGroupDDPStrategy(destroy=destroy)
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        make_trainer(PGroupDDPStrategy(destroy=destroy)).test(TinyModel(), datamodule=TinyData(), verbose=False)
        with pytest.raises(ValueError, match="boom"):
            make_trainer(PGroupDDPStrategy(destroy=destroy), callbacks=[Raises("on_fit_end", ValueError("boom"))]).fit(
                TinyModel(), datamodule=TinyData()
            )
        with pytest.raises(PGroupError, match="created by other code"):
            strategy.destroy_process_group()
        strategy.close()
        gc.collect()
        process_state().end()
        assert dist.group.WORLD is foreign
        total = rank_sum(rank)
        events = whats(strategy)
        del foreign
        dist.destroy_process_group()
        assert not dist.is_initialized()
        __import__("sys").excepthook = hook
        return total, events

    assert run_ranks(job) == [(1.0, [("fit", "adopted", 0)])] * 2


def test_after_a_foreign_group_was_destroyed_by_its_owner_ours_is_created():
    def job(rank):
        hook = __import__("sys").excepthook
        init_foreign(rank)
        strategy = PGroupDDPStrategy(destroy="on_teardown")
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        dist.destroy_process_group()
        __import__("sys").excepthook = hook
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        return whats(strategy)

    assert run_ranks(job) == [[("fit", "adopted", 0), ("fit", "created", 1), ("fit", "destroyed", 1)]] * 2


def test_a_foreign_group_on_one_rank_only_is_an_error_on_both_and_no_hang():
    def job(rank):
        hook = __import__("sys").excepthook
        if rank == 0:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        trainer = make_trainer(PGroupDDPStrategy())
        with pytest.raises(RanksDisagreeError, match="rank 0: a group of other code; rank 1: none of that kind"):
            trainer.fit(TinyModel(), datamodule=TinyData())
        if rank == 0:
            dist.destroy_process_group()
            __import__("sys").excepthook = hook

    run_ranks(job, deadline=20)


def test_f27_a_foreign_group_of_another_size_is_refused():
    def job(rank):
        hook = __import__("sys").excepthook
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        with pytest.raises(WorldSizeError, match="in which this process is rank 0 of 1, but 'fit' asks to be rank"):
            make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
        dist.destroy_process_group()
        __import__("sys").excepthook = hook

    run_ranks(job, deadline=20)


@pytest.mark.parametrize("who", [{0}, {1}], ids=str)
def test_one_rank_has_lost_its_group_and_both_are_in_the_next_within_100_ms(who):
    start = multiprocessing.get_context("fork").Barrier(2)

    def job(rank):
        strategy = PGroupDDPStrategy(destroy="at_exit")
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        took = []
        for _ in range(9):
            if rank in who:
                dist.destroy_process_group()
            start.wait(30)
            begin = time.perf_counter()
            strategy.barrier()  # agrees, ends what is left, creates, and a first collective
            took.append(time.perf_counter() - begin)
        return statistics.median(took), strategy.generation

    for took, generation in run_ranks(job):
        assert took < 0.1
        assert generation == 10


@pytest.mark.parametrize("who", [{0}, {1}, {0, 1}], ids=str)
def test_a_group_destroyed_behind_our_back_is_noticed_and_created_anew(who):
    def job(rank):
        strategy = PGroupDDPStrategy(destroy="at_exit")
        trainer = make_trainer(strategy)
        trainer.fit(TinyModel(), datamodule=TinyData())
        if rank in who:
            dist.destroy_process_group()
            assert strategy.generation is None
        trainer.fit(TinyModel(), datamodule=TinyData())
        created = next(event for event in strategy.events if event.generation == 2)
        return whats(strategy), created.why

    for rank, (events, why) in enumerate(run_ranks(job)):
        end = ("fit", "lost" if rank in who else "destroyed", 1)
        assert events == [("fit", "created", 1), end, ("fit", "created", 2)]
        if len(who) == 1:
            assert f"rank {next(iter(who))}: no group" in why


def test_losing_the_group_in_the_middle_of_a_stage_raises_instead_of_being_local():
    def job(rank):
        class Vandal(Callback):
            def on_train_end(self, trainer, pl_module):
                dist.destroy_process_group()
                trainer.strategy.barrier()

        from lightning_pgroup import GroupLostError

        with pytest.raises(GroupLostError, match="ended while 'fit' was running"):
            make_trainer(PGroupDDPStrategy(), callbacks=[Vandal()]).fit(TinyModel(), datamodule=TinyData())

    run_ranks(job, deadline=20)


def test_destructor_ends_the_group_with_the_last_strategy_that_used_it():
    def job(rank):
        first, second = PGroupDDPStrategy(destroy="on_destructor"), PGroupDDPStrategy(destroy="on_destructor")
        for strategy in (first, second):
            make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        seen = [dist.is_initialized()]
        del first, strategy
        gc.collect()
        seen.append(dist.is_initialized())
        del second
        gc.collect()
        seen.append(dist.is_initialized())
        return seen

    assert run_ranks(job) == [[True, True, False]] * 2


def test_del_trainer_alone_frees_nothing_until_the_collector_runs():
    """F23: Trainer and strategy refer to each other."""

    def job(rank):
        gc.disable()
        trainer = make_trainer(PGroupDDPStrategy(destroy="on_destructor"))
        trainer.fit(TinyModel(), datamodule=TinyData())
        del trainer
        before = dist.is_initialized()
        gc.collect()
        return before, dist.is_initialized()

    assert run_ranks(job) == [(True, False)] * 2


def test_f19_a_collector_that_runs_on_one_rank_only_harms_nobody():
    def job(rank):
        gc.disable()
        events = []
        for number in range(6):
            strategy = PGroupDDPStrategy(destroy="on_destructor")
            make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
            events.append(strategy.generation)
            del strategy
            if number % 2 == rank:
                gc.collect()
        return events

    first, second = run_ranks(job)
    # Each time one of the two has lost its group, and both go on with the next generation.
    assert first == second == [1, 2, 3, 4, 5, 6]


def test_f19_the_collector_in_the_middle_of_another_strategys_stage_only_gives_up_the_claim():
    def job(rank):
        class Collect(Callback):
            def on_train_batch_end(self, *args):
                gc.collect()

        gc.disable()
        first = PGroupDDPStrategy(destroy="on_destructor")
        make_trainer(first).fit(TinyModel(), datamodule=TinyData())
        del first
        second = PGroupDDPStrategy(destroy="on_destructor")
        make_trainer(second, callbacks=[Collect()]).fit(TinyModel(), datamodule=TinyData())
        return whats(second), dist.is_initialized()

    assert run_ranks(job) == [([("fit", "reused", 1)], True)] * 2


@pytest.mark.parametrize(("destroy", "counted"), [("on_teardown", 16.0), (None, 32.0)], ids=["ours", "plain"])
def test_f34_a_single_device_test_counts_each_sample_once_when_the_group_is_gone(destroy, counted):
    """And twice when it lives: torchmetrics sums over two processes that each believe that they are alone."""
    from lightning.pytorch.strategies import DDPStrategy

    def job(rank):
        model = CountingModel()
        strategy = DDPStrategy() if destroy is None else PGroupDDPStrategy(destroy=destroy)
        make_trainer(strategy).fit(model, datamodule=TinyData())
        single = make_trainer("auto", devices=1, limit_test_batches=100)
        return single.test(model, datamodule=TinyData(16), verbose=False)[0]["count"], single.global_rank

    assert run_ranks(job, check_leaks=destroy is not None) == [(counted, 0)] * 2


def test_the_policy_of_the_last_user_applies():
    def job(rank):
        keeps, ends = PGroupDDPStrategy(destroy="at_exit"), PGroupDDPStrategy(destroy="on_teardown")
        make_trainer(keeps).fit(TinyModel(), datamodule=TinyData())
        make_trainer(ends).fit(TinyModel(), datamodule=TinyData())
        return whats(keeps), whats(ends), dist.is_initialized()

    for keeps, ends, alive in run_ranks(job):
        assert keeps == [("fit", "created", 1), ("fit", "destroyed", 1)]
        assert ends == [("fit", "reused", 1), ("fit", "destroyed", 1)]
        assert not alive


def test_close_ends_the_group_unless_another_strategy_uses_it():
    def job(rank):
        first, second = PGroupDDPStrategy(destroy="at_exit"), PGroupDDPStrategy(destroy="at_exit")
        for strategy in (first, second):
            make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        first.close()
        seen = [dist.is_initialized()]
        second.close()
        second.close()
        return [*seen, dist.is_initialized()]

    assert run_ranks(job) == [[True, False]] * 2


def test_with_block_closes_also_when_its_body_raises():
    def job(rank):
        try:
            with PGroupDDPStrategy(destroy="on_destructor") as strategy:
                make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
                assert strategy.generation == 1
                raise ZeroDivisionError
        except ZeroDivisionError:
            assert strategy.events[-1].what == "destroyed"
        return dist.is_initialized()

    assert run_ranks(job) == [False, False]


def test_never_is_ended_by_nobody_but_the_user():
    def job(rank):
        strategy = PGroupDDPStrategy(destroy="never")
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        with pytest.raises(ValueError, match="boom"):
            make_trainer(PGroupDDPStrategy(destroy="never"), callbacks=[Raises("on_fit_end", ValueError("boom"))]).fit(
                TinyModel(), datamodule=TinyData()
            )
        strategy.close()
        process_state().end()
        alive = dist.is_initialized()
        dist.destroy_process_group()
        process_state().lifecycle._custody.notice_loss()
        return alive

    assert run_ranks(job) == [True, True]


def test_strategies_pickle_without_the_runtime():
    import pickle

    def job(rank):
        strategy = PGroupDDPStrategy(destroy=["on_teardown", "on_error"], destroy_timeout=3)
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        strategy._lightning_module = strategy._model = None
        copy = pickle.loads(pickle.dumps(strategy))
        return copy.events, copy._config == strategy._config, copy._claim

    assert run_ranks(job) == [([], True, None)] * 2
