"""The first failure of a generation: who, where and why, for all ranks to read."""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import datetime

from torch.distributed import Store

from lightning_pgroup import payload

MAX_MESSAGE = 2_000
"""Length at which the message of an exception is cut."""

PREFIX = "failure"
"""The part of the store in which the records stand, by generation."""


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
            message=str(error)[:MAX_MESSAGE],
            time=time.time(),
        )

    def describe(self) -> str:
        """The record as the note that each rank's exception gets."""
        at = datetime.fromtimestamp(self.time).strftime("%H:%M:%S")
        where = f"in {self.stage!r}" + (f", hook {self.hook!r}" if self.hook else "")
        what = f"{self.kind}: {self.message}" if self.message else self.kind
        return (
            f"The first failure of generation {self.generation} was on rank {self.rank} (pid {self.pid} on {self.host}) at {at}"
            f" {where}: {what}"
        )


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


def key(generation: int) -> str:
    """Where the first failure of a generation stands."""
    return f"{PREFIX}/{generation}"


def _load(where: str, value: bytes) -> FailureRecord | None:
    return payload.if_readable(lambda: payload.read(value, where, FailureRecord))
