"""The doctor's look at this host's network: its name, loopback, and the main address. Nothing here waits without a bound."""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar

from lightning_pgroup.bounded import run_bounded
from lightning_pgroup.doctor_listeners import owner_of_port
from lightning_pgroup.doctor_report import Finding, Result, duration

HOST_NAME = "host name"
LOOPBACK = "loopback"
MAIN_ADDRESS = "main address"

_LOOPBACK = "127.0.0.1"
_SLOW = 0.5
_HIGHEST_PORT = 65535
_FIREWALL = (
    "A firewall drops what this host sends to itself. Let it accept all on the interface lo, such as by: iptables -I INPUT"
    " -i lo -j ACCEPT; iptables -I OUTPUT -o lo -j ACCEPT. In a sandbox or container, ask for its network policy."
)
_NO_LOOPBACK = (
    "The loopback interface is down, or has no 127.0.0.1. As root: ip link set lo up. In a container, give it a network."
)

_T = TypeVar("_T")


def check_host_name(timeout: timedelta) -> Finding:
    """Resolve this host's own name, and the name of loopback's address, as torch does for each connection."""
    name = socket.gethostname()
    entry = f"Add a line to /etc/hosts: 127.0.1.1 {name}"
    start = time.monotonic()
    try:
        addresses = _within(timeout, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except TimeoutError:
        found = f"{name!r} did not resolve within {duration(timeout.total_seconds())}"
        advice = f"The name server does not answer: look at /etc/resolv.conf. {entry}"
        return Finding(HOST_NAME, Result.FAILED, found, (advice,), time.monotonic() - start)
    except OSError as error:
        found = f"{name!r} does not resolve ({error.strerror})"
        advice = f"What asks for this host's address fails, gloo outside of this package for example. {entry}"
        return Finding(HOST_NAME, Result.FAILED, found, (advice,), time.monotonic() - start)
    spent = time.monotonic() - start
    found = f"{name!r} is {', '.join(dict.fromkeys(str(one[4][0]) for one in addresses))}"
    reverse = _time_of_reverse_lookup(timeout)
    if max(spent, reverse) > _SLOW:
        found += f", after {duration(spent)}; the name of {_LOOPBACK} took {duration(reverse)}"
        advice = (
            "The name server is slow or does not answer, and torch asks it for each connection. Set"
            ' RES_OPTIONS="timeout:1 attempts:1", or add what is asked for to /etc/hosts:'
            f" 127.0.0.1 localhost, and 127.0.1.1 {name}"
        )
        return Finding(HOST_NAME, Result.WARNING, found, (advice,), max(spent, reverse))
    return Finding(HOST_NAME, Result.OK, found, (), spent)


def check_loopback(timeout: timedelta) -> Finding:
    """Listen on loopback, connect to that, and send a byte: what ranks on one node do."""
    start = time.monotonic()

    def failed(found: str, advice: str) -> Finding:
        return Finding(LOOPBACK, Result.FAILED, found, (advice,), time.monotonic() - start)

    with socket.socket() as listener:
        listener.settimeout(timeout.total_seconds())
        try:
            listener.bind((_LOOPBACK, 0))
            listener.listen()
        except OSError as error:
            return failed(f"{_LOOPBACK} can not be listened on ({error.strerror})", _NO_LOOPBACK)
        port = listener.getsockname()[1]
        try:
            with socket.create_connection((_LOOPBACK, port), timeout.total_seconds()) as client:
                accepted, _ = listener.accept()
                with accepted:
                    accepted.settimeout(timeout.total_seconds())
                    client.sendall(b"?")
                    accepted.recv(1)
        except TimeoutError:
            waited = duration(time.monotonic() - start)
            return failed(f"{_LOOPBACK} does not answer to itself: waited {waited} for a connection", _FIREWALL)
        except OSError as error:
            is_down = error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
            found = f"{_LOOPBACK} can not be connected to ({error.strerror})"
            return failed(found, _NO_LOOPBACK if is_down else _FIREWALL)
    return Finding(LOOPBACK, Result.OK, f"{_LOOPBACK} can be listened on and reached", (), time.monotonic() - start)


def check_main_address(environ: Mapping[str, str], timeout: timedelta, *, is_torchruns: bool = False) -> Finding:
    """Look at where ``MASTER_ADDR`` and ``MASTER_PORT`` lead, if they are set: to a free port here, or to another host.

    Args:
        environ: The environment.
        timeout: Bound of each of the two waits.
        is_torchruns: Whether torchrun, which lives, has set them: it listens there itself.
    """
    host, text = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host and not text:
        return Finding(MAIN_ADDRESS, Result.OK, "MASTER_ADDR and MASTER_PORT are not set, and not needed on one node")
    if text and not (text.isdecimal() and 0 < int(text) <= _HIGHEST_PORT):
        advice = f"Set MASTER_PORT to a number from 1 to {_HIGHEST_PORT}, or unset it."
        return Finding(MAIN_ADDRESS, Result.FAILED, f"MASTER_PORT={text} is no port", (advice,))
    host, start = host or _LOOPBACK, time.monotonic()

    def finding(result: Result, found: str, *advice: str) -> Finding:
        return Finding(MAIN_ADDRESS, result, found, advice, time.monotonic() - start)

    try:
        answer = _within(timeout, lambda: socket.getaddrinfo(host, int(text or 0), type=socket.SOCK_STREAM))
    except OSError as error:
        why = "no answer within " + duration(timeout.total_seconds()) if isinstance(error, TimeoutError) else error.strerror
        advice = "Set it to a name or address of the node of rank 0 that all nodes know, or unset it for a run on one node."
        return finding(Result.FAILED, f"MASTER_ADDR={host} does not resolve ({why})", advice)
    family, _, _, _, address = answer[0]
    where = f"{host}:{text}" if text else host
    if is_torchruns:
        return finding(Result.OK, f"torchrun listens at {where}")
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        return finding(Result.OK, f"{where} is an address of this host{', and the port is free' if text else ''}")
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            return finding(Result.FAILED, *_taken(int(text or 0), error))
    if not text:
        return finding(Result.OK, f"{where} is an address of another host")
    return finding(*_knock(where, family, address, timeout))


def listens(host: str, port: str, timeout: timedelta) -> bool:
    """Whether something accepts connections there."""
    try:
        _within(timeout, lambda: socket.create_connection((host, int(port)), timeout.total_seconds()).close())
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _taken(port: int, error: OSError) -> tuple[str, str]:
    if error.errno != errno.EADDRINUSE:
        advice = "Set MASTER_PORT to a port above 1023 that nobody uses, or unset it for a run on one node."
        return f"MASTER_PORT={port} can not be listened on ({error.strerror})", advice
    owner = owner_of_port(port)
    found = f"MASTER_PORT={port} is taken" + (f" by {owner}" if owner else ", by a process that can not be seen from here")
    advice = (
        "Rank 0 could not host its store there. End that process, which may be left of an earlier run; or set MASTER_PORT to"
        " another port on all nodes, or unset it for a run on one node."
    )
    return found, advice


def _knock(where: str, family: int, address: object, timeout: timedelta) -> tuple[Result, str, str] | tuple[Result, str]:
    """Whether another host answers. That nothing listens there is fine: rank 0 of the run will."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as knocking:
            knocking.settimeout(timeout.total_seconds())
            knocking.connect(address)  # type: ignore[arg-type]
    except ConnectionRefusedError:
        return Result.OK, f"{where} is another host, which answers; nothing listens there yet"
    except OSError as error:
        why = f"no answer within {duration(timeout.total_seconds())}" if isinstance(error, TimeoutError) else error.strerror
        advice = (
            "Is that an address of the node of rank 0, in this network? If so, a firewall is in between: let the nodes"
            " connect to each other, at MASTER_PORT and at all ports above 1023, which backends choose from."
            " For one node unset MASTER_ADDR."
        )
        return Result.FAILED, f"{where} can not be reached ({why})", advice
    advice = "That may be the run that this node is to join. If it is not started yet, set MASTER_PORT to another port."
    return Result.WARNING, f"something listens at {where} already, on another host", advice


def _time_of_reverse_lookup(timeout: timedelta) -> float:
    start = time.monotonic()
    with contextlib.suppress(OSError):  # that there is no name is no fault
        _within(timeout, lambda: socket.getnameinfo((_LOOPBACK, 0), 0))
    return time.monotonic() - start


def _within(timeout: timedelta, function: Callable[[], _T]) -> _T:
    """Call what may block in the system's resolver, which has no bound of its own.

    Raises:
        TimeoutError: It did not return in time.
        OSError: What it raised.
    """
    answers: list[_T] = []
    if not run_bounded(lambda: answers.append(function()), timeout, "resolve"):
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    return answers[0]
