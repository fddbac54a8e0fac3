"""Reuse or re-create, decided by all ranks; what is left after a failure; skewed ranks (F1, F4, F25, F36)."""

import logging
import multiprocessing
import random
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy

from lightning_pgroup import (
    GroupMismatchError,
    PGroupDDPStrategy,
    RanksDisagreeError,
    RendezvousAbandonedError,
    RendezvousTimeoutError,
    __version__,
)
from lightning_pgroup.process_state import process_state
from tests.models import TinyData, TinyModel, make_trainer, whats
from tests.ranks import run_ranks
from tests.test_stage_boundaries import rank_sum


def skew(seconds: float) -> None:
    """Let this rank be late, as a slow disk or a long validation would."""
    threading.Event().wait(seconds)


def test_f01_a_second_trainer_gets_what_it_asks_for():
    def job(rank):
        first, second = PGroupDDPStrategy(timeout=100), PGroupDDPStrategy(timeout=200)
        make_trainer(first).fit(TinyModel(), datamodule=TinyData())
        old = dist.group.WORLD
        make_trainer(second).fit(TinyModel(), datamodule=TinyData())
        options = dist.group.WORLD._get_backend(torch.device("cpu")).options
        return dist.group.WORLD is old, options._timeout.total_seconds(), whats(second)

    assert run_ranks(job) == [(False, 200.0, [("fit", "destroyed", 1), ("fit", "created", 2)])] * 2


def test_f01_plain_ddp_gives_it_the_group_of_the_first():
    def job(rank):
        make_trainer(DDPStrategy()).fit(TinyModel(), datamodule=TinyData())
        old = dist.group.WORLD
        make_trainer(DDPStrategy()).fit(TinyModel(), datamodule=TinyData())
        same = dist.group.WORLD is old
        dist.destroy_process_group()
        return same

    assert run_ranks(job, check_leaks=False) == [True, True]


def test_per_trainer_reuses_within_a_trainer_and_not_across():
    def job(rank):
        events = []
        for _ in range(3):
            strategy = PGroupDDPStrategy()
            trainer = make_trainer(strategy)
            trainer.fit(TinyModel(), datamodule=TinyData())
            trainer.test(TinyModel(), datamodule=TinyData(), verbose=False)
            events += [(e.what, e.generation) for e in strategy.events if e.what in ("created", "reused")]
        return events

    want = [(what, generation) for generation in (1, 2, 3) for what in ("created", "reused")]
    assert run_ranks(job) == [want] * 2


@pytest.mark.parametrize(
    ("on_mismatch", "whats_second", "timeout"),
    [("recreate", ["destroyed", "created"], 200.0), ("reuse", ["reused"], 100.0)],
)
def test_on_mismatch_recreate_and_reuse(on_mismatch, whats_second, timeout):
    def job(rank):
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logging.getLogger("lightning_pgroup").addHandler(handler)
        make_trainer(PGroupDDPStrategy(destroy="at_exit", timeout=100)).fit(TinyModel(), datamodule=TinyData())
        second = PGroupDDPStrategy(destroy="at_exit", timeout=200, on_mismatch=on_mismatch)
        make_trainer(second).fit(TinyModel(), datamodule=TinyData())
        options = dist.group.WORLD._get_backend(torch.device("cpu")).options
        warnings = [r.getMessage() for r in records if r.levelno == logging.WARNING]
        return [e.what for e in second.events], [e.why for e in second.events], options._timeout.total_seconds(), warnings

    for got, whys, got_timeout, warnings in run_ranks(job):
        assert got == whats_second
        assert "timeout: 0:01:40 -> 0:03:20" in whys[-1]
        assert got_timeout == timeout
        assert len(warnings) == (on_mismatch == "reuse")
        assert all("timeout: 0:01:40 -> 0:03:20" in warning for warning in warnings)


