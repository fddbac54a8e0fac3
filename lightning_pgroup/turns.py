"""Turns: one operation on the group of this process at a time, and a place for what can not wait for its turn."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta


class Turns:
    """Hands out turns. One thread has the turn, and may take it again inside."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._postponed: deque[Callable[[], None]] = deque()

    @contextlib.contextmanager
    def take(self, timeout: timedelta | None = None) -> Iterator[None]:
        """One operation at a time; what was postponed meanwhile follows at its end.

        Args:
            timeout: Go on without the turn after this long, because the process ends.
        """
        locked = counted = False
        try:
            locked = self._lock.acquire(timeout=-1 if timeout is None else timeout.total_seconds())
            self._depth += 1
            counted = True
            yield
            self._catch_up()
        finally:
            if counted:
                self._depth -= 1
            if locked:
                self._lock.release()

    def run(self, operation: Callable[[], None]) -> None:
        """The same as :meth:`take` for an operation that signals may end, as it may take long.

        Only a ``with`` on the lock itself leaves no moment for one between taking the lock and being sure to give it back.
        """
        with self._lock:
            self._depth += 1
            try:
                operation()
                self._catch_up()
            finally:
                self._depth -= 1

    def postpone(self, work: Callable[[], None], *, now: bool = True) -> None:
        """Do ``work`` now, or right after the operation that has the turn. Never waits for the turn.

        For what the garbage collector calls, at any moment and on any thread, in the middle of an operation too.

        Args:
            work: What to do.
            now: Whether this thread may do it, if the turn is free; else it follows the next operation.
        """
        self._postponed.append(work)
        if now and self._lock.acquire(blocking=False):
            try:
                if self._depth == 0:
                    with self.take():
                        pass
            finally:
                self._lock.release()

    def _catch_up(self) -> None:
        if self._depth == 1:
            while self._postponed:
                self._postponed.popleft()()
