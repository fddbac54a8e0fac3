"""Blocks of `process_group` that do not end well: nobody waits, all know why, and the next block starts clean."""

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_pgroup import PGroupDDPStrategy, PGroupError, destroy_process_group, membership, process_group
from lightning_pgroup.gloo_interface import VARIABLE
from lightning_pgroup.process_state import process_state
from tests.blocks import Lines, block, generation, rank_sum
from tests.faults import PATIENCE, Boom, fit
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks
from tests.test_interrupted_ends import Alarm, ring


def attempt(context, body):
    """Run a body in a block and say how it ended, and when, on a clock that all ranks share."""
    kind, notes = None, []
    try:
        with context:
            body()
    except BaseException as error:
        kind, notes = type(error).__name__, list(getattr(error, "__notes__", []))
    return {"kind": kind, "notes": notes, "at": time.monotonic(), "gone": not dist.is_initialized()}


def backward():
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    for _ in range(50):
        model(torch.ones(1, 2)).sum().backward()


WAITS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "barrier": lambda: dist.barrier(),
    "backward": backward,
    "new_group": lambda: dist.new_group(),
    "sub-group": lambda: dist.barrier(dist.new_group()),
    "a stage": lambda: make_trainer(PGroupDDPStrategy(), devices=dist.get_world_size()).fit(TinyModel(), datamodule=TinyData()),
    "nothing": lambda: None,
}


def check_rows(size, rows):
    """Go through rows in one set of ranks: some fail with some error while the others wait, and a good block follows."""

    def job(rank):
        found = []
        for number, (failing, wait, error, on_error) in enumerate(rows):

            def body(failing=failing, wait=wait, error=error):
                dist.barrier()
                if rank in failing:
                    raise error(f"on rank {rank}")
                WAITS[wait]()

            ended = attempt(block(rank, size, timeout=30, on_error=on_error), body)
            with block(rank, size):
                found.append((ended, generation() == 2 * number + 2, rank_sum(rank)))
        return found

    results = run_ranks(job, size=size, deadline=60)
    for number, (failing, wait, error, on_error) in enumerate(rows):
        first = min(results[rank][number][0]["at"] for rank in failing)
        for rank in range(size):
            row = f"{wait}, {error.__name__} on {failing}, rank {rank}"
            ended, next_generation, total = results[rank][number]
            assert next_generation, row
            assert total == sum(range(size)), row
            assert ended["at"] - first < PATIENCE, f"{row} came back after {ended['at'] - first:.1f} s"
            if rank in failing:
                assert ended["kind"] == error.__name__, row
                assert ended["gone"] == (on_error != "keep"), row
            elif wait != "nothing":
                assert ended["kind"] is not None, row
            if ended["kind"] is not None and on_error != "keep":
                assert len(ended["notes"]) == 1, f"{row}: {ended['notes']}"
                assert f"in 'process_group': {error.__name__}: on rank" in ended["notes"][0], row
                assert f"was on rank {min(failing)} (" in ended["notes"][0] or len(failing) > 1, row


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}], ids=str)
def test_two_ranks_of_which_some_raise(failing):
    check_rows(2, [(failing, wait, Boom, None) for wait in WAITS])


@pytest.mark.parametrize("failing", [{3}, {0, 2}], ids=str)
def test_four_ranks_of_which_some_raise(failing):
    check_rows(4, [(failing, wait, Boom, None) for wait in ("all_reduce", "new_group", "backward")])


def test_every_kind_of_exception_counts():
    check_rows(2, [({1}, "all_reduce", kind, None) for kind in (KeyboardInterrupt, SystemExit, StopIteration)])


@pytest.mark.parametrize("on_error", ["abort", "destroy"])
def test_what_happens_to_the_group_is_a_choice(on_error):
    check_rows(2, [({1}, "all_reduce", Boom, on_error)])


def test_kept_for_the_handling_of_the_error_until_the_next_block():
    def job(rank):
        with pytest.raises(Boom), block(rank, on_error="keep"):
            raise Boom
        total, number = rank_sum(rank), generation()
        with block(rank):
            return total, number, generation(), rank_sum(rank)

    assert run_ranks(job) == [(1.0, 1, 2, 1.0)] * 2


def test_an_error_that_leaves_an_inner_block_frees_the_others_when_it_leaves_the_outer_one():
    def job(rank):
        def body():
            with process_group(), process_group():
                if rank == 1:
                    raise Boom("inside")
                rank_sum(rank)

        ended = attempt(block(rank), body)
        with block(rank):
            return ended, rank_sum(rank)

    results = run_ranks(job, deadline=20)
    assert [total for _, total in results] == [1.0, 1.0]
    for ended, _ in results:
        assert ended["gone"]
        assert len(ended["notes"]) == 1
        assert "on rank 1" in ended["notes"][0]
    assert results[0][0]["at"] - results[1][0]["at"] < PATIENCE


