"""Strangers at the store: whoever writes garbage there, or only connects, makes no rank run code, crash or hang."""

import contextlib
import json
import multiprocessing
import os
import pickle
import resource
import socket
import struct
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from lightning_pgroup import (
    GarbledStoreError,
    PGroupDDPStrategy,
    PGroupError,
    RendezvousTimeoutError,
    StoreLostError,
    failure,
    payload,
)
from lightning_pgroup.agreement import Decision, Report
from lightning_pgroup.descriptors import ROOM, make_room
from lightning_pgroup.failure import FailureRecord
from lightning_pgroup.first_contact import meet
from lightning_pgroup.gloo_wire import RankAddress, call_and_hang_up, parse
from lightning_pgroup.greetings import Hello
from lightning_pgroup.introduction import Said
from lightning_pgroup.key_waiter import KeyWaiter
from lightning_pgroup.monitor import FailureMonitor
from lightning_pgroup.process_state import process_state
from lightning_pgroup.records import LifecycleEvent
from lightning_pgroup.rounds import Rounds
from lightning_pgroup.store import LOOPBACK, Endpoint, connect_store, delete_below, host_store, listen
from lightning_pgroup.team import Invitation, Team
from lightning_pgroup.watched_store import WatchedStore
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks

PATIENCE = 10.0  # the rendezvous timeout of the runs here
LONG = timedelta(seconds=20)
PROOF = Path(tempfile.gettempdir()) / f"lightning-pgroup-unpickled-{os.getpid()}"


class Bomb:
    """Unpickled, it leaves a folder as a proof of that."""

    def __reduce__(self):
        return os.mkdir, (str(PROOF),)


GARBAGE = {
    "empty object": b"{}",
    "no json": b"GET / HTTP/1.1\r\n\r\n",
    "pickle": pickle.dumps(Bomb()),
    "not utf-8": b"\xff\xfe\x00{}",
    "list": b"[1, 2]",
    "number": b"7",
    "true": b"true",
    "null": b"null",
    "huge": b'"' + b"x" * 7_000_000 + b'"',  # torch's store takes no value of 8 MiB or more
    "deep": b"[" * 100_000,
    "long number": b"9" * 10_000,
    "nan": b"NaN",
    "wrong types": json.dumps(
        {key: [[]] for key in ["size", "version", "rank", "who", "host", "pid", "round", "left", "time", "said"]}
        | {key: [[]] for key in ["answer", "refused", "abandoned", "why", "generation", "stage", "hook", "kind", "message"]}
    ).encode(),
    "negative": json.dumps(
        {"who": "x", "host": "x", "pid": 1, "round": -1, "left": False, "time": 1.0, "said": {}, "abandoned": -1, "why": "x"}
        | {"size": -1, "version": "x", "rank": -1, "generation": -1, "stage": "", "hook": "", "kind": "", "message": ""}
    ).encode(),
}


def stranger_of(invitation):
    """A client of the store as anybody can have it, below the prefix of one run."""
    return dist.PrefixStore(
        f"lightning_pgroup/{invitation.run}", connect_store(Endpoint(invitation.host, invitation.port), LONG)
    )


def fit(**kwargs):
    """Fit once; returns the error, and the seconds that it took."""
    start = time.monotonic()
    strategy = PGroupDDPStrategy(destroy="on_teardown", rendezvous_timeout=PATIENCE, timeout=10)
    try:
        make_trainer(strategy, **kwargs).fit(TinyModel(), datamodule=TinyData())
    except Exception as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def in_new_runs(cases, write, *, size=2):
    """Let ranks fit once in a run of its own for each case, after a stranger has written; returns what each rank raised."""
    barrier = multiprocessing.get_context("fork").Barrier(size)

    def job(rank):
        state, found = process_state(), {}
        first = state.membership.invitation
        for number, (name, case) in enumerate(cases.items()):
            run = Invitation(run=f"run{number}", size=size, host=first.host, port=first.port, highest=0)
            state.membership.join(run)
            if rank == 0:
                store = stranger_of(run)
                write(store, case, state.lifecycle.highest_generation + 1)
                store.check(["x"])  # the store does not answer when a key is set
            barrier.wait(30)
            error, took = fit()
            found[name] = (None if error is None else type(error), str(error or ""), took)
            # The ranks that failed may know of different generations.
            barrier.wait(30)
        return found

    found = run_ranks(job, size=size)
    assert not PROOF.exists()
    return found


