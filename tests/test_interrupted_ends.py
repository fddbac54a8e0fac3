"""Signals, and exceptions that do not behave, while a stage begins or ends: nobody waits, and nothing is left half ended."""

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_pgroup import PGroupDDPStrategy, group, process_group, stage_call, turns
from lightning_pgroup.gloo_interface import VARIABLE
from lightning_pgroup.interrupts import run_shielded
from lightning_pgroup.process_state import process_state
from tests.faults import PATIENCE, Boom, attempt, fit, same, weights_of_a_fresh_process
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks


class Alarm(Exception):
    """What the handler of a user's own signal raises."""


def ring(*args):
    raise Alarm


@pytest.mark.parametrize("operation", ["close", "destroy", "collected", "destroy_sub_group"])
def test_a_signal_at_any_moment_of_an_operation_leaves_the_turn_to_others(operation):
    """What a user calls runs on the main thread, and what ends his stage afterwards does not."""

    def job(rank):
        lifecycle, claim = process_state().lifecycle, PGroupDDPStrategy().claim()
        lifecycle._custody.end_sub_group = lambda *args, **kwargs: None
        arguments = {"destroy": (), "destroy_sub_group": (None, timedelta(0))}.get(operation, (claim,))
        place, interrupted = -1, True
        while interrupted:
            place, interrupted, events, ended = place + 1, False, 0, threading.Event()

            def profile(frame, event, argument):
                nonlocal events
                if event in ("call", "c_return") and frame.f_code.co_filename in (turns.__file__, contextlib.__file__):
                    events += 1
                    if events > place:  # noqa: B023  # called in this round only
                        sys.setprofile(None)
                        raise Alarm

            sys.setprofile(profile)
            try:
                getattr(lifecycle, operation)(*arguments)
            except Alarm:
                interrupted = True
                other = threading.Thread(target=lambda: lifecycle.next_trainer(claim) or ended.set(), daemon=True)  # noqa: B023
                other.start()
                assert ended.wait(5), f"the turn is not free after an interrupt at place {place}"
            finally:
                sys.setprofile(None)
            assert lifecycle._turns._depth == 0
        return place

    assert run_ranks(job, 1, deadline=30)[0] > 3


@pytest.mark.parametrize("by", ["the collector", "SIGTERM"])
def test_a_group_that_ends_in_the_middle_of_a_line_of_the_log(by):
    """The thread on which it ends has something to log too, and the main thread has locked the handler."""

    def job(rank):
        class Busy(logging.Handler):
            def emit(self, record):
                if record.name == "user":
                    gc.collect() if by == "the collector" else os.kill(os.getpid(), signal.SIGTERM)
                else:
                    said.append((record.getMessage().split(":")[0].split(" in ")[0], threading.current_thread().name))

        said, handler = [], Busy()
        logging.getLogger("lightning_pgroup").setLevel(logging.DEBUG)
        strategy = PGroupDDPStrategy(destroy="on_destructor")
        trainer = make_trainer(strategy, devices=1)
        if by == "SIGTERM":
            trainer.callbacks.append(Callback())
            trainer.callbacks[-1].on_train_batch_start = lambda *args: logging.getLogger("user").warning("busy")
        logging.getLogger().addHandler(handler)
        try:
            trainer.fit(TinyModel(), datamodule=TinyData())
        except SystemExit:
            said.append("ended")
        del strategy, trainer
        if by == "the collector":
            logging.getLogger("user").warning("busy")
        logging.getLogger().removeHandler(handler)
        return said, dist.is_initialized()

    said, left = run_ranks(job, 1, deadline=30)[0]
    assert said
    assert not left


def test_a_signal_right_before_the_creation_of_a_group_leaves_no_variable_behind():
    def job(rank):
        group.c10d.name_groups_after = ring
        os.environ.pop(VARIABLE, None)
        with pytest.raises(Alarm), process_group(rank=0, world_size=1):
            raise AssertionError("the block was entered")
        assert VARIABLE not in os.environ

    run_ranks(job, size=1)