def test_a_body_that_destroys_the_group_itself():
    def job(rank):
        with Lines() as log, block(rank):
            destroy_process_group(dist.new_group())
            with pytest.raises(PGroupError, match=r"'process_group' is running\. .* it ends with that block"):
                destroy_process_group()
            assert rank_sum(rank) == 1.0
            dist.destroy_process_group()
        assert log.about("lost for process_group", "other code destroyed it")
        with block(rank):
            dist.destroy_process_group()
            with process_group():  # the ranks of the block around it, which has lost its group
                inner = (generation(), rank_sum(rank))
            assert rank_sum(rank) == 1.0
        assert attempt(block(rank), lambda: (dist.destroy_process_group(), {}["x"]))["kind"] == "KeyError"
        with block(rank):
            return inner, generation(), rank_sum(rank), dist.is_initialized()

    assert run_ranks(job) == [((3, 1.0), 5, 1.0, True)] * 2


def test_an_old_handle_of_the_default_group_does_not_end_the_new_one():
    def job(rank):
        with block(rank) as old:
            pass
        with block(rank):
            destroy_process_group(old)
            return rank_sum(rank)

    assert run_ranks(job) == [1.0, 1.0]


def test_a_rank_that_fails_on_a_thread_of_its_own():
    def job(rank):
        found = []

        def body():
            if rank == 1:
                raise Boom
            rank_sum(rank)

        thread = threading.Thread(target=lambda: found.append(attempt(block(rank), body)))
        thread.start()
        thread.join()
        with block(rank):
            return found[0], rank_sum(rank)

    results = run_ranks(job, deadline=20)
    assert [ended["kind"] for ended, _ in results] == ["RuntimeError", "Boom"]
    assert all("on rank 1" in ended["notes"][0] and total == 1.0 for ended, total in results)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed(victim):
    """Rank 0 hosts the store."""

    def job(rank):
        def body():
            dist.barrier()
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            rank_sum(rank)

        membership.LEAVE_TIMEOUT = timedelta(seconds=0.1)  # nobody is left that could leave
        start = time.monotonic()
        return attempt(block(rank), body), time.monotonic() - start

    results = run_ranks(job, expect_death={victim}, deadline=20)
    ended, took = results[1 - victim]
    assert took < PATIENCE + 1
    assert ended["kind"] == "RuntimeError"
    assert ended["gone"]
    said = "The store does not answer any more" if victim == 0 else "Nothing was heard from rank 1: it was killed"
    assert said in ended["notes"][0]


def test_an_interrupt_while_it_waits_for_the_others_to_come():
    given_up = multiprocessing.get_context("fork").Event()

    def interrupt():
        pause = threading.Event()
        while not any(thread.name == "lightning-pgroup-round" for thread in threading.enumerate()):
            pause.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    def job(rank):
        if rank == 0:
            threading.Thread(target=interrupt).start()
        else:
            assert given_up.wait(20)
        ended = attempt(block(rank, rendezvous_timeout=20), lambda: None)
        given_up.set()
        with block(rank):
            return ended["kind"], generation(), rank_sum(rank)

    assert run_ranks(job, deadline=30) == [("KeyboardInterrupt", 1, 1.0), ("RendezvousAbandonedError", 1, 1.0)]


@pytest.mark.parametrize("failing", [True, False], ids=["a failed block", "a good block"])
def test_signals_at_any_moment_around_a_block(failing):
    """Sixty, on one rank of two; the next block of both works, and nothing is left."""

    def job(rank):
        chance, found, lifecycle = random.Random(failing), [], process_state().lifecycle
        enter = lifecycle.enter

        def enter_and_arm(*args, **kwargs):
            stage = enter(*args, **kwargs)  # a signal before that keeps the rank out of the block
            signal.setitimer(signal.ITIMER_REAL, delay)
            return stage

        for _ in range(60):
            who, delay = chance.randrange(2), chance.uniform(1e-6, 0.02)

            def body(who=who):
                if failing and rank == who:
                    raise Boom("the first")
                rank_sum(rank)

            signal.signal(signal.SIGALRM, ring)
            try:
                lifecycle.enter = enter_and_arm if rank == who else enter
                ended = attempt(block(rank), body)  # its block is dropped, if a signal came right before its end
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                ended = None
            lifecycle.enter = enter
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            alive, left = dist.is_initialized(), VARIABLE in os.environ
            with block(rank):
                found.append((ended, alive, left, rank_sum(rank), len(process_state().lifecycle._stages)))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return found

    results = run_ranks(job, deadline=50)
    assert sum(ended is None or ended["kind"] == "Alarm" for found in results for ended, *_ in found) > 10, "hardly any signals"
    for row in zip(*results, strict=True):
        for ended, alive, left, total, stages in row:
            assert not alive, "a group was left"
            assert not left, "a variable was left"
            assert stages == 1, "a block was left open"
            assert total == 1.0
            kinds = (None, "Boom", "Alarm", "RuntimeError", "RendezvousAbandonedError")
            assert ended is None or ended["kind"] in kinds
        both = [ended["at"] for ended, *_ in row if ended is not None]
        assert max(both) - min(both) < PATIENCE if len(both) == 2 else True


