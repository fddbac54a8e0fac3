"""What came out of attacks on the package: each was a defect once."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_pgroup import GroupLostError, PGroupDDPStrategy, PGroupError, RendezvousTimeoutError
from lightning_pgroup.process_state import process_state
from tests.models import TinyData, TinyModel, make_trainer, whats
from tests.ranks import run_ranks
from tests.test_stage_boundaries import Raises, rank_sum


@pytest.mark.parametrize("on_error", ["abort", "destroy"])
def test_two_hundred_failures_right_after_a_collective(on_error):
    """The DDP reducer must not be the last to hold an aborted group: its destructor then waits for Python's own lock."""

    def job(rank):
        for _ in range(200):
            strategy = PGroupDDPStrategy(on_error=on_error)
            trainer = make_trainer(strategy, callbacks=[Raises("on_train_batch_end", ValueError("boom"))])
            with pytest.raises(ValueError, match="boom"):
                trainer.fit(TinyModel(), datamodule=TinyData())
        return strategy.events[-1].generation

    assert run_ranks(job, deadline=100) == [200, 200]


def test_failures_whose_tracebacks_are_kept():
    """They keep the DDP wrappers, and with them the groups, alive."""

    def job(rank):
        kept = []
        for _ in range(20):
            trainer = make_trainer(PGroupDDPStrategy(), callbacks=[Raises("on_train_batch_end", ValueError("boom"))])
            try:
                trainer.fit(TinyModel(), datamodule=TinyData())
            except ValueError as error:
                kept.append((error, trainer.model, trainer))
        make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
        return len(kept)

    assert run_ranks(job) == [20, 20]


def test_the_users_own_destroy_inside_a_hook():
    def job(rank):
        class Destroys(Callback):
            def on_train_batch_end(self, *args):
                dist.destroy_process_group()
                raise ValueError("boom")

        for _ in range(100):
            with pytest.raises(ValueError, match="boom"):
                make_trainer(PGroupDDPStrategy(), callbacks=[Destroys()]).fit(TinyModel(), datamodule=TinyData())

    run_ranks(job, deadline=60)


def test_f33_a_hook_for_errors_that_raises_leaves_no_collective_silently_local():
    """Lightning calls neither `strategy.on_exception` nor `strategy.teardown` then."""

    def job(rank):
        class Bad(Callback):
            def on_train_start(self, trainer, pl_module):
                raise ValueError("first")

            def on_exception(self, trainer, pl_module, exception):
                trainer.strategy.barrier()
                raise KeyError("second")

        strategy = PGroupDDPStrategy()
        with pytest.raises(KeyError, match="second"):
            make_trainer(strategy, callbacks=[Bad()]).fit(TinyModel(), datamodule=TinyData())
        return strategy.all_gather(torch.tensor([float(rank)])).flatten().tolist(), strategy.broadcast(rank)

    # Lightning leaves its signal handlers behind in this case.
    assert run_ranks(job, check_leaks=False) == [([0.0, 1.0], 0)] * 2


def test_a_boolean_decision_in_a_hook_for_errors_is_this_ranks_own():
    def job(rank):
        seen = []

        class Watch(Callback):
            def on_exception(self, trainer, pl_module, exception):
                for all_ranks in (True, False):
                    seen.extend(trainer.strategy.reduce_boolean_decision(d, all=all_ranks) for d in (True, False))

        trainer = make_trainer(PGroupDDPStrategy(), callbacks=[Watch(), Raises("on_fit_start", ValueError("boom"))])
        with pytest.raises(ValueError, match="boom"):
            trainer.fit(TinyModel(), datamodule=TinyData())
        return seen

    assert run_ranks(job) == [[True, False, True, False]] * 2


def test_a_second_strategy_before_its_own_first_stage_is_not_silently_local():
    def job(rank):
        make_trainer(PGroupDDPStrategy(destroy="on_teardown")).fit(TinyModel(), datamodule=TinyData())
        second = PGroupDDPStrategy(destroy="on_teardown")
        make_trainer(second)
        return second.broadcast(rank), second.all_gather(torch.tensor([float(rank)])).flatten().tolist()

    assert run_ranks(job) == [(0, [0.0, 1.0])] * 2


@pytest.mark.parametrize("same_trainer", [True, False])
def test_an_inner_stage_that_fails_leaves_the_outer_ones_collectives_alone(same_trainer):
    def job(rank):
        strategy = PGroupDDPStrategy(destroy="on_teardown")
        seen = []

        class Broken(TinyModel):
            def on_validation_start(self):
                raise ValueError("inner")

        class Outer(Callback):
            def on_train_end(self, trainer, pl_module):
                inner = trainer if same_trainer else make_trainer(strategy, limit_val_batches=1)
                try:
                    inner.validate(Broken(), dataloaders=DataLoader(TinyData().rows, batch_size=4), verbose=False)
                except ValueError:
                    seen.append("inner raised")
                seen.append(trainer.strategy.all_gather(torch.tensor([float(rank)])).flatten().tolist())
                seen.append(rank_sum(rank))

        trainer = make_trainer(strategy, callbacks=[Outer()], limit_val_batches=1)
        try:
            trainer.fit(TinyModel(), datamodule=TinyData())
        except Exception as error:
            # Sharing one Trainer, or its strategy, confuses Lightning itself afterwards; not the group.
            seen.append(type(error).__name__)
        return seen[:3]

    # A Trainer that runs one stage inside the other registers Lightning's signal handlers twice and restores them once.
    assert run_ranks(job, check_leaks=not same_trainer) == [["inner raised", [0.0, 1.0], 1.0]] * 2


