"""The function that a launcher runs in each rank, wrapped so that a stage encloses all hooks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer

from lightning_pgroup.errors import WorldSizeError
from lightning_pgroup.lightning_private import SIGTERMException, TunerExitException, failing_hook, requested_devices
from lightning_pgroup.process_state import process_state

if TYPE_CHECKING:
    from lightning_pgroup.strategy import PGroupDDPStrategy


class StageCall:
    """Runs a Trainer's function as one stage. Pickled to the ranks where the launcher spawns them.

    Args:
        strategy: Whose stage it is.
        function: What the Trainer asked the launcher to run.
        trainer: The Trainer, if the launcher was told.
    """

    def __init__(self, strategy: "PGroupDDPStrategy", function: Callable[..., Any], trainer: Trainer | None) -> None:
        self._strategy = strategy
        self._function = function
        self._trainer = trainer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function. Called by the launcher, in each rank."""
        lifecycle = process_state().lifecycle
        stage = lifecycle.enter(self._strategy.claim(), stage_name(self._trainer), self._trainer, self._strategy.request)
        try:
            result = self._function(*args, **kwargs)
        except BaseException as error:
            hook = failing_hook(error)
            if stage.claim.terminated and not isinstance(error, SIGTERMException):
                # The group was dropped when the signal arrived; what followed from that is not what ends this rank.
                end = SIGTERMException()
                lifecycle.leave(stage, end, hook=hook)
                raise end from error
            lifecycle.leave(stage, error, tuner_exit=isinstance(error, TunerExitException), hook=hook)
            raise
        lifecycle.leave(stage)
        return result


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
