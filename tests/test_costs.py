"""What a create, a reuse and a destroy may cost: fails when a change adds an operation on the store, a thread or a connection.

No time is measured here. Who raises a number says in the changelog what for; who lowers one lowers it here too.
"""

import shutil
from collections import Counter

import pytest

from lightning_pgroup import PGroupDDPStrategy, key_waiter, rounds
from lightning_pgroup.process_state import process_state
from tests.costs import Costs, Trace
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks

PHASES = ("first", "reuse", "reuse again", "destroy", "create", "reuse after it")

_REUSE = {"add": 2, "compare_set": 2, "delete_key": 3, "multi_get": 1, "set": 6}
OPERATIONS = {
    "first": {"add": 2, "compare_set": 8, "get": 2, "list_keys": 2, "multi_get": 1, "set": 7},
    "reuse": {name: count for name, count in _REUSE.items() if name != "delete_key"},  # that of the stage before the last
    "reuse again": _REUSE,
    "destroy": {},
    "create": {"add": 2, "compare_set": 4, "delete_key": 5, "get": 2, "list_keys": 2, "multi_get": 1, "set": 7},
    "reuse after it": _REUSE,
}
"""Operations on the store that two ranks do together, whoever comes first. One more is asked for by who waits for the other."""

MOST_WAITS = {"first": 3, "reuse": 1, "reuse again": 1, "destroy": 0, "create": 3, "reuse after it": 1}
MOST_CLONES = {"first": 2, "reuse": 1, "reuse again": 1, "destroy": 0, "create": 1, "reuse after it": 1}
MOST_THREADS_STARTED = {"first": 5, "reuse": 2, "reuse again": 2, "destroy": 4, "create": 4, "reuse after it": 2}
MOST_SOCKETS = {"first": 13, "reuse": 13, "reuse again": 13, "destroy": 9, "create": 13, "reuse after it": 13}
MOST_CALLS = {
    "first": {"bind": 8, "listen": 2, "socket": 18, "connect": 8, "threads": 11},
    "reuse": {"threads": 2, "socket": 2, "connect": 2},
    "reuse again": {"threads": 2, "socket": 2, "connect": 2},
    "destroy": {"threads": 4},
    "create": {"bind": 8, "listen": 2, "socket": 15, "connect": 5, "threads": 10},
    "reuse after it": {"threads": 2, "socket": 2, "connect": 2},
}
"""System calls of both ranks. The first to wait in a store opens a second connection to it, in whichever phase that is."""

MOST_ACCEPTED = 6
"""Over all phases, since the host of the store accepts a connection whenever it comes to that."""


class Bare(TinyModel):
    """Has no metrics."""

    def test_step(self, batch, batch_idx):
        self.layer(batch[0])


def run_phases(begin):
    """One stage after the other, and a destroy; calls ``begin(phase)`` before each, and once at the end."""
    strategy = PGroupDDPStrategy(destroy="at_exit")
    trainer = make_trainer(strategy)
    for phase in PHASES:
        begin(phase)
        if phase == "destroy":
            strategy.destroy_process_group()
            process_state().lifecycle.finish_releases()
        else:
            trainer.test(Bare(), datamodule=TinyData(), verbose=False)
    begin("")


@pytest.fixture
def patient(monkeypatch):
    """A rank that waits looks for failures now and then, by operations that are not to be counted."""
    monkeypatch.setattr(key_waiter, "INTERVAL", 60.0)
    monkeypatch.setattr(rounds, "_LIVENESS_PERIOD", 60.0)


def test_operations_threads_and_sockets(patient):
    def job(rank):
        costs, taken = Costs(), []
        with costs.counted():
            run_phases(lambda phase: taken.append(costs.take()))
        return taken[1:]

    zero, one = run_ranks(job)
    for phase, mine, its in zip(PHASES, zero, one, strict=True):
        both = {name: mine.get(name, 0) + its.get(name, 0) for name in mine.keys() | its.keys()}
        waits, clones = both.pop("wait", 0), both.pop("clone", 0)
        started, sockets = both.pop("threads started"), both.pop("sockets")
        both.pop("threads")
        print(phase, both, waits, clones, started, sockets)
        assert waits <= MOST_WAITS[phase], phase
        assert clones <= MOST_CLONES[phase], phase
        assert started <= MOST_THREADS_STARTED[phase], phase
        assert sockets <= MOST_SOCKETS[phase], phase


def test_system_calls(patient, tmp_path):
    if shutil.which("strace") is None:
        pytest.skip("there is no strace")

    def job(rank):
        try:
            trace = Trace(tmp_path / f"rank-{rank}")
        except OSError as error:
            return str(error)
        run_phases(trace.mark)
        return trace.stop()

    zero, one = run_ranks(job)
    if isinstance(zero, str):
        pytest.skip(zero)
    accepted = 0
    for phase in PHASES:
        both = Counter(zero[phase]) + Counter(one[phase])
        both["threads"] = both.pop("clone", 0) + both.pop("clone3", 0)
        accepted += both.pop("accept4", 0)
        assert both <= Counter(MOST_CALLS[phase]), phase
    assert accepted <= MOST_ACCEPTED