@pytest.mark.parametrize("failing", [True, False], ids=["a failed stage", "a good stage"])
def test_signals_at_any_moment_around_the_end_of_a_stage(failing):
    """Forty, on one rank of two; a stage that raises gets a second signal while it ends, as by an impatient Ctrl-C."""
    fresh = weights_of_a_fresh_process(PGroupDDPStrategy())

    def job(rank):
        chance, found = random.Random(failing), []
        for _ in range(40):
            who, delay = chance.randrange(2), chance.uniform(0, 0.01)

            class End(Callback):
                def on_train_end(self, *args, who=who, delay=delay):
                    if rank == who:
                        threading.Timer(delay, os.kill, [os.getpid(), signal.SIGALRM]).start()
                        if failing:
                            raise Boom("the first")

            signal.signal(signal.SIGALRM, ring)
            try:
                ended = attempt(PGroupDDPStrategy(destroy="on_teardown", timeout=20), callbacks=[End()])
                threading.Event().wait(0.02)  # for a signal that comes after it all
            except Alarm:
                ended = None
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            alive, left = dist.is_initialized(), VARIABLE in os.environ
            found.append((who, ended, alive, left, same(fresh[rank], fit(PGroupDDPStrategy(destroy="on_teardown")))))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return found

    # A signal in Lightning's own handling of an exception lets it leave its signal handlers behind.
    for row in zip(*run_ranks(job, deadline=80, check_leaks=not failing), strict=True):
        for _, ended, alive, left, equal in row:
            assert not alive, "a group was left"
            assert not left, "a variable was left"
            assert equal
            assert ended is None or ended["kind"] in (None, "Boom", "Alarm", "RuntimeError", "RendezvousAbandonedError")
        both = [ended["at"] for _, ended, _, _, _ in row if ended is not None]
        assert max(both) - min(both) < PATIENCE if len(both) == 2 else True


def test_a_signal_right_before_the_end_of_a_stage_does_not_leave_it_open(monkeypatch):
    def job(rank):
        ends = []

        def interrupted(function):
            if function.__name__ != "enter":
                ends.append(function)
                if len(ends) == 1:
                    raise Alarm
            run_shielded(function)

        monkeypatch.setattr(stage_call, "run_shielded", interrupted)
        strategy = PGroupDDPStrategy(destroy="at_exit", timeout=20)
        ended = attempt(strategy)
        alive, running = dist.is_initialized(), strategy.claim().running
        fit(strategy)
        return ended["kind"], alive, running, [event.what for event in strategy.events], len(ends)

    events = ["created", "aborted", "created"]
    assert run_ranks(job, deadline=30) == [("Alarm", False, 0, events, 3)] * 2


class NoText(Exception):
    def __str__(self):
        raise ValueError("no str")


class WrongText(Exception):
    def __str__(self):
        return 5


class Frozen(Exception):
    __notes__ = ("mine",)


class Mute(Exception):
    add_note = None


@pytest.mark.parametrize("kind", [NoText, WrongText, Frozen, Mute], ids=lambda kind: kind.__name__)
def test_exceptions_that_can_not_be_told(kind):
    def job(rank):
        faults = [("module", "training_step", kind())] if rank == 1 else []
        try:
            fit(PGroupDDPStrategy(timeout=30), faults=faults)
        except Exception as error:
            return type(error).__name__, [str(note) for note in getattr(error, "__notes__", [])]

    (zero, notes), (one, _) = run_ranks(job, deadline=20)
    assert (zero, one) == ("RuntimeError", kind.__name__)
    assert "was on rank 1" in notes[0]
    assert kind.__name__ in notes[0]


def test_a_child_that_is_forked_inside_a_stage_has_no_part_in_it():
    def job(rank):
        codes = []

        class Fork(Callback):
            def on_train_batch_start(self, *args):
                child = os.fork()
                if child == 0:
                    raise SystemExit(0)  # unwinds the stage, in the child
                codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                dist.barrier()

        parent = os.getpid()
        try:
            ended = attempt(PGroupDDPStrategy(timeout=20), callbacks=[Fork()])
        finally:
            if os.getpid() != parent:
                os._exit(7)
        fit(PGroupDDPStrategy())
        return ended["kind"], set(codes)

    assert run_ranks(job, deadline=30) == [(None, {7}), (None, {7})]


def test_the_barrier_that_torch_makes_in_the_store_on_demand():
    """Its keys look like those of gloo, but are none."""

    def job(rank):
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
        dist.distributed_c10d._USE_STORE_BARRIER = True
        try:
            return [attempt(PGroupDDPStrategy(destroy="on_teardown", timeout=20))["kind"] for _ in range(5)]
        finally:
            del os.environ["TORCH_DIST_INIT_BARRIER"]

    assert run_ranks(job, deadline=30) == [[None] * 5] * 2
