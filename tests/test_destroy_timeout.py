"""A destroy is bounded by `destroy_timeout` in every path; past it the group is aborted, with a warning that says so."""

import gc
import logging
import os
import signal
import time

import pytest
import torch.distributed as dist

from lightning_pgroup import PGroupDDPStrategy
from lightning_pgroup.process_state import process_state
from tests.backends import NAME, StubbornGroup, register_stubborn_backend
from tests.models import TinyData, TinyModel, make_trainer, whats
from tests.ranks import run_ranks
from tests.scripts import run
from tests.test_stage_boundaries import Raises

TIMEOUT = 0.3


def fit(strategy, **kwargs):
    make_trainer(strategy, devices=1, **kwargs).fit(TinyModel(), datamodule=TinyData())


def end_of_stage():
    strategy = PGroupDDPStrategy(destroy="on_teardown", destroy_timeout=TIMEOUT, process_group_backend=NAME)
    fit(strategy)
    return strategy


def next_trainer():
    strategy = PGroupDDPStrategy(destroy="per_trainer", destroy_timeout=TIMEOUT, process_group_backend=NAME)
    fit(strategy)
    fit(PGroupDDPStrategy(process_group_backend="gloo"))
    return strategy


def collector():
    holder = PGroupDDPStrategy(destroy="on_destructor", destroy_timeout=TIMEOUT, process_group_backend=NAME)
    fit(holder)
    events = holder.claim().events
    del holder
    gc.collect()
    return type("Seen", (), {"events": events})


def close():
    strategy = PGroupDDPStrategy(destroy="at_exit", destroy_timeout=TIMEOUT, process_group_backend=NAME)
    fit(strategy)
    strategy.close()
    return strategy


def by_hand():
    strategy = PGroupDDPStrategy(destroy="at_exit", destroy_timeout=TIMEOUT, process_group_backend=NAME)
    fit(strategy)
    strategy.destroy_process_group()
    return strategy


def at_exit():
    strategy = PGroupDDPStrategy(destroy="at_exit", destroy_timeout=TIMEOUT, process_group_backend=NAME)
    fit(strategy)
    process_state().end()
    return strategy


def on_error():
    strategy = PGroupDDPStrategy(destroy="at_exit", on_error="destroy", destroy_timeout=TIMEOUT, process_group_backend=NAME)
    with pytest.raises(ValueError, match="boom"):
        fit(strategy, callbacks=[Raises("on_fit_end", ValueError("boom"))])
    return strategy


@pytest.mark.parametrize("path", [end_of_stage, next_trainer, collector, close, by_hand, at_exit, on_error])
@pytest.mark.parametrize("deaf", [False, True], ids=["abort-helps", "abort-hangs"])
def test_a_hanging_shutdown_is_given_up(path, deaf, monkeypatch):
    def job(rank):
        register_stubborn_backend()
        StubbornGroup.deaf = deaf
        monkeypatch.setattr("lightning_pgroup.transport.ABORT_TIMEOUT", __import__("datetime").timedelta(seconds=TIMEOUT))
        records = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = records.append
        logging.getLogger("lightning_pgroup").addHandler(handler)
        start = time.monotonic()
        seen = path()
        took = time.monotonic() - start
        event = next(event for event in seen.events if event.backend == NAME and event.what != "created")
        calls = list(StubbornGroup.calls)
        # The new group of a next Trainer must survive the late return of the old one's shutdown.
        alive = dist.is_initialized()
        StubbornGroup.released.set()
        gc.collect()
        still = dist.is_initialized()
        if alive:
            process_state().end()
        return took, event.what, event.why, event.duration, calls, [r.getMessage() for r in records], alive, still

    took, what, why, duration, calls, warnings, alive, still = run_ranks(job, size=1, check_leaks=False)[0]
    assert TIMEOUT <= duration < took < TIMEOUT * 2 + 4
    assert what == "aborted"
    assert "did not end within `destroy_timeout` of 0.3 s" in why
    assert calls[:2] == ["shutdown", "abort"]
    assert any("aborted" in warning and "destroy_timeout" in warning for warning in warnings)
    assert alive is (path is next_trainer)
    assert still is alive


