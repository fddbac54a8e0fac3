"""One generation: creates a default group over a store, knows whether it still lives, and ends it."""

import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store
from torch.nn.parallel import DistributedDataParallel

from lightning_pgroup import c10d, lineage, transport
from lightning_pgroup.backends import peers_notice
from lightning_pgroup.bounded import time_left
from lightning_pgroup.excepthook import ExceptHookGuard
from lightning_pgroup.gloo_interface import GlooInterface
from lightning_pgroup.graveyard import Graveyard, Wrapper
from lightning_pgroup.monitor import FailureMonitor
from lightning_pgroup.records import prefix
from lightning_pgroup.saves import finish_saves
from lightning_pgroup.signature import GroupSignature
from lightning_pgroup.watched_store import WatchedStore

_CALL_TIMEOUT = timedelta(seconds=0.5)


@dataclass(eq=False, slots=True)
class OwnedGroup:
    """A default group that we created. Torch holds it, so that other code may destroy it; we do only for its DDP wrappers.

    Attributes:
        generation: Its number, agreed by all ranks.
        signature: What it was created with.
        run: Name of the run.
        attempt: How often the launcher has restarted the ranks, if it counts that.
        inner_stages: How many stages began in it while another one was running; equal on all ranks that run the same.
    """

    generation: int
    signature: GroupSignature
    run: str
    attempt: int | None
    inner_stages: int = field(default=0, init=False)
    _reference: "weakref.ref[ProcessGroup]"
    _hook: ExceptHookGuard = field(repr=False)
    _interface: GlooInterface = field(repr=False)
    _wrappers: list[Wrapper] = field(default_factory=list, repr=False)
    _held: list[ProcessGroup] = field(default_factory=list, repr=False)
    _store: Store | None = field(default=None, repr=False)
    _addresses: tuple[bytes, ...] = field(default=(), repr=False)
    _peers: int = field(default=0, repr=False)
    _monitor: FailureMonitor | None = field(default=None, repr=False)

    @property
    def log_prefix(self) -> str:
        """What a line of the log that concerns it begins with."""
        return prefix(self.run, self.attempt, self.signature.rank, self.signature.world_size, self.generation)

    def is_alive(self) -> bool:
        """Whether it is still the default group of this process."""
        group = self._reference()
        return group is not None and c10d.default_group() is group

    def hold_for(self, wrapper: DistributedDataParallel) -> None:
        """A DDP wrapper works with it: it must not be the last to let go; see :mod:`lightning_pgroup.graveyard`."""
        self._wrappers.append(weakref.ref(wrapper))
        default, own = self._reference(), wrapper.process_group
        self._held += [group for group in (default, own) if group is not None and group not in self._held]

    def release_holds(self) -> None:
        """Stop holding it for wrappers that are gone."""
        self._wrappers = [wrapper for wrapper in self._wrappers if wrapper() is not None]
        if not self._wrappers:
            self._held.clear()

    def wrappers_of(self, group: ProcessGroup) -> list[Wrapper]:
        """The DDP wrappers that work with ``group``, the default group or one of its sub-groups."""
        return [one for one in self._wrappers if (wrapper := one()) is not None and wrapper.process_group is group]

    def let_go_of(self, group: ProcessGroup) -> None:
        """Stop holding a sub-group that has ended; whoever ended it looks after its wrappers."""
        self._held = [one for one in self._held if one is not group]

    def destroy(self, timeout: timedelta, graveyard: Graveyard) -> str:
        """End it in good order, or abort it when that takes longer than ``timeout``. Not collective.

        Checkpoints that other threads are writing are waited for, within the same bound: they may write them over it. So is
        what is pending in it, unless a variable or a DDP wrapper still holds it, which then can not talk over its connections
        any more (F31 of the design).

        Returns:
            Why it did not end in good order; empty if it did.
        """
        unfinished, rest = finish_saves(timeout)
        if unfinished:
            self.abort(graveyard)
            return unfinished
        deadline = time.monotonic() + rest.total_seconds()
        backends, addresses, used = c10d.backends_in_use(), self._seen_addresses(), self._used_addresses()
        groups = self._take()
        problem = "it was interrupted"
        try:
            if transport.shut_down(groups, time_left(deadline)) and (
                self._wrappers or graveyard.drain(groups, time_left(deadline))
            ):
                problem = ""
                transport.cut(backends, used)
                graveyard.leave_connections(backends, tuple(one for one in addresses if one not in used))
            elif time.monotonic() >= deadline:
                problem = f"the orderly shutdown did not end within `destroy_timeout` of {timeout.total_seconds():g} s"
        except Exception as error:
            problem = f"the backend's shutdown raised {type(error).__name__}: {error}"
        finally:
            if problem:
                transport.abort(groups, backends, addresses)
            graveyard.bury(groups, self._wrappers)
        return problem

    def abort(self, graveyard: Graveyard) -> None:
        """End it at once, in whatever state it is. Not collective; waits for no other rank."""
        backends, addresses = c10d.backends_in_use(), self._all_addresses()
        if isinstance(self._store, WatchedStore):
            self._store.take_leave(c10d.group_names(), _CALL_TIMEOUT)
        groups = self._take()
        transport.abort(groups, backends, addresses)
        graveyard.bury(groups, self._wrappers)

    def cut(self) -> None:
        """Cut its connections, so that those who wait for this rank wake up; it is to be aborted next. Waits for nobody."""
        transport.cut(c10d.backends_in_use(), self._all_addresses())

    def watch(self, run_store: Store, backends: Iterable[str]) -> None:
        """Let a thread abort the group when another rank fails, if one of ``backends`` does not wake a waiting rank itself."""
        if self._monitor is None and self.signature.world_size > 1 and not peers_notice(backends):
            if self._store is not None and not isinstance(self._store, WatchedStore) and hasattr(self._store, "clone"):
                self._store = self._store.clone()  # the thread must not wait for a client that the main thread waits with
            self._monitor = FailureMonitor(run_store, self.generation, self._abort_in_place)

    def forget(self, graveyard: Graveyard) -> None:
        """Clean up after it was destroyed by other code."""
        self._stop_monitor()
        self._hook.restore()
        self._interface.restore()
        c10d.restore_local_names()
        graveyard.bury(self._held, self._wrappers)

    def has_lost_a_peer(self) -> bool:
        """Whether another rank has ended, as far as the backend's connections show it. Local, never waits."""
        return self._count_peers() < self._peers

    def _count_peers(self) -> int:
        """How many connections the default group has; those of sub-groups do not count."""
        addresses = self._addresses
        if isinstance(self._store, WatchedStore):
            addresses = self._store.addresses_of(c10d.group_names(lambda group: group is self._reference()))
        return transport.count_peers([self.signature.backend], addresses) if addresses else 0

    def _abort_in_place(self) -> None:
        """Free a rank that waits in a collective; it then drops the group itself. Called on the monitor's thread."""
        if self.is_alive():
            transport.abort(c10d.all_groups(), c10d.backends_in_use(), self._all_addresses())

    def _seen_addresses(self) -> tuple[bytes, ...]:
        """The addresses of this generation that this rank knows without asking the store."""
        return self._store.addresses if isinstance(self._store, WatchedStore) else self._addresses

    def _used_addresses(self) -> tuple[bytes, ...]:
        """Of these, those of groups in which there was a collective, so that all their members have made them."""
        if not isinstance(self._store, WatchedStore):
            return self._addresses
        names = c10d.group_names(c10d.was_used) if self.is_alive() else frozenset()
        return self._store.addresses_of(names)

    def _all_addresses(self) -> tuple[bytes, ...]:
        """All addresses of this generation, sub-groups of others included; what is known of them if the store is gone."""
        store = self._store
        if store is None or isinstance(store, WatchedStore) or not self.is_alive():
            return self._seen_addresses()
        return (*self._seen_addresses(), *transport.read_addresses([(store, c10d.address_keys(c10d.all_groups()))]))

    def _stop_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None

    def _take(self) -> list[ProcessGroup]:
        self._stop_monitor()
        self.release_holds()
        groups = c10d.take_all_groups() if self.is_alive() else []
        self._held.clear()
        self._hook.restore()
        self._interface.restore()
        return groups


