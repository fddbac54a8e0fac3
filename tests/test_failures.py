"""A rank that fails: the others wake up at once, all know why, and the next run starts clean (F5 to F7, F29, F30, F33)."""

import inspect
import itertools
import os
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader

from lightning_pgroup import PGroupDDPStrategy
from tests.faults import (
    CALLBACK_HOOKS,
    DATA_HOOKS,
    MODULE_HOOKS,
    PATIENCE,
    PLACES,
    Boom,
    attempt,
    fit,
    same,
    weights_of_a_fresh_process,
)
from tests.models import TinyModel, make_trainer
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def fresh():
    """The weights that each rank of 2 and of 4 has after a fit in a process that ran nothing before."""
    return {size: weights_of_a_fresh_process(PGroupDDPStrategy(), size) for size in (2, 4)}


def check_rows(fresh, size, rows):
    """Go through rows of the table in one set of ranks: some fail in some place, and a good fit follows.

    Args:
        fresh: From the fixture.
        size: Number of ranks.
        rows: For each, the ranks that fail, and the part and the hook in which they do.

    Returns:
        For each row, how each rank ended.
    """

    def job(rank):
        found = []
        for failing, part, hook in rows:
            print(f"rank {rank}: {part} {hook} of {failing}", file=sys.stderr, flush=True)
            faults = [(part, hook, Boom(f"on rank {rank}"))] if rank in failing else []
            ended = attempt(PGroupDDPStrategy(timeout=30), devices=size, faults=faults)
            gone = not dist.is_initialized() or ended["kind"] is None
            again = fit(PGroupDDPStrategy(), devices=size)
            found.append((ended, gone, same(fresh[size][rank], again)))
        return found

    results = run_ranks(job, size=size, deadline=100)
    for number, (failing, part, hook) in enumerate(rows):
        row = f"{part} {hook} of {failing}"
        first = min(results[rank][number][0]["at"] for rank in failing)
        for rank in range(size):
            ended, gone, equal = results[rank][number]
            assert gone, f"{row}: rank {rank} kept its group"
            assert equal, f"{row}: the next fit of rank {rank} has other weights than one in a fresh process"
            assert ended["at"] - first < PATIENCE, f"{row}: rank {rank} came back after {ended['at'] - first:.1f} s"
            if rank in failing:
                assert ended["kind"] == "Boom", f"{row}: rank {rank} raised {ended['kind']}"
            if ended["kind"] is not None:
                assert len(ended["notes"]) == 1, f"{row}: the notes of rank {rank} are {ended['notes']}"
                assert f"was on rank {min(failing)}" in ended["notes"][0] or len(failing) > 1, row
                assert "Boom: on rank" in ended["notes"][0], row
    return [[results[rank][number][0] for rank in range(size)] for number in range(len(rows))]


def rows_of(part, size):
    """All hooks of a part, each with a rank that fails in it; with two ranks, each hook with each of them."""
    hooks = [hook for one, hook in PLACES if one == part]
    one_each = [(hook, number % size) for number, hook in enumerate(hooks)]
    pairs = itertools.product(hooks, range(size)) if size == 2 else one_each
    # Lightning calls `prepare_data` on local rank 0 only.
    return [({0 if hook == "prepare_data" else rank}, part, hook) for hook, rank in pairs]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("part", ["module", "data", "callback"])
def test_an_exception_in_each_hook_of_one_rank(part, size, fresh):
    check_rows(fresh, size, rows_of(part, size))


@pytest.mark.parametrize(
    "place",
    [
        ("module", "setup"),
        ("module", "training_step"),
        ("data", "prepare_data"),
        ("callback", "on_train_end"),
        ("callback", "teardown"),
    ],
    ids=".".join,
)
def test_an_exception_in_the_first_stage_of_the_processes(place, fresh):
    check_rows(fresh, 2, [({0 if place[1] == "prepare_data" else 1}, *place)])


@pytest.mark.parametrize("failing", [{0, 2}, {1, 2}, {1, 2, 3}, {0, 1, 2, 3}], ids=str)
def test_several_of_four_ranks_fail_in_the_same_moment_with_different_errors(failing, fresh):
    hooks = ["setup", "training_step", "on_before_optimizer_step", "on_train_batch_end", "on_fit_end"]
    for row in check_rows(fresh, 4, [(failing, "module", hook) for hook in hooks]):
        notes = [ended["notes"] for ended in row if ended["kind"] is not None]
        assert all(one == notes[0] for one in notes), "all name the same first failure"


