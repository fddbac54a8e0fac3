"""Which ranks this process belongs to, and where they meet: its invitation, the store that it hosts, and its teams."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from torch.distributed import TCPStore

from lightning_pgroup import failure
from lightning_pgroup.bounded import run_bounded, time_left
from lightning_pgroup.children import Children
from lightning_pgroup.errors import StoreLostError, WorldSizeError
from lightning_pgroup.init_method import resolve
from lightning_pgroup.store import LOOPBACK, Endpoint, host_store, listen
from lightning_pgroup.team import Invitation, RunEnd, Team, join_invited, join_launched

STORE_TIMEOUT = timedelta(minutes=5)
"""Bound of one operation on a store that this process hosts."""

LEAVE_TIMEOUT = timedelta(seconds=5)
"""How long the host of a store waits at exit for the other ranks to leave."""

_LEAVE_POLL = 0.01
_LONGEST_KNOCK = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank stands in the run that a stage asks for.

    Attributes:
        rank: Its rank.
        size: Number of ranks.
        nodes: Number of nodes.
        init_method: As given by the user, or ``None``.
        default_init_method: Where ranks that somebody else started meet; asked for only when it is needed.
        starter: Who has started the ranks, for messages.
        timeout: How long to wait for the other ranks.
    """

    rank: int
    size: int
    nodes: int
    init_method: str | None
    default_init_method: Callable[[], str]
    starter: str
    timeout: timedelta


