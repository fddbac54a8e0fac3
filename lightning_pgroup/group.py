"""One generation: creates a default group over a store, knows whether it still lives, and ends it."""

import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from lightning_pgroup import c10d, transport
from lightning_pgroup.excepthook import ExceptHookGuard
from lightning_pgroup.signature import GroupSignature


@dataclass(eq=False, slots=True)
class OwnedGroup:
    """A default group that we created. Holds no reference to it: torch does, so that other code may destroy it.

    Attributes:
        generation: Its number, agreed by all ranks.
        signature: What it was created with.
    """

    generation: int
    signature: GroupSignature
    _reference: "weakref.ref[ProcessGroup]"
    _hook: ExceptHookGuard = field(repr=False)

    def is_alive(self) -> bool:
        """Whether it is still the default group of this process."""
        group = self._reference()
        return group is not None and c10d.default_group() is group

    def destroy(self, timeout: timedelta) -> str:
        """End it in good order, or abort it when that takes longer than ``timeout``. Not collective.

        Returns:
            Why it did not end in good order; empty if it did.
        """
        groups = self._take()
        try:
            if transport.shut_down(groups, timeout):
                return ""
        except Exception as error:
            return f"the backend's shutdown raised {type(error).__name__}: {error}"
        transport.abort(groups)
        return f"the orderly shutdown did not end within `destroy_timeout` of {timeout.total_seconds():g} s"

    def abort(self) -> None:
        """End it at once, in whatever state it is. Not collective; waits for no other rank."""
        transport.abort(self._take())

    def forget(self) -> None:
        """Clean up after it was destroyed by other code."""
        self._hook.restore()

    def leak(self) -> ProcessGroup | None:
        """The group itself, for a forked child, which must never run its destructor."""
        return self._reference()

    def _take(self) -> list[ProcessGroup]:
        groups = c10d.take_all_groups() if self.is_alive() else []
        self._hook.restore()
        return groups


def create_group(
    generation: int, signature: GroupSignature, store: Store, device_id: torch.device | None, pg_options: Any
) -> OwnedGroup:
    """Create the default group of one generation. Collective; blocks at most the group's timeout.

    Args:
        generation: Its number; all ranks give the same.
        signature: What it shall be.
        store: The part of the store that belongs to this generation alone.
        device_id: The device to bind it to; ``None`` on CPU.
        pg_options: Options of the backend.

    Raises:
        Exception: What torch raised; nothing of the group is left behind.
    """
    # Its functions take the default group as a default argument, evaluated at import: imported after the creation of a group,
    # they would hold that group for ever (F20 of the design).

    hook = ExceptHookGuard()
    c10d.name_groups_after(generation)
    try:
        dist.init_process_group(
            signature.backend,
            store=store,
            rank=signature.rank,
            world_size=signature.world_size,
            timeout=None if signature.timeout is None else timedelta(seconds=signature.timeout),
            pg_options=pg_options,
            device_id=device_id,
        )
        hook.created()
        group = c10d.default_group()
        assert group is not None
        return OwnedGroup(generation, signature, weakref.ref(group), hook)
    except BaseException:
        hook.created()
        hook.restore()
        c10d.take_all_groups()
        raise
