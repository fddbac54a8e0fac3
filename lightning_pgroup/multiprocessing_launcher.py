"""Ranks as workers of this process, spawned or forked anew for each stage."""

import json
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_pgroup import environment
from lightning_pgroup.lifecycle_logger import log_news
from lightning_pgroup.lightning_private import MultiProcessingLauncher
from lightning_pgroup.policy import Event
from lightning_pgroup.process_state import process_state
from lightning_pgroup.records import LifecycleEvent, Tally
from lightning_pgroup.stage_call import StageCall, check_devices, stage_name
from lightning_pgroup.team import Invitation

if TYPE_CHECKING:
    from lightning_pgroup.strategy import PGroupDDPStrategy


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

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the workers, run ``function`` in each as one stage, and wait for them. Called in the parent."""
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
        try:
            with environment.restored_afterwards():
                return super().launch(call, *args, trainer=trainer, **kwargs)
        finally:
            if self._invitation is not None:
                end = state.membership.close_run(self._invitation)
                state.lifecycle.note_generation(end.highest)
                for event in LifecycleEvent.all_from_json(end.records):
                    claim.note(event)
                self._invitation = None

    @override
    def kill(self, signum: int) -> None:
        """Hand a signal on to the workers; in a worker, drop the group on SIGTERM before Lightning's handler broadcasts."""
        super().kill(signum)
        if signum == signal.SIGTERM:
            process_state().lifecycle.terminate(self._pgroup_strategy.claim())

    @override
    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        state = process_state()
        state.membership.join(self._invitation)
        if self._invitation is not None:
            state.lifecycle.note_generation(self._invitation.highest)
        claim = self._pgroup_strategy.claim()
        claim.tally = self._tally  # goes on where the workers of the last stage have stopped
        known = claim.tally.total
        try:
            super()._wrapping_function(process_idx, *args, **kwargs)
        finally:
            state.lifecycle.end_of_process(Event.WORKER_END)
            log_news(args[0])
            events = list(claim.events)
            new = events[max(0, len(events) - (claim.tally.total - known)) :]
            state.membership.leave_records(json.dumps([event.to_payload() for event in new]))
            state.membership.leave()

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        # Lightning computes the state dict in here, on all ranks, for the sake of metrics: only then may the group end.
        output = super()._collect_rank_zero_results(trainer, results)
        process_state().lifecycle.end_of_process(Event.WORKER_END)
        return output
