"""Teams: which processes are ranks of one run, and the store in which they meet.

A launcher of ours hands each process that it starts an :class:`Invitation`. With one, a rank knows how many processes there
really are, before any of them waits for another.
"""

import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import HashStore, PrefixStore, Store, is_torchelastic_launched

from lightning_pgroup import failure, payload, show_of_hands
from lightning_pgroup.bounded import run_bounded
from lightning_pgroup.errors import RendezvousAbandonedError
from lightning_pgroup.first_contact import meet, successor
from lightning_pgroup.greetings import Contact, Hello
from lightning_pgroup.init_method import host_of, is_hosted_by_rank_0, launcher_store
from lightning_pgroup.key_waiter import KeyWaiter
from lightning_pgroup.main_address import reach_at
from lightning_pgroup.rounds import Rounds
from lightning_pgroup.show_of_hands import ShowOfHands
from lightning_pgroup.store import LOOPBACK, Endpoint, delete_below
from lightning_pgroup.watched_store import WatchedStore

ENVIRONMENT_VARIABLE = "LIGHTNING_PGROUP_INVITATION"

_GENERATIONS = "gen"
_HIGHEST = "highest"
_RECORDS = "records"
_CHECK_TIMEOUT = timedelta(seconds=1)


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
        torchrun: The run of torchrun in which the inviting process is, if any.
    """

    run: str
    size: int
    host: str = LOOPBACK
    port: int
    highest: int
    torchrun: str = ""

    @classmethod
    def to(cls, endpoint: Endpoint, size: int, highest: int) -> "Invitation":
        """Invite ``size`` ranks to a new run at the store that listens at ``endpoint``."""
        host, port = endpoint
        return cls(run=uuid.uuid4().hex, size=size, host=host, port=port, highest=highest, torchrun=_torchrun())

    def to_environment(self) -> str:
        """The value for :data:`ENVIRONMENT_VARIABLE`."""
        return json.dumps(asdict(self))

    @classmethod
    def take_from_environment(cls) -> "Invitation | None":
        """Read the invitation that this process was started with, and take it out of the environment.

        A program that this rank may start itself must not take it for its own. One that a shell has left over is ignored, as
        far as that can be told: a rank has a local rank, and is in the same run of torchrun as its inviter, or in none.
        """
        text = os.environ.pop(ENVIRONMENT_VARIABLE, None)
        if text is None or "LOCAL_RANK" not in os.environ:
            return None
        invitation = cls(**json.loads(text))
        return invitation if invitation.torchrun == _torchrun() else None


class Team:
    """The ranks of one run, seen from one of them.

    Args:
        store: The store, not yet below the prefix of the run.
        run: Name of the run.
        rank: This process's rank.
        size: Number of ranks.
        is_host: Whether the store dies with this process.
        check_peers: Raises when a peer is known to be gone for good; see :meth:`Rounds.run`.
        attempt: How often the launcher has restarted the ranks, if it counts that.
        waiter: Waits for keys of ``store``; by default one of its own.
        main_host: Where rank 0 can be reached from other nodes, if that is known.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        rank: int,
        size: int,
        *,
        is_host: bool,
        check_peers: Callable[[], None] | None = None,
        attempt: int | None = None,
        waiter: KeyWaiter | None = None,
        main_host: str | None = None,
    ) -> None:
        self.run = run.partition("/")[0]
        self.attempt = attempt
        self.main_host = main_host
        self.is_host = is_host
        self.rank = rank
        self.size = size
        self.check_peers = check_peers or (lambda: None)
        self.store: Store = PrefixStore(_prefix(run), store)
        self._waiter = (waiter or KeyWaiter(store)).below(_prefix(run))
        self.rounds = Rounds(self.store, rank, size, self._waiter, show_of_hands.keys_of)
        self.hands = ShowOfHands(self.store, rank, size, self._waiter)

    @classmethod
    def alone(cls) -> "Team":
        """A team of one, which needs no network."""
        return cls(HashStore(), _torchrun() or "alone", 0, 1, is_host=True, attempt=_attempt())

    def generation_store(self, generation: int) -> Store:
        """The part of the store that belongs to one generation."""
        return PrefixStore(f"{_GENERATIONS}/{generation}", self.store)

    def watched_store(self, generation: int, timeout: timedelta) -> WatchedStore:
        """The same, in which a wait for another rank ends when one has failed.

        Args:
            generation: Its number.
            timeout: Bound of a wait that is given none.
        """
        who = f"Rank {self.rank} of {self.size}"
        waiter = self._waiter.below(f"{_GENERATIONS}/{generation}")

        def check() -> None:
            self.check_failure(generation, f"{who} can not go on creating a process group of generation {generation}")

        return WatchedStore(self.generation_store(generation), waiter, timeout, who, check)

    def check_failure(self, generation: int, what: str) -> None:
        """Look whether waiting for the other ranks of a generation still makes sense. Two operations on the store.

        Args:
            generation: Its number.
            what: What is given up if it does not, for the message.

        Raises:
            RendezvousAbandonedError: One has failed.
        """
        self.check_peers()
        failed = failure.read(self.store, generation)
        if failed is not None:
            raise RendezvousAbandonedError(f"{what}, for rank {failed.rank} has failed: {failed.kind}")

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
                delete_below(self.store, prefix, lambda key: _is_before(key, generation))

    def leave_records(self, text: str) -> None:
        """Leave this rank's records for the process that has started the run."""
        self.store.set(f"{_RECORDS}/{self.rank}", text)

    @staticmethod
    def clean_up(store: Store, invitation: Invitation) -> RunEnd:
        """Take what a run has left behind, whose ranks have ended, and delete all its keys."""
        below = PrefixStore(_prefix(invitation.run), store)
        said = below.get(_HIGHEST) if below.check([_HIGHEST]) else str(invitation.highest).encode()
        highest = payload.if_readable(lambda: payload.read_number(said, _HIGHEST))
        records = next((key for rank in range(invitation.size) if below.check([key := f"{_RECORDS}/{rank}"])), None)
        text = "[]" if records is None else below.get(records).decode(errors="replace")
        end = RunEnd(max(highest or 0, invitation.highest), text)
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
    store = hosted or _reach_inviter(invitation, rank, timeout)
    return Team(store, invitation.run, rank, invitation.size, is_host=hosted is not None, check_peers=check_peers)