def test_the_pickle_would_run_code():
    pickle.loads(GARBAGE["pickle"])
    PROOF.rmdir()


def assert_ends_well(found, *, error=None):
    for ranks in zip(*(one.items() for one in found), strict=True):
        for name, (kind, text, took) in ranks:
            assert kind is None or issubclass(kind, PGroupError), (name, kind, text)
            assert took < PATIENCE + 3, (name, took)
        kinds = {kind for _, (kind, _, _) in ranks}
        assert (error in kinds) if error else kinds == {None}, ranks


@pytest.mark.parametrize("key", ["rank/1", "terms", "round/1/outcome"])
def test_garbage_that_a_rank_would_act_by_is_an_error_that_names_the_key(key):
    found = in_new_runs(GARBAGE, lambda store, value, _: store.set(key, value))
    assert_ends_well(found, error=GarbledStoreError)
    for ranks in found:
        for name, (kind, text, _) in ranks.items():
            if kind is GarbledStoreError:
                assert (
                    f"can not start 'fit': the store in which the ranks meet has a value that no rank wrote, under {key!r}"
                    in text
                )
                assert "see docs/security.md" in text, name
                assert len(text) < 700


def test_garbage_that_is_only_good_to_know_does_not_stop_a_run():
    def write(store, value, generation):
        for key in (
            f"failure/{generation}",
            f"failure/{value[:5]!r}",
            "highest",
            "records/0",
            "gen/x/y",
            "rank/7",
            "rank/-1",
            "left/x",
        ):
            store.set(key, value)
        store.set(b"gen/\xff\xfe", value)

    assert_ends_well(in_new_runs(GARBAGE, write))


OUTCOMES = {
    "answer is no decision": {"answer": "yes"},
    "answer is a number": {"answer": 3},
    "unknown action": {"answer": json.dumps({"action": "run", "generation": 1, "why": "x", "mismatch": False, "held": []})},
    "nan": {"answer": '{"action": "create", "generation": NaN, "why": "x", "mismatch": false, "held": []}'},
    "generation 0": {"answer": json.dumps({"action": "create", "generation": 0, "why": "x", "mismatch": False, "held": []})},
    "huge generation": {
        "answer": json.dumps({"action": "create", "generation": 10**30, "why": "x", "mismatch": False, "held": []})
    },
    "reuse what is not there": {
        "answer": json.dumps({"action": "reuse", "generation": 9, "why": "x", "mismatch": False, "held": []})
    },
    "reuse nothing": {"answer": json.dumps({"action": "reuse", "generation": 0, "why": "x", "mismatch": False, "held": []})},
    "adopt what is not there": {
        "answer": json.dumps({"action": "adopt", "generation": 0, "why": "x", "mismatch": False, "held": []})
    },
    "a group that no rank knows": {"answer": Decision(action="create", generation=1, why="x", held=("x",)).to_json()},
    "abandoned by nobody": {"abandoned": 2, "why": "x"},
    "abandoned without a reason": {"abandoned": 1},
}


def test_an_outcome_that_the_ranks_can_not_have_decided():
    found = in_new_runs(OUTCOMES, lambda store, value, _: store.set("round/1/outcome", json.dumps(value)))
    assert_ends_well(found, error=GarbledStoreError)


def test_a_counter_that_is_no_number():
    """Torch's store drops the connection of a rank that adds to it, so that the process does not reach it any more."""
    (error, text, took), (other, _, later) = (
        one["x"] for one in in_new_runs({"x": b"garbage"}, lambda store, value, _: store.set("round/1/arrived", value))
    )
    assert {error, other} == {StoreLostError}
    assert "another program may have written to the store" in text
    assert max(took, later) < PATIENCE + 3


