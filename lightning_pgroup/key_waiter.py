"""Blocking waits for keys, on a client of their own; and such that a rank stays awake while it waits."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from lightning_pgroup.bounded import Call
from lightning_pgroup.interrupts import attentively

INTERVAL = 0.1
"""How often a rank that waits for others looks whether that still makes sense, seconds."""

_POLL = 0.02
_MARGIN = timedelta(seconds=2)


class _Client:
    """A second client of a store, opened on the first use."""

    def __init__(self, store: Store) -> None:
        self.store: Any = store
        self._clone: Any = None

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if hasattr(self.store, "clone"):
            if self._clone is None:
                self._clone = self.store.clone()
            self._clone.wait(keys, timeout)
            return
        pause = threading.Event()
        while not self.store.check(keys):
            pause.wait(_POLL)

    def replace(self) -> None:
        self._clone = None


class KeyWaiter:
    """Waits for keys of a store without the lock of its client, so that other threads can go on using that (F21 of the design).

    One per process and store: with a slow name server a new client costs seconds, since torch 2.13 asks for the name of each
    address that it connects to, loopback too.

    Args:
        store: The store. Nothing is opened before the first wait.
    """

    def __init__(self, store: Store) -> None:
        self._client = _Client(store)
        self._prefix = ""

    def below(self, prefix: str) -> "KeyWaiter":
        """The same waiter, for keys below ``prefix``, as ``PrefixStore`` has them."""
        other = KeyWaiter.__new__(KeyWaiter)
        other._client = self._client
        other._prefix = f"{self._prefix}{prefix}/"
        return other

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Block this thread, deaf to signals, until all ``keys`` are there, at most ``timeout``.

        Raises:
            DistStoreError: They did not come in time.
            DistNetworkError: The store is gone.
        """
        self._client.wait([self._prefix + key for key in keys], timeout)

    def replace(self) -> None:
        """Use a new client from now on, since a thread that nothing can stop still waits on the present one."""
        self._client.replace()

    def watch(
        self,
        keys: Sequence[str],
        timeout: timedelta,
        *,
        check: Callable[[], None],
        late: Callable[[float], Exception],
        last_words: Callable[[BaseException], bytes] | None,
    ) -> None:
        """Wait until all ``keys`` are there, awake to signals and to what becomes of the others.

        Args:
            keys: The keys. Whoever sets them does it once.
            timeout: How long to wait at most.
            check: Called ten times a second; raises when waiting has become pointless.
            late: Makes the error for ``timeout``, from the seconds that were waited.
            last_words: Makes the value that the missing keys get when this rank gives up, from its error: the thread that waits
                here has to end, and others may wait for them too. A key that has come meanwhile keeps its value. ``None`` where
                these keys are not ours to set; the thread then goes on to the end of ``timeout``.

        Raises:
            BaseException: What ``check`` or a signal raised, what ``late`` made, or what the store raised.
        """
        start = time.monotonic()
        call = Call(lambda: self.wait(keys, timeout + _MARGIN))  # this rank gives up first
        call.start("wait")
        try:
            while not call.done:
                check()
                left = timeout.total_seconds() - (time.monotonic() - start)
                if left <= 0:
                    raise late(time.monotonic() - start)
                attentively(functools.partial(call.wait, min(INTERVAL, left)))
            call.finish()
        except BaseException as error:
            with contextlib.suppress(Exception):  # a store that is gone must not hide what happened
                if last_words is not None:
                    for key in keys:
                        self._client.store.compare_set(self._prefix + key, b"", last_words(error))
            if not call.wait_for_end(timedelta(0) if last_words is None else _MARGIN):
                self.replace()
            raise
