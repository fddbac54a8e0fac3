"""Where the ranks meet at a place that the user names: tcp://, file://, env://; and what is said when that place is wrong."""

import contextlib
import multiprocessing
import os
import re
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore

from lightning_pgroup import (
    PGroupDDPStrategy,
    PGroupError,
    RanksDisagreeError,
    RendezvousAbandonedError,
    RendezvousTimeoutError,
    StoreLostError,
)
from lightning_pgroup.store import LOOPBACK, listen
from tests.models import TinyData, TinyModel, make_trainer, whats
from tests.ranks import free_port, run_ranks
from tests.test_cluster_environments import by_hand, torchrun, variables
from tests.test_stage_boundaries import rank_sum


def fit(init_method=None, timeout=20, **kwargs):
    strategy = PGroupDDPStrategy(init_method=init_method, rendezvous_timeout=timeout)
    make_trainer(strategy, **kwargs).fit(TinyModel(), datamodule=TinyData())
    return strategy


def refused(kind, init_method=None, timeout=2, **kwargs):
    """What a fit says that must fail, and how long it took."""
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        fit(init_method, timeout, **kwargs)
    # A busy machine is some tenths late.
    return re.sub(r"waited (\d+)\.\d s of", r"waited \1.0 s of", str(caught.value)), time.monotonic() - start


@pytest.mark.parametrize("scheme", ["tcp", "file", "env"])
def test_init_method(scheme, tmp_path):
    """Two Trainers, four stages, where the ranks meet at a place that the user names."""

    def job(rank):
        port = os.environ["MASTER_PORT"]
        init_method = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/store", "env": "env://"}[scheme]
        events = []
        for _ in range(2):
            strategy = PGroupDDPStrategy(destroy="on_teardown", init_method=init_method)
            trainer = make_trainer(strategy)
            trainer.fit(TinyModel(), datamodule=TinyData())
            trainer.test(TinyModel(), datamodule=TinyData(), verbose=False)
            events += [(what, generation) for _, what, generation in whats(strategy)]
        return events

    want = [(what, generation) for generation in (1, 2, 3, 4) for what in ("created", "destroyed")]
    assert run_ranks(job, deadline=40) == [want] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_f25_a_failure_before_the_first_contact_at_all_keeps_the_ranks_in_step(failing):
    """Where ranks meet that we did not start, nobody is connected yet when the first stage fails on one of them."""

    def job(rank):
        init_method = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
        seen = []
        for number in range(3):
            strategy = PGroupDDPStrategy(init_method=init_method, rendezvous_timeout=20)
            path = "best" if rank == failing and number == 0 else None
            try:
                make_trainer(strategy).validate(TinyModel(), datamodule=TinyData(), ckpt_path=path, verbose=False)
                seen.append(strategy.all_gather(torch.tensor([float(number)])).flatten().tolist())
            except Exception as error:
                seen.append(type(error).__name__)
        return seen

    for rank, seen in enumerate(run_ranks(job, deadline=40)):
        assert seen[0] == "RendezvousAbandonedError" or rank == failing
        assert seen[1:] == [[1.0, 1.0], [2.0, 2.0]]


def test_one_address_in_three_ways_is_one_team():
    """Each Trainer names the place in another way, and the rounds of the first are not taken for those of the next."""

    def job(rank):
        ways = [None, "env://", f"tcp://{LOOPBACK}:{os.environ['MASTER_PORT']}", None]
        return [event for way in ways for event in whats(fit(way)) if event[1] == "created"]

    with free_port() as port:

        def started(rank):
            with variables(**by_hand(rank, port, 0)):
                return job(rank)

        assert run_ranks(started, bare=True) == [[("fit", "created", n) for n in (1, 2, 3, 4)]] * 2


@pytest.mark.parametrize("way", ["tcp", "env", "main address"])
def test_ipv6(way):
    with contextlib.closing(listen("::1")) as probe:
        port = probe.getsockname()[1]

    def job(rank):
        init_method = {"tcp": f"tcp://[::1]:{port}", "env": "env://", "main address": None}[way]
        with variables(**{**by_hand(rank, port, 0), "MASTER_ADDR": "::1"}):
            strategy = fit(init_method)
            return rank_sum(rank), whats(strategy)

    assert run_ranks(job, bare=True) == [(1.0, [("fit", "created", 1)])] * 2


def test_a_group_of_the_users_own_at_the_same_address():
    """His store and ours share the port, since one process hosts both."""
    with free_port() as port:

        def job(rank):
            hook = __import__("sys").excepthook
            with variables(**by_hand(rank, port, 0)):
                dist.init_process_group("gloo", init_method="env://")
                adopted = whats(fit())
                dist.destroy_process_group()
                __import__("sys").excepthook = hook
                return adopted, whats(fit())

        assert run_ranks(job, bare=True) == [([("fit", "adopted", 0)], [("fit", "created", 1)])] * 2


