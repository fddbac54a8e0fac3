"""What gloo says of a rank in the store, and how to take its waiting peers off their listening sockets.

Gloo connects a pair of ranks one way: one of them dials, the other waits for that call in C++ code, deaf to everything, until
the timeout of the group. A rank that has told its address and then fails would leave those who wait for its call. So it calls
them, says which pair it is, and hangs up: they go on with a broken connection, which their first collective finds.

The form of a value in the store, in the byte order of the host (gloo as in torch 2.13; anything else is left alone): the length
of the host name and the name, the length of the address and the address (a ``sockaddr_storage`` and a number), and a number for
each rank, which a caller sends first to say which pair it belongs to.
"""

import contextlib
import selectors
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

_NUMBER = 8
_ADDRESS = 128 + _NUMBER

_LONGEST_NAME = 255
_LARGEST_PAIR = 1 << 31


@dataclass(frozen=True, slots=True)
class RankAddress:
    """What one rank tells the others of itself.

    Attributes:
        family: ``AF_INET`` or ``AF_INET6``.
        host: Its address.
        port: Where it listens.
        pairs: For each rank, the number by which a call of that rank is known.
    """

    family: int
    host: str
    port: int
    pairs: tuple[int, ...]


def parse(value: bytes) -> RankAddress | None:
    """Read a value of gloo's in the store; ``None`` if it has another form.

    Whoever can write to the store can so make a rank call an address of his choice, as gloo does anyhow. A call of ours brings
    8 bytes, of which he chooses half: the numbers of pairs, which gloo counts from 0, are small.
    """
    name, rest = _counted(value)
    address, rest = _counted(rest)
    if (
        name is None
        or address is None
        or len(address) != _ADDRESS
        or not rest
        or len(rest) % _NUMBER
        or len(name) > _LONGEST_NAME
    ):
        return None
    family = int.from_bytes(address[:2], sys.byteorder)
    port = int.from_bytes(address[2:4], "big")
    if family == socket.AF_INET:
        host = socket.inet_ntop(family, address[4:8])
    elif family == socket.AF_INET6:
        host = socket.inet_ntop(family, address[8:24])
    else:
        return None
    pairs = tuple(int.from_bytes(rest[at : at + _NUMBER], sys.byteorder) for at in range(0, len(rest), _NUMBER))
    return RankAddress(family, host, port, pairs) if max(pairs) < _LARGEST_PAIR else None


def call_and_hang_up(calls: Iterable[tuple[RankAddress, int]], timeout: timedelta) -> int:
    """Call peers as one rank of their group, and hang up. Local; waits at most ``timeout`` for all of them together.

    Args:
        calls: For each call, who is called and the rank of the caller in that group.
        timeout: How long to wait for the connections.

    Returns:
        How many were reached.
    """
    reached, deadline = 0, time.monotonic() + timeout.total_seconds()
    with selectors.DefaultSelector() as selector:
        for peer, rank in calls:
            line = socket.socket(peer.family, socket.SOCK_STREAM)
            line.setblocking(False)
            with contextlib.suppress(OSError):  # no address at all
                line.connect_ex((peer.host, peer.port))
            selector.register(line, selectors.EVENT_WRITE, peer.pairs[rank].to_bytes(_NUMBER, sys.byteorder))
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                line = key.fileobj  # type: ignore[assignment]
                selector.unregister(line)
                with line, contextlib.suppress(OSError):  # nobody listens there any more, so that nobody waits there either
                    reached += line.send(key.data) == _NUMBER
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return reached


def _counted(value: bytes) -> tuple[bytes | None, bytes]:
    """The bytes that a number at the beginning counts, and what follows them."""
    length = int.from_bytes(value[:_NUMBER], sys.byteorder)
    end = _NUMBER + length
    return (value[_NUMBER:end], value[end:]) if len(value) >= _NUMBER and end <= len(value) else (None, b"")
