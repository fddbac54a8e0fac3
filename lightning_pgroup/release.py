"""Lets go of ended groups, on threads of their own, and keeps the number of these small.

The destructor of a group first waits for the work that is still pending in it. Gloo's then waits for its event loop, which
wakes up every 10 ms: about 20 ms in all (F17 of the design). Whoever ends a group waits for the first and not for the second.
"""

import contextlib
import time
from datetime import timedelta

from torch.distributed import ProcessGroup

from lightning_pgroup.bounded import Call, time_left
from lightning_pgroup.gloo_workers import GlooWorkers

MOST = 4
"""How many destructors may run at the same time; more would let threads and descriptors pile up."""


class Releases:
    """The threads on which groups of this process are destructed. Local; no other rank is waited for."""

    def __init__(self) -> None:
        self._running: list[Call] = []

    def start(self, groups: list[ProcessGroup]) -> Call | None:
        """Let go of groups, without waiting: a destructor may wait for work that never ends.

        Args:
            groups: The last references of ours to them; the list is empty at the end.

        Returns:
            The call on whose thread that happens; ``None`` if there was none.
        """
        for one in tuple(self._running):
            if one.done:
                self._forget(one)
        if not groups:
            return None
        call = Call(groups.clear)
        call.start("release")
        self._running.append(call)
        return call

    def drain(self, groups: list[ProcessGroup], timeout: timedelta) -> bool:
        """Let go of groups, and return as soon as nothing is pending in them any more. Their destructors go on.

        Args:
            groups: As in :meth:`start`.
            timeout: How long to wait; an interrupt ends the wait.

        Returns:
            Whether that was so in time.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        workers = GlooWorkers(groups)
        while len(running := [one for one in self._running if not one.done]) >= MOST:
            if not running[0].wait_for_end(time_left(deadline), impatient=True):
                return False
        call = self.start(groups)
        return call is None or call.wait_for_end(time_left(deadline), impatient=True, enough=workers.have_left)

    def finish(self, timeout: timedelta) -> None:
        """Wait, at most ``timeout``, for the destructors: the interpreter must not end, or fork, in the middle of one.

        On any thread, also while another one waits for them; those that take longer are not waited for again.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        for call in tuple(self._running):
            if call.wait_for_end(time_left(deadline)):
                call.finish()
            self._forget(call)

    def _forget(self, call: Call) -> None:
        with contextlib.suppress(ValueError):  # another thread was faster
            self._running.remove(call)