def test_an_address_of_the_users_own_under_torchrun():
    """Torch takes any address for that of the agent, at which nobody then listens."""
    with free_port() as agent, free_port() as port:

        def job(rank):
            with variables(**torchrun(rank, agent, 0, agent=True)):
                return whats(fit(f"tcp://{LOOPBACK}:{port}"))

        assert run_ranks(job, bare=True) == [[("fit", "created", 1)]] * 2


def test_a_host_name_that_does_not_resolve():
    results = run_ranks(lambda rank: refused(StoreLostError, "tcp://no-such-host.invalid:4711"), deadline=20)
    for rank, (text, took) in enumerate(results):
        assert re.search(rf"Rank {rank} of 2 waited 2\.\d s of 2\.0 s", text)
        assert "at no-such-host.invalid:4711, but the host name 'no-such-host.invalid' does not resolve" in text
        assert took < 3


def test_an_address_that_is_not_one_of_rank_0():
    with free_port() as port:
        results = run_ranks(lambda rank: refused(StoreLostError, f"tcp://192.0.2.77:{port}"), deadline=20, check_leaks=False)
    for rank, (text, took) in enumerate(results):
        assert re.search(rf"Rank {rank} of 2 waited 2\.\d s of 2\.0 s", text)
        assert f"at 192.0.2.77:{port}, but " in text
        assert ("Is it an address of this host?" in text) == (rank == 0)
        assert took < 3


@contextlib.contextmanager
def stranger(answers):
    """A program that has nothing to do with us, at a port that it says; it closes each connection, or never says a word."""
    listener = listen(LOOPBACK)
    opened = []

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                opened.append(connection)
                if answers == "closes":
                    connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection in opened:
            connection.close()


@pytest.mark.parametrize("answers", ["closes", "says nothing"])
def test_a_port_that_a_stranger_has(answers):
    """Rank 0 says so at once; the others wait no longer than they were told."""
    with stranger(answers) as port:
        # A thread of torch's stays behind with the stranger.
        results = run_ranks(lambda rank: refused(StoreLostError, f"tcp://{LOOPBACK}:{port}"), deadline=20, check_leaks=False)
    (first, at_once), (second, took) = results
    assert f"Rank 0 of 2 can not host the store in which the ranks meet, at {LOOPBACK}:{port}" in first
    assert "can not be listened on (address already in use)" in first
    assert at_once < 1
    assert f"Rank 1 of 2 waited 2.0 s of 2.0 s for the store in which the ranks meet, at {LOOPBACK}:{port}" in second
    assert "does not answer as a store does" in second
    assert took < 3


def test_after_a_port_that_is_taken_the_ranks_meet_at_another():
    with contextlib.closing(listen(LOOPBACK)) as taken, free_port() as port:

        def job(rank):
            refused(StoreLostError, f"tcp://{LOOPBACK}:{taken.getsockname()[1]}", timeout=1)
            return whats(fit(f"tcp://{LOOPBACK}:{port}"))

        assert run_ranks(job, check_leaks=False) == [[("fit", "created", 1)]] * 2


def test_a_wrong_address_on_one_rank():
    with free_port() as right, free_port() as wrong:

        def job(rank):
            address = f"tcp://{LOOPBACK}:{wrong if rank else right}"
            return refused((StoreLostError, RendezvousTimeoutError), address)

        (first, _), (second, took) = run_ranks(job, deadline=30)
    assert f"Rank 0 of 2 waited 2.0 s of 2.0 s for the other ranks to start 'fit' at tcp://{LOOPBACK}:{right}" in first
    assert "rank 1 (never seen)" in first
    assert f"Rank 1 of 2 waited 2.0 s of 2.0 s for the store in which the ranks meet, at {LOOPBACK}:{wrong}" in second
    assert "nothing listens there. Rank 0 hosts it there: look for its own error, or for another address" in second
    assert took < 3


def test_a_rank_that_gave_up_before_the_host_came_stays_in_step():
    gave_up = multiprocessing.get_context("fork").Event()
    with free_port() as port:
        address = f"tcp://{LOOPBACK}:{port}"

        def job(rank):
            if rank == 1:
                refused(StoreLostError, address, timeout=0.5)
                gave_up.set()
            else:
                assert gave_up.wait(20)
                text, _ = refused(RendezvousAbandonedError, address, timeout=20)
                assert "rank 1 is not there for it, it has not reached the store" in text
            return whats(fit(address))

        assert run_ranks(job, deadline=30) == [[("fit", "created", 1)]] * 2


def test_a_host_that_fails_before_the_first_contact_and_ends_frees_the_others():
    with free_port() as port:
        address = f"tcp://{LOOPBACK}:{port}"

        def job(rank):
            if rank == 1:
                return refused(RendezvousAbandonedError, address, timeout=30)
            with pytest.raises(ValueError, match="best"):
                make_trainer(PGroupDDPStrategy(init_method=address)).validate(
                    TinyModel(), datamodule=TinyData(), ckpt_path="best", verbose=False
                )
            return None

        _, (text, took) = run_ranks(job, deadline=40)
    assert "rank 0 is not there for it, it has failed before" in text
    assert took < 10


