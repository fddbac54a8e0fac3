"""The owner of this process's group between its stages: whose the group is, and the ends that it comes to there.

The stages themselves are in :mod:`lightning_pgroup.lifecycle`.
"""

import weakref
from datetime import timedelta

from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from lightning_pgroup import c10d
from lightning_pgroup.claim import Claim, Stage
from lightning_pgroup.custody import Custody
from lightning_pgroup.destroy import end_foreign
from lightning_pgroup.errors import PGroupError
from lightning_pgroup.membership import Membership
from lightning_pgroup.notices import Notices
from lightning_pgroup.policy import Event, Ownership
from lightning_pgroup.saves import is_saving
from lightning_pgroup.turns import Turns, in_turn

RELEASE_TIMEOUT = timedelta(seconds=1)
"""How long the end of a process, a fork, or :meth:`Owner.close` waits for the destructors of groups that have ended."""

FOREIGN_TIMEOUT = timedelta(seconds=30)
"""How long an orderly destroy of a group of other code may take."""

LOCK_TIMEOUT = timedelta(seconds=5)
"""How long the end of a process waits for a stage that still runs in another thread."""


class Owner:
    """The owner of the default process group of this process, which knows that stages run but not how.

    Args:
        membership: How to reach the other ranks.
        inherited: A group that a fork copied from the parent process. It does not work here and is dropped when it is met.
    """

    def __init__(self, membership: Membership, inherited: "weakref.ref[ProcessGroup] | None" = None) -> None:
        self._custody = Custody(inherited)
        self._notices = Notices(self._custody, membership)
        self._turns = Turns()
        self._has_run = False
        self._stages: list[Stage] = []
        self._pending: list[tuple[Event, str]] = []

    @property
    def generation(self) -> int | None:
        """Number of the living group that we own, or ``None``."""
        current = self._custody.current
        return current.generation if current is not None and current.is_alive() else None

    @property
    def highest_generation(self) -> int:
        """The highest generation that this process knows of."""
        return self._custody.highest

    def note_generation(self, generation: int) -> None:
        """Others have come as far as ``generation``; ours will follow it."""
        self._custody.highest = max(self._custody.highest, generation)

    def ownership(self) -> Ownership:
        """Whose the default group of this process is right now."""
        return self._custody.ownership()

    def hold_for(self, wrapper: DistributedDataParallel) -> None:
        """A strategy has built a DDP wrapper around a group; see :mod:`lightning_pgroup.graveyard`."""
        self._custody.hold_for(wrapper)

    def release(self, groups: list[ProcessGroup]) -> None:
        """Let ended groups go that something has held until now. Local, never waits; the list is empty afterwards."""
        self._custody.graveyard.bury(groups, ())

    def has_run(self) -> bool:
        """Whether any stage has ever run in this process, which makes it a rank."""
        return self._has_run

    def collected(self, claim: Claim) -> None:
        """A strategy was garbage-collected and gives up its claim. Local, bounded by ``destroy_timeout``.

        Called by the garbage collector, at any moment and on any thread.
        """
        # While a checkpoint is written on this thread it may need the very group: who takes the next turn acts on it then.
        self._turns.postpone(lambda: self._give_up(claim, Event.STRATEGY_COLLECTED), now=not is_saving())

    def close(self, claim: Claim) -> None:
        """A strategy was closed and gives up its claim for good. Local, bounded by ``destroy_timeout``.

        Raises:
            PGroupError: One of its stages is running.
        """
        if claim.running:
            raise PGroupError("A strategy can not be closed while one of its own stages is running.")
        self._close(claim)

    @in_turn
    def _close(self, claim: Claim) -> None:
        claim.closed = True
        self._finish_pending()
        self._give_up(claim, Event.STRATEGY_CLOSED)
        self.finish_releases()

    def destroy(self, timeout: timedelta | None = None, *, foreign: bool = False) -> None:
        """End the group at a user's request; nothing happens without one. Local, bounded by ``timeout``.

        Args:
            timeout: How long an orderly destroy may take; by default the ``destroy_timeout`` of its last user.
            foreign: Whether a group of other code may be ended too.

        Raises:
            PGroupError: A stage is running, or the group belongs to other code.
        """
        if self._stages:
            innermost = self._stages[-1]
            advice = "it ends with that block" if innermost.is_block else "or use `destroy='on_teardown'`"
            raise PGroupError(f"{innermost.name!r} is running. Destroy the process group between stages, {advice}.")
        self._destroy(timeout, foreign)

    @in_turn
    def _destroy(self, timeout: timedelta | None, foreign: bool) -> None:
        if self.ownership() is Ownership.FOREIGN:
            if not foreign:
                raise PGroupError("The process group was created by other code, which has to destroy it.")
            self._custody.notice_loss()
            end_foreign(timeout or FOREIGN_TIMEOUT)
            return
        self._custody.drop_inherited()
        self._finish_pending()
        self._custody.apply(Event.USER_REQUEST, timeout=timeout)

    @in_turn
    def destroy_sub_group(self, group: ProcessGroup, timeout: timedelta) -> None:
        """End one sub-group at a user's request; the default group lives on. Local, bounded by ``timeout``.

        Raises:
            PGroupError: The stage that is running trains with it.
        """
        self._custody.end_sub_group(group, timeout, in_use=bool(self._stages))

    def watch(self, group: ProcessGroup) -> None:
        """A sub-group was made: see to it that a rank which waits in one of its collectives wakes up when another one fails."""
        current, team = self._custody.current, self._notices.team
        if current is not None and current.is_alive() and team is not None:
            current.watch(team.store, c10d.backends_of(group))

    @in_turn
    def next_trainer(self, trainer: object) -> None:
        """A Trainer is about to start a stage in processes of its own, forked or spawned from this one."""
        if not self._stages:
            self._finish_pending()
            if self._custody.is_next_trainer(weakref.ref(trainer)):
                self._custody.apply(Event.NEXT_TRAINER)

    @in_turn
    def end_of_run(self, why: str) -> None:
        """End the group, whatever the policies, because its other ranks are about to be replaced. Local; as :meth:`close`.

        A group of other code stays. This process is then no rank of anything, as before its first stage.

        Args:
            why: The reason, for the record.

        Raises:
            PGroupError: A stage is running.
        """
        if self._stages:
            raise PGroupError(f"{self._stages[-1].name!r} is running, so that its ranks can not be replaced.")
        self._pending.clear()
        self._custody.notice_loss()
        self._custody.end(why)
        self._notices.team = None
        self._has_run = False

    def end_of_process(self, event: Event) -> None:
        """End the group because this process ends (``WORKER_END`` or ``EXIT``). Local, bounded by ``destroy_timeout``.

        A stage that still waits in another thread, which no exit can wait for, loses its group after :data:`LOCK_TIMEOUT`.
        """
        with self._turns.take_at_the_end(LOCK_TIMEOUT):
            self._pending.clear()
            self._custody.apply(event)
            self._custody.graveyard.clear()
        self.finish_releases()

    def finish_releases(self) -> None:
        """Wait, at most :data:`RELEASE_TIMEOUT`, for the destructors of groups that have ended. Local, on any thread."""
        self._custody.graveyard.finish(RELEASE_TIMEOUT)

    def _finish_pending(self) -> None:
        """End what a stage left over, once no stage runs any more."""
        if self._stages:
            return
        while self._pending:
            event, name = self._pending.pop(0)
            self._custody.apply(event, stage=name)

    def _is_shared(self) -> bool:
        """Whether a running stage has got the group."""
        return any(stage.acquired for stage in self._stages)

    def _give_up(self, claim: Claim, event: Event) -> None:
        if claim in self._custody.users:
            self._custody.users.discard(claim)
            self._custody.apply(event, in_use=bool(self._custody.users) or self._is_shared(), by=claim)
