"""A rank that fails while others wait for it where no socket is yet: in the rendezvous, and in the creation of a group."""

import multiprocessing
import os
import random
import signal
import sys
import threading

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_pgroup import PGroupDDPStrategy
from lightning_pgroup.gloo_wire import parse
from lightning_pgroup.process_state import process_state
from lightning_pgroup.rounds import Rounds
from tests.faults import PATIENCE, Boom, attempt, fit, same, weights_of_a_fresh_process
from tests.ranks import run_ranks

FAULTS = {"exception": Boom("not today"), "interrupt": KeyboardInterrupt("not today"), "exit": SystemExit("not today")}


@pytest.fixture(scope="module")
def fresh():
    return {size: weights_of_a_fresh_process(PGroupDDPStrategy(), size) for size in (2, 4)}


def failing_at(owner, name, *, after, fault):
    """Let a function of torch or of ours raise, before or after it has done its work; returns how to mend it."""
    real = getattr(owner, name)

    def faulty(*args, **kwargs):
        if after:
            real(*args, **kwargs)
        raise fault

    setattr(owner, name, faulty)
    return lambda: setattr(owner, name, real)


WHERE = {
    "the round": (Rounds, "run", False),
    "the round, after it": (Rounds, "run", True),
    "the default group": (dist, "init_process_group", False),
    "the default group, after it": (dist, "init_process_group", True),
    "Lightning's group without a timeout (F29)": (dist, "new_group", False),
    "Lightning's group without a timeout, after it (F29)": (dist, "new_group", True),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("size", [2, 4])
def test_one_rank_fails_in_the_creation(where, size, fresh):
    """Twice for each rank and fault: in the first stage of the processes, and when there is a group already."""
    owner, name, after = WHERE[where]
    failing = (0, 1) if size == 2 else (0, 3)

    def job(rank):
        found = []
        for who in failing:
            for kind, fault in FAULTS.items():
                print(f"rank {rank}: {kind} of {who}", file=sys.stderr, flush=True)
                mend = failing_at(owner, name, after=after, fault=fault) if rank == who else lambda: None
                try:
                    ended = attempt(PGroupDDPStrategy(), devices=size)
                finally:
                    mend()
                # Lightning leaves Ctrl-C ignored behind one.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                alive = dist.is_initialized()
                found.append((ended, alive, same(fresh[size][rank], fit(PGroupDDPStrategy(), devices=size))))
        return found

    results = run_ranks(job, size=size, deadline=60)
    number = 0
    for who in failing:
        for kind in FAULTS:
            row = [results[rank][number] for rank in range(size)]
            number += 1
            for rank, (ended, alive, equal) in enumerate(row):
                assert ended["kind"] is not None, f"{kind} of {who}: rank {rank} went on"
                assert not alive, f"{kind} of {who}: rank {rank} has kept a group"
                assert equal, f"{kind} of {who}: the next fit of rank {rank} has other weights than one in a fresh process"
                assert abs(ended["at"] - row[who][0]["at"]) < PATIENCE, f"{kind} of {who}: rank {rank} was late"
                told = " ".join([ended["text"], *ended["notes"]])
                if rank != who:
                    assert f"rank {who}" in told, f"{kind} of {who}: rank {rank} only heard {told!r}"
                    assert "not today" in told, f"{kind} of {who}: rank {rank} only heard {told!r}"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_group_of_the_users_own(failing):
    """One rank waits in `new_group`, without a bound worth the name, for one that raises before it."""

    def job(rank):
        class Sub(Callback):
            def on_train_batch_start(self, *args):
                if rank == failing:
                    raise Boom("no group today")
                dist.new_group([0, 1])

        return attempt(PGroupDDPStrategy(), callbacks=[Sub()])

    results = run_ranks(job, deadline=20)
    assert results[failing]["kind"] == "Boom"
    assert results[1 - failing]["kind"] == "RendezvousAbandonedError"
    assert f"rank {failing} has failed: Boom" in results[1 - failing]["text"]
    assert "no group today" in results[1 - failing]["notes"][0]
    assert abs(results[0]["at"] - results[1]["at"]) < PATIENCE


def test_on_error_keep_does_not_keep_anybody_waiting_in_the_creation():
    """There is no group yet that could be kept."""

    def job(rank):
        mend = failing_at(dist, "init_process_group", after=False, fault=Boom("not today")) if rank else lambda: None
        ended = attempt(PGroupDDPStrategy(on_error="keep", destroy="at_exit"))
        mend()
        fit(PGroupDDPStrategy())
        return ended

    zero, one = run_ranks(job, deadline=20)
    assert abs(zero["at"] - one["at"]) < PATIENCE
    assert "not today" in zero["notes"][0]


def test_a_rank_that_is_killed_in_the_creation():
    """A launcher looks after the ranks that it has started, here too; without one the timeout of the group counts."""

    def job(rank):
        if rank == 1:
            dist.init_process_group = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
        ended = attempt(PGroupDDPStrategy(timeout=3))
        return ended["kind"], ended["text"]

    kind, text = run_ranks(job, deadline=20, expect_death={1})[0]
    assert kind == "RendezvousTimeoutError"
    assert "Rank 0 of 2 waited 3.0 s of 3.0 s for rank 1 of that group in the creation of a process group" in text


def test_an_interrupt_reaches_a_rank_that_waits_in_the_creation():
    """Torch's own wait is deaf to Ctrl-C."""

    pid = multiprocessing.get_context("fork").Value("i")

    def job(rank):
        real = dist.init_process_group

        def late(*args, **kwargs):
            kwargs["store"].wait([f"{1 << 20}//cpu//0/0"])  # rank 0 has told its address, and waits for ours
            os.kill(pid.value, signal.SIGINT)
            kwargs["store"].wait(["interrupted"])
            return real(*args, **kwargs)

        def told(*args, **kwargs):
            try:
                return real(*args, **kwargs)
            finally:
                kwargs["store"].set("interrupted", "1")

        if rank == 0:
            pid.value = os.getpid()
        dist.init_process_group = late if rank == 1 else told
        ended = attempt(PGroupDDPStrategy())
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning leaves it ignored
        dist.init_process_group = real
        fit(PGroupDDPStrategy())
        return ended

    zero, one = run_ranks(job, deadline=20)
    assert zero["kind"] == "SystemExit", "which is what Lightning makes of KeyboardInterrupt"
    assert "was on rank 0" in one["notes"][0]
    assert "KeyboardInterrupt" in one["notes"][0]
    assert abs(zero["at"] - one["at"]) < PATIENCE


@pytest.mark.parametrize("name", ["init_process_group", "new_group"])
def test_interrupts_at_any_moment_of_a_creation(name):
    """Forty of them, on one rank of three each, within the few milliseconds that gloo needs to collect and to connect."""

    def job(rank):
        chance, found = random.Random(name), []
        real = getattr(dist, name)
        for _ in range(40):
            who, delay = chance.randrange(3), chance.uniform(0, 0.006)

            def hit(*args, who=who, delay=delay, **kwargs):
                if rank == who:
                    threading.Timer(delay, os.kill, [os.getpid(), signal.SIGINT]).start()
                return real(*args, **kwargs)

            setattr(dist, name, hit)
            ended = attempt(PGroupDDPStrategy(destroy="on_teardown"), devices=3)
            setattr(dist, name, real)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning leaves it ignored
            found.append((who, ended))
        return found, len(fit(PGroupDDPStrategy(), devices=3))

    results = run_ranks(job, size=3, deadline=60)
    for row in zip(*(found for found, _ in results), strict=True):
        who = row[0][0]
        ends = [ended for _, ended in row]
        assert ends[who]["kind"] == "SystemExit", "which is what Lightning makes of KeyboardInterrupt"
        assert max(end["at"] for end in ends) - min(end["at"] for end in ends) < PATIENCE
        assert all("KeyboardInterrupt" in end["notes"][0] for rank, end in enumerate(ends) if rank != who)


def test_what_gloo_says_of_a_rank_has_the_form_that_we_read():
    def job(rank):
        seen = []

        class Look(Callback):
            def on_train_start(self, *args):
                seen.extend(process_state().lifecycle._custody.current._store.addresses)

        fit(PGroupDDPStrategy(), callbacks=[Look()])
        return [parse(value) for value in seen]

    for found in run_ranks(job):
        assert len(found) == 4, "two ranks, in the default group and in Lightning's own"
        for one in found:
            assert one.host == "127.0.0.1"
            assert one.port > 0
            assert len(set(one.pairs)) == 2


@pytest.mark.parametrize("garbage", [b"", b"x", bytes(8), b"\xff" * 200, bytes(7) + b"\x01" + bytes(200)])
def test_another_form_is_left_alone(garbage):
    assert parse(garbage) is None
