"""A rank that fails: the others wake up at once, all know why, and the next run starts clean (F5 to F7, F29, F30)."""

import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_pgroup import PGroupDDPStrategy
from lightning_pgroup.process_state import process_state
from tests.backends import BLOCKING, BlockingGroup, register_blocking_backend
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks

PATIENCE = 2.0  # seconds in which every surviving rank must be back


class Boom(Exception):
    """The fault itself, so that no other error can be taken for it."""


class HookedModel(TinyModel):
    """Has all the hooks that a fault may be put into."""


class HookedData(TinyData):
    def prepare_data(self):
        pass


MODULE_HOOKS = [
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "validation_step",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
]
DATA_HOOKS = ["prepare_data", "setup", "train_dataloader", "val_dataloader", "on_before_batch_transfer", "teardown"]
CALLBACK_HOOKS = [
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_batch_start",
    "on_after_backward",
    "on_train_batch_end",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
]
PLACES = (
    [("module", hook) for hook in MODULE_HOOKS if not hook.startswith("on_sanity")]
    + [("data", hook) for hook in DATA_HOOKS]
    + [("callback", hook) for hook in CALLBACK_HOOKS]
)


def inject(owner, hook, error):
    """Let a hook raise, after what it does itself."""
    original = getattr(owner, hook, None)

    def faulty(*args, **kwargs):
        if original is not None:
            original(*args, **kwargs)
        raise error

    setattr(owner, hook, faulty)


def fit(strategy, *, devices=2, faults=(), callbacks=(), rows=32):
    """Fit with some faults put in; returns the weights."""
    seed_everything(5, verbose=False)
    parts = {"module": HookedModel(), "data": HookedData(rows), "callback": Callback()}
    for part, hook, error in faults:
        inject(parts[part], hook, error)
    trainer = make_trainer(
        strategy,
        devices=devices,
        callbacks=[parts["callback"], *callbacks],
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        limit_train_batches=2,
        limit_val_batches=1,
        num_sanity_val_steps=0 if not any("sanity" in hook for _, hook, _ in faults) else 1,
    )
    trainer.fit(parts["module"], datamodule=parts["data"])
    return [tensor.detach().clone() for tensor in parts["module"].state_dict().values()]


def attempt(strategy, **kwargs):
    """Fit and say how it ended, and when, on a clock that all ranks share."""
    try:
        fit(strategy, **kwargs)
    except BaseException as error:
        return {"kind": type(error).__name__, "notes": getattr(error, "__notes__", []), "at": time.monotonic()}
    return {"kind": None, "notes": [], "at": time.monotonic()}


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def check_case(size, failing, places, kinds=("Boom",)):
    """One row of the table: some ranks fail in some places; returns how each rank ended."""

    def job(rank):
        fresh = fit(PGroupDDPStrategy(destroy="on_teardown"), devices=size)
        faults = [(part, hook, Boom(f"on rank {rank}")) for part, hook in places] if rank in failing else []
        ended = attempt(PGroupDDPStrategy(timeout=30), devices=size, faults=faults)
        gone = not dist.is_initialized() or ended["kind"] is None
        again = fit(PGroupDDPStrategy(), devices=size)
        return ended, gone, same(fresh, again)

    results = run_ranks(job, size=size, deadline=60)
    first = min(results[rank][0]["at"] for rank in failing)
    for rank, (ended, gone, equal) in enumerate(results):
        assert gone, f"rank {rank} kept its group"
        assert equal, f"the next fit of rank {rank} has other weights than a fresh one"
        assert ended["at"] - first < PATIENCE, f"rank {rank} came back after {ended['at'] - first:.1f} s"
        if rank in failing:
            assert ended["kind"] in kinds
        if ended["kind"] is not None:
            assert len(ended["notes"]) == 1
            assert f"was on rank {min(failing)}" in ended["notes"][0] or len(failing) > 1
            assert "Boom: on rank" in ended["notes"][0]
    return [ended for ended, _, _ in results]


ROWS = [(part, hook, failing) for part, hook in PLACES for failing in (0, 1) if (hook, failing) != ("prepare_data", 1)]


@pytest.mark.parametrize(("part", "hook", "failing"), ROWS, ids=["-".join(map(str, row)) for row in ROWS])
def test_an_exception_in_each_hook_of_one_of_two_ranks(part, hook, failing):
    """Lightning calls `prepare_data` on local rank 0 only, so that there is no such row for rank 1."""
    check_case(2, {failing}, [(part, hook)])


@pytest.mark.parametrize("hook", ["setup", "training_step", "on_before_optimizer_step", "on_train_batch_end"])
@pytest.mark.parametrize("failing", [{0}, {3}, {1, 2}], ids=str)
def test_an_exception_in_some_of_four_ranks(hook, failing):
    check_case(4, failing, [("module", hook)])


