"""The store at an address that all ranks were told: rank 0 hosts it, the others wait for it, with a bound and a reason.

Torch's own client says no more than "timed out", may take twice the time that it was given, and waits for ever for a stranger
that accepts its connection and never answers. So a plain connection is tried first, which says what is wrong, and torch's part
runs on a thread that is left behind when the time is over.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

from lightning_pgroup.bounded import run_bounded
from lightning_pgroup.errors import StoreLostError
from lightning_pgroup.store import Endpoint, host_on

_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.5
_LONGEST_TRY = 5.0


def host_at(endpoint: Endpoint, size: int, timeout: timedelta, nodes: int) -> TCPStore:
    """Host the store at the address that all ranks were told. On rank 0; does not wait for the others.

    See :func:`~lightning_pgroup.store.host_on` for where it listens. It shares the port with another store that this very
    process hosts there by torch's own ``env://`` or ``tcp://``.

    Args:
        endpoint: The address.
        size: Number of ranks, for messages.
        timeout: How long to wait for the name to resolve, and bound of each operation on the store.
        nodes: Number of nodes of the run.

    Raises:
        StoreLostError: The port is taken (at once), the name does not resolve, or the address is not one of this host.
    """

    def attempt(trial: _Trial) -> TCPStore:
        trial.repeat(lambda: socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM))
        trial.problem = (
            f"it listens on port {endpoint.port} of {socket.gethostname()} and does not reach itself at that address. Is it an"
            " address of this host?"
        )
        try:
            return host_on(endpoint.host, endpoint.port, nodes, trial.left())
        except RuntimeError as error:
            if "failed to listen" not in str(error):
                raise TimeoutError from error
            name = f"port {endpoint.port} of {socket.gethostname()}"
            raise StoreLostError(
                f"Rank 0 of {size} can not host the store in which the ranks meet, at {endpoint}: {name} can not be"
                f" listened on ({_reason(str(error))}). Let all ranks use another port, or end the process that has it: an"
                " earlier run may still be alive."
            ) from error

    return _Trial(endpoint, 0, size, timeout).run(attempt, "to host the store in which the ranks meet")


def reach_at(
    endpoint: Endpoint, rank: int, size: int, timeout: timedelta, *, patience: timedelta | None = None, hint: str = ""
) -> TCPStore:
    """Connect to the store that another process hosts at an address that all ranks were told.

    Args:
        endpoint: The address.
        rank: This process's rank, for messages.
        size: Number of ranks, for messages.
        timeout: How long to wait for the store, and bound of each operation on it.
        patience: How long to wait while nothing listens there, if that is less: the host was there before this process.
        hint: What that would mean.

    Raises:
        StoreLostError: The name does not resolve, nothing listens there, or what listens there is no store.
    """

    def attempt(trial: _Trial) -> TCPStore:
        trial.repeat(lambda: trial.knock(), patience)
        trial.problem = (
            "what listens there does not answer as a store does: the port belongs to another program, or its host is stopped"
        )
        while True:
            try:
                return TCPStore(endpoint.host, endpoint.port, None, False, trial.left(), wait_for_workers=False)
            except RuntimeError:  # a stranger that closes the connection, or a host that has just ended
                trial.pause()

    absent = hint or "Rank 0 hosts it there: look for its own error, or for another address that it was given."
    return _Trial(endpoint, rank, size, timeout, absent).run(attempt, "for the store in which the ranks meet")


class _Trial:
    """One attempt to get the store, which knows how much time is left and what stood in the way last."""

    def __init__(self, endpoint: Endpoint, rank: int, size: int, timeout: timedelta, absent: str = "") -> None:
        self.problem = "it did not get an answer"
        self._endpoint, self._timeout, self._absent = endpoint, timeout, absent
        self._who = f"Rank {rank} of {size}"
        self._start = time.monotonic()
        self._over = threading.Event()
        self._length = _FIRST_PAUSE

    def run(self, attempt: "Callable[[_Trial], TCPStore]", what: str) -> TCPStore:
        found: list[TCPStore] = []
        try:
            in_time = run_bounded(lambda: found.append(attempt(self)), self._timeout, "connect", attentive=True)
        except TimeoutError:
            in_time = False
        except OSError as error:
            in_time, self.problem = False, self._explain(error)
        finally:
            self._over.set()
        if in_time:
            found[0].set_timeout(self._timeout)
            return found[0]
        raise StoreLostError(
            f"{self._who} waited {time.monotonic() - self._start:.1f} s of {self._timeout.total_seconds():.1f} s {what}, at"
            f" {self._endpoint}, but {self.problem}."
        )

    def left(self) -> timedelta:
        spent = timedelta(seconds=time.monotonic() - self._start)
        return max(self._timeout - spent, timedelta(milliseconds=1))

    def pause(self) -> None:
        """Wait a little, longer each time; ends the thread once nobody waits for it any more."""
        if self._over.wait(self._length):
            raise SystemExit
        self._length = min(2 * self._length, _LONGEST_PAUSE)

    def repeat(self, function: Callable[[], object], patience: timedelta | None = None) -> None:
        """Call ``function`` until it works; what the network says is tried again, since hosts and names come up late."""
        while True:
            try:
                function()
                return
            except OSError as error:
                self.problem = self._explain(error)
                refused = isinstance(error, ConnectionRefusedError)
                if refused and patience is not None and self._timeout - self.left() >= patience:
                    raise
            self.pause()

    def knock(self) -> None:
        longest = min(self.left().total_seconds(), _LONGEST_TRY)
        with contextlib.closing(socket.create_connection((self._endpoint.host, self._endpoint.port), timeout=longest)):
            pass

    def _explain(self, error: OSError) -> str:
        if isinstance(error, socket.gaierror):
            return f"the host name {self._endpoint.host!r} does not resolve ({error.strerror})"
        if isinstance(error, ConnectionRefusedError):
            return f"nothing listens there. {self._absent}".rstrip(".")
        text = os.strerror(error.errno) if error.errno else "no answer to a connection"
        return f"the address can not be reached ({text})"


def _reason(text: str) -> str:
    """What torch's error says of the system's reason."""
    return text.rpartition("message: ")[2] or text
