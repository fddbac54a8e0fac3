"""Signals around work that they must not cut in two: put off, heard in the waits that hear them, and after the end."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_pgroup.bounded import run_bounded, wait_until
from lightning_pgroup.gloo_interface import VARIABLE
from lightning_pgroup.interrupts import attentively, in_a_hurry, run_attentive, run_shielded
from lightning_pgroup.key_waiter import KeyWaiter
from lightning_pgroup.process_state import process_state
from lightning_pgroup.show_of_hands import ShowOfHands
from tests.blocks import block, rank_sum
from tests.ranks import run_ranks
from tests.test_interrupted_ends import Alarm, ring
from tests.test_process_group_failures import attempt

BOTH = pytest.mark.parametrize("run", [run_shielded, run_attentive])


@pytest.fixture(autouse=True)
def _alarm():
    process_state()  # sees that forked children begin anew
    before = signal.signal(signal.SIGUSR2, ring)
    yield
    assert signal.getsignal(signal.SIGUSR2) is ring, "the handler was not given back"
    signal.signal(signal.SIGUSR2, before)


class SignalAt:
    """Sends this process a signal at the n-th place of a ``with`` block at which Python would run its handler.

    That is after each call of a function in C, at the beginning of each in Python, and in the middle of a wait for a lock.
    Without ``number`` it only counts the places.
    """

    def __init__(self, number=None, *, files=("",)):
        self.number, self.files, self.seen, self.sent = number, files, 0, False

    def __enter__(self):
        sys.setprofile(self._look)
        return self

    def __exit__(self, *args):
        sys.setprofile(None)

    def _look(self, frame, event, argument):
        waits = event == "c_call" and getattr(argument, "__name__", "") == "acquire"
        if (event not in ("call", "c_return") and not waits) or not any(one in frame.f_code.co_filename for one in self.files):
            return
        self.seen += 1
        if self.seen == self.number:
            self.sent = True
            sys.setprofile(None)
            signal.raise_signal(signal.SIGUSR2)


@BOTH
def test_the_work_runs_to_its_end_and_the_interrupt_follows(run):
    steps = []

    def work():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR2)
            threading.Event().wait(0.02)
            steps.append("done")

    with pytest.raises(Alarm):
        run(work)
    assert steps == ["done"] * 3


@BOTH
def test_what_the_work_raises_is_raised_and_is_the_cause_of_an_interrupt(run):
    def work(number):
        if number:
            signal.raise_signal(number)
        raise KeyError("the work")

    with pytest.raises(KeyError):
        run(lambda: work(0))
    with pytest.raises(Alarm) as caught:
        run(lambda: work(signal.SIGUSR2))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_handler_that_raises_nothing_runs_after_the_work():
    order = []
    signal.signal(signal.SIGUSR2, lambda *args: order.append("handler"))
    try:
        run_shielded(lambda: (signal.raise_signal(signal.SIGUSR2), order.append("work")))
    finally:
        signal.signal(signal.SIGUSR2, ring)
    assert order == ["work", "handler"]


def test_a_wait_hears_it_unless_the_work_around_is_shielded():
    heard = []

    def wait():
        attentively(lambda: heard.append("before") or signal.raise_signal(signal.SIGUSR2))
        heard.append("after")

    with pytest.raises(Alarm):
        run_attentive(wait)
    assert heard == ["before"]
    heard.clear()
    with pytest.raises(Alarm):
        run_attentive(lambda: (run_shielded(wait), attentively(lambda: heard.append("waited"))))
    assert heard == ["before", "after"], "the next wait that hears it did not begin with that"
    with pytest.raises(Alarm):
        attentively(lambda: signal.raise_signal(signal.SIGUSR2))


def test_an_interrupt_hurries_the_work_that_it_came_in_and_no_later_one():
    """An impatient wait is given up."""
    released, ended = threading.Event(), []

    def hang(number):
        signal.raise_signal(number)
        ended.append(run_bounded(lambda: released.wait(20), timedelta(seconds=20), "test", impatient=True))

    with pytest.raises(KeyboardInterrupt):
        run_shielded(lambda: hang(signal.SIGINT))
    with pytest.raises(Alarm):
        run_shielded(lambda: hang(signal.SIGUSR2))
    released.set()
    run_shielded(
        lambda: ended.append(run_bounded(lambda: threading.Event().wait(0.3), timedelta(seconds=20), "test", impatient=True))
    )
    assert ended == [False, False, True]
    assert not in_a_hurry()


def test_a_signal_whose_handler_raises_nothing_is_no_reason_to_hurry():
    """Such as Lightning's own for SIGTERM, and that of a timer, which rings again and again."""
    heard, ended = [], []

    def work():
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        ended.append(run_bounded(lambda: threading.Event().wait(0.3), timedelta(seconds=20), "test", impatient=True))
        ended.append(len(heard) > 3)

    before = signal.signal(signal.SIGALRM, lambda *args: heard.append(args))
    try:
        run_shielded(work)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ended == [True, True]


