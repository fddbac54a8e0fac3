"""How a failure reaches ranks that wait in a collective: cut connections, a thread where that wakes nobody (F5 to F7, F30)."""

import multiprocessing
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy

from lightning_pgroup import PGroupDDPStrategy
from tests.backends import BLOCKING, BlockingGroup, register_blocking_backend
from tests.faults import PATIENCE, Boom, attempt, fit
from tests.ranks import run_ranks


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

    (zero, *rest), one = run_ranks(job)
    assert zero in ("RuntimeError", "RendezvousAbandonedError"), "in the collective, or still in the creation"
    assert (rest, one) == ([b"still here", 0], ("Boom", b"still here", 0))


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
