"""Blocking waits for keys, on a client of their own."""

import threading
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

_POLL = 0.02


class KeyWaiter:
    """Waits for keys of a store without the lock of its client, so that other threads can go on using that (F21 of the design).

    Args:
        store: The store. Nothing is opened before the first wait.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._client: Store | None = None

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Block this thread, deaf to signals, until all ``keys`` are there, at most ``timeout``.

        Raises:
            DistStoreError: They did not come in time.
            DistNetworkError: The store is gone.
        """
        if hasattr(self._store, "clone"):
            if self._client is None:
                self._client = self._store.clone()
            self._client.wait(list(keys), timeout)
            return
        pause = threading.Event()
        while not self._store.check(list(keys)):
            pause.wait(_POLL)

    def replace(self) -> None:
        """Use a new client from now on, since a thread that nothing can stop still waits on the present one."""
        self._client = None
