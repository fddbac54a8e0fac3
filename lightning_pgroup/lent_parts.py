"""Keeps what a Trainer lends to a strategy apart from what its user gave to it, so that one object can serve two Trainers.

A Trainer fills the gaps of its strategy with an accelerator and a precision plugin. The next Trainer takes these for the
user's own: it refuses its own ``accelerator``, and silently ignores its own ``precision``.
"""

from abc import abstractmethod

from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override


class LentParts(DDPStrategy):
    """``DDPStrategy`` whose accelerator and precision plugin can come from one Trainer after the other."""

    _lent_accelerator: Accelerator | None = None
    _lent_precision: Precision | None = None
    _is_built = False

    @property
    @abstractmethod
    def has_own_devices(self) -> bool:
        """Whether the user gave the devices to the strategy itself, so that those of a Trainer do not count."""

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        return self._lent_accelerator or self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        self._lent_accelerator = accelerator

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._lent_precision or self._precision_plugin or Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if self._is_built:
            self._lent_precision = precision_plugin
        else:
            self._precision_plugin = precision_plugin