def test_what_a_handler_has_raised_in_a_shielded_wait_is_heard_in_the_next_wait_of_the_work_around():
    steps = []

    def shielded():
        signal.raise_signal(signal.SIGUSR2)
        steps.append(wait_until(lambda: False, timedelta(seconds=20)))

    def work():
        run_shielded(shielded)
        attentively(lambda: steps.append("waited"))

    with pytest.raises(Alarm):
        run_attentive(work)
    assert steps == [False]


def test_a_handler_that_the_work_sets_stays():
    other = signal.getsignal(signal.SIGTERM)
    try:
        run_shielded(lambda: signal.signal(signal.SIGTERM, ring))
        assert signal.getsignal(signal.SIGTERM) is ring
    finally:
        signal.signal(signal.SIGTERM, other)


def test_a_child_that_is_forked_in_the_work_hears_its_signals():
    def work():
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGUSR2)
            except Alarm:
                os._exit(7)
            os._exit(8)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    codes = []
    run_shielded(work)
    assert codes == [7]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_on_another_thread_nothing_is_put_off():
    seen = []
    thread = threading.Thread(target=lambda: run_shielded(lambda: seen.append(signal.getsignal(signal.SIGUSR2))))
    thread.start()
    thread.join()
    assert seen == [ring]


def test_the_end_of_the_stack_is_no_interrupt():
    def deeper():
        try:
            deeper()
        except RecursionError:
            run_shielded(lambda: None)
            raise

    for _ in range(3):
        with pytest.raises(RecursionError):
            deeper()
        with pytest.raises(Alarm):
            run_shielded(lambda: signal.raise_signal(signal.SIGUSR2))
        assert signal.getsignal(signal.SIGUSR2) is ring


@pytest.mark.parametrize(("run", "before"), [(run_shielded, 2), (run_attentive, 150)])
def test_a_signal_at_any_place_neither_cuts_the_work_nor_is_it_lost(run, before):
    """The work may not begin, if the signal comes before it all; and that which waits for others must not then."""
    with SignalAt() as counter:
        run(lambda: threading.Event().wait(0))
    assert counter.seen > 20
    for place in range(1, counter.seen):
        ran, heard = [], False
        with SignalAt(place) as at:
            try:
                run(lambda: ran.append("begun") or threading.Event().wait(0) or ran.append("ended"))  # noqa: B023
            except Alarm:
                heard = True
        assert heard == at.sent, place
        assert ran in ([], ["begun", "ended"]), place
        assert ran or place <= before, place  # of `SignalAt` itself, and the calls of `run` and of what that calls
        assert signal.getsignal(signal.SIGUSR2) is ring, place
        run(lambda: None)


def test_no_wait_begins_when_an_interrupt_has_come_before_it():
    """In the microseconds in which signals begin to be put off, too: it would be heard after the whole wait."""
    begun = []
    with SignalAt() as counter:
        run_attentive(lambda: attentively(lambda: begun.append(counter.seen)))
    for place in range(1, begun[0]):
        waited, at = [], SignalAt(place)
        with pytest.raises(Alarm), at:
            run_attentive(lambda: attentively(lambda: waited.append("begun")))  # noqa: B023
        assert at.sent, place
        assert not waited, place


def test_an_error_from_one_handler_does_not_hide_that_another_ends_the_process():
    def both():
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGINT)

    def stopped():
        try:
            attentively(lambda: signal.raise_signal(signal.SIGINT))
        finally:
            signal.raise_signal(signal.SIGUSR2)

    with pytest.raises(KeyboardInterrupt):
        run_shielded(both)
    with pytest.raises(KeyboardInterrupt):
        run_attentive(stopped)


