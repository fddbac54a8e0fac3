"""The collectives of a strategy, which work between its stages too."""

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from typing_extensions import override

from lightning_pgroup.claim import Claim, GroupRequest
from lightning_pgroup.collectives import collective
from lightning_pgroup.lightning_private import in_error_handling
from lightning_pgroup.process_state import existing_process_state, process_state
from lightning_pgroup.sweep import leave_earlier_job

T = TypeVar("T")

_OVER_THE_GROUP = nullcontext(True)


class StrategyCollectives(DDPStrategy):
    """``DDPStrategy`` whose collectives get the group that they need, or are local where there is nobody to talk to."""

    @abstractmethod
    def claim(self) -> Claim:
        """This strategy's stake in the group of this process."""

    @abstractmethod
    def request(self) -> GroupRequest:
        """The group that a stage of this strategy asks for."""

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. Collective; between stages too, where it creates the group if needed."""
        with self._collective("barrier") as distributed:
            if distributed:
                super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """Send an object of one rank to all. Collective; between stages too, where it creates the group if needed."""
        with self._collective("broadcast") as distributed:
            return super().broadcast(obj, src) if distributed else obj

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Tensor:
        """Reduce a tensor over all ranks. Collective; between stages too, where it creates the group if needed."""
        with self._collective("reduce") as distributed:
            return super().reduce(tensor, group, reduce_op) if distributed else tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor of all ranks. Collective; between stages too, where it creates the group if needed."""
        with self._collective("all_gather") as distributed:
            return super().all_gather(tensor, group, sync_grads) if distributed else tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, say so. Collective; between stages too, where it creates the group if needed."""
        with self._collective("reduce_boolean_decision") as distributed:
            return super().reduce_boolean_decision(decision, all) if distributed else decision

    @abstractmethod
    def ranks_are_there(self) -> bool:
        """Whether the other ranks of a stage run already."""

    def _collective(self, name: str) -> AbstractContextManager[bool]:
        claim, state = self.claim(), existing_process_state()
        if state is not None and state.lifecycle.serves(claim):
            return _OVER_THE_GROUP
        leave_earlier_job()
        if claim.failed and not in_error_handling():
            claim.failed = False  # a hook for errors has raised itself, so that Lightning did not call `teardown` (F33)
        attached = self.cluster_environment is not None and bool(self.parallel_devices)
        may_be_rank = attached and self._start_method == "popen" and self.ranks_are_there()
        return collective(process_state().lifecycle, claim, name, self.request, may_be_rank=may_be_rank)
