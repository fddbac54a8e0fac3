"""Ended groups are let go of on threads of their own (F17), which are few, and over before a fork, a close and an exit."""

import multiprocessing
import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_pgroup import PGroupDDPStrategy, destroy_process_group, gloo_workers
from lightning_pgroup.bounded import Call
from lightning_pgroup.process_state import process_state
from lightning_pgroup.release import MOST, Releases
from tests.models import TinyData, TinyModel, make_trainer, whats
from tests.ranks import run_ranks

SOON = timedelta(seconds=0.05)
LONG = timedelta(seconds=30)


class Slow:
    """Like a group whose destructor takes long."""

    def __init__(self):
        self.begun, self.go_on, self.ended = threading.Event(), threading.Event(), threading.Event()

    def handle(self):
        return _Handle(self)


class _Handle:
    def __init__(self, slow):
        self._slow = slow

    def __del__(self):
        self._slow.begun.set()
        self._slow.go_on.wait(30)
        self._slow.ended.set()


def test_a_drain_returns_when_the_destructor_has_ended():
    slow = Slow()
    slow.go_on.set()
    groups = [slow.handle()]
    assert Releases().drain(groups, LONG)
    assert slow.ended.is_set()
    assert groups == []


def test_a_destructor_that_waits_is_given_up_on_time_and_not_stopped():
    slow, releases = Slow(), Releases()
    assert not releases.drain([slow.handle()], SOON)
    releases.finish(SOON)
    assert slow.begun.is_set()
    assert not slow.ended.is_set()
    slow.go_on.set()
    assert slow.ended.wait(30)


def test_no_more_than_a_few_destructors_run_at_once():
    releases, slow = Releases(), [Slow() for _ in range(MOST + 1)]
    for one in slow[:MOST]:
        releases.start([one.handle()])
    last = [slow[MOST].handle()]
    assert not releases.drain(last, SOON)
    assert len(last) == 1
    assert not slow[MOST].begun.is_set()
    for one in slow:
        one.go_on.set()
    assert releases.drain(last, LONG)
    releases.finish(LONG)
    assert all(one.ended.is_set() for one in slow)


def test_each_thread_that_forks_or_exits_waits_also_while_another_one_does(monkeypatch):
    releases, slow, waiting = Releases(), Slow(), threading.Semaphore(0)
    wait_for_end = Call.wait_for_end
    monkeypatch.setattr(Call, "wait_for_end", lambda *args, **kwargs: (waiting.release(), wait_for_end(*args, **kwargs))[1])
    releases.start([slow.handle()])
    ended = []
    threads = [threading.Thread(target=lambda: (releases.finish(LONG), ended.append(slow.ended.is_set()))) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert waiting.acquire(timeout=10)
    slow.go_on.set()
    for thread in threads:
        thread.join(10)
    assert ended == [True] * 2


def test_two_threads_may_wait_for_the_same_call():
    slow = Slow()
    call = Call(slow.handle().__del__)
    call.start("test")
    ended = []
    waiting = [threading.Thread(target=lambda: ended.append(call.wait_for_end(LONG))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    slow.go_on.set()
    for thread in waiting:
        thread.join(10)
    assert ended == [True] * 3


@pytest.mark.parametrize("act", ["fork", "close", "end of the process"])
def test_destructors_are_waited_for_before(act):
    """Else a child would have half of one, or the interpreter end in the middle of it."""

    def job(rank):
        slow, strategy = Slow(), PGroupDDPStrategy()
        make_trainer(strategy, devices=1).test(TinyModel(), datamodule=TinyData(), verbose=False)
        process_state().lifecycle._custody.graveyard._releases.start([slow.handle()])
        assert slow.begun.wait(30)
        threading.Timer(0.05, slow.go_on.set).start()  # the act can not do it, since it waits
        if act == "fork":
            child = os.fork()
            if not child:
                os._exit(0 if slow.ended.is_set() else 1)
            assert os.waitpid(child, 0)[1] == 0
            strategy.close()
        elif act == "close":
            strategy.close()
        else:
            process_state().end()
        return slow.ended.is_set()

    assert run_ranks(job, size=1) == [True]


def test_f17_a_destroy_does_not_wait_for_gloos_event_loop():
    """Its threads are seen to be alive when the destroy has returned, at least now and then, and are few after many of them."""

    def job(rank):
        strategy = PGroupDDPStrategy(destroy="on_teardown")
        trainer = make_trainer(strategy)
        early, most = 0, 0
        for _ in range(20):
            trainer.test(TinyModel(), datamodule=TinyData(), verbose=False)
            loops = sum(gloo_workers._name_of(task) == b"gloo_tcp_loop" for task in os.listdir("/proc/self/task"))
            early, most = early + (loops > 0), max(most, loops)
            assert not dist.is_initialized()
        strategy.close()
        after = sum(gloo_workers._name_of(task) == b"gloo_tcp_loop" for task in os.listdir("/proc/self/task"))
        return early, most, after, {what for _, what, _ in whats(strategy)}

    for early, most, after, happened in run_ranks(job):
        assert early > 0
        assert most <= MOST
        assert after == 0
        assert happened == {"created", "destroyed"}


def end_with_pending_work(hold):
    """Rank 1 joins in a collective when rank 0 is already in its destroy, so the connections must not be cut before.

    Rank 0 drops what ``hold()`` has returned when its destroy first looks whether anything is pending.
    """
    waits = multiprocessing.get_context("fork").Event()

    def job(rank):
        strategy = PGroupDDPStrategy(destroy="at_exit", timeout=20)
        make_trainer(strategy).test(TinyModel(), datamodule=TinyData(), verbose=False)
        held, tensor = hold(), torch.ones(1)
        if rank == 0:
            have_left, asked = gloo_workers.GlooWorkers.have_left, []

            def ask(self):
                held.clear()
                asked.append(have_left(self))
                if len(asked) == 5:
                    waits.set()
                return asked[-1]

            gloo_workers.GlooWorkers.have_left = ask
            dist.all_reduce(tensor, async_op=True)
            strategy.destroy_process_group()
            waits.set()
            assert not any(asked[:4])
        else:
            assert waits.wait(20)
            dist.all_reduce(tensor)
        strategy.destroy_process_group()
        return tensor.item(), whats(strategy)[-1]

    assert run_ranks(job) == [(2.0, ("", "destroyed", 1))] * 2


def test_work_that_is_pending_at_a_destroy_still_comes_to_its_end():
    end_with_pending_work(list)


def test_threads_of_a_group_that_ended_before_are_not_taken_for_those_of_the_one_that_ends():
    """Somebody drops a sub-group that he has held, while the end of the default group waits for what is pending in that."""

    def hold():
        group = dist.new_group([0, 1])
        destroy_process_group(group)
        return [group]

    end_with_pending_work(hold)


def test_where_threads_can_not_be_seen_a_destroy_waits_for_the_whole_destructor(monkeypatch):
    def job(rank):
        monkeypatch.setattr(gloo_workers, "_TASKS", "/nowhere")
        strategy = PGroupDDPStrategy(destroy="on_teardown")
        make_trainer(strategy).test(TinyModel(), datamodule=TinyData(), verbose=False)
        return [one.done for one in process_state().lifecycle._custody.graveyard._releases._running], whats(strategy)[-1]

    assert run_ranks(job) == [([], ("test", "destroyed", 1))] * 2