def create_group(
    generation: int,
    signature: GroupSignature,
    store: Store,
    device_id: torch.device | None,
    pg_options: Any,
    *,
    interface: GlooInterface,
    run: str,
    attempt: int | None,
) -> OwnedGroup:
    """Create the default group of one generation. Collective; blocks at most the group's timeout.

    Args:
        generation: Its number; all ranks give the same.
        signature: What it shall be.
        store: The part of the store that belongs to this generation alone.
        device_id: The device to bind it to; ``None`` on CPU.
        pg_options: Options of the backend.
        interface: What gloo is to use; restored with the end of the group, or at once if its creation fails.
        run: Name of the run.
        attempt: How often the launcher has restarted the ranks, if it counts that.

    Raises:
        Exception: What torch raised. :func:`discard_unfinished` is to follow, once the others have been told.
    """
    # Its functions take the default group as a default argument, evaluated at import: imported after the creation of a group,
    # they would hold that group for ever (F20 of the design).
    import torch.distributed.nn.functional  # noqa: F401

    hook = ExceptHookGuard()
    try:
        interface.use()
        c10d.name_groups_after(generation)
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
        lineage.remember(group, None)
        owned = OwnedGroup(generation, signature, run, attempt, weakref.ref(group), hook, interface, _store=store)
        if signature.world_size > 1 and not isinstance(store, WatchedStore):
            owned._addresses = tuple(one for keys in c10d.address_keys([group]) for one in transport.values(store, keys))
        transport.settle(group, [signature.backend])
        owned._peers = owned._count_peers()
        return owned
    except BaseException:
        hook.created()
        hook.restore()
        interface.restore()
        raise


def discard_unfinished(backend: str, store: Store) -> None:
    """Drop what a failed creation has left. Local, waits for no other rank.

    Whatever holds its exception holds what was made so far, and with it the connections, so these are cut.

    Args:
        backend: The backend of the group.
        store: The part of the store that belonged to its generation.
    """
    watched = store if isinstance(store, WatchedStore) else None
    if watched is not None:
        watched.take_leave(c10d.group_names(), _CALL_TIMEOUT)
    transport.abort(c10d.take_all_groups(), [backend], () if watched is None else watched.addresses)
