"""First contact: ranks that somebody else has started meet in a store that may be full of the keys of an earlier attempt.

The store of torchrun's agent outlives a restart of its workers (F24 of the design), the counts of restarts differ between nodes
(F26), and the file of an ``init_method`` outlives a crash. So neither a key that is there nor a name from the environment tells
a living rank from a dead one. Each rank says hello with a fresh nonce, and only a living rank 0 can answer that, with a fresh
token. All keys that follow stand below the token, where no dead rank ever wrote.

===========================  ===========================================================================================
``hellos``                   how many said hello, over all attempts; each hello has a number
``host``                     the token of the rank 0 that came last: whoever has another one belongs to ranks that are over
``answered``                 the number up to which an earlier rank 0 has answered
``latest``                   the token of the latest attempt, whose keys the next one deletes
``hello/<n>``                who says hello
``answer/<nonce>``           the token, or why the rank can not take part
``<token>/confirmed``        how many have got their answer
``<token>/confirmed/<rank>`` that this rank has
``<token>/refused``          that a rank has got a refusal, and which: it lives, so the ranks really do not fit together
``<token>/go``               why this attempt comes to nothing, if it does, and the number of the last hello
===========================  ===========================================================================================
"""

import contextlib
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Collection
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import Store

from lightning_pgroup import payload
from lightning_pgroup.errors import RanksDisagreeError, RendezvousAbandonedError, RendezvousTimeoutError
from lightning_pgroup.exceptions import describe
from lightning_pgroup.greetings import Answer, Contact, Go, Hello
from lightning_pgroup.interrupts import attentively
from lightning_pgroup.key_waiter import KeyWaiter
from lightning_pgroup.store import delete_below

logger = logging.getLogger(__name__)

_POLL = 0.01
_NAME = re.compile("[0-9a-f]{32}")

_FORGOTTEN = 1_000
"""How many numbers rank 0 looks at, beyond those of ten attempts: a counter that a stranger has set must not keep it busy."""


def meet(store: Store, waiter: KeyWaiter, hello: Hello, timeout: timedelta, where: str) -> Contact:
    """Find the other ranks. Collective; blocks at most ``timeout``, awake to signals.

    Args:
        store: The store, below a prefix that is the same on all ranks.
        waiter: Waits for its keys.
        hello: From :meth:`Hello.of`.
        timeout: How long to wait for the others.
        where: Where they meet, for messages.

    Raises:
        RendezvousTimeoutError: Not all ranks came; the message names them.
        RanksDisagreeError: A rank was told another number of ranks.
        RendezvousAbandonedError: Another rank has given up.
        GarbledStoreError: Another program has written to the store.
    """
    if hello.rank == 0:
        return _Host(store, hello, timeout, where).meet()
    return _Guest(store, waiter, hello, timeout, where).meet()


def successor(store: Store, contact: Contact) -> str:
    """Which rank was started again since all had met, if one was. At most five operations, never waits.

    A launcher with an agent on each node starts the ranks of one node again without a word to the others, who may be waiting
    for one of them where they have no connection that would break.

    Args:
        store: The store in which they have met.
        contact: What they have agreed on.

    Returns:
        The rank, in words; empty if there is none.
    """
    if _is_hosted_by_another(store, contact.token):
        return "rank 0"
    if (payload.if_readable(lambda: payload.read_number(store.get("hellos"), "hellos")) or 0) <= contact.last:
        return ""
    key = f"hello/{contact.last + 1}"
    hello = payload.if_readable(lambda: payload.read(store.get(key), key, Hello)) if store.check([key]) else None
    return "another rank" if hello is None else hello.describe()


def _is_hosted_by_another(store: Store, token: str) -> bool:
    return store.check(["host"]) and store.get("host") != token.encode()


class _Guest:
    """The first contact of every rank but 0."""

    def __init__(self, store: Store, waiter: KeyWaiter, hello: Hello, timeout: timedelta, where: str) -> None:
        self._store = store
        self._hello = hello
        self._timeout = timeout
        self._where = where
        self._start = time.monotonic()
        self._waiter = waiter
        self._token = ""

    def meet(self) -> Contact:
        hello = self._hello
        number = self._store.add("hellos", 1)
        self._store.set(f"hello/{number}", json.dumps(asdict(hello)))
        key = f"answer/{hello.nonce}"
        answer = payload.read(self._wait(key), key, Answer)
        token = answer["token"]
        if not _NAME.fullmatch(token):
            raise payload.garbled(key, "a token", token)
        self._token = token
        if answer["refused"]:
            self._store.set(f"{token}/refused", json.dumps(answer["refused"]))
            raise RanksDisagreeError(
                f"Rank {hello.rank} of {hello.size} can not take part at {self._where}: {answer['refused']}."
            )
        # Its launcher may have started this rank again meanwhile: each counts once.
        first = self._store.compare_set(f"{token}/confirmed/{hello.rank}", "", hello.nonce)
        if first == hello.nonce.encode():
            self._store.add(f"{token}/confirmed", 1)
        key = f"{token}/go"
        go = payload.read(self._wait(key), key, Go)
        if go["why"]:
            raise RendezvousAbandonedError(
                f"Rank {hello.rank} of {hello.size} gives up the first contact at {self._where}: {go['why']}"
            )
        return Contact(token=token, attempt=answer["attempt"], last=go["last"])

    def _wait(self, key: str) -> bytes:
        left = max(0.0, self._timeout.total_seconds() - (time.monotonic() - self._start))
        self._waiter.watch(
            [key],
            timedelta(seconds=left),
            check=self._check_host,
            late=lambda waited: self._late(),
            last_words=self._last_words,
        )
        return self._store.get(key)

    def _check_host(self) -> None:
        """Notice that the rank 0 which has answered is over, and another has come."""
        if self._token and _is_hosted_by_another(self._store, self._token):
            raise RendezvousAbandonedError(
                f"Rank {self._hello.rank} of {self._hello.size} gives up the first contact at {self._where}: rank 0 was started"
                " again."
            )

    def _last_words(self, error: BaseException) -> bytes:
        """What others may read who wait for the same word of rank 0."""
        return json.dumps({"why": f"{self._hello.describe()} gave up, {describe(error)}", "last": 0}).encode()

    def _late(self) -> RendezvousTimeoutError:
        return RendezvousTimeoutError(
            f"Rank {self._hello.rank} of {self._hello.size} waited {time.monotonic() - self._start:.1f} s of"
            f" {self._timeout.total_seconds():.1f} s at {self._where} for rank 0, which did not answer. Look for its own error,"
            " and whether it was given the same address."
        )


