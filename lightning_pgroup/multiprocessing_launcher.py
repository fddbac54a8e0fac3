"""Ranks as workers of this process, spawned or forked anew for each stage."""

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_pgroup import environment
from lightning_pgroup.claim import Claim
from lightning_pgroup.interrupts import run_shielded
from lightning_pgroup.lifecycle_logger import log_news
from lightning_pgroup.lightning_private import MultiProcessingLauncher
from lightning_pgroup.openmp import let_threads_go
from lightning_pgroup.policy import Event
from lightning_pgroup.process_state import process_state
from lightning_pgroup.records import LifecycleEvent, Tally
from lightning_pgroup.stage_call import StageCall, check_devices, stage_name
from lightning_pgroup.sweep import leave_earlier_job
from lightning_pgroup.team import Invitation

if TYPE_CHECKING:
    from lightning_pgroup.strategy import PGroupDDPStrategy


OWN_END = timedelta(seconds=1)
"""How long the parent waits, when it was interrupted, for workers that were interrupted with it."""

INTERRUPTED_END = timedelta(seconds=5)
"""How long it then waits for those that it has interrupted, before it kills them."""

PRECEDENCE = timedelta(seconds=5)
"""How long a worker that failed because of another waits for the parent to notice that one first."""


class PGroupMultiProcessingLauncher(MultiProcessingLauncher):
    """Lightning's launcher for workers. The parent hosts the store; a worker ends its group before it returns (F22, F23).

    Args:
        strategy: The strategy that it launches for.
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``.
    """

    def __init__(self, strategy: "PGroupDDPStrategy", start_method: Literal["spawn", "fork", "forkserver"] = "spawn") -> None:
        super().__init__(strategy, start_method)
        self._pgroup_strategy = strategy
        self._invitation: Invitation | None = None
        self._tally = Tally()
        self._asked_to_end = False

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the workers, run ``function`` in each as one stage, and wait for them. Called in the parent."""
        leave_earlier_job()
        strategy = self._pgroup_strategy
        check_devices(trainer, strategy)
        claim = strategy.claim()
        self._tally = claim.tally
        state = process_state()
        state.lifecycle.check_open(claim, stage_name(trainer))
        if trainer is not None:
            state.lifecycle.next_trainer(trainer)
        if strategy.num_nodes == 1:
            self._invitation = state.membership.invite(strategy.num_processes, state.lifecycle.highest_generation)
        call = StageCall(strategy, function, trainer, in_worker=True)
        others = set(multiprocessing.active_children())
        self.procs, self._asked_to_end = [], False
        if self._start_method == "fork":
            let_threads_go()
        try:
            with environment.restored_afterwards():
                return super().launch(call, *args, trainer=trainer, **kwargs)
        finally:
            # An interrupt of the parent alone leaves the workers running; Lightning knows none of them before all are started.
            new = (child for child in multiprocessing.active_children() if child not in others)
            workers: list[BaseProcess] = [*(self.procs or new)]
            run_shielded(lambda: self._end_run(workers, claim))

    def _end_run(self, workers: Sequence[BaseProcess], claim: Claim) -> None:
        _end_workers(workers)
        if self._invitation is None:
            return
        state = process_state()
        end = state.membership.close_run(self._invitation)
        state.lifecycle.note_generation(end.highest)
        for event in LifecycleEvent.all_from_json(end.records):
            claim.note(event)
        self._invitation = None

    @override
    def kill(self, signum: int) -> None:
        """Hand a signal on to the workers; in a worker, drop the group on SIGTERM before Lightning's handler broadcasts."""
        hand_on = partial(super().kill, signum)
        if signum == signal.SIGTERM:
            self._asked_to_end = True
            process_state().lifecycle.terminate(self._pgroup_strategy.claim(), hand_on)
        else:
            hand_on()

    @override
    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        state = process_state()
        state.membership.join(self._invitation)
        if self._invitation is not None:
            state.lifecycle.note_generation(self._invitation.highest)
        claim = self._pgroup_strategy.claim()
        follows = False
        claim.tally = self._tally  # goes on where the workers of the last stage have stopped
        known = claim.tally.total
        try:
            super()._wrapping_function(process_idx, *args, **kwargs)
        except Exception:
            follows = state.membership.follows_a_failure(state.lifecycle.highest_generation)
            raise
        finally:
            state.lifecycle.end_of_process(Event.WORKER_END)
            log_news(args[0])
            events = list(claim.events)
            new = events[max(0, len(events) - (claim.tally.total - known)) :]
            state.membership.leave_records(json.dumps([event.to_payload() for event in new]))
            state.membership.leave()
            if follows:
                self._let_the_first_failure_end_first()

    def _let_the_first_failure_end_first(self) -> None:
        """Wait, in a worker, until the parent ends it, which it does with SIGTERM when another has failed. At most 5 s.

        The parent raises the exception of the worker that it sees end first, which should be the cause and not a consequence.
        """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not self._asked_to_end:
            threading.Event().wait(PRECEDENCE.total_seconds())

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        # Lightning computes the state dict in here, on all ranks, for the sake of metrics: only then may the group end.
        output = super()._collect_rank_zero_results(trainer, results)
        process_state().lifecycle.end_of_process(Event.WORKER_END)
        return output


def _end_workers(workers: Sequence[BaseProcess]) -> None:
    """Wait for workers to end, interrupt those that go on, and kill those that do not hear it. Bounded by 6 s."""
    _join(workers, OWN_END)
    for worker in workers:
        if worker.is_alive() and worker.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGINT)
    _join(workers, INTERRUPTED_END)
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join()


def _join(workers: Sequence[BaseProcess], timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