ADDRESSES = {
    "nothing": lambda own: b"",
    "one byte": lambda own: b"x",
    "text": lambda own: b"garbage garbage garbage",
    "random": lambda own: bytes(range(256))[: len(own)],
    "ones": lambda own: b"\xff" * len(own),
    "zeros": lambda own: bytes(len(own)),
    "cut": lambda own: own[:-1],
    "no pairs": lambda own: own[:-16],
    "too few pairs": lambda own: own[:-8],
    "too many pairs": lambda own: own + bytes(8),
    "huge": lambda own: own + bytes(7_000_000),
    "endless name": lambda own: struct.pack("=Q", 1 << 62) + own[8:],
    "obituary": lambda own: b"lightning_pgroup abandoned: \xff\x1b[2J" + b"x" * 100_000,
}


@pytest.mark.parametrize(("name", "whose"), [(name, whose) for name in ADDRESSES for whose in ("own", "other")][1:])
def test_gloo_never_sees_an_address_that_it_could_not_read(name, whose):
    """It reads beyond the end of one that is too short, and the process ends with SIGSEGV."""

    def job(rank):
        inner = HashStore()

        class Watched(WatchedStore):
            def set(self, key, value):
                value = value.encode() if isinstance(value, str) else bytes(value)
                if "//" in key:
                    inner.set(key if whose == "own" else f"{key[:-1]}1", ADDRESSES[name](value))
                super().set(key, value)

        store = Watched(inner, KeyWaiter(inner), LONG, "Rank 0 of 2", lambda: None)
        with pytest.raises(PGroupError) as caught:
            dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=LONG)
        return str(caught.value)

    (text,) = run_ranks(job, size=1, check_leaks=False)
    assert "Rank 0 of 2 can not go on creating a process group" in text
    assert "\x1b" not in text
    assert len(text) < 3_000


@contextlib.contextmanager
def stranger(behave):
    """A process that gets a port, does ``behave`` to it, says that it did, and stays as it is until the end of the block."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def live():
        ours.close()
        try:
            kept = behave(theirs.recv())
            theirs.send(None)
        except BaseException as error:
            theirs.send(repr(error))
            raise
        with contextlib.suppress(EOFError):
            theirs.recv()
        del kept

    process = context.Process(target=live)
    process.start()
    theirs.close()

    def meet_it(port):
        ours.send(port)
        assert ours.poll(30)
        assert ours.recv() is None

    try:
        yield meet_it
    finally:
        process.terminate()
        process.join()
        ours.close()
        process.close()


MAGIC = struct.pack("<BI", 0, 0x3C85F7CE)  # what a client of torch's store says first


def lines(count, data=b""):
    def behave(port):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < count + 100:
            resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, hard))
        kept = [socket.create_connection((LOOPBACK, port), timeout=20) for _ in range(count)]
        for line in kept:
            line.sendall(data)
        return kept

    return behave


BEHAVIOUR = {
    "silent": lines(1),
    "silent, a thousand times": lines(1_000),
    "silent after a greeting, a hundred times": lines(100, MAGIC),
    "http": lines(20, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "noise": lines(20, bytes(range(256)) * 16),
    "noise after a greeting": lines(20, MAGIC + bytes(range(7, 256)) * 16),
    "a string that never ends": lines(20, MAGIC + b"\1" + struct.pack("<Q", 1 << 62)),
}


@pytest.mark.parametrize("name", BEHAVIOUR)
def test_a_stranger_that_connects_does_not_stop_a_run(name):
    """The ranks have the usual soft limit of 1,024 descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < ROOM:
        pytest.skip(f"the system allows a process {hard} descriptors, too few for a thousand connections")
    barrier = multiprocessing.get_context("fork").Barrier(2)
    with stranger(BEHAVIOUR[name]) as meet_it:

        def job(rank):
            resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, hard))
            if rank == 0:
                make_room()  # as hosting a store does; the ranks of these tests host it before they can set the limit
                meet_it(process_state().membership.invitation.port)
            barrier.wait(30)
            return [fit() for _ in range(2)]

        for one in run_ranks(job):
            assert [error for error, _ in one] == [None, None]
            assert max(took for _, took in one) < PATIENCE


