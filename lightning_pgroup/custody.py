"""Custody of the group: which one we own, who uses it, and its end when the policy table says so."""

import time
import weakref
from datetime import timedelta

from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from lightning_pgroup import c10d, record_file, records
from lightning_pgroup.claim import Claim, Stage
from lightning_pgroup.destroy import end_sub_group
from lightning_pgroup.errors import PGroupError
from lightning_pgroup.graveyard import Graveyard, Wrapper
from lightning_pgroup.group import OwnedGroup
from lightning_pgroup.interrupts import run_shielded
from lightning_pgroup.policy import Action, Event, Ownership, action_for, reason
from lightning_pgroup.records import LifecycleEvent
from lightning_pgroup.store import leak


class Custody:
    """The group that this process owns. Not safe for threads; :class:`~lightning_pgroup.lifecycle.Lifecycle` locks.

    Args:
        inherited: A group that a fork copied from the parent process: it does not work here.

    Attributes:
        graveyard: Where ended groups rest until nothing in C++ holds them.
        current: The group that we created last and did not end, alive or destroyed by other code.
        highest: The highest generation that this process ever had.
        users: The strategies that use the current group.
        last_user: The one that used it last; its policies apply.
        trainer: The Trainer that used it last.
        trainer_number: Its number, for records.
    """

    def __init__(self, inherited: "weakref.ref[ProcessGroup] | None" = None) -> None:
        self.graveyard = Graveyard()
        self.current: OwnedGroup | None = None
        self.highest = 0
        self.users: set[Claim] = set()
        self.last_user: Claim | None = None
        self.trainer: weakref.ref[object] | None = None
        self.trainer_number: int | None = None
        self._inherited = inherited
        self._wrappers: list[Wrapper] = []

    def ownership(self) -> Ownership:
        """Whose the default group of this process is right now."""
        group = c10d.default_group()
        if group is None or self._is_inherited(group):
            return Ownership.NONE
        if self.current is not None and self.current.is_alive():
            return Ownership.OWNED
        return Ownership.FOREIGN

    def drop_inherited(self) -> None:
        """Drop the group that a fork has copied into this process, without touching the parent's."""
        group = c10d.default_group()
        if group is not None and self._is_inherited(group):
            for copied in c10d.take_all_groups():
                leak(copied)

    def notice_loss(self, stage: str = "") -> None:
        """Notice that other code has destroyed our group, if it did, and clean up after it."""
        if self.current is not None and not self.current.is_alive():
            lost = self.current
            lost.forget(self.graveyard)
            self._record(records.LOST, "other code destroyed it", lost, stage, time.time(), 0.0)
            self._clear()

    def take(self, group: OwnedGroup) -> None:
        """Take a new group into custody."""
        self.current = group

    def use(self, stage: Stage) -> None:
        """A stage uses the group from now on."""
        self.users.add(stage.claim)
        self.last_user = stage.claim
        if stage.trainer is not None:
            self.trainer = stage.trainer
            self.trainer_number = stage.number

    def is_next_trainer(self, trainer: "weakref.ref[object] | None") -> bool:
        """Whether ``trainer`` is another one than the one that used the group last."""
        return trainer is not None and self.trainer is not None and trainer() is not self.trainer()

    def action(self, event: Event, *, in_use: bool = False) -> Action:
        """What ``event`` does to the group, by the policies of the strategy that used it last."""
        if self.last_user is None:
            return Action.KEEP
        config = self.last_user.config
        return action_for(event, config.policies, config.on_error, self.ownership(), in_use=in_use)

    def apply(
        self,
        event: Event,
        *,
        in_use: bool = False,
        stage: str = "",
        why: str = "",
        by: Claim | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Let ``event`` happen: end the group or keep it.

        Args:
            event: What happened.
            in_use: See :func:`~lightning_pgroup.policy.action_for`.
            stage: Name of the stage, for the record.
            why: The reason, if there is more to say than the name of the event.
            by: A strategy that gets the record too, although it does not use the group.
            timeout: How long an orderly destroy may take; by default the ``destroy_timeout`` of the last user.
        """
        self.notice_loss(stage)
        action = self.action(event, in_use=in_use)
        if action is Action.DESTROY:
            self.end(why or reason(event), stage=stage, by=by, timeout=timeout)
        elif action is Action.ABORT:
            self.end(why or reason(event), stage=stage, by=by, abort=True)

    def end(
        self, why: str, *, stage: str = "", by: Claim | None = None, abort: bool = False, timeout: timedelta | None = None
    ) -> None:
        """End the group that we own, within ``timeout`` or its last user's. Local; nothing happens without one.

        A signal that arrives meanwhile is heard afterwards: a group that is half ended would be nobody's.
        """
        run_shielded(lambda: self._end(why, stage, by, abort, timeout))

    def hold_for(self, wrapper: DistributedDataParallel) -> None:
        """A strategy has built a DDP wrapper. In a default group of other code nobody else remembers it."""
        if self.current is not None and self.current.is_alive():
            self.current.hold_for(wrapper)
        else:
            self._wrappers = [one for one in self._wrappers if one() is not None]
            self._wrappers.append(weakref.ref(wrapper))

    def end_sub_group(self, group: ProcessGroup, timeout: timedelta, *, in_use: bool) -> None:
        """End one sub-group of whatever default group there is. Local, bounded by ``timeout``; shielded as :meth:`end`.

        Args:
            group: One that torch knows.
            timeout: How long an orderly destroy may take.
            in_use: Whether a stage runs, so that a DDP wrapper may still work with it.

        Raises:
            PGroupError: One does.
        """
        wrappers = [] if self.current is None else self.current.wrappers_of(group)
        wrappers += [one for one in self._wrappers if (wrapper := one()) is not None and wrapper.process_group is group]
        if wrappers and in_use:
            raise PGroupError(
                f"`DistributedDataParallel` reduces gradients over the group {group.group_name!r} in the stage that is running."
                " Destroy it between stages."
            )

        def end() -> None:
            backends = c10d.backends_of(group)
            self.graveyard.leave_connections(backends, end_sub_group(group, timeout))
            if self.current is not None:
                self.current.let_go_of(group)
            self.graveyard.bury([group], wrappers)

        run_shielded(end)

    def _end(self, why: str, stage: str, by: Claim | None, abort: bool, timeout: timedelta | None) -> None:
        group, last = self.current, self.last_user
        if group is None or last is None:
            return
        # Whatever happens from here on, an interrupt included, the group is not ours to use any more.
        self.current = None
        start, clock = time.time(), time.perf_counter()
        what, interrupted = (records.ABORTED if abort else records.DESTROYED), True
        try:
            if abort:
                group.abort(self.graveyard)
            elif problem := group.destroy(timeout or last.config.destroy_timeout, self.graveyard):
                what = records.ABORTED
                why = f"{why}; {problem}"
            interrupted = False
        finally:
            if interrupted:
                what, why = records.ABORTED, f"{why}; it was interrupted"
            self._record(what, why, group, stage, start, time.perf_counter() - clock, by)
            self._clear()

    def record_use(self, what: str, why: str, stage: Stage, start: float, duration: float) -> None:
        """Record that a stage got its group."""
        if self.current is not None:
            self._record(what, why, self.current, stage.name, start, duration, stage.claim, stage.number)

    def note_end(self, stage: Stage) -> None:
        """A stage that had got a group has ended, whatever becomes of the group: the next line on disk says when."""
        if stage.acquired and stage.claim.config.record is not None:
            record_file.note_end(stage.claim.config.record)

    def record_foreign(self, why: str, stage: Stage, rank: int, world_size: int, backend: str) -> None:
        """Record that a stage uses a group of other code."""
        event = LifecycleEvent(
            what=records.ADOPTED,
            why=why,
            generation=0,
            policy=stage.claim.config.policy_names,
            stage=stage.name,
            rank=rank,
            world_size=world_size,
            backend=backend,
            start=time.time(),
            duration=0.0,
            run="",
            attempt=None,
            trainer=stage.number,
        )
        _hand_out(event, {stage.claim})

    def _record(
        self,
        what: str,
        why: str,
        group: OwnedGroup,
        stage: str,
        start: float,
        duration: float,
        by: Claim | None = None,
        trainer: int | None = None,
    ) -> None:
        begins = what in (records.CREATED, records.REUSED)
        owner = by if begins else self.last_user
        event = LifecycleEvent(
            what=what,
            why=why,
            generation=group.generation,
            policy=() if owner is None else owner.config.policy_names,
            stage=stage,
            rank=group.signature.rank,
            world_size=group.signature.world_size,
            backend=group.signature.backend,
            start=start,
            duration=duration,
            run=group.run,
            attempt=group.attempt,
            trainer=trainer if begins else self.trainer_number,
        )
        users = set[Claim]() if begins else self.users
        _hand_out(event, users if by is None else users | {by})

    def _clear(self) -> None:
        self.current = None
        self.users.clear()
        self.trainer = None
        self.trainer_number = None

    def _is_inherited(self, group: ProcessGroup) -> bool:
        return self._inherited is not None and group is self._inherited()


def _hand_out(event: LifecycleEvent, interested: set[Claim]) -> None:
    """Give a record to the strategies that it concerns, to the log, and once to each place on disk that they name."""
    for claim in interested:
        claim.note(event)
    event.log()
    for path in sorted({claim.config.record for claim in interested if claim.config.record is not None}):
        record_file.append(path, event)