def test_a_child_that_is_forked_in_the_work_has_none_of_the_signals_of_its_parent():
    def work():
        signal.raise_signal(signal.SIGINT)
        child = os.fork()
        if child == 0:
            try:
                run_shielded(lambda: attentively(lambda: None))
                os._exit(in_a_hurry())
            finally:
                os._exit(9)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    codes = []
    with pytest.raises(KeyboardInterrupt):
        run_shielded(work)
    assert codes == [0]


def test_a_timer_that_rings_all_the_time_leaves_nothing_behind():
    with pytest.raises(Alarm):
        run_shielded(lambda: [signal.raise_signal(signal.SIGUSR2) for _ in range(1000)])
    assert not in_a_hurry()
    run_shielded(lambda: None)


def test_what_the_system_does_with_a_signal_stays_as_it_is(tmp_path):
    """A dump of `faulthandler` in the work too, which is when somebody may want it most."""

    def ring_for_a_dump():
        os.kill(os.getpid(), signal.SIGUSR2)
        sizes.append(os.fstat(stacks.fileno()).st_size)

    sizes = []
    with (tmp_path / "stacks").open("w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=False, chain=True)
        try:
            with pytest.raises(Alarm):
                run_shielded(ring_for_a_dump)
            with pytest.raises(Alarm):
                ring_for_a_dump()
        finally:
            sizes.append(os.fstat(stacks.fileno()).st_size)
            faulthandler.unregister(signal.SIGUSR2)
    assert 0 < sizes[0] < sizes[1]


def test_a_signal_at_any_place_of_a_show_of_hands_leaves_no_thread_and_no_key():
    store = dist.HashStore()
    hands = [ShowOfHands(store, rank, 2, KeyWaiter(store)) for rank in range(2)]

    def raise_hand(number, place=None):
        hands[1].keep_down(number, "does not come")
        with SignalAt(place, files=("lightning_pgroup", "threading.py", "contextlib.py")) as at:
            hands[0].raise_hand(number, True, timedelta(seconds=20), lambda: None)
        return at.seen

    places = raise_hand(0)
    assert places > 50
    for place in range(1, places):
        with contextlib.suppress(Alarm):
            raise_hand(place, place)
        waiting = [thread for thread in threading.enumerate() if thread.name == "lightning-pgroup-wait"]
        assert not waiting, place
    raise_hand(places)
    left = [key for number in range(places) for key in ("raised", "raised/0") if store.check([f"hands/{number}/{key}"])]
    assert not left


@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_at_any_place_of_the_agreement_leaves_the_ranks_in_step(who):
    """Every seventh place of it, on one rank of two; the next block of both works, and nothing is left."""
    files = ("lightning_pgroup", "threading.py", "contextlib.py")

    def job(rank):
        lifecycle, found = process_state().lifecycle, []
        acquire = lifecycle.acquire

        def visit(place):
            at = SignalAt(place, files=files)

            def acquire_at(stage):
                with at:
                    acquire(stage)

            if rank == who:
                lifecycle.acquire = acquire_at
            try:
                ended = attempt(block(rank), lambda: rank_sum(rank))
            finally:
                lifecycle.acquire = acquire
            return ended, at

        places = visit(None)[1].seen
        count = [None, None]
        with block(rank):
            dist.all_gather_object(count, places)
        for place in range(1, count[who], 7):
            ended, at = visit(place)
            alive, left = dist.is_initialized(), VARIABLE in os.environ
            with block(rank):
                found.append((place, at.sent, ended["kind"], alive, left, rank_sum(rank), len(lifecycle._stages)))
        return found

    results = run_ranks(job, deadline=50)
    assert len(results[0]) > 30
    for ours, others in zip(results[who], results[1 - who], strict=True):
        assert ours[2] == ("Alarm" if ours[1] else None), ours
        assert others[2] in (None, "RuntimeError", "RendezvousAbandonedError"), others
        for _, _, _, alive, left, total, stages in (ours, others):
            assert not alive, "a group was left"
            assert not left, "a variable was left"
            assert (total, stages) == (1.0, 1)