def test_f29_prepare_data_is_waited_for_in_a_group_without_a_timeout():
    """Lightning makes it with a timeout of 10,000 days; its connections are cut as well."""
    ended = check_case(2, {0}, [("data", "prepare_data")])
    assert ended[1]["kind"] == "RuntimeError"


def test_two_ranks_fail_in_the_same_moment_with_different_errors():
    ended = check_case(2, {0, 1}, [("module", "training_step")])
    assert ended[0]["notes"] == ended[1]["notes"], "both name the same first failure"


def test_the_note_says_all_there_is_to_know():
    def job(rank):
        faults = [("callback", "on_train_batch_end", Boom("x" * 5000))] if rank == 1 else []
        return os.getpid(), attempt(PGroupDDPStrategy(timeout=30), faults=faults)["notes"]

    (_, notes), (pid, own) = run_ranks(job)
    assert notes == own
    assert f"The first failure of generation 1 was on rank 1 (pid {pid} on {socket.gethostname()}) at " in notes[0]
    assert "in 'fit', hook 'on_train_batch_end': Boom: " + "x" * 2000 in notes[0]
    assert "x" * 2001 not in notes[0]


def test_f05_plain_ddp_waits_for_the_timeout():
    over = multiprocessing.get_context("fork").Event()

    def job(rank):
        faults = [("module", "training_step", Boom())] if rank == 1 else []
        start = time.monotonic()
        ended = attempt(DDPStrategy(timeout=timedelta(seconds=4)), faults=faults)
        over.set() if rank == 0 else over.wait(30)  # a process that ends closes its connections
        return ended["kind"], ended["at"] - start

    (kind, waited), (own, _) = run_ranks(job, check_leaks=False, deadline=60)
    assert own == "Boom"
    assert kind == "RuntimeError"
    assert waited > 3.5


def test_a_backend_that_wakes_nobody_is_watched_by_a_thread():
    """NCCL is such a one; here one written in Python, whose collective blocks until its `abort` is called."""

    def job(rank):
        register_blocking_backend()
        threads = []

        class Wait(Callback):
            def on_train_batch_start(self, *args):
                threads.extend(t.name for t in threading.enumerate() if "monitor" in t.name)
                if rank == 1:
                    raise Boom("and nobody hears it")
                BlockingGroup.armed.set()
                dist.barrier()

        ended = attempt(PGroupDDPStrategy(process_group_backend=BLOCKING, timeout=30), callbacks=[Wait()])
        left = [t.name for t in threading.enumerate() if "monitor" in t.name]
        return ended, threads, left, list(BlockingGroup.calls)

    (zero, threads, left, calls), (one, _, _, _) = run_ranks(job, deadline=15)
    assert (zero["kind"], one["kind"]) == ("RuntimeError", "Boom")
    assert abs(zero["at"] - one["at"]) < PATIENCE
    assert "Boom: and nobody hears it" in zero["notes"][0]
    assert threads == ["lightning-pgroup-monitor"]
    assert left == []
    assert "abort" in calls


def test_no_thread_watches_where_the_sockets_suffice():
    def job(rank):
        names = []

        class Look(Callback):
            def on_train_batch_start(self, *args):
                names.extend(thread.name for thread in threading.enumerate())

        fit(PGroupDDPStrategy(), callbacks=[Look()])
        return [name for name in names if "lightning-pgroup" in name]

    assert run_ranks(job) == [[], []]


def test_transports_of_mixed_and_third_party_backends():
    from lightning_pgroup import backends

    assert [type(one).__name__ for one in backends.transports(["cpu:gloo,cuda:nccl"])] == [
        "GlooTransport",
        "BackendTransport",
    ]
    assert backends.peers_notice(["gloo"])
    assert not backends.peers_notice(["cpu:gloo,cuda:nccl"])

    class Loud(backends.BackendTransport):
        peers_notice = True

    backends.register_backend_transport("loud", Loud())
    try:
        assert backends.peers_notice(["cpu:loud", "gloo"])
    finally:
        del backends._transports["loud"]