def _reach_inviter(invitation: Invitation, rank: int, timeout: timedelta) -> Store:
    # The store listened before this process was started, so that there is nothing to wait for if it does not.
    hint = (
        "Rank 0 of the run, which started this process, has ended. If nobody started this process as a rank, unset"
        f" {ENVIRONMENT_VARIABLE}, LOCAL_RANK, NODE_RANK and WORLD_SIZE."
    )
    endpoint = Endpoint(invitation.host, invitation.port)
    return reach_at(endpoint, rank, invitation.size, timeout, patience=timedelta(0), hint=hint)


def join_launched(init_method: str, rank: int, size: int, timeout: timedelta, nodes: int) -> Team:
    """Join a team whose processes somebody else started; see :func:`~lightning_pgroup.init_method.launcher_store`."""
    start = time.monotonic()
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    attempt = _attempt()
    store = launcher_store(init_method, rank, size, timeout, nodes)
    waiter = KeyWaiter(store)
    of_rank_0 = is_hosted_by_rank_0(init_method)
    contact = Contact(token="", attempt=attempt, last=0)
    check_peers = None
    if size > 1 and not of_rank_0:
        # The store outlives its ranks, so that it may be full of what dead ones have left (F24 of the design).
        left = timedelta(seconds=max(1.0, timeout.total_seconds() - (time.monotonic() - start)))
        below = PrefixStore(_prefix(run), store)
        contact = meet(below, waiter.below(_prefix(run)), Hello.of(rank, size, attempt), left, init_method)
        check_peers = _SuccessorCheck(below, contact, f"Rank {rank} of {size}", init_method)
    return Team(
        store,
        f"{run}/{contact.token}",
        rank,
        size,
        is_host=rank == 0 and of_rank_0,
        check_peers=check_peers,
        attempt=contact.attempt,
        waiter=waiter,
        main_host=host_of(init_method),
    )


class _SuccessorCheck:
    """Raises when a rank of a team was started again. Asks no more once the store has not answered in time.

    Args:
        store: The store in which the ranks have met.
        contact: What they have agreed on.
        who: This rank, for messages.
        where: Where they have met, for messages.
    """

    def __init__(self, store: Store, contact: Contact, who: str, where: str) -> None:
        self._store, self._contact, self._who, self._where = store, contact, who, where
        self._silent = False

    def __call__(self) -> None:
        found: list[str] = []
        if self._silent:
            return
        # Whoever asks has a deadline of his own, which a store that does not answer must not outlast.
        in_time = run_bounded(lambda: found.append(successor(self._store, self._contact)), _CHECK_TIMEOUT, "check")
        self._silent = not in_time
        if in_time and found[0]:
            raise RendezvousAbandonedError(
                f"{self._who} can not go on with the ranks that it has met at {self._where}: {found[0]} was started again,"
                " since a rank of its node has ended. Let this process end too, so that its launcher starts it again."
            )


def _is_before(key: str, generation: int) -> bool:
    number = payload.if_readable(lambda: payload.read_number(key.partition("/")[0], key))
    return number is not None and number < generation


def _torchrun() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def _attempt() -> int | None:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) if is_torchelastic_launched() else None


def _prefix(run: str) -> str:
    return f"lightning_pgroup/{run}"
