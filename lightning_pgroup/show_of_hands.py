"""A show of hands: do all ranks have something to do together before a stage ends?

Keys, below the prefix of the run, for the stage that began with round ``r``:

==========================  ============================================================================================
``hands/<r>/raised``        how many ranks have raised their hand, and 2³² for each of them that has work for all
``hands/<r>/raised/<k>``    that rank ``k`` has, for messages
``hands/<r>/outcome``       whether all have, and for nothing, or which rank has not and why
==========================  ============================================================================================

A rank that raises no hand says so in one operation, and waits for nobody, not even for the store. Those that do raise theirs
hear at once of one that does not, of one that has failed, and of one that gives up waiting: then none of them begins what only
all can do.
"""

import contextlib
import json
from collections.abc import Callable
from datetime import timedelta
from typing import TypedDict

from torch.distributed import Store

from lightning_pgroup import payload
from lightning_pgroup.errors import PGroupError, RendezvousTimeoutError
from lightning_pgroup.exceptions import describe
from lightning_pgroup.interrupts import run_attentive
from lightning_pgroup.key_waiter import KeyWaiter
from lightning_pgroup.store import value_of

_PREFIX = "hands"
_WORK = 1 << 32


class _Outcome(TypedDict, total=False):
    """That all ranks have raised their hand, that they have nothing to do, or which rank has not raised its, and why."""

    all: bool
    idle: bool
    without: int
    why: str


def keys_of(number: int) -> list[str]:
    """The keys of the stage that began with a round that belong to no rank in particular."""
    return [_outcome_of(number)]


def _outcome_of(number: int) -> str:
    return f"{_PREFIX}/{number}/outcome"


class ShowOfHands:
    """The shows of hands of one set of ranks.

    Args:
        store: Where the ranks meet; under the prefix of the run.
        rank: This process's rank.
        size: Number of ranks.
        waiter: Waits for keys of ``store``.
    """

    def __init__(self, store: Store, rank: int, size: int, waiter: KeyWaiter) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._waiter = waiter
        self._passed: dict[int, list[str]] = {}  # and the keys that this rank deletes of it

    def raise_hand(self, number: int, has_work: bool, timeout: timedelta, check: Callable[[], None]) -> str:
        """Say that this rank is ready. Collective among the ranks that are; waits at most ``timeout`` for the others.

        An interrupt is heard in that wait: half a hand would leave keys, and a thread on the client with which rounds wait.

        Args:
            number: The round with which the stage began; equal on all ranks.
            has_work: Whether this rank has something for all to do.
            timeout: How long to wait.
            check: Called ten times a second by a rank that waits; raises a ``PGroupError`` when another one has failed.

        Returns:
            Which rank is not ready, and why, or that no rank has work; empty if all are to begin.

        Raises:
            Exception: The store is gone, or has a value that no rank wrote.
        """
        answers: list[str] = []
        run_attentive(lambda: answers.append(self._raise_hand(number, has_work, timeout, check)))
        return answers[0]

    def _raise_hand(self, number: int, has_work: bool, timeout: timedelta, check: Callable[[], None]) -> str:
        mine = self._delete_passed(number)
        key, own = _outcome_of(number), f"{_PREFIX}/{number}/raised/{self._rank}"
        self._store.set(own, "1")
        mine.append(own)
        raised = self._store.add(f"{_PREFIX}/{number}/raised", 1 + _WORK * has_work)
        if raised % _WORK == 1:
            mine.append(f"{_PREFIX}/{number}/raised")
        if raised % _WORK == self._size:
            return self._settle(number, {"all": True} if raised >= _WORK else {"idle": True})
        with contextlib.suppress(PGroupError):  # what is written there then counts for all, whoever wrote it
            self._waiter.watch(
                [key],
                timeout,
                check=check,
                late=lambda waited: self._late(number, waited, timeout),
                last_words=lambda error: json.dumps({"without": self._rank, "why": f"gave up: {describe(error)}"}).encode(),
            )
        return self._text(key, value_of(self._store, key))

    def keep_down(self, number: int, why: str) -> None:
        """Say that this rank is not ready. One operation on the store, never waits for other ranks."""
        outcome: _Outcome = {"without": self._rank, "why": why}
        if number in self._passed:  # it had raised its hand, and may be the last that was waited for
            self._settle(number, outcome)
        else:  # all can not have raised theirs, so nothing is lost if another rank has said the same
            self._store.set(_outcome_of(number), json.dumps(outcome))

    def _settle(self, number: int, outcome: _Outcome) -> str:
        key = _outcome_of(number)
        return self._text(key, self._store.compare_set(key, "", json.dumps(outcome)))

    def _text(self, key: str, value: bytes) -> str:
        outcome = payload.read(value, key, _Outcome)
        if outcome.get("all"):
            return ""
        if outcome.get("idle"):
            return "no rank has anything to do"
        if "without" in outcome and "why" in outcome and outcome["without"] < self._size:
            return f"rank {outcome['without']} {outcome['why']}"
        raise payload.garbled(key, "how a show of hands ended", value)

    def _late(self, number: int, waited: float, timeout: timedelta) -> RendezvousTimeoutError:
        missing = [rank for rank in range(self._size) if not self._store.check([f"{_PREFIX}/{number}/raised/{rank}"])]
        ranks, limit = ", ".join(map(str, missing)), timeout.total_seconds()
        return RendezvousTimeoutError(f"it had waited {waited:.1f} s of {limit:.1f} s for rank {ranks} to end the stage")

    def _delete_passed(self, number: int) -> list[str]:
        """Delete the keys of earlier stages. All ranks have left those, since they have come to the round of this one.

        Returns:
            Those that this rank is to delete of the present one, to be added to.
        """
        for passed, keys in self._passed.items():
            if passed != number:
                for key in keys:
                    self._store.delete_key(key)
        self._passed = {number: self._passed.get(number, [])}
        return self._passed[number]
