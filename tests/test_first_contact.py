"""First contact in a store that is full of what dead attempts have left (F24, F26)."""

import contextlib
import json
import threading
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from lightning_pgroup.errors import PGroupError, RanksDisagreeError, RendezvousAbandonedError, RendezvousTimeoutError
from lightning_pgroup.first_contact import meet, successor
from lightning_pgroup.greetings import Contact, Hello
from lightning_pgroup.key_waiter import KeyWaiter
from lightning_pgroup.team import join_launched

SHORT = timedelta(seconds=1)
LONG = timedelta(seconds=20)


def contact(stores, size, *, change=None, timeout=LONG, absent=()):
    """Let some ranks meet, each on a thread of its own; returns the contact or the error of each."""
    found = {}

    def run(rank):
        hello = Hello.of(rank, size, 0)
        hello = replace(hello, **(change or {}).get(rank, {}))
        try:
            store = stores()
            found[rank] = meet(store, KeyWaiter(store), hello, timeout, "here")
        except PGroupError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return [found.get(rank) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 8])
def test_all_ranks_get_the_same_token_and_each_attempt_another(stores, size):
    seen = set()
    for _ in range(3):
        found = contact(stores, size)
        assert len({one.token for one in found}) == 1
        seen.add(found[0].token)
    assert len(seen) == 3


def test_f24_what_dead_attempts_have_left_harms_nobody(stores):
    """Hellos that nobody answered, answers that nobody read, and a rank that died between its number and its hello."""
    store = stores()
    for rank in (1, 2, 1):
        number = store.add("hellos", 1)
        store.set(f"hello/{number}", json.dumps(asdict(Hello.of(rank, 3, 7))))
    store.add("hellos", 1)
    store.set("answer/of-old", json.dumps({"token": "old", "attempt": 0, "refused": ""}))
    found = contact(stores, 2)
    assert all(isinstance(one, Contact) for one in found), found
    assert "old" not in {one.token for one in found}


def test_the_keys_of_the_attempt_before_are_deleted():
    store = HashStore()
    first = contact(lambda: store, 2)[0].token
    store.set(f"{first}/round/1/outcome", "x")
    counts = []
    for _ in range(4):
        contact(lambda: store, 2)
        counts.append(store.num_keys())
    assert not store.check([f"{first}/round/1/outcome"])
    assert len(set(counts)) == 1, "the store does not grow with the attempts"


@pytest.mark.parametrize("again", [0, 1])
def test_a_rank_that_was_started_again_is_seen_by_those_it_had_met(again, stores):
    """Though it has not met anybody yet, since the others are still busy with the ranks that are over."""
    first = contact(stores, 2)
    assert [successor(stores(), one) for one in first] == ["", ""]
    contact(stores, 2, timeout=SHORT, absent={1 - again})
    for one in first:
        assert successor(stores(), one).startswith(f"rank {again}")
    second = contact(stores, 2)
    assert [successor(stores(), one) for one in second] == ["", ""]
    for one in first:
        assert successor(stores(), one)


def test_a_rank_that_waits_for_one_that_was_started_again_leaves(tmp_path):
    """Rank 1 is killed between two stages, where no connection breaks, and the agent of its node starts it again."""
    where, found = f"file://{tmp_path}/store", {}

    def join(rank, name):
        found[name] = join_launched(where, rank, 2, LONG, 2)

    def wait(name):
        try:
            found[name].rounds.run({}, lambda said: "", LONG, check_peers=found[name].check_peers)
        except RendezvousAbandonedError as error:
            found["error"] = str(error)

    def start(target, *args):
        threads.append(threading.Thread(target=target, args=args))
        threads[-1].start()
        return threads[-1]

    threads = []
    for one in [start(join, rank, f"old {rank}") for rank in range(2)]:
        one.join(30)
    waiting = start(wait, "old 0")
    start(join, 1, "new 1")
    waiting.join(10)
    assert "Rank 0 of 2 can not go on with the ranks that it has met at" in found["error"]
    assert "rank 1, pid" in found["error"]
    start(join, 0, "new 0")
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for rank in range(2):
        found[f"new {rank}"].check_peers()
        with pytest.raises(RendezvousAbandonedError, match="rank 0 was started again"):
            found[f"old {rank}"].check_peers()


