"""Ranks that are told to end, or are ended: SystemExit, Ctrl-C, SIGTERM and SIGKILL (F28)."""

import multiprocessing
import os
import signal
import time

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pgroup import PGroupDDPStrategy
from tests.faults import PATIENCE, attempt, fit
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks


@pytest.mark.parametrize("fault", [SystemExit(4), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_exits_and_interrupts_on_one_rank(fault):
    def job(rank):
        faults = [("module", "on_train_batch_start", fault)] if rank == 1 else []
        ended = attempt(PGroupDDPStrategy(timeout=30), faults=faults)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning leaves it ignored
        fit(PGroupDDPStrategy())
        return ended

    zero, one = run_ranks(job)
    assert (zero["kind"], one["kind"]) == ("RuntimeError", "SystemExit")
    assert abs(zero["at"] - one["at"]) < PATIENCE
    assert type(fault).__name__ in zero["notes"][0]


@pytest.mark.parametrize("hit", [{0}, {1}, {0, 1}], ids=str)
def test_f28_sigterm_ends_the_run_on_every_rank_within_a_step(hit, tmp_path):
    def job(rank):
        class Signal(Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                if batch_idx == 1 and rank in hit:
                    os.kill(os.getpid(), signal.SIGTERM)

        class Long(TinyData):
            def __init__(self):
                super().__init__(4096)

        trainer = make_trainer(
            PGroupDDPStrategy(timeout=30),
            callbacks=[Signal(), OnExceptionCheckpoint(tmp_path / str(rank))],
            enable_checkpointing=True,
            limit_train_batches=400,
        )
        try:
            trainer.fit(TinyModel(), datamodule=Long())
            kind = None
        except BaseException as error:
            kind = type(error).__name__
        steps, at = trainer.global_step, time.monotonic()
        fit(PGroupDDPStrategy())
        return kind, steps, at, len(list((tmp_path / str(rank)).glob("*.ckpt")))

    results = run_ranks(job)
    for rank, (kind, steps, _, files) in enumerate(results):
        assert kind == ("SIGTERMException" if rank in hit else "RuntimeError")
        assert steps <= 3
        assert files == (rank == 0), "rank 0 writes the checkpoint"
    assert abs(results[0][2] - results[1][2]) < PATIENCE
    assert issubclass(SIGTERMException, SystemExit)


@pytest.mark.parametrize(("size", "killed"), [(2, 1), (4, 2)])
def test_sigkill_of_a_rank_wakes_the_others(size, killed):
    """It can tell nothing, so the others look who is gone."""
    died = multiprocessing.get_context("fork").Value("d")

    def job(rank):
        class Die(Callback):
            def on_train_batch_start(self, *args):
                if rank == killed:
                    died.value = time.monotonic()
                    os.kill(os.getpid(), signal.SIGKILL)

        return attempt(PGroupDDPStrategy(timeout=30), devices=size, callbacks=[Die()])

    for rank, ended in enumerate(run_ranks(job, size=size, expect_death={killed}, deadline=30)):
        if rank != killed:
            assert ended["kind"] == "RuntimeError"
            assert ended["at"] - died.value < PATIENCE
            assert f"Nothing was heard from rank {killed}: it was killed, has ended" in ended["notes"][0]


def test_sigkill_of_the_host_of_the_store_wakes_the_other():
    def job(rank):
        class Die(Callback):
            def on_train_batch_start(self, *args):
                if rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        ended = attempt(PGroupDDPStrategy(timeout=30), callbacks=[Die()])
        start = time.monotonic()
        later = attempt(PGroupDDPStrategy(timeout=30))
        return ended, later["kind"], time.monotonic() - start

    ended, later, took = run_ranks(job, expect_death={0}, deadline=40, check_leaks=False)[1]
    assert (ended["kind"], later) == ("RuntimeError", "StoreLostError")
    assert "the process that hosts it, rank 0 or the launcher, has ended" in ended["notes"][0]
    assert took < 5
