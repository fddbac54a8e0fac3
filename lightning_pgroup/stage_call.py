"""The function that a launcher runs in each rank, wrapped so that a stage encloses all hooks."""

import itertools
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer

from lightning_pgroup import metrics
from lightning_pgroup.claim import Stage
from lightning_pgroup.errors import WorldSizeError
from lightning_pgroup.exceptions import describe
from lightning_pgroup.interrupts import run_shielded
from lightning_pgroup.lifecycle import Lifecycle
from lightning_pgroup.lifecycle_logger import log_news
from lightning_pgroup.lightning_private import SIGTERMException, TunerExitException, failing_hook, requested_devices
from lightning_pgroup.process_state import process_state

if TYPE_CHECKING:
    from lightning_pgroup.strategy import PGroupDDPStrategy


_counter = itertools.count(1)
_numbers: "weakref.WeakKeyDictionary[Trainer, int]" = weakref.WeakKeyDictionary()


class StageCall:
    """Runs a Trainer's function as one stage. Pickled to the ranks where the launcher spawns them.

    Args:
        strategy: Whose stage it is.
        function: What the Trainer asked the launcher to run.
        trainer: The Trainer, if the launcher was told.
        in_worker: Whether it runs in a process that ends with it.
    """

    def __init__(
        self, strategy: "PGroupDDPStrategy", function: Callable[..., Any], trainer: Trainer | None, *, in_worker: bool
    ) -> None:
        self._strategy = strategy
        self._function = function
        self._trainer = trainer
        self._in_worker = in_worker
        self._number = None if trainer is None else _number_of(trainer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function. Called by the launcher, in each rank.

        A signal that arrives while the stage begins or ends is heard right after that: half an end would let others wait.
        """
        lifecycle, process = process_state().lifecycle, os.getpid()
        stages: list[Stage] = []

        def enter() -> None:
            name, claim = stage_name(self._trainer), self._strategy.claim()
            stages.append(lifecycle.enter(claim, name, self._trainer, self._strategy.request, number=self._number))

        def leave() -> None:
            lifecycle.leave(stages.pop())

        try:
            run_shielded(enter)
            result = self._function(*args, **kwargs)
            if os.getpid() == process:
                if self._trainer is not None and not self._in_worker:  # those in a worker end with it
                    metrics.compute_before_the_end(lifecycle, stages[0], self._trainer, self._strategy.root_device)
                run_shielded(leave)  # in here, so that a signal right before it does not leave the stage open
                self._log_news()
            return result
        except BaseException as error:
            if not stages or os.getpid() != process:  # it has ended; a child that was forked inside has no part in it
                raise
            caught, ends = error, list[BaseException]()
            run_shielded(lambda: ends.append(self._leave(lifecycle, stages[0], caught)))
            self._log_news()
            if ends[0] is not error:
                raise ends[0] from error
            raise

    def _log_news(self) -> None:
        if not self._in_worker:  # a worker ends its group later
            log_news(self._trainer)

    def _leave(self, lifecycle: Lifecycle, stage: Stage, error: BaseException) -> BaseException:
        """End a stage that raised; returns what it is to raise."""
        hook, is_tuner = failing_hook(error), isinstance(error, TunerExitException)
        if stage.claim.terminated and not isinstance(error, SIGTERMException):
            # The group was dropped when the signal arrived; what followed from that is not what ends this rank.
            error = SIGTERMException()
        trainer, ground = None if self._in_worker else self._trainer, lifecycle.common_ground(stage)
        if trainer is not None:
            metrics.hand_on(lifecycle, stage, trainer, self._strategy.root_device)
        lifecycle.leave(stage, error, tuner_exit=is_tuner, hook=hook)
        if trainer is not None:
            metrics.after_failure(ground, stage, trainer, "was left by a tuner" if is_tuner else f"raised {describe(error)}")
        return error


def _number_of(trainer: Trainer) -> int:
    if trainer not in _numbers:
        _numbers[trainer] = next(_counter)
    return _numbers[trainer]


def stage_name(trainer: Trainer | None) -> str:
    """``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""
    function = None if trainer is None else trainer.state.fn
    return "stage" if function is None else str(function.value)


def check_devices(trainer: Trainer | None, strategy: "PGroupDDPStrategy") -> None:
    """Refuse a Trainer that asks for other devices than its strategy object already has from an earlier Trainer.

    Raises:
        WorldSizeError: They differ in number.
    """
    if trainer is None or strategy.has_own_devices:
        return
    asked = requested_devices(trainer)
    if asked is not None and asked != strategy.num_processes:
        raise WorldSizeError(
            f"The Trainer asks for {asked} devices, but its strategy object was set up for {strategy.num_processes} by an"
            " earlier Trainer. Build a new strategy for it."
        )
