"""Rounds over real stores, with threads as ranks."""

import contextlib
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore

from lightning_pgroup.errors import RanksDisagreeError, RendezvousAbandonedError, RendezvousTimeoutError
from lightning_pgroup.rounds import Rounds
from lightning_pgroup.store import LOOPBACK, Endpoint, connect_store, host_store, listen

LONG = timedelta(seconds=20)
SHORT = timedelta(seconds=0.2)


def everything(said):
    return json.dumps([one["stage"] for one in said])


def never_asked(said):
    pytest.fail("a round that was given up must not be answered")


def in_threads(count, function):
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(function, index) for index in range(count)]
        return [future.result(30) for future in futures]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_get_the_answer_of_the_last(stores, size):
    rounds = [Rounds(PrefixStore("run", stores()), rank, size) for rank in range(size)]

    def run(rank):
        return [rounds[rank].run({"stage": f"{number}-{rank}"}, everything, LONG) for number in range(20)]

    answers = in_threads(size, run)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0] == [json.dumps([f"{number}-{rank}" for rank in range(size)]) for number in range(20)]


def test_keys_stay_few(stores):
    watcher = stores()
    rounds = [Rounds(PrefixStore("run", stores()), rank, 2) for rank in range(2)]

    def run(rank, count):
        for _ in range(count):
            rounds[rank].run({"stage": "fit"}, everything, LONG)

    in_threads(2, lambda rank: run(rank, 3))
    early = len(watcher.list_keys())
    in_threads(2, lambda rank: run(rank, 50))
    assert len(watcher.list_keys()) == early <= 8  # the terms, each rank, two rounds, and one of a file


def test_a_missing_rank_is_named_and_located(stores):
    store = PrefixStore("run", stores())
    rounds = [Rounds(store, rank, 3) for rank in range(3)]
    in_threads(3, lambda rank: rounds[rank].run({"stage": "fit"}, everything, LONG))
    rounds[2].note("finished fit")

    def late(rank):
        with pytest.raises(RendezvousTimeoutError) as caught:
            rounds[rank].run({"stage": "test"}, everything, SHORT)
        return str(caught.value)

    text = late(0)
    assert "Rank 0 of 3 waited 0.2 s of 0.2 s" in text
    assert "rank 1 (last seen at " in text
    assert "rank 2 (last seen at " in text
    assert "'finished fit'" in text


def test_a_rank_that_never_came_is_said_to_be_so():
    rounds = Rounds(HashStore(), 1, 2)
    with pytest.raises(RendezvousTimeoutError, match=r"1 did not come: rank 0 \(never seen\)"):
        rounds.run({"stage": "fit"}, everything, SHORT)


def test_a_timeout_is_also_a_timeout_error_and_a_runtime_error():
    assert issubclass(RendezvousTimeoutError, TimeoutError)
    assert issubclass(RendezvousTimeoutError, RuntimeError)


def test_after_a_round_was_abandoned_all_meet_in_the_next(stores):
    rounds = [Rounds(PrefixStore("run", stores()), rank, 2) for rank in range(2)]
    for _ in range(3):
        with pytest.raises(RendezvousTimeoutError):
            rounds[0].run({"stage": "early"}, everything, SHORT)
    rounds[0].note("raised in early")
    # Rank 1 comes late to three abandoned rounds, is told so in each, and meets rank 0 in the fourth.
    for _ in range(3):
        with pytest.raises(RendezvousAbandonedError, match="'late': rank 0 is not there for it, it had given up waiting"):
            rounds[1].run({"stage": "late"}, never_asked, LONG)
    answers = in_threads(2, lambda rank: rounds[rank].run({"stage": f"met {rank}"}, everything, LONG))
    assert answers == [json.dumps(["met 0", "met 1"])] * 2


