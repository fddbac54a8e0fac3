"""The first failure of a generation: who, where and why, for all ranks to read."""

import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from datetime import datetime

from torch.distributed import Store

from lightning_pgroup import payload
from lightning_pgroup.exceptions import text_of

MAX_MESSAGE = 2_000
"""Length at which the message of an exception is cut."""

PREFIX = "failure"
"""The part of the store in which the records stand, by generation."""

_POLL = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRecord:
    """What one rank says of its failure.

    Attributes:
        generation: The generation in which it failed.
        rank: Its rank.
        host: Its host.
        pid: Its process.
        stage: The stage that failed.
        hook: The hook in which it failed, as far as that is known.
        kind: Type of the exception.
        message: Its message, cut at 2,000 characters.
        time: When, seconds since the epoch on its host's clock.
        silent: The ranks that had not woken up soon after, if it failed of a lost connection.
        store_lost: Whether the store did not answer any more, so that no other rank reads this.
    """

    generation: int
    rank: int
    host: str
    pid: int
    stage: str
    hook: str
    kind: str
    message: str
    time: float
    silent: tuple[int, ...] = ()
    store_lost: bool = False

    @classmethod
    def of(cls, error: BaseException, *, generation: int, rank: int, stage: str, hook: str) -> "FailureRecord":
        """Describe ``error`` of this process."""
        return cls(
            generation=generation,
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            stage=stage,
            hook=hook,
            kind=type(error).__name__,
            message=text_of(error)[:MAX_MESSAGE],
            time=time.time(),
        )

    def describe(self) -> str:
        """The record as the note that each rank's exception gets."""
        at = datetime.fromtimestamp(self.time).strftime("%H:%M:%S")
        where = f"in {self.stage!r}" + (f", hook {self.hook!r}" if self.hook else "")
        what = f"{self.kind}: {self.message}" if self.message else self.kind
        note = (
            f"The first failure of generation {self.generation} was on rank {self.rank} (pid {self.pid} on {self.host}) at {at}"
            f" {where}: {what}"
        )
        if self.store_lost:
            return f"{note} The store does not answer any more: the process that hosts it, rank 0 or the launcher, has ended."
        if not self.silent:
            return note
        ranks = "rank " + ", ".join(map(str, self.silent))
        return f"{note} Nothing was heard from {ranks}: it was killed, has ended, or is busy with something else."


def publish(store: Store, record: FailureRecord) -> FailureRecord:
    """Leave the record of a failure for all ranks, unless one is there already. One operation, two if there is garbage.

    Returns:
        The first record of that generation.
    """
    where, mine = key(record.generation), json.dumps(asdict(record))
    found = store.compare_set(where, "", mine)
    first = _load(where, found)
    if first is None:
        first = _load(where, store.compare_set(where, found, mine))  # type: ignore[arg-type]  # torch takes bytes too
    return first or record


def read(store: Store, generation: int) -> FailureRecord | None:
    """The first failure of a generation, if there was one. At most two operations, never waits.

    What can not be read is no failure: it is left out, and replaced by the first record.
    """
    where = key(generation)
    return _load(where, store.get(where)) if store.check([where]) else None


def fails_with_all(store: Store, generation: int, inner: int, size: int, patience: float) -> bool:
    """Whether all ranks fail in an inner stage, as they do when they run the same code with the same fault.

    Called by each rank that fails in it; they all get the same answer. A rank that goes on may wait for them in a collective.

    Args:
        store: Where the ranks meet; under the prefix of the run.
        generation: That of the group.
        inner: Number of the stage among the inner ones of its generation.
        size: Number of ranks.
        patience: How long to wait for the others, seconds.
    """
    where, pause, deadline = f"{key(generation)}/inner/{inner}", threading.Event(), time.monotonic() + patience
    answer = "all" if int(store.add(f"{where}/failed", 1)) == size else "some"
    while answer == "some" and time.monotonic() < deadline:
        if store.check([f"{where}/answer"]) or read(store, generation) is not None:
            break
        pause.wait(_POLL)
    return store.compare_set(f"{where}/answer", "", answer) == b"all"


def sign_in(store: Store, generation: int, rank: int) -> None:
    """Say that this rank has lost a connection, and so lives. One operation, never waits."""
    store.set(f"{key(generation)}/awake/{rank}", "1")


def is_first_to_ask(store: Store, generation: int) -> bool:
    """Whether this rank is the one that is to look who has not signed in. One operation, never waits."""
    return int(store.add(f"{key(generation)}/asked", 1)) == 1


def silent_ranks(store: Store, generation: int, size: int) -> tuple[int, ...]:
    """The ranks that have not signed in. One operation for each rank, never waits."""
    return tuple(rank for rank in range(size) if not store.check([f"{key(generation)}/awake/{rank}"]))


def key(generation: int) -> str:
    """Where the first failure of a generation stands."""
    return f"{PREFIX}/{generation}"


def _load(where: str, value: bytes) -> FailureRecord | None:
    return payload.if_readable(lambda: payload.read(value, where, FailureRecord))
