"""The one owner of this process's group: stages begin and end here, share the group, and lose it when a policy says so.

Knows nothing of Lightning. A strategy registers its stages (:meth:`Lifecycle.enter`, :meth:`Lifecycle.leave`) and asks for a
group in between (:meth:`Lifecycle.acquire`); the table in :mod:`lightning_pgroup.policy` decides what ends when.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace

from torch.distributed import ProcessGroup

from lightning_pgroup import c10d
from lightning_pgroup.acquisition import Acquisition
from lightning_pgroup.claim import Claim, GroupRequest, Stage
from lightning_pgroup.common_ground import CommonGround
from lightning_pgroup.errors import GroupLostError, GroupMismatchError, StrategyClosedError
from lightning_pgroup.exceptions import describe
from lightning_pgroup.interrupts import run_attentive
from lightning_pgroup.membership import Membership
from lightning_pgroup.owner import Owner
from lightning_pgroup.policy import Event, OnError, Ownership, reason
from lightning_pgroup.saves import watch_saves
from lightning_pgroup.turns import in_turn


class Lifecycle(Owner):
    """The owner of the default process group of this process, with its stages. One per process.

    Args:
        membership: How to reach the other ranks.
        inherited: A group that a fork copied from the parent process. It does not work here and is dropped when it is met.
    """

    def __init__(self, membership: Membership, inherited: "weakref.ref[ProcessGroup] | None" = None) -> None:
        super().__init__(membership, inherited)
        self._acquisition = Acquisition(self._custody, membership, self._notices)

    def surrounding_request(self) -> GroupRequest | None:
        """What the innermost stage that has got the group asked for, with what that group is if it is ours; or ``None``."""
        stage = next((one for one in reversed(self._stages) if one.acquired), None)
        if stage is None:
            return None
        request, current = stage.request(), self._custody.current
        return replace(request, signature=current.signature) if current is not None and current.is_alive() else request

    @in_turn
    def enter(
        self,
        claim: Claim,
        name: str,
        trainer: object | None,
        request: Callable[[], GroupRequest],
        *,
        number: int | None = None,
        is_block: bool = False,
    ) -> Stage:
        """Begin a stage. Local; waits for nothing but an end that an earlier stage left over (``destroy_timeout``).

        Raises:
            StrategyClosedError: The strategy was closed.
        """
        self.check_open(claim, name)
        watch_saves()
        self._finish_pending()
        if not self._stages:
            self._custody.graveyard.clear()
        current = self._custody.current
        stage = Stage(claim, name, None if trainer is None else weakref.ref(trainer), request, number, is_block)
        if current is not None and self._is_shared():
            current.inner_stages += 1
            stage.inner = current.inner_stages
        self._stages.append(stage)
        claim.running += 1
        claim.is_rank = True
        self._has_run = self._has_run or not is_block
        claim.failed = claim.pending = claim.terminated = False
        return stage

    def check_open(self, claim: Claim, name: str) -> None:
        """Refuse a stage of a closed strategy.

        Raises:
            StrategyClosedError: It is closed.
        """
        if claim.closed:
            raise StrategyClosedError(f"This strategy was closed and can not run {name!r} any more. Build a new one.")

    def refuse(self, claim: Claim) -> None:
        """A stage of this strategy could not even begin: what its hooks for errors ask for is local, until :meth:`finish`."""
        claim.failed = claim.config.on_error is not OnError.KEEP

    def acquire(self, stage: Stage) -> None:
        """Get the group for a stage: reuse the living one or create the next. Collective.

        Blocks at most ``rendezvous_timeout`` for ranks that do not come, and at most the group's timeout in its creation.

        Raises:
            PGroupError: The ranks did not come, do not agree, or there are not as many as the stage asks for.
            GroupLostError: The group ended in the middle of the stage.
        """
        run_attentive(lambda: self._turns.run(lambda: self._acquire(stage)))

    def _acquire(self, stage: Stage) -> None:
        alive = self.ownership() is not Ownership.NONE
        if stage.acquired and alive:
            return
        if stage.acquired:
            advice = "A stage inside it has failed" if stage.failure else "Do not destroy the group in the middle of a stage"
            raise GroupLostError(
                f"The process group ended while {stage.name!r} was running, so that no collective of it can work any more."
                f" {advice}."
            )
        self._custody.notice_loss(stage.name)
        request = stage.request()
        if alive and self._is_shared():
            self._acquisition.share_running(stage, request)
        else:
            self._acquisition.agree(stage, request)
        stage.acquired = True
        self._custody.use(stage)

    def stage_around(self, stage: Stage) -> Stage | None:
        """The stage that runs around another one, if any."""
        place = self._stages.index(stage)
        return self._stages[place - 1] if place else None

    def common_ground(self, stage: Stage) -> CommonGround | None:
        """Where the ranks of a running stage can still do something together; ``None`` if they need not, or must not."""
        team = self._notices.team
        alone = team is None or team.size == 1 or self.stage_around(stage) is not None
        if team is None or alone or not stage.acquired or self.ownership() is Ownership.FOREIGN:
            return None
        return CommonGround(team, stage, self._custody.current if self.generation is not None else None)

    @in_turn
    def discard(self, stage: Stage, why: str) -> None:
        """Drop the group at once, since others may wait in it for this rank. Local; the next stage gets a new one."""
        self._custody.end(why, stage=stage.name, by=stage.claim, abort=True)

    @in_turn
    def leave(self, stage: Stage, error: BaseException | None = None, *, tuner_exit: bool = False, hook: str = "") -> None:
        """End a stage, whose function returned or raised. Local; bounded by ``destroy_timeout``.

        Args:
            stage: From :meth:`enter`.
            error: What the function raised.
            tuner_exit: The exception is Lightning's way out of a tuner and no error: the Trainer goes on to call the
                ``teardown`` hooks, and the stage ends with :meth:`finish`.
            hook: The hook in which it raised, as far as that is known.
        """
        claim, noun = stage.claim, "block" if stage.is_block else "stage"
        self._stages.remove(stage)
        claim.running -= 1
        self._custody.note_end(stage)
        nested = bool(self._stages)
        if nested and self._stages[-1].acquired:
            self._custody.use(self._stages[-1])  # the stage around it goes on using the group, by its own policies
        if tuner_exit:
            self._end_later(stage, Event.STAGE_END)
        elif error is None:
            between = "" if stage.trainer is not None else f"{reason(Event.STAGE_END)} (a collective between stages)"
            why = "the block ended" if stage.is_block else between
            self._custody.apply(Event.STAGE_END, stage=stage.name, in_use=nested, why=why)
        else:
            claim.failed = claim.config.on_error is not OnError.KEEP
            why = f"the {noun} raised {describe(error)}"
            # Who refuses a group, as all ranks do then, does not use it: it stays as it is.
            refused = isinstance(error, GroupMismatchError) and not stage.acquired
            try:
                if claim.failed and not nested:
                    self._notices.tell_failure(stage, error, hook)
                elif claim.failed and self._notices.tell_if_alone(stage, error, hook):
                    for around in self._stages:
                        around.failure = around.failure or stage.failure
                    self._custody.end(f"{why}, inside another one and not on all ranks", stage=stage.name, by=claim, abort=True)
            finally:
                self._custody.apply(Event.STAGE_ERROR, stage=stage.name, in_use=nested or refused, why=why, by=claim)
            if not claim.failed:
                self._end_later(stage, Event.ERROR_HANDLED)
        if not self._is_shared():
            self._notices.leave_word(stage, error)
        if stage.is_block:
            self._custody.users.discard(claim)  # else a group that a strategy has lent it would be in use for ever

    @in_turn
    def terminate(self, claim: Claim, hand_on: Callable[[], None]) -> None:
        """The process was asked to end by SIGTERM: tell the others and drop the group, so that nobody waits (F28).

        Called in the signal handler. The stage goes on to its end or to the next collective, which raises.

        Args:
            claim: Of the strategy whose stage runs.
            hand_on: Sends the signal to ranks that this one has started: when it is told who got it first, and before they
                wake up for another reason.
        """
        stage = next((one for one in reversed(self._stages) if one.claim is claim), None)
        if stage is None or claim.config.on_error is OnError.KEEP:  # none in a child that was forked inside one
            hand_on()
            return
        claim.terminated = True
        try:
            self._notices.tell_failure(stage, SystemExit("SIGTERM was received"), "")
        finally:
            hand_on()
        self._custody.apply(Event.STAGE_ERROR, stage=stage.name, why="SIGTERM was received", by=claim)

    def finish(self, claim: Claim) -> None:
        """The Trainer tears down a stage of this strategy. Local, bounded by ``destroy_timeout``.

        Ends what had to outlive the launcher's function: a stage that a tuner left, or that failed and keeps its group.
        """
        claim.failed = False
        if claim.running:
            if self._custody.current is not None:
                self._custody.current.release_holds()
            return
        self._finish(claim)

    @in_turn
    def _finish(self, claim: Claim) -> None:
        if not self._stages:
            self._custody.graveyard.clear()
        if claim.pending:
            claim.pending = False
            self._finish_pending()

    def serves(self, claim: Claim) -> bool:
        """Whether a stage of this strategy runs and has its group, so that its collectives need nothing else. Costs little."""
        if not claim.running or claim.failed or claim.closed or c10d.default_group() is None:
            return False
        return self.running_stage(claim).acquired

    def running_stage(self, claim: Claim) -> Stage:
        """The innermost running stage of a strategy."""
        return next(stage for stage in reversed(self._stages) if stage.claim is claim)

    def leave_when_possible(self, stage: Stage, error: BaseException | None) -> None:
        """The same as :meth:`leave` for a stage whose end the garbage collector may have brought, at any moment."""
        self._turns.postpone(lambda: self.leave(stage, error))

    def _end_later(self, stage: Stage, event: Event) -> None:
        stage.claim.pending = True
        self._pending.append((event, stage.name))
