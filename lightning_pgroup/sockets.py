"""Counts and shuts down the connections of groups, exactly these, whoever still holds them (F6, F7 and F30 of the design).

Gloo leaves its addresses in the store as raw socket addresses, among other bytes. A connected socket of this process whose own
address, or whose peer's, stands there is one of gloo's. Listening sockets are left alone: shutting one down ends the process in
gloo's code.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence

_DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"


def shut_down_connections(addresses: Sequence[bytes]) -> int:
    """Shut down this process's connections whose local or remote address stands in ``addresses``. Never waits.

    Args:
        addresses: What the groups have left in the store.

    Returns:
        The number of connections.
    """
    count = 0
    for connection, ends in _connections():
        with connection:
            if any(end in value for end in ends for value in addresses):
                with contextlib.suppress(OSError):  # the peer may have closed it meanwhile
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def count_connections(addresses: Sequence[bytes]) -> int:
    """How many of this process's connections have an end that stands in ``addresses``. Never waits."""
    count = 0
    for connection, ends in _connections():
        with connection:
            count += any(end in value for end in ends for value in addresses)
    return count


def _connections() -> Iterator[tuple[socket.socket, list[bytes]]]:
    """The connected TCP sockets of this process, each as a duplicate of its own, with its raw addresses."""
    for name in os.listdir(_DESCRIPTORS):
        try:
            duplicate = os.dup(int(name))
        except OSError:
            continue
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            continue
        try:
            family, kind = connection.family, connection.type
            ends = [_raw(family, connection.getsockname()), _raw(family, connection.getpeername())]
            known = [end for end in ends if end]
        except OSError:  # listening, or not a socket of the network
            connection.close()
            continue
        if kind == socket.SOCK_STREAM and known:
            yield connection, known
        else:
            connection.close()


def _raw(family: int, address: object) -> bytes:
    """The address as the kernel has it: family, port, and what follows for that family."""
    if not isinstance(address, tuple) or family not in (socket.AF_INET, socket.AF_INET6):
        return b""
    head = int(family).to_bytes(2, sys.byteorder) + int(address[1]).to_bytes(2, "big")
    if family == socket.AF_INET:
        return head + socket.inet_aton(address[0])
    return head + bytes(4) + socket.inet_pton(socket.AF_INET6, address[0].partition("%")[0])
