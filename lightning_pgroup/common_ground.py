"""Where the ranks of a stage can do something together before it ends."""

import time
from datetime import timedelta

from lightning_pgroup import records
from lightning_pgroup.claim import Stage
from lightning_pgroup.errors import RendezvousAbandonedError
from lightning_pgroup.group import OwnedGroup
from lightning_pgroup.team import Team

_COURTESY = 0.5
"""How long a rank that has lost a connection lets the other one say why, seconds: it may only have ended its group."""


class CommonGround:
    """The team of a running stage, and its group.

    Args:
        team: The ranks.
        stage: The stage.
        group: Its group; ``None`` if that has ended already.

    Attributes:
        team: See above.
        group: See above.
        number: The round with which the stage began; equal on all ranks, and no other stage has it.
        log_prefix: What a line of the log that concerns it begins with.
    """

    def __init__(self, team: Team, stage: Stage, group: OwnedGroup | None) -> None:
        self.team = team
        self.group = group
        self.number = team.rounds.number
        self._stage = stage
        self._lost_at = 0.0
        self._generation = 0 if group is None else group.generation
        self.log_prefix = records.prefix(team.run, team.attempt, team.rank, team.size, self._generation)

    @property
    def timeout(self) -> timedelta:
        """Bound of what is done together: that of the group's collectives."""
        seconds = None if self.group is None else self.group.signature.timeout
        return self._stage.request().place.timeout if seconds is None else timedelta(seconds=seconds)

    def check(self) -> None:
        """Look whether it makes sense to wait for the others.

        Raises:
            RendezvousAbandonedError: One of them has failed, or its process has ended, which leaves no word.
        """
        self._check_word()
        if self.group is None or not self.group.has_lost_a_peer():
            return
        self._lost_at = self._lost_at or time.monotonic()
        if time.monotonic() - self._lost_at > _COURTESY:
            raise RendezvousAbandonedError(
                "it can not go on: a connection of the process group has broken, so a rank has ended"
            )

    def _check_word(self) -> None:
        self.team.check_failure(self._generation, "it can not go on")

    def has_failed(self) -> bool:
        """Whether a rank has failed, so that the group, if it is there, works no more.

        Connections do not count: another rank may have left the stage by now, and ended its group in good order.
        """
        try:
            self._check_word()
        except RendezvousAbandonedError:
            return self.group is not None
        return False