@pytest.mark.parametrize("on_mismatch", ["recreate", "reuse", "error"])
def test_on_mismatch_when_the_size_differs(on_mismatch):
    def job(rank):
        records = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = records.append
        logging.getLogger("lightning_pgroup").addHandler(handler)
        make_trainer(PGroupDDPStrategy(destroy="at_exit")).fit(TinyModel(), datamodule=TinyData())
        strategy = PGroupDDPStrategy(destroy="at_exit", on_mismatch=on_mismatch)
        trainer = make_trainer(strategy, devices=1)
        if on_mismatch == "error":
            with pytest.raises(GroupMismatchError, match="world_size: 2 -> 1"):
                trainer.fit(TinyModel(), datamodule=TinyData())
        else:
            trainer.fit(TinyModel(), datamodule=TinyData())
        return dist.get_world_size(), whats(strategy), [r.getMessage() for r in records if r.levelno == logging.WARNING]

    for size, events, warnings in run_ranks(job):
        if on_mismatch == "error":
            assert (size, events, warnings) == (2, [], [])  # the group that was refused stays as it is
        else:
            assert (size, events) == (1, [("fit", "destroyed", 1), ("fit", "created", 2)])
            assert len(warnings) == (on_mismatch == "reuse")


def test_on_mismatch_error_raises_on_all_ranks_naming_each_difference():
    def job(rank):
        make_trainer(PGroupDDPStrategy(destroy="at_exit", timeout=100)).fit(TinyModel(), datamodule=TinyData())
        second = PGroupDDPStrategy(destroy="at_exit", timeout=200, on_mismatch="error", pg_options="fast")
        with pytest.raises(GroupMismatchError) as caught:
            make_trainer(second).fit(TinyModel(), datamodule=TinyData())
        return str(caught.value)

    for text in run_ranks(job):
        assert "timeout: 0:01:40 -> 0:03:20" in text
        assert "pg_options: none -> \"'fast'\"" in text
        assert "ranks 0, 1" in text


def test_ranks_that_start_different_stages_are_told_at_once():
    def job(rank):
        trainer = make_trainer(PGroupDDPStrategy())
        stage = trainer.fit if rank == 0 else trainer.test
        start = time.monotonic()
        with pytest.raises(RanksDisagreeError, match="stage \\(rank 0: 'fit'; rank 1: 'test'\\)"):
            stage(TinyModel(), datamodule=TinyData())
        took = time.monotonic() - start
        make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
        return took < 5

    assert run_ranks(job, deadline=30) == [True, True]


def test_ranks_that_ask_for_different_groups_are_told_at_once():
    def job(rank):
        with pytest.raises(RanksDisagreeError, match="timeout"):
            make_trainer(PGroupDDPStrategy(timeout=100 + rank)).fit(TinyModel(), datamodule=TinyData())

    run_ranks(job, deadline=20)


def test_ranks_with_different_backends_are_told_at_once():
    def job(rank):
        for _ in range(2):
            with pytest.raises(RanksDisagreeError, match="backend \\(rank 0: 'gloo'; rank 1: 'cpu:gloo'\\)"):
                make_trainer(PGroupDDPStrategy(process_group_backend="cpu:gloo" if rank else "gloo")).fit(
                    TinyModel(), datamodule=TinyData()
                )

    run_ranks(job, deadline=20)


@pytest.mark.parametrize("other", [0, 1])
def test_another_version_of_this_package_is_named_on_all_ranks_at_once(other):
    """Before anything else is read that the other version may have written in another form."""

    def job(rank):
        with pytest.MonkeyPatch.context() as patch:
            if rank == other:
                patch.setattr("lightning_pgroup.introduction.__version__", "0.0.other")
                patch.setattr(
                    "lightning_pgroup.acquisition.Report.to_payload", lambda report: {"stage": report.stage, "form": 2}
                )
            texts = []
            for _ in range(2):
                with pytest.raises(RanksDisagreeError) as caught:
                    make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
                texts.append(str(caught.value))
            return texts

    for rank, texts in enumerate(run_ranks(job, deadline=20)):
        for text in texts:
            assert f"Rank {rank} of 2 can not start 'fit'" in text
            assert "the ranks differ in the version of lightning_pgroup" in text
            assert re.search(rf"rank {other}, pid \d+ on \S+: '0.0.other'", text)
            assert re.search(rf"rank {1 - other}, pid \d+ on \S+: '{__version__}'", text)