class _Host:
    """The first contact of rank 0, which answers the others."""

    def __init__(self, store: Store, hello: Hello, timeout: timedelta, where: str) -> None:
        self._store = store
        self._hello = hello
        self._timeout = timeout
        self._where = where
        self._token = uuid.uuid4().hex
        answered = store.get("answered") if store.check(["answered"]) else b"0"
        number = payload.if_readable(lambda: payload.read_number(answered, "answered")) or 0
        self._next = 1 + (number if number <= store.add("hellos", 0) else 0)
        self._open: set[int] = set()
        self._keys: list[str] = []
        self._seen: dict[int, Hello] = {}
        self._refused = ""
        self._misfits: set[int] = set()

    def meet(self) -> Contact:
        self._store.set("host", self._token)
        try:
            self._answer_until_all_have_confirmed()
        except BaseException as error:
            with contextlib.suppress(Exception):  # a store that is gone must not hide what happened
                self._go(describe(error))
            raise
        self._go("")
        self._clean_up()
        return Contact(token=self._token, attempt=self._hello.attempt, last=self._next - 1)

    def _answer_until_all_have_confirmed(self) -> None:
        start = time.monotonic()
        pause = threading.Event()
        while self._store.add(f"{self._token}/confirmed", 0) < self._hello.size - 1:
            count = self._store.add("hellos", 0)
            # Before any answer: a rank that was refused may have come again, and is not to be refused twice for one attempt.
            if self._refused and self._store.check([f"{self._token}/refused"]):
                why = payload.read_text(self._store.get(f"{self._token}/refused"), f"{self._token}/refused")
                self._answer_hellos(count, all_but=self._misfits)  # so that the others hear it too
                raise RanksDisagreeError(f"Rank 0 of {self._hello.size} can not start at {self._where}: {why}.")
            self._answer_hellos(count)
            if time.monotonic() - start > self._timeout.total_seconds():
                raise self._late(time.monotonic() - start)
            attentively(lambda: pause.wait(_POLL))

    def _answer_hellos(self, count: int, all_but: Collection[int] = ()) -> None:
        self._next = max(self._next, count - _FORGOTTEN - 10 * self._hello.size)
        self._open.update(range(self._next, count + 1))
        self._next = max(self._next, count + 1)
        for number in sorted(self._open):
            key = f"hello/{number}"
            if self._store.check([key]):  # or its rank has just drawn the number, or died with it
                self._open.discard(number)
                value = self._store.get(key)
                hello = payload.if_readable(lambda value=value, key=key: _hello(value, key))  # type: ignore[misc]
                if hello is None or hello.rank in all_but:
                    continue
                refused = self._misfit(hello)
                if refused:
                    self._misfits.add(hello.rank)
                answer = {"token": self._token, "attempt": self._hello.attempt, "refused": refused}
                self._store.set(f"answer/{hello.nonce}", json.dumps(answer))
                self._seen[hello.rank] = hello
                self._refused = self._refused or refused
                self._keys += [key, f"answer/{hello.nonce}"]

    def _misfit(self, hello: Hello) -> str:
        mine = self._hello
        if hello.size != mine.size or not 0 < hello.rank < mine.size:
            return (
                f"the ranks differ in the number of ranks ({mine.describe()}: {mine.size}; {hello.describe()}: {hello.size})."
                " Each must be given the same"
            )
        return ""

    def _late(self, waited: float) -> RendezvousTimeoutError:
        missing = [
            f"{self._seen[rank].describe()} said hello but did not go on" if rank in self._seen else f"rank {rank} (never seen)"
            for rank in range(1, self._hello.size)
            if not self._store.check([f"{self._token}/confirmed/{rank}"])
        ]
        return RendezvousTimeoutError(
            f"Rank 0 of {self._hello.size} waited {waited:.1f} s of {self._timeout.total_seconds():.1f} s at {self._where} for"
            f" the other ranks, but {len(missing)} did not come: {'; '.join(missing)}. {self._refused}".rstrip()
        )

    def _go(self, why: str) -> None:
        self._store.set(f"{self._token}/go", json.dumps({"why": why, "last": self._next - 1}))

    def _clean_up(self) -> None:
        """Delete what nobody will read again: the hellos and their answers, and all keys of the attempt before this one."""
        store = self._store
        store.set("answered", str(self._next - 1))
        before = store.get("latest").decode(errors="replace") if store.check(["latest"]) else ""
        store.set("latest", self._token)
        for key in self._keys:
            store.delete_key(key)
        if _NAME.fullmatch(before):  # it names what is deleted
            logger.info("the store at %s was used before, by an attempt that has ended; its keys are deleted", self._where)
            delete_below(store, before)


def _hello(value: bytes, key: str) -> Hello:
    hello = payload.read(value, key, Hello)
    if not _NAME.fullmatch(hello.nonce):
        raise payload.garbled(key, "a hello with a nonce", value)
    return hello
