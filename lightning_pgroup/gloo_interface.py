"""Which network interface gloo uses: loopback where all ranks are on one node, else the one that leads to the main address.

Left to itself, gloo takes the address that this host's name stands for. That may be open to the network although all ranks
are on one node; or it is a loopback address on each node (Debian's ``127.0.1.1``), so that the nodes never find one another.
"""

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator

VARIABLE = "GLOO_SOCKET_IFNAME"

_SIOCGIFADDR = 0x8915
_NAME_LENGTH = 16

_set_by_us: list[str] = []


class GlooInterface:
    """Lets gloo use one interface for all groups of a generation, by its variable in the environment, and restores that.

    A value that the user has given is left alone.

    Args:
        nodes: Number of nodes of the run.
        main_address: The address of the node of rank 0, for runs of several nodes.
    """

    def __init__(self, nodes: int, main_address: str | None) -> None:
        self._nodes, self._main_address = nodes, main_address
        self._name: str | None = None

    def use(self) -> None:
        """Set the variable, until :meth:`restore`, which is to follow also when a signal ends this one in the middle."""
        name = None if VARIABLE in os.environ else choose(self._nodes, self._main_address)
        if name is not None:
            self._name = name
            os.environ[VARIABLE] = name
            _set_by_us.append(name)

    def restore(self) -> None:
        """Take the variable away again, unless somebody has changed it. May be called again."""
        if self._name is not None:
            if self._name in _set_by_us:
                _set_by_us.remove(self._name)
            if os.environ.get(VARIABLE) == self._name:
                del os.environ[VARIABLE]
        self._name = None


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Take the variable out of the environment for a while, if it is ours: what is started now may have other nodes."""
    ours = _set_by_us and os.environ.get(VARIABLE) == _set_by_us[-1]
    if ours:
        del os.environ[VARIABLE]
    try:
        yield
    finally:
        if ours:
            os.environ[VARIABLE] = _set_by_us[-1]


def choose(nodes: int, main_address: str | None) -> str | None:
    """The name of the interface to use, or ``None`` to leave that to gloo. Sends nothing.

    Args:
        nodes: Number of nodes of the run.
        main_address: The address of the node of rank 0.
    """
    if nodes == 1:
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    own = own_address_towards(main_address) if main_address else None
    return None if own is None or own.startswith("127.") else interface_of(own)


def own_address_towards(address: str) -> str | None:
    """The IPv4 address by which this host reaches ``address``; ``None`` if there is none. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # a datagram socket only looks up the way
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The name of the interface that has an IPv4 address of this host; ``None`` where that can not be asked for."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[: _NAME_LENGTH - 1]))
            except OSError:  # it has no such address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