def test_a_rank_that_does_not_come_is_named_and_comes_later():
    gave_up = multiprocessing.get_context("fork").Event()

    def job(rank):
        strategy = PGroupDDPStrategy(destroy="on_teardown", rendezvous_timeout=1.0)
        trainer = make_trainer(strategy)
        trainer.fit(TinyModel(), datamodule=TinyData())
        text = ""
        if rank == 0:
            with pytest.raises(RendezvousTimeoutError) as caught:
                trainer.test(TinyModel(), datamodule=TinyData(), verbose=False)
            text = str(caught.value)
            gave_up.set()
        else:
            assert gave_up.wait(30)
            with pytest.raises(RendezvousAbandonedError, match="rank 0 is not there for it, it had given up waiting"):
                trainer.test(TinyModel(), datamodule=TinyData(), verbose=False)
        trainer = make_trainer(PGroupDDPStrategy(destroy="on_teardown"))
        trainer.fit(TinyModel(), datamodule=TinyData())
        return text

    text, _ = run_ranks(job)
    assert re.search(r"Rank 0 of 2 waited [1-9]\d*\.\d s of 1\.0 s for the other ranks to start 'test'", text)
    assert "rank 1 (last seen at" in text
    assert "'finished fit'" in text


class RaisesOn(Callback):
    def __init__(self, rank, hook):
        self.rank = rank
        setattr(self, hook, self._raise)

    def _raise(self, trainer, *args, **kwargs):
        if trainer.global_rank == self.rank:
            raise ValueError("on one rank")


@pytest.mark.parametrize("failing", [0, 1])
def test_f25_after_a_failure_on_one_rank_that_is_caught_the_next_trainer_trains(failing):
    def job(rank):
        strategy = PGroupDDPStrategy(timeout=2)
        trainer = make_trainer(strategy, callbacks=[RaisesOn(failing, "on_train_batch_start")])
        with pytest.raises(ValueError if rank == failing else RuntimeError):
            trainer.fit(TinyModel(), datamodule=TinyData())
        next_one = PGroupDDPStrategy()
        make_trainer(next_one).fit(TinyModel(), datamodule=TinyData())
        return rank_sum(rank), whats(next_one)[0][1:]

    for total, first in run_ranks(job, deadline=40):
        assert total == 1.0
        assert first == ("created", 2)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("first", [True, False])
def test_f25_a_failure_before_the_rendezvous_frees_the_others_and_all_stay_in_step(failing, first):
    """A checkpoint that is not there on one rank, say: the others must not wait, nor pair this stage with the next."""

    def job(rank):
        if not first:
            make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
        seen = []
        for number in range(4):
            strategy = PGroupDDPStrategy()
            trainer = make_trainer(strategy)
            path = "best" if rank == failing and number % 2 == 0 else None
            start = time.monotonic()
            try:
                trainer.validate(TinyModel(), datamodule=TinyData(), ckpt_path=path, verbose=False)
                seen.append((number, strategy.broadcast(number)))
            except Exception as error:
                seen.append((number, str(error)))
            assert time.monotonic() - start < 10
        return seen

    results = run_ranks(job, deadline=40)
    for rank, seen in enumerate(results):
        assert [seen[1], seen[3]] == [(1, 1), (3, 3)]
        for number in (0, 2):
            text = seen[number][1]
            assert "best" in text or rank != failing
            assert f"rank {failing} is not there for it, it has failed before" in text or rank == failing


