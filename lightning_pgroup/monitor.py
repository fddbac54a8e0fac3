"""Watches for the failure of another rank, where the backend does not wake a rank that waits in a collective."""

import logging
import threading
from collections.abc import Callable

from torch.distributed import Store

from lightning_pgroup import failure

logger = logging.getLogger(__name__)

INTERVAL = 0.1
"""How often the store is asked, seconds. One question costs about 0.2 ms, on a thread and a client of its own."""

_JOIN = 2.0


class FailureMonitor:
    """One daemon thread that waits for the first failure of a generation.

    Args:
        store: The store of the run; the thread uses a clone of it, so as not to hold its lock (F21 of the design).
        generation: The generation to watch.
        on_failure: Called once, on the thread, when a failure is recorded.
    """

    def __init__(self, store: Store, generation: int, on_failure: Callable[[], None]) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self._key, self._generation = failure.key(generation), generation
        self._on_failure = on_failure
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning-pgroup-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Waits at most 2 s for a question that is under way; may be called on the thread itself."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN)

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            try:
                failed = self._store.check([self._key]) and failure.read(self._store, self._generation) is not None
            except Exception as error:
                logger.debug("the monitor ends, for the store is gone: %s", error)
                return
            if failed:
                self._on_failure()
                return
