"""A callback that hands what was done with the process group to the Trainer's loggers."""

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_pgroup.group_names import GroupNames
from lightning_pgroup.records import ABORTED, CREATED, DESTROYED, REUSED, logger

_SHOWN = (CREATED, REUSED, DESTROYED, ABORTED)


class LifecycleLogger(Callback):
    """Hands to the Trainer's loggers how often the group was created, reused, destroyed and aborted, and how long that took.

    On rank 0, in the ``teardown`` hook, and once more after the stage if the group has ended with it: two metrics each,
    ``pgroup/created`` (how often so far) and ``pgroup/created_seconds`` (how long in all), over all stages of the strategy.
    Nothing is logged where nothing has changed, and with another strategy than ours. Local: no rank waits for another.

    Args:
        prefix: What the names of the metrics begin with.
    """

    def __init__(self, prefix: str = "pgroup") -> None:
        self._prefix = prefix
        self._logged: dict[str, float] = {}
        self._has_warned = False

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log what is new, before Lightning closes the loggers of this stage. Called by the Trainer on each rank."""
        self.log_news(trainer)

    def log_news(self, trainer: Trainer, *, save: bool = False) -> None:
        """Log what has changed since the last call. Local; nothing happens on other ranks than 0.

        Args:
            trainer: Whose loggers get it.
            save: Whether they are to write it at once, since Lightning does not do that any more.
        """
        if not trainer.is_global_zero:
            return
        if not isinstance(trainer.strategy, GroupNames):
            if not self._has_warned:
                self._has_warned = True
                name = type(trainer.strategy).__name__
                logger.warning("LifecycleLogger has nothing to log: %s does not own its process group", name)
            return
        tally = trainer.strategy.claim().tally
        metrics: dict[str, float] = {}
        for what in _SHOWN:
            metrics[f"{self._prefix}/{what}"] = float(tally.counts[what])
            metrics[f"{self._prefix}/{what}_seconds"] = tally.seconds.get(what, 0.0)
        if metrics == self._logged or not any(metrics.values()):
            return
        self._logged = metrics
        for one in trainer.loggers:
            one.log_metrics(metrics, step=trainer.global_step)
            if save:
                one.save()


def log_news(trainer: Trainer | None) -> None:
    """Let the callbacks of a Trainer log how its stage has ended. For the launchers; what a logger raises is only a warning."""
    for callback in getattr(trainer, "callbacks", ()):
        if trainer is None or not isinstance(callback, LifecycleLogger):
            continue
        try:
            callback.log_news(trainer, save=True)
        except Exception as error:  # the stage is over, and must not fail any more
            logger.warning("a logger did not take what became of the process group: %s", error, exc_info=True)