def test_a_stranger_at_the_port_of_gloo_does_not_stop_a_run():
    """Each rank listens for the others for as long as the group lives, where gloo chose to."""

    def behave(port):
        return [*lines(20)(port), *lines(20, bytes(range(256)))(port)]

    with stranger(behave) as meet_it:

        def job(rank):
            class Meeting(TinyModel):
                def on_fit_start(self):
                    if rank == 0:
                        listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
                        ports = {c.laddr.port for c in listening} - {process_state().membership.invitation.port}
                        assert ports
                        meet_it(min(ports))
                    self.trainer.strategy.barrier()
                    dist.new_group(backend="gloo")

            strategy = PGroupDDPStrategy(destroy="on_teardown", rendezvous_timeout=PATIENCE, timeout=10)
            for model in (Meeting(), TinyModel()):
                make_trainer(strategy).fit(model, datamodule=TinyData())

        run_ranks(job)


def test_a_call_goes_once_to_each_rank_and_brings_eight_bytes():
    listener = listen(LOOPBACK)
    port = listener.getsockname()[1]
    nowhere = RankAddress(socket.AF_INET6, "::ffff:255.255.255.255", 0, (0, 0))
    assert call_and_hang_up([(RankAddress(socket.AF_INET, LOOPBACK, port, (5, 6)), 1), (nowhere, 1)], timedelta(seconds=1)) == 1
    line, _ = listener.accept()
    with line, listener:
        assert line.recv(100) == struct.pack("=Q", 6)
        assert line.recv(100) == b""


def address(port=4711, *, name=b"host", pairs=(0, 1)):
    raw = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(LOOPBACK)
    parts = [struct.pack("=Q", len(name)) + name, struct.pack("=Q", 136) + raw.ljust(136, b"\0")]
    return b"".join(parts) + b"".join(struct.pack("=Q", pair) for pair in pairs)


def test_what_is_no_address_is_never_called():
    assert parse(address()) == RankAddress(socket.AF_INET, LOOPBACK, 4711, (0, 1))
    assert parse(address(name=b"x" * 1_000)) is None
    assert parse(address(pairs=(0, int.from_bytes(b"GET / HT", "little")))) is None
    assert parse(address(pairs=())) is None


def test_a_rank_that_takes_leave_calls_no_more_than_its_group_has():
    store, strangers = HashStore(), [listen(LOOPBACK) for _ in range(3)]
    watched = WatchedStore(store, KeyWaiter(store), LONG, "Rank 0 of 3", lambda: None)
    watched.set("0//cpu//0/0", address(pairs=(0, 1, 2)))
    for rank, (listener, pairs) in enumerate(zip(strangers, [(0, 1, 2), (0, 1), (0, 1, 2)], strict=True), start=1):
        store.set(f"0//cpu//0/{rank}", address(listener.getsockname()[1], pairs=pairs))
    watched.take_leave((), timedelta(seconds=5))
    reached = []
    for listener in strangers:
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            line, _ = listener.accept()
            reached.append(listener)
            line.close()
        listener.close()
    assert reached == strangers[:1], "rank 2 has told numbers for two ranks only, and there is no rank 3"


@pytest.mark.parametrize("name", GARBAGE)
def test_first_contact_amid_garbage(name):
    """In a store that outlives its ranks, as torchrun's does. What strangers have left there harms nobody."""
    store, value, found = HashStore(), GARBAGE[name], {}
    for key in ("answered", "latest", "hello/1", "hello/2", "answer/x"):
        store.set(key, value)
    store.set("hello/3", json.dumps({**hello_of(1), "nonce": "../round"}))
    store.add("hellos", 4)

    def run(rank):
        found[rank] = meet(store, KeyWaiter(store), Hello.of(rank, 2, 0), LONG, "here")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[0] == found[1]


def hello_of(rank):
    return {"rank": rank, "size": 2, "attempt": 0, "host": "x", "pid": 1}