def test_an_inner_stage_that_fails_on_one_rank_ends_the_group_and_frees_the_others():
    """Its failure is caught in a hook. The stage around can not go on: its ranks would be one collective apart."""

    def job(rank):
        strategy, seen = PGroupDDPStrategy(destroy="on_teardown", timeout=60), []

        class Broken(TinyModel):
            def on_validation_start(self):
                if rank == 1:
                    raise ValueError("inner")

        class Outer(Callback):
            def on_train_end(self, trainer, pl_module):
                inner = make_trainer(PGroupDDPStrategy(timeout=60), limit_val_batches=1)
                try:
                    inner.validate(Broken(), dataloaders=DataLoader(TinyData().rows, batch_size=4), verbose=False)
                except Exception as error:
                    seen.append((type(error).__name__, error.__notes__[0]))
                trainer.strategy.barrier()

        trainer = make_trainer(strategy, callbacks=[Outer()])
        with pytest.raises(GroupLostError, match="A stage inside it has failed") as lost:
            trainer.fit(TinyModel(), datamodule=TinyData())
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        return seen, lost.value.__notes__, whats(strategy)[-2:]

    results = run_ranks(job, deadline=30)
    for rank, (((kind, note),), notes, last) in enumerate(results):
        assert kind == ("ValueError" if rank == 1 else "RuntimeError")
        assert note in notes
        assert "was on rank 1" in note
        assert [event[:2] for event in last] == [("fit", "created"), ("fit", "destroyed")]


def test_a_stopped_host_of_the_store_is_not_waited_for_beyond_the_timeout(tmp_path):
    told = multiprocessing.get_context("fork").Event()
    host = tmp_path / "host"

    def job(rank):
        make_trainer(PGroupDDPStrategy(destroy="on_teardown")).fit(TinyModel(), datamodule=TinyData())
        if rank == 0:
            (tmp_path / "part").write_text(str(os.getpid()))
            (tmp_path / "part").rename(host)
            assert told.wait(40)
            return None
        pause = threading.Event()
        while not host.exists():
            pause.wait(0.01)
        pid = int(host.read_text())
        os.kill(pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            with pytest.raises(RendezvousTimeoutError, match="the store in which they meet does not answer"):
                make_trainer(PGroupDDPStrategy(rendezvous_timeout=1)).fit(TinyModel(), datamodule=TinyData())
            return time.monotonic() - start
        finally:
            os.kill(pid, signal.SIGCONT)
            told.set()

    _, took = run_ranks(job, check_leaks=False, deadline=50)
    assert took < 8


def test_the_end_of_a_process_does_not_wait_for_a_stage_in_another_thread():
    def job(rank):
        make_trainer(PGroupDDPStrategy(destroy="at_exit")).fit(TinyModel(), datamodule=TinyData())
        if rank == 1:
            return 0.0, None
        strategy = PGroupDDPStrategy(rendezvous_timeout=20)

        def wait_for_the_other():
            with contextlib.suppress(PGroupError):
                make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())

        thread = threading.Thread(target=wait_for_the_other, daemon=True)
        thread.start()
        pause = threading.Event()
        while not strategy.claim().running:
            pause.wait(0.01)
        start = time.monotonic()
        with pytest.raises(PGroupError, match="stages is running"):
            strategy.close()
        with pytest.raises(PGroupError, match="'fit' is running"):
            strategy.destroy_process_group()
        refused = time.monotonic() - start
        start = time.monotonic()
        process_state().end()
        return refused, time.monotonic() - start

    (refused, ended), _ = run_ranks(job, check_leaks=False, deadline=60)
    assert refused < 2
    assert ended < 15


def test_an_interrupt_during_a_hanging_destroy_is_recorded_as_an_abort():
    from tests.backends import NAME, StubbornGroup, register_stubborn_backend

    def job(rank):
        register_stubborn_backend()
        strategy = PGroupDDPStrategy(destroy="at_exit", destroy_timeout=30, process_group_backend=NAME)
        make_trainer(strategy, devices=1).fit(TinyModel(), datamodule=TinyData())
        in_shutdown = StubbornGroup.calls

        def interrupt():
            pause = threading.Event()
            while "shutdown" not in in_shutdown:
                pause.wait(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            strategy.destroy_process_group()
        took = time.monotonic() - start
        return took, whats(strategy)[-1], list(StubbornGroup.calls), dist.is_initialized()

    took, last, calls, alive = run_ranks(job, size=1, check_leaks=False)[0]
    assert took < 10
    assert last == ("", "aborted", 1)
    assert calls == ["shutdown", "abort"]
    assert not alive


def test_a_missing_rank_is_named_at_the_first_contact_too():
    """Ranks that somebody else started, or was to start: the host of the store does not wait in the dark."""

    def job(rank):
        process_state().membership.join(None)
        with pytest.raises(RendezvousTimeoutError, match=r"1 did not come: rank 1 \(never seen\)"):
            make_trainer(PGroupDDPStrategy(rendezvous_timeout=1)).fit(TinyModel(), datamodule=TinyData())

    # One process only, which believes to be rank 0 of two.
    run_ranks(job, size=1, deadline=30)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_data_loader_in_the_middle_of_all_that(workers):
    class Data(TinyData):
        def train_dataloader(self):
            return DataLoader(self.rows, batch_size=4, num_workers=workers)

    def job(rank):
        for destroy in ("on_teardown", "per_trainer"):
            trainer = make_trainer(PGroupDDPStrategy(destroy=destroy))
            trainer.fit(TinyModel(), datamodule=Data())
        return trainer.strategy.generation

    assert run_ranks(job) == [2, 2]
