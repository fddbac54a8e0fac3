"""Rounds: each rank says one thing, the last to arrive answers for all, and nobody waits without bound.

Keys, all below the prefix of the run, with JSON or plain numbers as values:

=========================  =============================================================================================
``terms``                  what the first rank to come was told: the number of ranks, and the version of this package
``rank/<k>``               what rank ``k`` said last, and in which round; stays, so that a missing rank can be located
``round/<r>/arrived``      how many ranks came to round ``r``
``round/<r>/outcome``      the answer of round ``r``, or that it was abandoned and by whom; the first writer wins
=========================  =============================================================================================

A rank does a fixed number of store operations in a round, whatever the number of ranks. A rank that gives up, or fails before
it comes, writes that as the round's outcome. All others, also those that come later, then raise too, and the ranks meet again
in the next round: a rank that has caught its error never gets into step with one that is a stage behind.

On its first round a rank introduces itself (:mod:`lightning_pgroup.introduction`). One that was told another number of ranks,
or has another version of this package, ends the round for all, with an error that names it.
"""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any, TypedDict

from torch.distributed import Store

from lightning_pgroup import payload
from lightning_pgroup.bounded import Call, run_bounded, time_left
from lightning_pgroup.errors import GarbledStoreError, RanksDisagreeError, RendezvousAbandonedError, RendezvousTimeoutError
from lightning_pgroup.exceptions import describe
from lightning_pgroup.interrupts import attentively
from lightning_pgroup.introduction import Introduction, Said
from lightning_pgroup.key_waiter import KeyWaiter
from lightning_pgroup.store import value_of

_LIVENESS_PERIOD = 0.5
_GRACE = timedelta(seconds=5)
_ANSWER_TIMEOUT = timedelta(seconds=2)
_SHOWN = 300

Answer = Callable[[list[dict[str, Any]]], str]
"""Makes the outcome of a round from what the ranks said, in rank order; those who said the same share an object. Runs on one
rank only, the last to arrive."""


class Outcome(TypedDict, total=False):
    """How a round ended: with an answer, with a refusal, or abandoned by a rank, and why."""

    answer: str
    refused: str
    abandoned: int
    why: str
    silent: bool


