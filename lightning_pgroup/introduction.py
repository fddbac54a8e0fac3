"""What a rank and its team must know of each other before anything else: who it is, how many there are, which version.

Each rank was told these things by somebody, a scheduler or a user's hand, and may have been told wrong. Ranks that differ in
them would wait for each other in vain, or take a stranger for one of them.
"""

import json
import os
import socket
import uuid
from typing import Any, TypedDict

from torch.distributed import Store

from lightning_pgroup import payload
from lightning_pgroup.__about__ import __version__


class Said(TypedDict):
    """What stands under ``rank/<k>``. What it says in the round is JSON of its own, so that equal texts are read once."""

    who: str
    host: str
    pid: int
    round: int
    left: bool
    time: float
    said: str


class Terms(TypedDict):
    """What stands under ``terms``."""

    size: int
    version: str
    rank: int
    who: str
    host: str
    pid: int


class Introduction:
    """Introduces one rank to its team, by a fixed number of operations, until nothing is wrong any more.

    Args:
        store: The store of the team.
        rank: This process's rank.
        size: Number of ranks, as this process was told.

    Attributes:
        me: Who this process is: to be part of all that stands under ``rank/<k>``.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self.me: dict[str, Any] = {"who": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
        self._is_known = self._is_agreed = False

    def check_rank(self) -> str:
        """Take the place of this rank; returns, in words, who else has it, or nothing.

        Raises:
            GarbledStoreError: Something else than a rank has it.
        """
        if self._is_known:
            return ""
        first = json.dumps({**self.me, "round": 0, "left": True, "time": 0.0, "said": "{}"})
        key = f"rank/{self._rank}"
        other = payload.read(self._store.compare_set(key, "", first), key, Said)
        self._is_known = other["who"] == self.me["who"]
        if self._is_known:
            return ""
        return (
            f"another process is rank {self._rank} of this run already, pid {other['pid']} on {other['host']}. Two processes"
            " were given the same rank, or those of two runs the same address"
        )

    def check_terms(self) -> str:
        """Compare what this rank was told with what the first rank was; returns the differences in words, or nothing.

        Raises:
            GarbledStoreError: What stands there is not from a rank.
        """
        if self._is_agreed:
            return ""
        mine: Terms = {"size": self._size, "version": __version__, "rank": self._rank, **self.me}  # type: ignore[typeddict-item]
        first = payload.read(self._store.compare_set("terms", "", json.dumps(mine)), "terms", Terms)
        compared = (
            ("number of ranks", first["size"], mine["size"]),
            ("version of lightning_pgroup", first["version"], mine["version"]),
        )
        found = [f"{name} ({_by(first)}: {one!r}; {_by(mine)}: {other!r})" for name, one, other in compared if one != other]
        self._is_agreed = not found
        return f"the ranks differ in the {' and the '.join(found)}. Each must be given the same" if found else ""


def _by(one: Terms) -> str:
    return f"rank {one['rank']}, pid {one['pid']} on {one['host']}"