@pytest.mark.parametrize("name", sorted(GARBAGE.keys() - {"number"}))
@pytest.mark.parametrize("key", ["answer", "go"])
def test_first_contact_with_a_garbled_answer(key, name):
    store, hello = HashStore(), Hello.of(1, 2, 0)
    token = "0" * 32
    store.set("host", token)
    store.set(f"answer/{hello.nonce}", json.dumps({"token": token, "attempt": 0, "refused": ""}))
    store.set(f"answer/{hello.nonce}" if key == "answer" else f"{token}/go", GARBAGE[name])
    with pytest.raises(GarbledStoreError, match=key if key == "answer" else f"{token}/go"):
        meet(store, KeyWaiter(store), hello, LONG, "here")


def test_first_contact_without_the_name_of_the_host():
    """Whoever has deleted it: a rank that asks for it must not wait for it in the store, where no bound is its own."""
    store, hello = HashStore(), Hello.of(1, 2, 0)
    store.set(f"answer/{hello.nonce}", json.dumps({"token": "0" * 32, "attempt": 0, "refused": ""}))
    start = time.monotonic()
    with pytest.raises(RendezvousTimeoutError, match="for rank 0, which did not answer"):
        meet(store, KeyWaiter(store), hello, timedelta(seconds=0.5), "here")
    assert time.monotonic() - start < 5


def test_first_contact_with_a_token_that_is_a_path():
    store, hello = HashStore(), Hello.of(1, 2, 0)
    store.set(f"answer/{hello.nonce}", json.dumps({"token": "../latest", "attempt": 0, "refused": ""}))
    with pytest.raises(GarbledStoreError, match="a token was expected"):
        meet(store, KeyWaiter(store), hello, LONG, "here")


def test_first_contact_with_a_counter_that_counts_to_the_end():
    """Rank 0 would look at each of these numbers."""
    store = HashStore()
    store.add("hellos", 1 << 62)
    start = time.monotonic()
    with pytest.raises(PGroupError, match=r"rank 1 \(never seen\)"):
        meet(store, KeyWaiter(store), Hello.of(0, 2, 0), timedelta(seconds=0.5), "here")
    assert time.monotonic() - start < 5


def test_the_latest_attempt_names_no_other_keys_to_delete():
    store, found = HashStore(), {}
    store.set("latest", "round")
    store.set("round/1/outcome", "x")
    run = lambda rank: found.update({rank: meet(store, KeyWaiter(store), Hello.of(rank, 2, 0), LONG, "here")})  # noqa: E731
    thread = threading.Thread(target=run, args=(1,))
    thread.start()
    run(0)
    thread.join(20)
    assert store.check(["round/1/outcome"])


def test_a_garbled_failure_is_none_and_the_first_real_one_replaces_it():
    store = HashStore()
    records = [FailureRecord.of(ValueError(f"{rank}"), generation=3, rank=rank, stage="fit", hook="") for rank in range(2)]
    for value in GARBAGE.values():
        store.set("failure/3", value)
        assert failure.read(store, 3) is None
        assert [failure.publish(store, record) for record in records] == [records[0]] * 2
        assert failure.read(store, 3) == records[0]


def test_the_monitor_takes_garbage_for_no_failure():
    store, told = HashStore(), threading.Event()
    looked = threading.Event()

    class Looking:
        """The store as the monitor sees it, which has looked once it asks again."""

        def __init__(self):
            self.count = 0

        def check(self, keys):
            self.count += 1
            if self.count == 3:
                looked.set()
            return store.check(keys)

        def get(self, key):
            return store.get(key)

    store.set("failure/3", b"garbage")
    monitor = FailureMonitor(Looking(), 3, told.set)
    assert looked.wait(10)
    assert not told.is_set()
    failure.publish(store, FailureRecord.of(ValueError("x"), generation=3, rank=0, stage="fit", hook=""))
    assert told.wait(10)
    monitor.stop()


@pytest.mark.parametrize("name", GARBAGE)
def test_a_rank_that_waits_does_not_stumble_over_where_another_was_last_seen(name):
    store = HashStore()
    rounds = Rounds(store, 0, 2)
    store.set("rank/1", GARBAGE[name])
    with pytest.raises(PGroupError, match=r"1 did not come: rank 1 \(never seen\)"):
        rounds.run({"stage": "fit"}, lambda said: "", timedelta(seconds=0.1))


