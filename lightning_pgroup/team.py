"""Teams: which processes are ranks of one run, and the store in which they meet.

A launcher of ours hands each process that it starts an :class:`Invitation`. With one, a rank knows how many processes there
really are, before any of them waits for another.
"""

import json
import os
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import HashStore, PrefixStore, Store, is_torchelastic_launched

from lightning_pgroup import failure
from lightning_pgroup.rounds import Rounds
from lightning_pgroup.store import LOOPBACK, Endpoint, connect_store, delete_below, launcher_store

ENVIRONMENT_VARIABLE = "LIGHTNING_PGROUP_INVITATION"

_GENERATIONS = "gen"
_HIGHEST = "highest"
_RECORDS = "records"


class RunEnd(NamedTuple):
    """What a run of workers leaves to the process that has started it.

    Attributes:
        highest: Its highest generation.
        records: The records of its lowest rank that left any, as JSON.
    """

    highest: int
    records: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Invitation:
    """What a launcher of ours tells the ranks that it starts.

    Attributes:
        run: Name of the run; prefix of all its keys, so that one store can serve many runs.
        size: Number of ranks.
        host: Where the store listens.
        port: Its port.
        highest: The highest generation that the inviting process knows of; those of the run follow it.
    """

    run: str
    size: int
    host: str = LOOPBACK
    port: int
    highest: int

    @classmethod
    def to(cls, endpoint: Endpoint, size: int, highest: int) -> "Invitation":
        """Invite ``size`` ranks to a new run at the store that listens at ``endpoint``."""
        return cls(run=uuid.uuid4().hex, size=size, host=endpoint.host, port=endpoint.port, highest=highest)

    def to_environment(self) -> str:
        """The value for :data:`ENVIRONMENT_VARIABLE`."""
        return json.dumps(asdict(self))

    @classmethod
    def take_from_environment(cls) -> "Invitation | None":
        """Read the invitation that this process was started with, and take it out of the environment.

        A program that this rank may start itself must not take it for its own.
        """
        text = os.environ.pop(ENVIRONMENT_VARIABLE, None)
        return None if text is None else cls(**json.loads(text))


class Team:
    """The ranks of one run, seen from one of them.

    Args:
        store: The store, not yet below the prefix of the run.
        run: Name of the run.
        rank: This process's rank.
        size: Number of ranks.
        is_host: Whether the store dies with this process.
        check_peers: Raises when a peer is known to be gone for good; see :meth:`Rounds.run`.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        rank: int,
        size: int,
        *,
        is_host: bool,
        check_peers: Callable[[], None] = lambda: None,
    ) -> None:
        self.is_host = is_host
        self.rank = rank
        self.size = size
        self.check_peers = check_peers
        self.store: Store = PrefixStore(_prefix(run), store)
        self.rounds = Rounds(self.store, rank, size)

    @classmethod
    def alone(cls) -> "Team":
        """A team of one, which needs no network."""
        return cls(HashStore(), "alone", 0, 1, is_host=True)

    def generation_store(self, generation: int) -> Store:
        """The part of the store that belongs to one generation."""
        return PrefixStore(f"{_GENERATIONS}/{generation}", self.store)

    def announce(self, generation: int) -> None:
        """Note that the ranks have agreed on a generation. On one rank, before the others learn of it."""
        self.store.set(_HIGHEST, str(generation))

    def delete_before(self, generation: int) -> None:
        """Delete the keys of all generations before this one, which all ranks have agreed to leave.

        To be called on all ranks; rank 0 does it, since it hosts the store wherever a rank does: in torch 2.13 ``list_keys``
        waits with Python's lock held, so that a rank whose host is stopped would stand still altogether.
        """
        if self.rank == 0:
            for prefix in (_GENERATIONS, failure.PREFIX):
                delete_below(self.store, prefix, lambda key: int(key.partition("/")[0]) < generation)

    def leave_records(self, text: str) -> None:
        """Leave this rank's records for the process that has started the run."""
        self.store.set(f"{_RECORDS}/{self.rank}", text)

    @staticmethod
    def clean_up(store: Store, invitation: Invitation) -> RunEnd:
        """Take what a run has left behind, whose ranks have ended, and delete all its keys."""
        below = PrefixStore(_prefix(invitation.run), store)
        highest = int(below.get(_HIGHEST)) if below.check([_HIGHEST]) else invitation.highest
        records = next((key for rank in range(invitation.size) if below.check([key := f"{_RECORDS}/{rank}"])), None)
        end = RunEnd(highest, "[]" if records is None else below.get(records).decode())
        delete_below(store, _prefix(invitation.run))
        return end


def join_invited(
    invitation: Invitation, rank: int, timeout: timedelta, hosted: Store | None, check_peers: Callable[[], None]
) -> Team:
    """Join the team that a launcher of ours started.

    Args:
        invitation: From the launcher.
        rank: This process's rank.
        timeout: Bound of the connection and of each operation on the store.
        hosted: The store, if this very process hosts it.
        check_peers: See :class:`Team`.
    """
    store = hosted or connect_store(Endpoint(invitation.host, invitation.port), timeout)
    return Team(store, invitation.run, rank, invitation.size, is_host=hosted is not None, check_peers=check_peers)


def join_launched(init_method: str, rank: int, size: int, timeout: timedelta, nodes: int) -> Team:
    """Join a team whose processes somebody else started; see :func:`~lightning_pgroup.store.launcher_store`."""
    # The store of torchrun's agent can outlive an attempt, so that the prefix names the attempt as well (F24 of the design).
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = launcher_store(init_method, rank, size, timeout, nodes)
    is_host = rank == 0 and not is_torchelastic_launched() and not init_method.startswith("file://")
    return Team(store, f"{run}/{attempt}", rank, size, is_host=is_host)


def _prefix(run: str) -> str:
    return f"lightning_pgroup/{run}"