class Rounds:
    """The rounds of one set of ranks over one store.

    Args:
        store: Where the ranks meet; already under a prefix of their own.
        rank: This process's rank.
        size: Number of ranks.
        waiter: Waits for keys of ``store``; by default one of its own.
        litter: Names further keys of a round, which nobody reads any more after the next one.

    Attributes:
        number: How many rounds this rank has come to or left.
        where: Where the store is, for messages.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        waiter: KeyWaiter | None = None,
        litter: Callable[[int], Iterable[str]] = lambda number: (),
    ) -> None:
        self.where = ""
        self._introduction = Introduction(store, rank, size)
        self._store = store
        self._rank = rank
        self._size = size
        self.number = 0
        self._outcome: Outcome | None = None
        self._litter = litter
        self._passed: list[int] = []  # since the last answer
        self._over: list[int] = []  # before it: all ranks have come to a later one
        self._waiter = waiter or KeyWaiter(store)
        self._call: Call | None = None

    def run(
        self,
        said: dict[str, Any],
        answer: Answer,
        timeout: timedelta,
        *,
        check_peers: Callable[[], None] = lambda: None,
    ) -> str:
        """Take part in the next round. Collective: every rank must call it; blocks at most ``timeout``.

        Args:
            said: What this rank says; plain JSON types.
            answer: Makes the outcome; called on one rank only.
            timeout: How long to wait for the other ranks.
            check_peers: Called about twice a second while this rank waits; raises when waiting has become pointless.

        Returns:
            The outcome, equal on all ranks.

        Raises:
            RendezvousTimeoutError: Not all ranks came in time; the message names them.
            RendezvousAbandonedError: Another rank gave up this round, or failed before it came.
            RanksDisagreeError: The ranks were not told the same, or another process is this rank.
            GarbledStoreError: Another program has written to the store.
        """
        start = time.monotonic()
        self._outcome = None
        number = self.number + 1
        try:
            self.number = number
            self._outcome = outcome = self._take_part(number, said, answer, start + timeout.total_seconds(), check_peers)
        except BaseException as error:
            self.settle(describe(error))
            raise
        if "answer" in outcome:
            self._over, self._passed = self._passed, [number]
            return str(outcome["answer"])
        self._passed.append(number)
        if "refused" in outcome:
            raise RanksDisagreeError(
                f"Rank {self._rank} of {self._size} can not start {said.get('stage', '')!r}{self._at()}: {outcome['refused']}."
            )
        if outcome["abandoned"] == self._rank:
            raise self._missing(number, said, time.monotonic() - start, timeout, silent=outcome.get("silent", False))
        raise RendezvousAbandonedError(
            f"Rank {self._rank} of {self._size} can not start {said.get('stage', '')!r}: rank {outcome['abandoned']} is not"
            f" there for it, {outcome['why']}."
        )

    def settle(self, why: str) -> str | None:
        """Leave the present round, because of a failure in or right after it. Waits at most 2 s, never for other ranks.

        Returns:
            Its answer, if the ranks have decided it: the others then go on as it says, without this one.
        """
        if self._outcome is None:
            self._outcome = {"abandoned": self._rank}
            self._passed.append(self.number)
            with contextlib.suppress(Exception):  # a store that is gone must not hide what happened
                self._outcome = self._give_up(f"round/{self.number}/outcome", why)
        return self._outcome.get("answer")

    def abandon(self, why: str) -> None:
        """Leave the next round without having come to it, since what it was for has failed. Never waits for other ranks.

        All ranks so stay in step: each stage is one round for each of them, whether or not it comes to it.
        """
        self.number += 1
        self._passed.append(self.number)
        self._publish(f"round/{self.number}/outcome", {"abandoned": self._rank, "why": why})

    def note(self, said: str) -> None:
        """Leave a note of where this rank is, for the message of a peer that waits for it. One operation, never waits."""
        self._say({"stage": said}, left=True)

    def _say(self, said: dict[str, Any], *, left: bool = False) -> None:
        where = {"round": self.number, "left": left, "time": time.time()}
        self._store.set(f"rank/{self._rank}", json.dumps({**self._introduction.me, **where, "said": json.dumps(said)}))

    def _take_part(
        self,
        number: int,
        said: dict[str, Any],
        answer: Answer,
        deadline: float,
        check_peers: Callable[[], None],
    ) -> Outcome:
        key = f"round/{number}/outcome"
        outcomes: list[Outcome] = []

        def take_part() -> None:
            stranger = self._introduction.check_rank()
            if stranger:
                outcomes.append({"refused": stranger})  # the round is not this process's to end
                return
            self._say(said)
            difference = self._introduction.check_terms()
            if difference:
                self._publish(key, {"refused": difference})
                outcomes.append({"refused": difference})
                return
            arrived = self._store.add(f"round/{number}/arrived", 1)
            if arrived == self._size:
                outcomes.append(self._close(number, key, answer))
                return
            if arrived == 1:
                self._tidy_up()
            self._wait(key, deadline)
            outcomes.append(self._read(key, value_of(self._store, key)))

        # Operations on the store are deaf to signals, and do not return when its host is stopped.
        self._call = call = Call(take_part)
        call.start("round")
        while not call.done:
            left = deadline - time.monotonic()
            if left <= 0:
                return self._give_up(key, "it had given up waiting")
            attentively(functools.partial(call.wait, min(_LIVENESS_PERIOD, left)))
            if not call.done:
                check_peers()
        call.finish()
        return outcomes[0]

    def _give_up(self, key: str, why: str) -> Outcome:
        """Write that this rank leaves the round, unless it has an outcome already, and end the thread that waits for one."""
        outcome: Outcome = {"abandoned": self._rank, "why": why, "silent": True}

        def publish() -> None:
            with contextlib.suppress(GarbledStoreError):  # whoever reads that gives up too
                outcome.update(self._publish(key, {"abandoned": self._rank, "why": why}))
            outcome["silent"] = False  # the store has answered

        run_bounded(publish, _ANSWER_TIMEOUT, "give-up")
        # It must have seen the key before a later round deletes it.
        patience = timedelta(0) if outcome["silent"] else _ANSWER_TIMEOUT
        if self._call is not None and not self._call.wait_for_end(patience):
            self._waiter.replace()
        return outcome.copy()

    def _close(self, number: int, key: str, answer: Answer) -> Outcome:
        keys = [f"rank/{rank}" for rank in range(self._size)]
        at_once = self._store.has_extended_api()  # type: ignore[attr-defined]
        values = self._store.multi_get(keys) if at_once else [self._store.get(one) for one in keys]
        spoken = [payload.read(value, one, Said) for one, value in zip(keys, values, strict=True)]
        if any(one["round"] != number or one["left"] for one in spoken):
            return self._read(key, value_of(self._store, key))  # whoever has moved on has given up this round before
        texts = [one["said"] for one in spoken]
        said: dict[str, dict[str, Any]] = {}
        for key_of_rank, text in zip(keys, texts, strict=True):
            if text not in said:
                said[text] = payload.parse_object(text, key_of_rank)
        return self._publish(key, {"answer": answer([said[text] for text in texts])})

    def _publish(self, key: str, outcome: Outcome) -> Outcome:
        return self._read(key, self._store.compare_set(key, "", json.dumps(outcome)))

    def _read(self, key: str, value: bytes) -> Outcome:
        outcome = payload.read(value, key, Outcome)
        abandoned = "abandoned" in outcome and "why" in outcome and outcome["abandoned"] < self._size
        if "answer" in outcome or "refused" in outcome or abandoned:
            return outcome
        raise payload.garbled(key, "how a round of the ranks ended", value)

    def _tidy_up(self) -> None:
        """Delete what nobody reads any more. For the first to come, who has to wait for the others anyway."""
        for over in self._over:
            for key in (f"round/{over}/arrived", f"round/{over}/outcome", *self._litter(over)):
                self._store.delete_key(key)
        self._over = []

    def _wait(self, key: str, deadline: float) -> None:
        """Wait for ``key``, a little beyond ``deadline``: this rank gives up first, and then sets the key itself."""
        self._waiter.wait([key], time_left(deadline) + _GRACE)

    def _at(self) -> str:
        return f" at {self.where}" if self.where else ""

    def _missing(
        self, number: int, said: dict[str, Any], waited: float, timeout: timedelta, *, silent: bool
    ) -> RendezvousTimeoutError:
        begin = (
            f"Rank {self._rank} of {self._size} waited {waited:.1f} s of {timeout.total_seconds():.1f} s for the other ranks"
            f" to start {said.get('stage', '')!r}{self._at()}, but "
        )
        if silent:
            return RendezvousTimeoutError(
                f"{begin}the store in which they meet does not answer. The process that hosts it, rank 0 or the launcher, is"
                " stopped or can not be reached any more."
            )
        missing = []
        for rank in range(self._size):
            key = f"rank/{rank}"
            value = self._store.get(key) if self._store.check([key]) else b""
            seen = payload.if_readable(lambda value=value, key=key: payload.read(value, key, Said)) if value else None  # type: ignore[misc]
            if seen is None:
                missing.append(f"rank {rank} (never seen)")
            elif (seen["round"] != number or seen["left"]) and rank != self._rank:
                at = datetime.fromtimestamp(seen["time"]).strftime("%H:%M:%S")
                said_then = payload.if_readable(lambda seen=seen, key=key: payload.parse_object(seen["said"], key)) or {}  # type: ignore[misc]
                stage = payload.clean(str(said_then.get("stage", ""))[:_SHOWN])
                missing.append(f"rank {rank} (last seen at {at}: {stage!r}, pid {seen['pid']} on {seen['host']})")
        absent = f"{len(missing)} did not come: {'; '.join(missing)}" if missing else "the last of them came too late"
        return RendezvousTimeoutError(
            f"{begin}{absent}. Let all ranks run the same stages in the same order; if a rank only needs longer, raise"
            " `rendezvous_timeout`."
        )