class Membership:
    """The runs that this process is a rank of. One per process.

    Attributes:
        invitation: The run that it belongs to, if one was started for it.
        children: The ranks that it has started.
        job: The job of a sweep for which it has started them, if any; see :mod:`lightning_pgroup.hydra_job`.
        before: The variables of the environment that describe a rank, as they were before it started them.
    """

    def __init__(self) -> None:
        self.invitation = Invitation.take_from_environment()
        self.children = Children()
        self.job: str | None = None
        self.before: Mapping[str, str | None] = {}
        self._hosted: TCPStore | None = None
        self._endpoint: Endpoint | None = None
        self._main_address: str | None = None
        self._alone = Team.alone()
        self._teams: dict[object, Team] = {}
        self._missed: dict[object, list[str]] = {}

    def invite(self, size: int, highest: int) -> Invitation:
        """Host this process's store, on loopback, if that is not done yet, and invite ranks to a new run.

        Args:
            size: How many ranks.
            highest: The highest generation that this process knows of.
        """
        if self._endpoint is None:
            self.host(listen(LOOPBACK))
        assert self._endpoint is not None
        return Invitation.to(self._endpoint, size, highest)

    def host(self, listener: socket.socket) -> None:
        """Host this process's store on a socket that already listens; the store owns the socket from then on.

        Waits for nobody; at most 5 s where this host does not let its own connection through.

        Raises:
            StoreLostError: This host can not reach itself there.
        """
        endpoint = Endpoint(*listener.getsockname()[:2])
        try:
            _knock(endpoint)
        except BaseException:
            listener.close()
            raise
        self._hosted = host_store(listener, STORE_TIMEOUT)
        self._endpoint = endpoint

    def join(self, invitation: Invitation | None) -> None:
        """Become a rank of the run that ``invitation`` names.

        Args:
            invitation: The run, or ``None`` for one whose ranks meet at the main address.
        """
        self.invitation = invitation

    def keep_main_address(self, place: Place) -> None:
        """Let the main address be what the first ``place`` says, whatever later ones do. A collective under MPI."""
        if self._main_address is None:
            self._main_address = place.default_init_method()

    def leave_records(self, text: str) -> None:
        """Leave the records of this worker, as JSON, for the process that has started it."""
        if self.invitation is not None and self.invitation in self._teams:
            self._teams[self.invitation].leave_records(text)

    def follows_a_failure(self, generation: int) -> bool:
        """Whether another rank of this worker's run has failed first, in a way that their parent will notice."""
        team = self.invited_team
        first = None if team is None else failure.read(team.store, generation)
        return first is not None and team is not None and first.rank != team.rank and first.kind != KeyboardInterrupt.__name__

    def close_run(self, invitation: Invitation) -> RunEnd:
        """Take over what a run has left in the store that this process hosts, and clean up. Its ranks must have ended."""
        assert self._hosted is not None
        return Team.clean_up(self._hosted, invitation)

    def check_size(self, wanted: int) -> None:
        """Refuse a stage that asks for another number of ranks than there are processes.

        A stage of one rank is always possible: each process then runs it for itself.

        Raises:
            WorldSizeError: On each rank, at once.
        """
        size = 1 if self.invitation is None else self.invitation.size
        if wanted in (1, size) or self.invitation is None:
            return
        raise WorldSizeError(
            f"This stage asks for {wanted} ranks, but this run has {size} processes, started for an earlier stage. Processes"
            " of `start_method='popen'` live as long as the script, so that all its stages need the same number of ranks (or"
            f" one). Use {size} ranks here too, `start_method='spawn'` or 'fork' (new processes for each stage), or another"
            " script."
        )

    def check_children(self) -> None:
        """Refuse to wait for a rank that this process started and that has ended.

        Raises:
            WorldSizeError: The message names the ranks and their exit codes.
        """
        ended = [(rank, child.poll()) for rank, child in enumerate(self.children, start=1)]
        gone = [f"local rank {rank} (exit code {code})" for rank, code in ended if code is not None]
        if gone:
            raise WorldSizeError(
                f"All ranks of this run are needed here, but these have ended: {', '.join(gone)}. A rank can not be started"
                " again in the middle of a script. If it has failed, look for its own error above; if it has come to the end"
                " of the script, let all ranks run the same stages and collectives."
            )

    @property
    def invited_team(self) -> Team | None:
        """The team of the run that this process was started for, or has started, once a stage of it has met the others."""
        return None if self.invitation is None else self._teams.get(self.invitation)

    def is_known(self, place: Place) -> bool:
        """Whether the team of ``place`` can be reached without a new rendezvous with processes that may not exist."""
        if place.init_method is None:
            return place.size == 1 or self._is_invited(place)
        return self._key(place) in self._teams

    def team(self, place: Place) -> Team:
        """The team of ``place``, joined on first use. Blocks at most ``place.timeout`` then.

        Raises:
            Exception: What torch's stores raise when the others can not be reached.
        """
        if place.size == 1 and place.init_method is None and not self._is_invited(place):
            return self._alone
        key = self._key(place)
        if key not in self._teams:
            self._teams[key] = self._join(place)
            self._teams[key].rounds.where = self.describe(place)
            for why in self._missed.pop(key, ()):
                self._teams[key].rounds.abandon(why)
        return self._teams[key]

    def _join(self, place: Place) -> Team:
        if place.init_method is None and self.invitation is not None and self._is_invited(place):
            hosted = self._hosted if self._is_own(self.invitation) else None
            return join_invited(self.invitation, place.rank, place.timeout, hosted, self.check_children)
        if place.init_method is None:
            self.check_size(place.size)
        # By whatever words the address is given, the ranks that meet there have one team: a second would read its rounds.
        init_method = resolve(place.init_method or self._main_address or place.default_init_method())
        key = (init_method, place.rank, place.size)
        if key not in self._teams:
            self._teams[key] = join_launched(init_method, place.rank, place.size, place.timeout, place.nodes)
        return self._teams[key]

    def stay_away(self, place: Place, why: str, timeout: timedelta) -> Team | None:
        """A stage has failed before this rank's rendezvous: tell the others now, or else when they meet, to stay in step.

        Args:
            place: Where this rank stands.
            why: In words.
            timeout: How long to wait for the store, if this is the first contact. As its host this rank waits for nobody.

        Returns:
            The team, if it was reached.
        """
        try:
            team = self.team(replace(place, timeout=min(timeout, place.timeout)))
        except Exception:
            self.note_missed(place, why)
            return None
        team.store.set_timeout(place.timeout)
        team.rounds.abandon(why)
        return team

    def note_missed(self, place: Place, why: str) -> None:
        """A stage ended before the first contact with its team: that is told when they meet, to stay in step."""
        self._missed.setdefault(self._key(place), []).append(why)

    def describe(self, place: Place) -> str:
        """Where the team of ``place`` meets, for messages."""
        if place.init_method is not None:
            return place.init_method
        if self.invitation is not None and self._is_invited(place):
            return f"{self.invitation.host}:{self.invitation.port}"
        return f"{self._main_address or place.default_init_method()}, the main address {place.starter}"

    def leave(self) -> None:
        """Tell the host that this rank leaves; as the host, wait for the others, at most :data:`LEAVE_TIMEOUT`.

        Ranks that are all children of this process are waited for by :meth:`Children.wait`, until they have ended.
        """
        deadline = time.monotonic() + LEAVE_TIMEOUT.total_seconds()
        pause = threading.Event()
        for team in set(self._teams.values()):
            with contextlib.suppress(Exception):  # the host may be gone already, and so may the others
                if not team.is_host:
                    team.store.add("left", 1)
                    continue
                if len(self.children) == team.size - 1:
                    continue
                while team.store.add("left", 0) < team.size - 1 and time.monotonic() < deadline:
                    pause.wait(_LEAVE_POLL)

    def leave_children(self, why: str, timeout: timedelta) -> list[str]:
        """Leave the run of the ranks that this process has started, and wait for them to end, so that it can start others.

        Those that wait for this process hear of it at once. Blocks at most ``timeout`` and twice :data:`LEAVE_TIMEOUT`.

        Args:
            why: Why this rank will not come to them any more, in words.
            timeout: How long they may take. Those that live then are terminated, and in the end killed.

        Returns:
            Which ranks had to be ended.
        """
        start, team, invitation = time.monotonic(), self.invited_team, self.invitation
        if team is not None:
            run_bounded(lambda: _suppressed(lambda: team.rounds.abandon(why)), LEAVE_TIMEOUT, "leave")
        ended_here = self.children.part(time_left(start + timeout.total_seconds()), LEAVE_TIMEOUT)
        if invitation is not None and self._hosted is not None:
            _suppressed(lambda: self.close_run(invitation))
        # With an `init_method` of the user's own the next ranks meet there too, as strangers to this team.
        self._teams = {key: one for key, one in self._teams.items() if one.size == 1}
        self._missed.clear()
        self.invitation, self.job, self.before = None, None, {}
        return ended_here

    def _is_invited(self, place: Place) -> bool:
        return self.invitation is not None and self.invitation.size == place.size

    def _is_own(self, invitation: Invitation) -> bool:
        return self._endpoint == Endpoint(invitation.host, invitation.port)

    def _key(self, place: Place) -> object:
        if place.init_method is None and self.invitation is not None and self._is_invited(place):
            return self.invitation
        return (place.init_method, place.rank, place.size)


def _knock(endpoint: Endpoint) -> None:
    """See that this process can reach its own socket: torch's store would try that for all of its timeout, deaf to Ctrl-C."""
    try:
        socket.create_connection(endpoint, _LONGEST_KNOCK).close()
    except OSError as error:
        why = f"no answer for {_LONGEST_KNOCK:g} s" if isinstance(error, TimeoutError) else error.strerror
        raise StoreLostError(
            f"This process can not host the store in which the ranks meet: it listens at {endpoint} and does not reach itself"
            f" there ({why}). Is the loopback interface down, or does a firewall guard it? `lightning-pgroup doctor` says more."
        ) from error


def _suppressed(function: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # the others may have ended in any state
        function()