def test_env_without_an_address():
    def job(rank):
        with variables(LOCAL_RANK=rank, MASTER_ADDR=LOOPBACK, MASTER_PORT=None):
            return refused(StoreLostError, "env://", timeout=20)

    for text, took in run_ranks(job, bare=True, deadline=15):
        assert "`init_method='env://'` needs MASTER_PORT in the environment of each rank" in text
        assert took < 5


@pytest.mark.parametrize("rank_without", [0, 1])
def test_a_file_in_a_folder_that_is_not_there_on_one_rank(rank_without, tmp_path):
    """Torch waits for it with Python's lock held, for longer than it was told."""

    def job(rank):
        path = tmp_path / "not here" / "store" if rank == rank_without else tmp_path / "store"
        return refused(PGroupError, f"file://{path}")

    results = run_ranks(job, deadline=20)
    text, took = results[rank_without]
    assert f"Rank {rank_without} of 2 can not meet the others in the file" in text
    assert f"there is no folder '{tmp_path}/not here'" in text
    assert took < 1
    text, _ = results[1 - rank_without]
    assert f"waited 2.0 s of 2.0 s at file://{tmp_path}/store for" in text
    assert ("rank 1 (never seen)" if rank_without else "for rank 0, which did not answer") in text


def test_a_file_that_is_a_folder(tmp_path):
    for text, took in run_ranks(lambda rank: refused(StoreLostError, f"file://{tmp_path}")):
        assert "that is a folder. Name a file in a folder that all ranks share" in text
        assert took < 1


@pytest.mark.parametrize("first", [0, 1])
def test_the_file_of_a_crashed_run_is_not_hung_on(first, tmp_path):
    """It holds rounds with outcomes and a generation with addresses of processes that are dead."""
    path = tmp_path / "store"

    def crash(rank):
        fit(f"file://{path}")
        fit(f"file://{path}")
        os._exit(1)

    run_ranks(crash, expect_death={0, 1})
    assert path.stat().st_size > 0, "a run that crashes leaves its file"
    come = multiprocessing.get_context("fork").Event()

    def job(rank):
        if rank != first:
            assert come.wait(20)
        come.set()
        events = [whats(fit(f"file://{path}"))[-1][1] for _ in range(2)]
        return rank_sum(rank), events

    assert run_ranks(job, deadline=40) == [(1.0, ["created", "created"])] * 2


NO_STORE = {
    "text": b"hello, this is a text and no store",
    "torn": b"\x09\0\0\0refco",
    "torn length": b"\1\0",
    "lengths": b"\xff" * 64,
}


@pytest.mark.parametrize("content", NO_STORE)
def test_a_file_that_is_no_store_is_an_error_at_once(content, tmp_path):
    """Torch would read on in it for ever, with Python's lock held."""
    path = tmp_path / "store"
    path.write_bytes(NO_STORE[content])
    for text, took in run_ranks(lambda rank: refused(StoreLostError, f"file://{path}"), deadline=20):
        assert "it holds something else than a store" in text
        assert took < 1


def test_a_file_with_anything_else_in_it_is_not_hung_on(tmp_path):
    """As another program of torch's leaves it."""
    path = tmp_path / "store"
    FileStore(str(path), -1).set("default_pg/0//cpu//0/0", "old")
    assert path.exists()
    assert run_ranks(lambda rank: whats(fit(f"file://{path}"))) == [[("fit", "created", 1)]] * 2


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("scheme", ["tcp", "by hand", "file"])
def test_ranks_that_were_told_different_world_sizes_are_told_at_once(scheme, wrong, tmp_path):
    with free_port() as port:
        address = {"tcp": f"tcp://{LOOPBACK}:{port}", "by hand": None, "file": f"file://{tmp_path}/store"}[scheme]

        def job(rank):
            devices = 3 if rank == wrong else 2
            with variables(**by_hand(rank, port, 0)):
                # Twice, since a script that goes on must not hang then.
                return [refused(RanksDisagreeError, address, timeout=30, devices=devices) for _ in range(2)]

        results = run_ranks(job, bare=True, deadline=40)
    for rank, told in enumerate(results):
        for text, took in told:
            assert re.search(rf"Rank {rank} of {3 if rank == wrong else 2} can not (start|take part)( 'fit')? at ", text)
            assert re.search(rf"rank {wrong}, pid \d+ on \S+: 3", text)
            assert re.search(rf"rank {1 - wrong}, pid \d+ on \S+: 2", text)
            assert took < 10


def test_two_processes_with_the_same_rank():
    """As on two nodes whose NODE_RANK was forgotten, or when two runs were given one address: the first is not disturbed."""
    met, told = (multiprocessing.get_context("fork").Event() for _ in range(2))
    with free_port() as port:

        def job(process):
            with variables(**by_hand(min(process, 1), port, 0)):
                if process < 2:
                    strategy = fit()
                    met.set()
                    assert told.wait(40)
                    return whats(strategy)
                assert met.wait(20)
                try:
                    return refused(RanksDisagreeError, timeout=20)
                finally:
                    told.set()

        good, same, (text, took) = run_ranks(job, 3, bare=True)
    assert good == same == [("fit", "created", 1)]
    assert "another process is rank 1 of this run already, pid" in text
    assert took < 2
