"""The fixture `ranks` of the plugin: values, and the tracebacks or stacks of what did not return any."""

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_pgroup import PGroupDDPStrategy, PGroupError, RanksFailedError, process_group
from lightning_pgroup.forked_ranks import ForkedRanks
from tests.models import TinyData, TinyModel, make_trainer
from tests.scripts import finish, listen, start


@pytest.fixture(autouse=True)
def _no_rank_is_left():
    yield
    assert multiprocessing.active_children() == []


@pytest.fixture
def ranks():
    """As in the plugin, which need not be installed here."""
    return ForkedRanks


def sum_of_ranks():
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    return tensor.item()


def plain():
    """Twice, at one port, and the second time when both have ended the first: else a rank may reach the store of that (F3)."""
    ended = multiprocessing.get_context("fork").Barrier(2)

    def job(rank):
        sums = []
        for _ in range(2):
            dist.init_process_group("gloo")
            sums.append((dist.get_rank(), sum_of_ranks()))
            dist.barrier()
            dist.destroy_process_group()
            ended.wait(30)
        return sums

    return job


def blocks(rank):
    sums = []
    for _ in range(2):
        with process_group("gloo"):
            sums.append((dist.get_rank(), sum_of_ranks()))
    return sums


def fit(strategy):
    trainer = make_trainer(strategy)
    trainer.fit(TinyModel(), datamodule=TinyData())
    return (trainer.global_rank, trainer.world_size)


def block_between_stages(rank):
    first = fit(PGroupDDPStrategy())
    with process_group():
        second = (dist.get_rank(), dist.get_world_size())
    return [first, second, fit(PGroupDDPStrategy())]


JOBS = {
    "plain torch": (None, lambda rank: [(rank, 1.0)] * 2),
    "blocks": (blocks, lambda rank: [(rank, 1.0)] * 2),
    "our strategy and a block": (block_between_stages, lambda rank: [(rank, 2)] * 3),
    "plain strategy": (lambda rank: fit(DDPStrategy()), lambda rank: (rank, 2)),
}


@pytest.mark.parametrize("name", JOBS)
def test_what_makes_a_group_in_the_ranks(ranks, name):
    job, want = JOBS[name]
    assert ranks(2)(job or plain()) == [want(0), want(1)]


def test_values_come_in_the_order_of_the_ranks_however_large(ranks):
    assert ranks(3)(lambda rank: (rank, "x" * 10**6)) == [(rank, "x" * 10**6) for rank in range(3)]


def test_it_decorates(ranks):
    @ranks(1)
    def values(rank):
        return torch.tensor([rank])

    assert values == [torch.tensor([0])]


def test_what_the_ranks_find_in_their_environment(ranks, monkeypatch):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"]
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("RANK", "7")
    found = ranks(2)(lambda rank: [os.environ.get(name) for name in names])
    assert found == [[str(rank), "2", str(rank), "2", "0", None, None] for rank in range(2)]
    assert os.environ["RANK"] == "7"


def test_the_traceback_of_each_rank_that_raises(ranks):
    def fails_here(rank):
        if rank != 1:
            raise ValueError(f"boom {rank}")

    with pytest.raises(RanksFailedError) as caught:
        ranks(3)(fails_here)
    text = str(caught.value)
    assert "rank 0 raised:\nTraceback" in text
    assert "ValueError: boom 0" in text
    assert "rank 2 raised:" in text
    assert text.count("fails_here") == 2
    assert "rank 1" not in text


def test_a_rank_that_waits_for_one_that_has_raised_wakes_up(ranks):
    def job(rank):
        dist.init_process_group("gloo")
        if rank == 1:
            raise ValueError("boom")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"(?s)rank 0 raised:.*RuntimeError.*rank 1 raised:.*ValueError: boom"):
        ranks(2)(job)
    assert time.monotonic() - start < 30, "not after the deadline"


def test_the_stacks_of_each_rank_that_hangs(ranks):
    def waits_for_ever(rank):
        if rank == 1:
            threading.Event().wait()
        return rank

    start = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"rank 1 hung, and was killed after 0\.5 s") as caught:
        ranks(2, deadline=0.5)(waits_for_ever)
    assert time.monotonic() - start < 20
    assert "in waits_for_ever" in str(caught.value)
    assert "rank 0" not in str(caught.value)


def test_a_rank_that_dies_is_noticed_at_once_even_if_a_child_of_it_lives(ranks):
    reader, writer = os.pipe()

    def dies(rank):
        if rank == 0:
            if os.fork() == 0:
                os.close(writer)
                os.read(reader, 1)  # until the test ends
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)

    try:
        with pytest.raises(RanksFailedError, match=r"(?s)rank 0 died with signal SIGKILL.*rank 1 died with exit code 3"):
            ranks(2)(dies)
    finally:
        os.close(reader)
        os.close(writer)


def test_a_value_that_can_not_be_pickled(ranks):
    with pytest.raises(RanksFailedError, match=r"(?s)rank 0 raised:.*[Pp]ickle"):
        ranks(1)(lambda rank: threading.Lock())


def test_a_store_of_rank_0_outlives_its_function(ranks):
    """Rank 1 makes the last use of it when rank 0 has long returned."""
    reader, writer = os.pipe()
    kept = []

    def job(rank):
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)
        kept.append(store)
        if rank == 0:
            os.write(writer, b"x")
            return "done"
        os.read(reader, 1)
        store.set("key", "value")
        return store.get("key")

    try:
        assert ranks(2)(job) == ["done", b"value"]
    finally:
        os.close(reader)
        os.close(writer)


def test_a_process_that_has_a_group_is_not_forked(ranks):
    with process_group(rank=0, world_size=1), pytest.raises(PGroupError, match="has a process group"):
        ranks(2)(lambda rank: rank)


@pytest.mark.parametrize(("size", "deadline"), [(0, 60), (-1, 60), (2, 0), (2, float("nan"))])
def test_no_ranks_or_no_time(ranks, size, deadline):
    with pytest.raises(ValueError, match="at least 1 rank and more than 0 seconds"):
        ranks(size, deadline=deadline)


def test_an_interrupt_leaves_no_rank_behind(ranks):
    def interrupts(rank):
        if rank == 0:
            os.kill(os.getppid(), signal.SIGINT)
        threading.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        ranks(2)(interrupts)


@pytest.mark.scripts
def test_ranks_end_with_their_parent(tmp_path):
    """Also one that was killed, so that it could end nothing itself."""
    body = """
        from lightning_pgroup.forked_ranks import ForkedRanks
        import threading

        def waits(rank):
            say("pid", os.getpid())
            if rank == 0:
                threading.Event().wait()
            return rank

        ForkedRanks(2)(waits)
    """
    process = start(body, tmp_path, cold=True)
    listen(process, "pid")
    process.kill()
    assert finish(process).code == -signal.SIGKILL  # which fails if a process is left
