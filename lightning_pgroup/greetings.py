"""What ranks say to one another on first contact; see :mod:`lightning_pgroup.first_contact`."""

import os
import socket
import uuid
from dataclasses import dataclass
from typing import TypedDict


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """What a rank says of itself on first contact.

    Attributes:
        rank: Its rank.
        size: The number of ranks that it was told.
        attempt: How often its launcher has restarted the ranks, if it counts that.
        nonce: A name that nobody had before.
        host: Its host.
        pid: Its process.
    """

    rank: int
    size: int
    attempt: int | None
    nonce: str
    host: str
    pid: int

    @classmethod
    def of(cls, rank: int, size: int, attempt: int | None) -> "Hello":
        """The hello of this process."""
        host, pid = socket.gethostname(), os.getpid()
        return cls(rank=rank, size=size, attempt=attempt, nonce=uuid.uuid4().hex, host=host, pid=pid)

    def describe(self) -> str:
        """Who it is, for messages."""
        return f"rank {self.rank}, pid {self.pid} on {self.host}"


class Answer(TypedDict):
    """What rank 0 answers to a hello."""

    token: str
    attempt: int | None
    refused: str


class Go(TypedDict):
    """What stands under ``<token>/go``."""

    why: str
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Contact:
    """What the ranks have agreed on.

    Attributes:
        token: The name of this attempt, below which all its keys stand.
        attempt: Its number as rank 0 counts it; ``None`` if its launcher does not count.
        last: The number of the last hello to which it answered.
    """

    token: str
    attempt: int | None
    last: int