def test_f25_plain_ddp_fails_in_every_later_trainer():
    def job(rank):
        from datetime import timedelta

        results = []
        strategy = DDPStrategy(timeout=timedelta(seconds=2))
        trainer = make_trainer(strategy, callbacks=[RaisesOn(0, "on_train_batch_start")])
        for _ in range(2):
            try:
                trainer.fit(TinyModel(), datamodule=TinyData())
                results.append(None)
            except Exception as error:
                results.append(type(error).__name__)
            trainer = make_trainer(DDPStrategy(timeout=timedelta(seconds=2)))
        return results

    first, second = run_ranks(job, check_leaks=False, deadline=60)
    assert first[0] == "ValueError"
    assert None not in second


def test_f03_f04_two_hundred_generations_with_random_delays_and_no_failure():
    def job(rank):
        noise = random.Random(rank)
        strategy = PGroupDDPStrategy(destroy="on_teardown")
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        for _ in range(200):
            strategy.barrier()
            skew(noise.random() * 0.004)
        return strategy.generation, strategy.events[-1].generation

    assert run_ranks(job, deadline=90) == [(None, 201)] * 2


@pytest.mark.parametrize("late", [0, 1])
def test_f36_a_healthy_destroy_while_the_peer_is_still_behind(late):
    """The faster rank ends its group and asks for the next one while the other is still in its hooks."""

    def job(rank):
        class Late(Callback):
            def teardown(self, trainer, pl_module, stage):
                if rank == late:
                    skew(1.5)

        took = []
        for _ in range(3):
            strategy = PGroupDDPStrategy(destroy="on_teardown", timeout=15)
            start = time.monotonic()
            make_trainer(strategy, callbacks=[Late()]).fit(TinyModel(), datamodule=TinyData())
            took.append(time.monotonic() - start)
        return max(took), strategy.events[-1].generation

    for longest, generation in run_ranks(job, deadline=40):
        assert longest < 5
        assert generation == 3


def test_keys_in_the_store_stay_as_many_as_they_are():
    def job(rank):
        counts = []
        for _ in range(12):
            strategy = PGroupDDPStrategy(destroy="on_teardown")
            make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
            strategy.barrier()
            hosted = process_state().membership._hosted
            counts.append(hosted.num_keys() if hosted else 0)
            strategy.barrier()
        return counts

    counts, _ = run_ranks(job)
    # Where each rank is, the last two rounds and shows of hands, and one generation; 24 generations have come and gone.
    assert max(counts) < 13


def test_no_value_in_the_store_is_a_pickle():
    import json

    def job(rank):
        strategy = PGroupDDPStrategy(destroy="on_teardown")
        trainer = make_trainer(strategy)
        seen = {}

        class Look(Callback):
            def on_train_end(self, trainer, pl_module):
                store = process_state().membership._hosted
                if store is not None:
                    seen.update({k: store.get(k) for k in store.list_keys() if "/gen/" not in k})

        trainer = make_trainer(strategy, callbacks=[Look()])
        trainer.fit(TinyModel(), datamodule=TinyData())
        return seen

    seen, _ = run_ranks(job)
    ours = {key: value for key, value in seen.items() if key.startswith("lightning_pgroup/")}
    assert len(ours) >= 4
    for value in ours.values():
        json.loads(value)


def test_four_ranks():
    def job(rank):
        strategy = PGroupDDPStrategy(destroy="on_teardown")
        trainer = make_trainer(strategy, devices=4)
        trainer.fit(TinyModel(), datamodule=TinyData(64))
        trainer.test(TinyModel(), datamodule=TinyData(64), verbose=False)
        return whats(strategy)

    want = [("fit", "created", 1), ("fit", "destroyed", 1), ("test", "created", 2), ("test", "destroyed", 2)]
    assert run_ranks(job, size=4) == [want] * 4