@pytest.mark.parametrize("held", [True, False])
def test_f06_f07_the_peer_wakes_up_whatever_still_holds_the_group(held):
    def job(rank):
        strategy = PGroupDDPStrategy(timeout=30)
        kept = []

        class Keep(Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                if held:
                    kept.extend([trainer.strategy.model, trainer.strategy.model.reducer, dist.group.WORLD])
                if rank == 1:
                    raise Boom
                dist.barrier()

        return attempt(strategy, callbacks=[Keep()])

    results = run_ranks(job)
    assert [ended["kind"] for ended in results] == ["RuntimeError", "Boom"]
    assert abs(results[0]["at"] - results[1]["at"]) < PATIENCE


def test_f30_a_strangers_connections_and_all_listening_sockets_are_left_alone():
    def job(rank):
        from lightning_pgroup.sockets import shut_down_connections

        listener = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()

        class Look(Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                self.sub = dist.new_group([0, 1])
                if rank == 1:
                    raise Boom
                dist.barrier(group=self.sub)

        ended = attempt(PGroupDDPStrategy(timeout=30), callbacks=[Look()])
        ours.sendall(b"still here")
        heard = theirs.recv(100)
        late = socket.create_connection(listener.getsockname())
        for one in (ours, theirs, late, listener):
            one.close()
        return ended["kind"], heard, shut_down_connections([b"no address at all"])

    assert run_ranks(job) == [("RuntimeError", b"still here", 0), ("Boom", b"still here", 0)]


def test_f30_ipv6_addresses_are_recognised():
    from lightning_pgroup.sockets import _connections, shut_down_connections

    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    here = socket.create_connection(listener.getsockname()[:2])
    there, _ = listener.accept()
    ends = next(ends for connection, ends in _connections() if connection.getsockname() == here.getsockname())
    assert len(ends[0]) == 24
    assert shut_down_connections([b"header" + ends[0] + b"garbage"]) == 2  # both ends are in this process
    assert there.recv(10) == b""
    for one in (here, there, listener):
        one.close()


@pytest.mark.parametrize("save", ["on_exception", "model_checkpoint"])
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


def test_an_exception_in_the_creation_of_the_group():
    """One rank fails after the agreement, so that the others wait for it in torch's own rendezvous."""

    def job(rank):
        from lightning_pgroup import acquisition

        real = acquisition.create_group
        if rank == 1:
            acquisition.create_group = lambda *args: (_ for _ in ()).throw(Boom("no group today"))
        ended = attempt(PGroupDDPStrategy(timeout=3))
        acquisition.create_group = real
        fit(PGroupDDPStrategy())
        return ended["kind"]

    zero, one = run_ranks(job, deadline=40)
    assert one == "Boom"
    assert zero is not None


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


def test_sigkill_of_a_rank_wakes_the_other():
    def job(rank):
        class Die(Callback):
            def on_train_batch_start(self, *args):
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)

        return attempt(PGroupDDPStrategy(timeout=30), callbacks=[Die()])

    start = time.monotonic()
    ended = run_ranks(job, expect_death={1}, deadline=30)[0]
    assert ended["kind"] == "RuntimeError"
    assert ended["at"] - start < 10


def test_sigkill_of_the_host_of_the_store_wakes_the_other():
    def job(rank):
        class Die(Callback):
            def on_train_batch_start(self, *args):
                if rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        ended = attempt(PGroupDDPStrategy(timeout=30), callbacks=[Die()])
        start = time.monotonic()
        later = attempt(PGroupDDPStrategy(timeout=30))
        return ended["kind"], later["kind"], time.monotonic() - start

    kind, later, took = run_ranks(job, expect_death={0}, deadline=40, check_leaks=False)[1]
    assert (kind, later) == ("RuntimeError", "StoreLostError")
    assert took < 5


SWEEP = 50


@pytest.mark.parametrize("destroy", ["on_teardown", "per_trainer", "on_destructor", "on_error", "at_exit"])
def test_a_sweep_of_fifty_trainers_of_which_every_third_fails(destroy):
    import random

    def job(rank):
        fresh = fit(PGroupDDPStrategy(destroy="on_teardown"))
        chance = random.Random(destroy)
        right = 0
        for number in range(SWEEP):
            failing, (part, hook) = chance.randrange(2), chance.choice(PLACES)
            if hook == "prepare_data":
                failing = 0
            strategy = PGroupDDPStrategy(destroy=destroy, timeout=30)
            if number % 3 == 2:
                attempt(strategy, faults=[(part, hook, Boom())] if rank == failing else [])
            else:
                right += same(fresh, fit(strategy))
        return right

    want = sum(number % 3 != 2 for number in range(SWEEP))
    assert run_ranks(job, deadline=100) == [want, want]


def test_keep_is_the_old_behaviour():
    over = multiprocessing.get_context("fork").Event()

    def job(rank):
        faults = [("module", "training_step", Boom())] if rank == 1 else []
        start = time.monotonic()
        ended = attempt(PGroupDDPStrategy(on_error="keep", timeout=3, destroy="at_exit"), faults=faults)
        over.set() if rank == 0 else over.wait(30)
        return ended["kind"], ended["notes"], ended["at"] - start

    (kind, notes, waited), (own, _, _) = run_ranks(job, check_leaks=False, deadline=40)
    assert (kind, own) == ("RuntimeError", "Boom")
    assert notes == []
    assert waited > 2.5


def test_the_table_has_no_hook_twice():
    assert len(set(PLACES)) == len(PLACES) == len(list(itertools.chain(MODULE_HOOKS, DATA_HOOKS, CALLBACK_HOOKS))) - 1
    assert threading.active_count() < 10
    assert process_state is not None
