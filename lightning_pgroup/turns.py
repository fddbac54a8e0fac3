"""Turns: one operation on the group of this process at a time, and a place for what can not wait for its turn."""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Turns:
    """Hands out turns. One thread has the turn, and may take it again inside."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._postponed: deque[Callable[[], None]] = deque()

    def run(self, operation: Callable[[], _T]) -> _T:
        """One operation at a time; what was postponed meanwhile follows at its end. A signal may end it.

        Only a ``with`` on the lock itself leaves no moment for one between taking the lock and being sure to give it back. A
        main thread that kept it would wait for ever for the thread of a shielded call.
        """
        with self._lock:
            self._depth += 1
            try:
                result = operation()
                self._catch_up()
                return result
            finally:
                self._depth -= 1

    @contextlib.contextmanager
    def take_at_the_end(self, timeout: timedelta) -> Iterator[None]:
        """The same, without the turn if it is not free after ``timeout``: for the end of the process, which no turn follows."""
        locked = self._lock.acquire(timeout=timeout.total_seconds())
        self._depth += 1
        try:
            yield
            self._catch_up()
        finally:
            self._depth -= 1
            if locked:
                self._lock.release()

    def postpone(self, work: Callable[[], None], *, now: bool = True) -> None:
        """Do ``work`` now, or right after the operation that has the turn, and does not wait for that.

        For what the garbage collector calls, at any moment and on any thread, in the middle of an operation too.

        Args:
            work: What to do.
            now: Whether this thread may do it, if the turn is free; else it follows the next operation.
        """
        self._postponed.append(work)
        # Not by trying the lock: a signal right after that would leave it locked.
        if now and self._depth == 0:
            self.run(_nothing)

    def _catch_up(self) -> None:
        if self._depth == 1:
            while self._postponed:
                self._postponed.popleft()()


def in_turn(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a method of an object that has ``_turns`` be one operation, as by :meth:`Turns.run`."""

    @functools.wraps(method)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        turns: Turns = args[0]._turns  # type: ignore[attr-defined]
        return turns.run(lambda: method(*args, **kwargs))

    return wrapper


def _nothing() -> None:
    pass
