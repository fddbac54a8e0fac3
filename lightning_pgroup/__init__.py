"""Who owns ``torch.distributed``'s process group, and when does it die? A strategy for Lightning that answers both.

What needs torch or Lightning is imported when it is asked for: pytest imports this package in each run of a project that has
it, and ``python -m lightning_pgroup`` needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_pgroup.__about__ import __version__
from lightning_pgroup.errors import (
    GarbledStoreError,
    GroupLostError,
    GroupMismatchError,
    NoGroupError,
    NotInGroupError,
    PGroupError,
    RanksDisagreeError,
    RanksFailedError,
    RendezvousAbandonedError,
    RendezvousTimeoutError,
    StoreLostError,
    StrategyClosedError,
    WorldSizeError,
)
from lightning_pgroup.registry import register_with_lightning

if TYPE_CHECKING:
    from lightning_pgroup.context import process_group
    from lightning_pgroup.lifecycle_logger import LifecycleLogger
    from lightning_pgroup.public import destroy_process_group
    from lightning_pgroup.records import LifecycleEvent
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
    "RanksFailedError",
    "RendezvousAbandonedError",
    "RendezvousTimeoutError",
    "StoreLostError",
    "StrategyClosedError",
    "WorldSizeError",
    "__version__",
    "destroy_process_group",
    "process_group",
]

_HOMES = {
    "LifecycleEvent": "records",
    "LifecycleLogger": "lifecycle_logger",
    "PGroupDDPStrategy": "strategy",
    "destroy_process_group": "public",
    "process_group": "context",
}
"""The public names that need torch, and the modules that have them."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_lightning()
