"""Who owns ``torch.distributed``'s process group, and when does it die? A strategy for Lightning that answers both."""

from lightning_pgroup.__about__ import __version__
from lightning_pgroup.context import process_group
from lightning_pgroup.errors import (
    GarbledStoreError,
    GroupLostError,
    GroupMismatchError,
    NoGroupError,
    NotInGroupError,
    PGroupError,
    RanksDisagreeError,
    RendezvousAbandonedError,
    RendezvousTimeoutError,
    StoreLostError,
    StrategyClosedError,
    WorldSizeError,
)
from lightning_pgroup.lifecycle_logger import LifecycleLogger
from lightning_pgroup.public import destroy_process_group
from lightning_pgroup.records import LifecycleEvent
from lightning_pgroup.registry import register_strategies
from lightning_pgroup.strategy import PGroupDDPStrategy

__all__ = [
    "GarbledStoreError",
    "GroupLostError",
    "GroupMismatchError",
    "LifecycleEvent",
    "LifecycleLogger",
    "NoGroupError",
    "NotInGroupError",
    "PGroupDDPStrategy",
    "PGroupError",
    "RanksDisagreeError",
    "RendezvousAbandonedError",
    "RendezvousTimeoutError",
    "StoreLostError",
    "StrategyClosedError",
    "WorldSizeError",
    "__version__",
    "destroy_process_group",
    "process_group",
]

register_strategies()