def test_f29_prepare_data_is_waited_for_in_a_group_without_a_timeout(fresh):
    """Lightning makes it with a timeout of 10,000 days; its connections are cut as well."""
    ((zero, one),) = check_rows(fresh, 2, [({0}, "data", "prepare_data")])
    assert (zero["kind"], one["kind"]) == ("Boom", "RuntimeError")


def test_the_note_says_all_there_is_to_know():
    def job(rank):
        faults = [("callback", "on_train_batch_end", Boom("x" * 5000))] if rank == 1 else []
        return os.getpid(), attempt(PGroupDDPStrategy(timeout=30), faults=faults)["notes"]

    (_, notes), (pid, own) = run_ranks(job)
    assert notes == own
    assert f"The first failure of generation 1 was on rank 1 (pid {pid} on {socket.gethostname()}) at " in notes[0]
    assert "in 'fit', hook 'on_train_batch_end': Boom: " + "x" * 2000 in notes[0]
    assert "x" * 2001 not in notes[0]


SAVES_ON_EXCEPTION = "save_on_exception" in inspect.signature(ModelCheckpoint).parameters
NOT_YET = pytest.mark.skipif(not SAVES_ON_EXCEPTION, reason="Lightning before 2.6 has no `save_on_exception`")


@pytest.mark.parametrize("save", ["on_exception", pytest.param("model_checkpoint", marks=NOT_YET)])
def test_checkpoints_are_written_on_failure_and_load(save, tmp_path):
    def job(rank):
        folder = tmp_path / str(rank)
        if save == "on_exception":
            callback = OnExceptionCheckpoint(folder)
        else:
            callback = ModelCheckpoint(folder, save_on_exception=True, every_n_train_steps=1)
        faults = [("module", "on_train_batch_end", Boom())] if rank == 1 else []
        ended = attempt(PGroupDDPStrategy(timeout=30), faults=faults, callbacks=[callback])
        files = [torch.load(path, weights_only=False)["state_dict"] for path in folder.glob("*.ckpt")]
        return ended["at"], ended["kind"], [sorted(state) for state in files]

    (zero, kind, files), (one, own, _) = run_ranks(job)
    assert (kind, own) == ("RuntimeError", "Boom")
    assert abs(zero - one) < PATIENCE
    assert files
    assert all(state == ["layer.bias", "layer.weight"] for state in files)


def test_a_failure_inside_on_exception_itself():
    def job(rank):
        faults = [("callback", "on_train_batch_end", Boom("first")), ("callback", "on_exception", KeyError("second"))]
        ended = attempt(PGroupDDPStrategy(timeout=30), faults=faults if rank == 0 else [])
        fit(PGroupDDPStrategy())
        return ended

    zero, one = run_ranks(job, check_leaks=False)  # Lightning leaves its signal handlers behind
    assert (zero["kind"], one["kind"]) == ("KeyError", "RuntimeError")
    assert abs(zero["at"] - one["at"]) < PATIENCE
    assert "Boom: first" in one["notes"][0]


class FaultyRows(torch.utils.data.Dataset):
    def __init__(self, fail):
        self.fail = fail

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if self.fail:
            raise Boom("in a worker of the data loader")
        return [torch.ones(4)]


def test_an_exception_in_a_worker_of_the_data_loader():
    def job(rank):
        model = TinyModel()
        loader = DataLoader(FaultyRows(rank == 1), batch_size=4, num_workers=1)
        try:
            make_trainer(PGroupDDPStrategy(timeout=30)).fit(model, train_dataloaders=loader)
        except Exception as error:
            ended = time.monotonic(), type(error).__name__, error.__notes__
        fit(PGroupDDPStrategy())
        return ended

    (zero, kind, notes), (one, own, _) = run_ranks(job)
    assert (kind, own) == ("RuntimeError", "Boom")
    assert abs(zero - one) < PATIENCE
    assert "in a worker of the data loader" in notes[0]


def test_the_table_has_no_hook_twice():
    assert len(set(PLACES)) == len(PLACES) == len(MODULE_HOOKS) + len(DATA_HOOKS) + len(CALLBACK_HOOKS) - 1
