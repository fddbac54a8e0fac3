"""One generation: creates a default group over a store, knows whether it still lives, and ends it."""

import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store
from torch.nn.parallel import DistributedDataParallel

from lightning_pgroup import c10d, transport
from lightning_pgroup.excepthook import ExceptHookGuard
from lightning_pgroup.graveyard import Graveyard, Wrapper
from lightning_pgroup.signature import GroupSignature


@dataclass(eq=False, slots=True)
class OwnedGroup:
    """A default group that we created. Torch holds it, so that other code may destroy it; we do only for its DDP wrappers.

    Attributes:
        generation: Its number, agreed by all ranks.
        signature: What it was created with.
    """

    generation: int
    signature: GroupSignature
    _reference: "weakref.ref[ProcessGroup]"
    _hook: ExceptHookGuard = field(repr=False)
    _wrappers: list[Wrapper] = field(default_factory=list, repr=False)
    _held: ProcessGroup | None = field(default=None, repr=False)

    def is_alive(self) -> bool:
        """Whether it is still the default group of this process."""
        group = self._reference()
        return group is not None and c10d.default_group() is group

    def hold_for(self, wrapper: DistributedDataParallel) -> None:
        """A DDP wrapper works with it: it must not be the last to let go; see :mod:`lightning_pgroup.graveyard`."""
        self._wrappers.append(weakref.ref(wrapper))
        self._held = self._reference()

    def release_holds(self) -> None:
        """Stop holding it for wrappers that are gone."""
        self._wrappers = [wrapper for wrapper in self._wrappers if wrapper() is not None]
        if not self._wrappers:
            self._held = None

    def destroy(self, timeout: timedelta, graveyard: Graveyard) -> str:
        """End it in good order, or abort it when that takes longer than ``timeout``. Not collective.

        Returns:
            Why it did not end in good order; empty if it did.
        """
        groups = self._take()
        problem = "it was interrupted"
        try:
            if transport.shut_down(groups, timeout, release=not self._wrappers):
                problem = ""
            else:
                problem = f"the orderly shutdown did not end within `destroy_timeout` of {timeout.total_seconds():g} s"
        except Exception as error:
            problem = f"the backend's shutdown raised {type(error).__name__}: {error}"
        finally:
            if problem:
                transport.abort(groups)
            graveyard.bury(groups, self._wrappers)
        return problem

    def abort(self, graveyard: Graveyard) -> None:
        """End it at once, in whatever state it is. Not collective; waits for no other rank."""
        groups = self._take()
        transport.abort(groups)
        graveyard.bury(groups, self._wrappers)

    def forget(self, graveyard: Graveyard) -> None:
        """Clean up after it was destroyed by other code."""
        self._hook.restore()
        if self._held is not None:
            groups, self._held = [self._held], None
            graveyard.bury(groups, self._wrappers)

    def _take(self) -> list[ProcessGroup]:
        self.release_holds()
        groups = c10d.take_all_groups() if self.is_alive() else []
        self._held = None
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
    import torch.distributed.nn.functional  # noqa: F401

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