@pytest.mark.parametrize("name", GARBAGE)
def test_a_rank_that_gives_up_amid_garbage_leaves_no_thread(name):
    store = HashStore()
    rounds = Rounds(store, 0, 2)

    def write():
        store.set("round/1/outcome", GARBAGE[name])
        raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, GarbledStoreError)):
        rounds.run({"stage": "fit"}, lambda said: "", LONG, check_peers=write)
    assert "lightning-pgroup-round" not in [thread.name for thread in threading.enumerate()]


def test_what_is_said_can_not_move_the_cursor():
    store = HashStore()
    rounds = Rounds(store, 0, 2)
    said = {
        "who": "x",
        "host": "\x1b[2J\ud800",
        "pid": 1,
        "round": 0,
        "left": True,
        "time": 2e11,
        "said": json.dumps({"stage": "\x1b]0;x"}),
    }
    store.set("rank/1", json.dumps(said))
    with pytest.raises(PGroupError) as caught:
        rounds.run({"stage": "fit"}, lambda said: "", timedelta(seconds=0.1))
    assert "\x1b" not in str(caught.value)
    str(caught.value).encode()


def test_reports_and_decisions_are_checked():
    good = Report(generation=2, highest=3, differences=("x",))
    assert Report.from_payload(json.loads(json.dumps(good.to_payload()))) == good
    for change in (
        {"generation": -1},
        {"generation": True},
        {"highest": 2.0},
        {"differences": "x"},
        {"differences": [1]},
        {"wanted": []},
        {"held": "x"},
        {"groups": ["x"]},
    ):
        with pytest.raises(GarbledStoreError, match="rank/1"):
            Report.from_payload(good.to_payload() | change, "rank/1")
    for change in ({"on_mismatch": "ignore"}, {"foreign": 0}, {"stage": None}):
        with pytest.raises(GarbledStoreError, match="rank/1"):
            Report.from_payload(good.to_payload() | change, "rank/1")
    decision = Decision(action="create", generation=1, why="x")
    assert Decision.from_json(decision.to_json()) == decision


def test_what_is_new_in_a_later_version_is_left_out():
    said = {"who": "x", "host": "x", "pid": 1, "round": 1, "left": False, "time": 1, "said": "{}"}
    assert payload.read(json.dumps({**said, "more": [1]}), "rank/1", Said) == said


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1", "1e15", '"1"', "null", "true"])
def test_a_time_is_a_time(value):
    text = json.dumps({"who": "x", "host": "x", "pid": 1, "round": 1, "left": False, "time": "T", "said": "{}"}).replace(
        '"T"', value
    )
    with pytest.raises(GarbledStoreError):
        payload.read(text, "rank/1", Said)


@pytest.mark.parametrize("name", GARBAGE)
def test_a_run_is_cleaned_up_whatever_it_has_left(name):
    store = HashStore()
    invitation = Invitation.to(Endpoint(LOOPBACK, 1), 1, 3)
    for key in ("highest", "records/0"):
        store.set(f"lightning_pgroup/{invitation.run}/{key}", GARBAGE[name])
    end = Team.clean_up(store, invitation)
    assert end.highest == (7 if name == "number" else 3)
    assert LifecycleEvent.all_from_json(end.records) == []


def test_a_key_that_is_no_text_is_no_reason_to_fail():
    store = HashStore()
    store.set(b"gen/\xff", "x")
    assert delete_below(store, "gen") == 0


def test_the_host_of_a_store_has_room_for_strangers():
    def job(rank):
        found = []
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for soft in (1_024, ROOM + 1):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard), hard))
            store = host_store(listen(LOOPBACK), LONG)
            found.append(resource.getrlimit(resource.RLIMIT_NOFILE))
            del store
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
        make_room()
        return hard, [*found, resource.getrlimit(resource.RLIMIT_NOFILE)]

    ((hard, found),) = run_ranks(job, size=1)
    limit = float("inf") if hard == resource.RLIM_INFINITY else hard
    assert found == [(min(ROOM, limit), hard), (min(ROOM + 1, limit), hard), (200, 200)]
