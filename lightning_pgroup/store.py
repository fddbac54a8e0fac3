"""Stores: where the ranks of one run meet. Hosts one, or connects to one; cleans up in it.

A store is kept for the whole life of the process; generations and rounds are prefixes in it, so that no port is ever bound
twice and no rank ever meets a key of the past.
"""

import ctypes
import errno
import ipaddress
import logging
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import PrefixStore, Store, TCPStore

from lightning_pgroup.descriptors import make_room

LOOPBACK = "127.0.0.1"

logger = logging.getLogger(__name__)


class Endpoint(NamedTuple):
    """Where a store listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen(host: str, port: int = 0) -> socket.socket:
    """Bind a listening socket on one address only and keep the port from this moment on.

    Args:
        host: The address to listen on.
        port: The port; 0 lets the system choose a free one.

    Raises:
        OSError: The port is taken or the address is not one of this host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(socket.SOMAXCONN)
    except BaseException:
        listener.close()
        raise
    return listener


def value_of(store: Store, key: str) -> bytes:
    """The value of a key that is there. One message to the store, of which ``get`` needs two, since it waits first."""
    value: bytes = store.compare_set(key, "", "")
    return value


def host_store(listener: socket.socket, timeout: timedelta, *, shared: bool = False) -> TCPStore:
    """Host a store on a listening socket, which the store owns from then on. Does not wait for anybody.

    Raises this process's soft limit of open descriptors (:mod:`lightning_pgroup.descriptors`).

    Args:
        listener: From :func:`listen`.
        timeout: Bound of each operation on the store.
        shared: Whether another store that this process hosts at this port is to be the same one, as with ``env://``.
    """
    make_room()
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        None,
        True,
        timeout,
        wait_for_workers=False,
        multi_tenant=shared,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )


def host_on(address: str, port: int, nodes: int, timeout: timedelta) -> TCPStore:
    """Host a store that can be reached at the given address only, where that is one of this host. Waits for nobody.

    It listens on all addresses, as torch does, where others must reach it at an address that can not be told from here: one
    that is not this host's (a service in front of it), or loopback in a run of several nodes (a host's name for itself).

    Args:
        address: The address, or a name for it.
        port: The port.
        nodes: Number of nodes of the run.
        timeout: Bound of each operation on the store.

    Raises:
        OSError: The name is not known.
        DistNetworkError: The port is taken, unless by a shared store of this process, which is then used.
    """
    found = dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM))
    for one in found:
        if nodes > 1 and ipaddress.ip_address(one).is_loopback:
            continue
        try:
            listener = listen(one, port)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            break  # torch shares a store of this process, and else raises at once
        return host_store(listener, timeout, shared=True)
    else:
        logger.info("The store listens on all addresses of this host, since others can not reach it at %s.", ", ".join(found))
    make_room()
    return TCPStore(address, port, None, True, timeout, wait_for_workers=False, multi_tenant=True)


def connect_store(endpoint: Endpoint, timeout: timedelta) -> TCPStore:
    """Connect to a store that another process hosts; waits at most ``timeout`` for it to listen."""
    return TCPStore(endpoint.host, endpoint.port, None, False, timeout, wait_for_workers=False)


def delete_below(store: Store, prefix: str, choose: Callable[[str], bool] = lambda key: True) -> int:
    """Delete the keys below ``prefix`` in ``store``, or those of them that ``choose`` takes; returns their number.

    Does nothing on a torch whose stores cannot list their keys (``list_keys`` is newer than torch 2.6): a few short keys of
    each generation then stay in the store.
    """
    if not hasattr(store, "list_keys"):
        return 0
    # A prefix store puts a slash behind its prefix, so that "gen" stands for all keys that start with "gen/".
    below = PrefixStore(prefix, store)
    try:
        keys = [key for key in below.list_keys() if choose(key)]
    except UnicodeDecodeError as error:  # a key that no rank has set; then none is deleted
        logger.debug("can not list the keys of the store: %s", error)
        return 0
    for key in keys:
        below.delete_key(key)
    return len(keys)


def leak(thing: object) -> None:
    """Keep ``thing`` alive for ever.

    In a forked child, the destructors of stores and groups would join threads that exist only in the parent.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