def test_many_abandoned_rounds_leave_no_keys(stores):
    watcher = stores()
    rounds = [Rounds(PrefixStore("run", stores()), rank, 2) for rank in range(2)]
    for _ in range(5):
        with pytest.raises(RendezvousTimeoutError):
            rounds[1].run({"stage": "x"}, everything, timedelta(seconds=0.01))
        with pytest.raises(RendezvousAbandonedError):
            rounds[0].run({"stage": "x"}, everything, LONG)
    for _ in range(2):
        in_threads(2, lambda rank: rounds[rank].run({"stage": "y"}, everything, LONG))
    assert len(watcher.list_keys()) <= 8


def test_an_interrupt_abandons_the_round():
    store = HashStore()
    rounds = [Rounds(store, rank, 2) for rank in range(2)]

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounds[0].run({"stage": "fit"}, everything, LONG, check_peers=interrupt)
    with pytest.raises(RendezvousAbandonedError, match="rank 0 is not there for it, KeyboardInterrupt"):
        rounds[1].run({"stage": "fit"}, everything, LONG)
    answers = in_threads(2, lambda rank: rounds[rank].run({"stage": "next"}, everything, LONG))
    assert answers == [json.dumps(["next", "next"])] * 2


def test_a_failing_answer_frees_the_others():
    store = HashStore()
    rounds = [Rounds(store, rank, 2) for rank in range(2)]
    waiting = threading.Event()

    def broken(said):
        raise ZeroDivisionError

    def first():
        with contextlib.suppress(RendezvousAbandonedError):
            rounds[0].run({"stage": "fit"}, everything, LONG, check_peers=waiting.set)

    thread = threading.Thread(target=first)
    thread.start()
    assert waiting.wait(10)
    with pytest.raises(ZeroDivisionError):
        rounds[1].run({"stage": "fit"}, broken, LONG)
    thread.join(10)
    assert not thread.is_alive()


def test_waiting_is_open_to_other_threads_of_the_client():
    """F21: a blocking wait holds the lock of its client; ours has a client of its own."""
    host = host_store(listen(LOOPBACK), LONG)
    client = connect_store(Endpoint(LOOPBACK, host.port), LONG)
    rounds = Rounds(client, 0, 2)
    waiting = threading.Event()
    took = []

    def other():
        assert waiting.wait(10)
        start = time.monotonic()
        client.set("x", "1")
        assert client.get("x") == b"1"
        took.append(time.monotonic() - start)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(RendezvousTimeoutError):
        rounds.run({"stage": "fit"}, everything, timedelta(seconds=3), check_peers=waiting.set)
    thread.join()
    assert took[0] < 1.0


def test_a_rank_that_stays_away_frees_those_that_wait_and_stays_in_step(stores):
    rounds = [Rounds(PrefixStore("run", stores()), rank, 2) for rank in range(2)]
    waiting = threading.Event()
    told = []

    def first():
        with pytest.raises(RendezvousAbandonedError) as caught:
            rounds[0].run({"stage": "fit"}, everything, LONG, check_peers=waiting.set)
        told.append(str(caught.value))

    thread = threading.Thread(target=first)
    thread.start()
    assert waiting.wait(10)
    rounds[1].abandon("it has failed before: ValueError: x")
    thread.join(10)
    assert told == ["Rank 0 of 2 can not start 'fit': rank 1 is not there for it, it has failed before: ValueError: x."]
    # Both may stay away from the same round; the first word stands.
    for one in rounds:
        one.abandon(f"both {one._rank}")
    answers = in_threads(2, lambda rank: rounds[rank].run({"stage": "met"}, everything, LONG))
    assert answers == [json.dumps(["met", "met"])] * 2


