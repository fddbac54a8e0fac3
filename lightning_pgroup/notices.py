"""What a rank tells the others of its stages: that one has failed, and how one has ended. Never waits for them."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from lightning_pgroup import failure, records
from lightning_pgroup.backends import blames_a_peer
from lightning_pgroup.bounded import run_bounded
from lightning_pgroup.claim import Stage
from lightning_pgroup.custody import Custody
from lightning_pgroup.exceptions import add_note, describe
from lightning_pgroup.failure import FailureRecord
from lightning_pgroup.membership import Membership
from lightning_pgroup.policy import Ownership
from lightning_pgroup.team import Team

TELL_TIMEOUT = timedelta(seconds=0.5)
"""How long a rank that fails tries to record that, before it cuts its connections."""

CONTACT_TIMEOUT = timedelta(seconds=0.5)
"""How long such a rank waits for the store, if it has not met the others before."""

_COURTESY = timedelta(seconds=0.2)
"""How long a rank that has lost a connection lets the other one tell why, before it calls its own failure the first."""

_POLL = 0.005

INNER_PATIENCE = 0.5
"""How long a rank whose inner stage has failed waits for the others to fail in it too, seconds."""

WORD_TIMEOUT = timedelta(seconds=1)
"""How long a rank that fails tries to tell the others."""


class Notices:
    """Tells the other ranks.

    Args:
        custody: Where the group is kept.
        membership: How to reach them.

    Attributes:
        team: The team of the last agreement, if any.
    """

    def __init__(self, custody: Custody, membership: Membership) -> None:
        self._custody = custody
        self._membership = membership
        self.team: Team | None = None

    def tell_failure(self, stage: Stage, error: BaseException, hook: str) -> None:
        """Record the failure of a stage for all ranks, and note on ``error`` which one was the first.

        Local, waits at most :data:`TELL_TIMEOUT`; never raises. To be called before the connections are cut, so that those who
        wake up find the record.
        """
        group, team = self._custody.current, self.team
        if not stage.failure and group is not None and team is not None and stage.acquired:
            self.tell(stage, error, hook, team, group.generation)
        elif stage.failure:
            add_note(error, stage.failure)

    def tell(self, stage: Stage, error: BaseException, hook: str, team: Team, generation: int) -> None:
        """Record the failure of a stage in, or before, the creation of a generation; see :meth:`tell_failure`."""
        record = FailureRecord.of(error, generation=generation, rank=team.rank, stage=stage.name, hook=hook)
        stage.failure = self._first_failure(team, record, error).describe()
        add_note(error, stage.failure)
        records.logger.warning(
            "%s %s failed here with %s. %s",
            records.prefix(team.run, team.attempt, team.rank, team.size, generation),
            stage.name,
            record.kind,
            stage.failure,
        )

    def _first_failure(self, team: Team, record: FailureRecord, error: BaseException) -> FailureRecord:
        first, group = [record], self._custody.current

        def tell() -> None:
            try:
                silent: tuple[int, ...] = ()
                if blames_a_peer(error):
                    failure.sign_in(team.store, record.generation, team.rank)
                    if group is not None:
                        group.cut()  # who only waits for this rank is to sign in, too
                    silent = _silent_ranks(team, record)
                first[0] = failure.publish(team.store, replace(record, silent=silent))
            except Exception:  # the host of the store may be the rank that has died
                first[0] = replace(record, store_lost=True)

        run_bounded(tell, TELL_TIMEOUT, "failure")
        return first[0]

    def tell_if_alone(self, stage: Stage, error: BaseException, hook: str) -> bool:
        """Record the failure of an inner stage, if other ranks go on in it and so may wait for this one. Never raises.

        Waits for the others at most :data:`INNER_PATIENCE`. When all ranks fail, the group is sound, and the stage around goes
        on with it.

        Returns:
            Whether it was recorded, so that the group must end.
        """
        group, team = self._custody.current, self.team
        if group is None or not group.is_alive() or team is None or team.size == 1 or not stage.inner:
            return False
        with_all = [False]

        def ask() -> None:
            with contextlib.suppress(Exception):  # the host of the store may be the rank that has died
                with_all[0] = failure.fails_with_all(team.store, group.generation, stage.inner, team.size, INNER_PATIENCE)

        run_bounded(ask, timedelta(seconds=INNER_PATIENCE) + TELL_TIMEOUT, "inner")
        if not with_all[0]:
            self.tell(stage, error, hook, team, group.generation)
        return not with_all[0]

    def leave_word(self, stage: Stage, error: BaseException | None) -> None:
        """Tell ranks that wait for this one how its stage ended. Local, waits at most :data:`WORD_TIMEOUT`; never raises.

        A rank whose stage has failed before its rendezvous stays away from that for good.
        """

        def tell() -> None:
            with contextlib.suppress(Exception):  # the host of the store may be gone
                if error is not None and not stage.met:
                    self._stay_away(stage, f"it has failed before: {describe(error)}")
                if self.team is not None:
                    self.team.rounds.note(f"{'raised in' if error else 'finished'} {stage.name}")

        if error is None:
            tell()
        else:
            run_bounded(tell, WORD_TIMEOUT, "word")  # or stopped

    def _stay_away(self, stage: Stage, why: str) -> None:
        stage.met = True
        place = stage.request().place
        if place.size == 1:
            return
        if self._membership.is_known(place) or self._custody.ownership() is not Ownership.FOREIGN:
            self.team = self._membership.stay_away(place, why, CONTACT_TIMEOUT) or self.team


def _silent_ranks(team: Team, record: FailureRecord) -> tuple[int, ...]:
    """Let the rank that this one has lost tell why; if it does not, the first to ask looks which ranks tell nothing at all."""

    def told() -> bool:
        return failure.read(team.store, record.generation) is not None

    if _wait_for(told):
        return ()
    if failure.is_first_to_ask(team.store, record.generation):
        return failure.silent_ranks(team.store, record.generation, team.size)
    _wait_for(told)
    return ()


def _wait_for(condition: Callable[[], bool]) -> bool:
    pause, deadline = threading.Event(), time.monotonic() + _COURTESY.total_seconds()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(_POLL)
    return True