def test_a_shutdown_that_an_interrupt_has_cut_short_is_not_said_to_have_taken_too_long(monkeypatch):
    def job(rank):
        register_stubborn_backend()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        hang = StubbornGroup.shutdown
        monkeypatch.setattr(StubbornGroup, "shutdown", lambda group: (os.kill(os.getpid(), signal.SIGINT), hang(group)))
        strategy = PGroupDDPStrategy(destroy="at_exit", destroy_timeout=30, process_group_backend=NAME)
        fit(strategy)
        with pytest.raises(KeyboardInterrupt):
            strategy.destroy_process_group()
        return strategy.events[-1].what, strategy.events[-1].why

    assert run_ranks(job, size=1, check_leaks=False) == [
        ("aborted", "destroy_process_group() was called; it was interrupted"),
    ]


def test_work_that_is_still_pending_does_not_hold_up_a_destroy():
    """Gloo's destructor waits for pending work; here for a peer that never joins in."""

    def job(rank):
        import torch

        strategy = PGroupDDPStrategy(destroy="at_exit", destroy_timeout=TIMEOUT, timeout=15)
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        if rank == 0:
            dist.all_reduce(torch.ones(1), async_op=True)
        start = time.monotonic()
        strategy.destroy_process_group()
        took = time.monotonic() - start
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        return took, whats(strategy)[-1]

    for took, last in run_ranks(job, check_leaks=False, deadline=40):
        assert took < 3
        assert last == ("fit", "created", 2)


def test_an_abort_does_not_wait_for_pending_work():
    def job(rank):
        import torch

        strategy = PGroupDDPStrategy(destroy="at_exit", timeout=15)

        class Pending(Raises):
            def _raise(self, *args, **kwargs):
                if rank == 0:
                    dist.all_reduce(torch.ones(1), async_op=True)
                raise ValueError("boom")

        start = time.monotonic()
        with pytest.raises(ValueError, match="boom"):
            make_trainer(strategy, callbacks=[Pending("on_fit_end", None)]).fit(TinyModel(), datamodule=TinyData())
        return time.monotonic() - start, whats(strategy)[-1]

    for took, last in run_ranks(job, check_leaks=False, deadline=40):
        assert took < 5
        assert last == ("fit", "aborted", 1)


def test_a_shutdown_that_raises_is_reported_and_does_not_stop_the_run():
    def job(rank):
        register_stubborn_backend()

        def broken(self):
            raise OSError("no shutdown today")

        StubbornGroup.shutdown = broken
        strategy = PGroupDDPStrategy(destroy="on_teardown", process_group_backend=NAME)
        fit(strategy)
        fit(strategy)
        return whats(strategy), dist.is_initialized(), strategy.events[1].why

    events, alive, why = run_ranks(job, size=1, check_leaks=False)[0]
    assert [event[1] for event in events] == ["created", "aborted"] * 2
    assert why == "on_teardown: the stage ended; the backend's shutdown raised OSError: no shutdown today"
    assert not alive


@pytest.mark.scripts
def test_a_hanging_shutdown_at_the_real_exit_of_the_interpreter(tmp_path):
    done = run(
        f"""
        import time
        from tests.backends import StubbornGroup, register_stubborn_backend
        register_stubborn_backend()
        StubbornGroup.deaf = True
        strategy = PGroupDDPStrategy(destroy="at_exit", destroy_timeout={TIMEOUT}, process_group_backend="{NAME}")
        make_trainer(strategy, devices=1).fit(TinyModel(), datamodule=TinyData())
        say("the end", time.time())
        sys.exit(5)
        """,
        tmp_path,
        timeout=50,
        cold=True,
    )
    ended = time.time() - float(done.said()[0].split()[-1])
    assert done.code == 5
    assert ended < 25  # `destroy_timeout`, then 5 s for the abort, then the interpreter's own end
    assert "destroy_timeout" in done.err