def test_f26_the_attempt_is_what_rank_0_counts(stores):
    found = contact(stores, 2, change={0: {"attempt": 2}, 1: {"attempt": 1}})
    assert [one.attempt for one in found] == [2, 2]


def test_a_missing_rank_is_named(stores):
    zero, one, two = contact(stores, 3, timeout=SHORT, absent={2})
    assert isinstance(zero, RendezvousTimeoutError)
    assert "Rank 0 of 3 waited 1.0 s of 1.0 s at here for the other ranks, but 1 did not come: rank 2 (never seen)" in str(zero)
    assert isinstance(one, PGroupError)
    assert "rank 2 (never seen)" in str(one) or "for rank 0, which did not answer" in str(one)
    assert two is None


def test_a_missing_rank_0_is_named(stores):
    _, one = contact(stores, 2, timeout=SHORT, absent={0})
    assert isinstance(one, RendezvousTimeoutError)
    assert "Rank 1 of 2 waited 1.0 s of 1.0 s at here for rank 0, which did not answer" in str(one)


def test_a_rank_that_does_not_fit_is_named_on_all(stores):
    zero, one, two = contact(stores, 3, change={2: {"size": 4}})
    for error in (zero, two):
        assert isinstance(error, RanksDisagreeError)
        assert "rank 2, pid" in str(error)
        assert ": 4)" in str(error)
    assert isinstance(one, RendezvousAbandonedError)
    assert ": 4)" in str(one)
    assert all(isinstance(one, Contact) for one in contact(stores, 3)), "and the next contact is well"


def test_a_rank_that_does_not_fit_and_is_dead_harms_nobody(stores):
    store = stores()
    number = store.add("hellos", 1)
    store.set(f"hello/{number}", json.dumps(asdict(Hello.of(3, 4, 0))))
    assert all(isinstance(one, Contact) for one in contact(stores, 2))


class Confirming:
    """The store as a rank sees it, of which each confirmation, or question how many there are, also calls a function."""

    def __init__(self, inner, act):
        self.inner, self.act = inner, act

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def add(self, key, amount):
        count = self.inner.add(key, amount)
        if key.endswith("/confirmed"):
            self.act(count)
        return count


def test_a_rank_that_confirms_dies_and_is_started_again_counts_once(stores):
    """Else rank 0 would go on without the rank that has not confirmed yet."""
    first = threading.Event()
    found = {}

    def die(count):
        first.set()
        raise SystemExit

    def run(name, rank, wrap=lambda store: store):
        store = stores()
        with contextlib.suppress(SystemExit):
            found[name] = meet(wrap(store), KeyWaiter(store), Hello.of(rank, 3, 0), LONG, "here")

    threads = [
        threading.Thread(target=run, args=args) for args in (("zero", 0), ("dying", 1, lambda store: Confirming(store, die)))
    ]
    for thread in threads:
        thread.start()
    assert first.wait(20)
    threads.append(threading.Thread(target=run, args=("again", 1)))
    threads[-1].start()
    last = threading.Thread(target=run, args=("two", 2))
    assert not found, "rank 2 has not come"
    last.start()
    for thread in [*threads, last]:
        thread.join(30)
        assert not thread.is_alive()
    assert len({found[name].token for name in ("zero", "again", "two")}) == 1


def test_rank_0_that_gives_up_frees_the_others():
    """By an interrupt, or whatever else ends it while it waits for the last one."""

    store = HashStore()
    found = {}

    def guest():
        try:
            meet(store, KeyWaiter(store), Hello.of(1, 3, 0), LONG, "here")
        except PGroupError as error:
            found[1] = error

    thread = threading.Thread(target=guest)
    thread.start()

    def interrupt(count):
        if count:
            raise KeyboardInterrupt("now")

    with pytest.raises(KeyboardInterrupt):
        meet(Confirming(store, interrupt), KeyWaiter(store), Hello.of(0, 3, 0), LONG, "here")
    thread.join(10)
    assert not thread.is_alive()
    assert "KeyboardInterrupt: now" in str(found[1])