def numbers(context):
    with context:
        while True:
            yield generation()


def test_a_generator_that_is_closed_in_the_middle_of_its_block():
    def job(rank):
        reader = numbers(block(rank))
        first = next(reader)
        reader.close()
        gone = not dist.is_initialized()
        second = next(iter(numbers(block(rank))))  # nobody holds it any more
        with block(rank):
            return first, gone, second, generation(), rank_sum(rank)

    assert run_ranks(job, deadline=20) == [(1, True, 2, 3, 1.0)] * 2


def test_a_generator_that_the_collector_closes_while_the_owner_is_at_work():
    """It closes wherever memory is asked for, also in the middle of an operation on the same group."""

    def job(rank):
        lifecycle, reader = process_state().lifecycle, numbers(block(rank))
        next(reader)
        inside = lifecycle._turns.run(lambda: (reader.close(), dist.is_initialized()))[1]
        after = dist.is_initialized()
        with block(rank):
            return inside, after, rank_sum(rank)

    assert run_ranks(job, deadline=20) == [(True, False, 1.0)] * 2


def test_a_block_that_is_dropped_without_its_end():
    def job(rank):
        context = block(rank)
        context.__enter__()
        rank_sum(rank)
        del context
        gone = not dist.is_initialized()
        with block(rank):
            return gone, generation(), rank_sum(rank)

    assert run_ranks(job, deadline=20) == [(True, 2, 1.0)] * 2


class SetupFails(PGroupDDPStrategy):
    """Fails before it asks for its group."""

    def setup_environment(self):
        raise Boom("inner")


@pytest.mark.parametrize(("size", "where"), [(2, "a step"), (4, "a step"), (2, "before its group"), (2, "a collective")])
def test_an_inner_stage_that_fails_on_one_rank_frees_the_others(size, where):
    """The failure is caught inside the block: the others would wait for this rank, and then be one collective behind."""

    def inner(rank, fails):
        if where == "a collective":
            if fails:
                with block(rank, size, timeout=60):
                    raise Boom("inner")
            with block(rank, size, timeout=60):
                dist.all_reduce(torch.ones(1))
            return
        kind = SetupFails if fails and where == "before its group" else PGroupDDPStrategy
        faults = [("module", "training_step", Boom("inner"))] if fails and where == "a step" else []
        fit(kind(timeout=60), faults=faults, devices=size)

    def job(rank):
        found = []
        with block(rank, size, timeout=60):
            try:
                inner(rank, fails=rank == 1)
            except Exception as error:
                found += [type(error).__name__, time.monotonic(), error.__notes__[0]]
            found.append(dist.is_initialized())
            with block(rank, size, timeout=60):
                found.append(rank_sum(rank))
        found.append(dist.is_initialized())
        with block(rank, size, timeout=60):
            found.append(rank_sum(rank))
        return found

    results = run_ranks(job, size, deadline=30)
    for rank, (kind, _, note, alive, total, left, later) in enumerate(results):
        assert kind == ("Boom" if rank == 1 else "RuntimeError")
        assert "was on rank 1" in note
        assert not alive, "the group was dropped, and what comes next inside the block gets another one"
        assert total == later == sum(range(size))
        assert not left
    times = [at for _, at, *_ in results]
    assert max(times) - min(times) < PATIENCE


def test_an_inner_stage_that_fails_on_all_ranks_leaves_the_group_to_the_block():
    def job(rank):
        with block(rank, timeout=60):
            for _ in range(3):
                with contextlib.suppress(Boom):
                    fit(PGroupDDPStrategy(timeout=60), faults=[("module", "on_train_start", Boom("both"))])
            total = torch.ones(1)
            dist.all_reduce(total)
        return int(total)

    assert run_ranks(job, deadline=30) == [2, 2]