class WithoutClone:
    """A store as older versions of torch have it."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        if name == "clone":
            raise AttributeError(name)
        return getattr(self._store, name)


def test_a_store_without_clone_is_polled():
    store = WithoutClone(HashStore())
    rounds = [Rounds(store, rank, 2) for rank in range(2)]
    assert in_threads(2, lambda rank: rounds[rank].run({"stage": str(rank)}, everything, LONG)) == ['["0", "1"]'] * 2
    with pytest.raises(RendezvousTimeoutError):
        rounds[0].run({"stage": "x"}, everything, SHORT)


class Counting:
    """Counts the operations that go through it."""

    def __init__(self, store):
        self._store = store
        self.count = 0

    def __getattr__(self, name):
        attribute = getattr(self._store, name)
        if callable(attribute) and name not in ("clone", "has_extended_api"):
            self.count += 1
        return attribute


def test_operations_per_rank_do_not_depend_on_the_number_of_ranks():
    most = {}
    for size in (2, 8, 32):
        store = HashStore()
        clients = [Counting(store) for _ in range(size)]
        rounds = [Rounds(client, rank, size) for rank, client in enumerate(clients)]
        for _ in range(2):
            in_threads(size, lambda rank, rounds=rounds: rounds[rank].run({"stage": "fit"}, everything, LONG))
        for client in clients:
            client.count = 0
        in_threads(size, lambda rank, rounds=rounds: rounds[rank].run({"stage": "fit"}, everything, LONG))
        most[size] = max(client.count for client in clients)
    assert most[2] == most[8] == most[32] <= 8


def test_a_rank_that_was_told_another_number_ends_the_round_for_all(stores):
    rounds = [Rounds(PrefixStore("run", stores()), rank, size) for rank, size in enumerate((3, 3, 4))]

    def run(rank):
        with pytest.raises(RanksDisagreeError) as caught:
            rounds[rank].run({"stage": "fit"}, never_asked, LONG)
        return str(caught.value)

    for _ in range(2):
        for text in in_threads(3, run):
            assert "the ranks differ in the number of ranks (rank" in text
            assert ": 3" in text
            assert "rank 2, pid" in text
            assert ": 4" in text


def test_a_second_process_with_the_same_rank_does_not_disturb_the_first(stores):
    rounds = [Rounds(PrefixStore("run", stores()), rank, 2) for rank in (0, 1, 1)]
    in_threads(2, lambda rank: rounds[rank].run({"stage": "fit"}, everything, LONG))
    for _ in range(2):
        with pytest.raises(RanksDisagreeError, match="another process is rank 1 of this run already, pid"):
            rounds[2].run({"stage": "fit"}, never_asked, LONG)
    answers = in_threads(2, lambda rank: rounds[rank].run({"stage": "next"}, everything, LONG))
    assert answers == [json.dumps(["next", "next"])] * 2


def test_the_place_is_part_of_what_is_said():
    rounds = Rounds(HashStore(), 0, 2)
    rounds.where = "tcp://node7:4711"
    with pytest.raises(
        RendezvousTimeoutError, match="for the other ranks to start 'fit' at tcp://node7:4711, but 1 did not come"
    ):
        rounds.run({"stage": "fit"}, everything, SHORT)


class Alarm(Exception):
    """What the handler of a signal raises in the middle of a wait."""


def test_an_interrupt_while_this_rank_answers_does_not_take_the_answer_back():
    """It counts the round as passed while its thread is still in it, and must not delete what the others are to read."""
    given_up, answered = threading.Event(), threading.Event()

    class Slow(HashStore):
        def compare_set(self, key, expected, value):
            if "abandoned" in value:
                given_up.set()
                assert answered.wait(10)
            return super().compare_set(key, expected, value)

    class Watched(Rounds):
        def _close(self, *args):
            try:
                return super()._close(*args)
            finally:
                answered.set()

    def answer(said):
        os.kill(os.getpid(), signal.SIGUSR2)
        assert given_up.wait(10)
        return everything(said)

    def ring(*args):
        raise Alarm

    store = Slow()
    other, this = Rounds(store, 0, 2), Watched(store, 1, 2)
    before = signal.signal(signal.SIGUSR2, ring)
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(other.run, {"stage": "fit"}, everything, LONG)
            while not store.check(["round/1/arrived"]):
                threading.Event().wait(0.01)
            with pytest.raises(Alarm):
                this.run({"stage": "fit"}, answer, LONG)
            assert this.settle("an alarm") == waiting.result(10) == json.dumps(["fit", "fit"])
    finally:
        signal.signal(signal.SIGUSR2, before)
