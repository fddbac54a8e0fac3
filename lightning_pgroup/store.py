"""Stores: where the ranks of one run meet. Hosts one, connects to one, or takes the one that the launcher brings.

A store is kept for the whole life of the process; generations and rounds are prefixes in it, so that no port is ever bound
twice and no rank ever meets a key of the past.
"""

import ctypes
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import urlparse

from torch.distributed import PrefixStore, Store, TCPStore, is_torchelastic_launched, rendezvous

LOOPBACK = "127.0.0.1"


class Endpoint(NamedTuple):
    """Where a store listens."""

    host: str
    port: int


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


def host_store(listener: socket.socket, timeout: timedelta) -> TCPStore:
    """Host a store on a listening socket, which the store owns from then on. Does not wait for anybody.

    Args:
        listener: From :func:`listen`.
        timeout: Bound of each operation on the store.
    """
    host, port = listener.getsockname()[:2]
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True)


def connect_store(endpoint: Endpoint, timeout: timedelta) -> TCPStore:
    """Connect to a store that another process hosts; waits at most ``timeout`` for it to listen."""
    return TCPStore(endpoint.host, endpoint.port, None, False, timeout, wait_for_workers=False)


def launcher_store(init_method: str, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The store that an ``init_method`` stands for, by torch's own rendezvous.

    Under torchrun that is a client of the agent's store; else rank 0 hosts it, and does not wait for the others: the first
    round does, and names those who do not come.

    Args:
        init_method: ``tcp://host:port``, ``file://path`` or ``env://``.
        rank: This process's rank.
        world_size: Number of ranks.
        timeout: How long to wait for the host, and bound of each operation.
    """
    url = urlparse(_as_address(init_method))
    if url.scheme == "tcp" and url.hostname and url.port:
        host = rank == 0 and rank_zero_hosts(init_method)
        return TCPStore(url.hostname, url.port, None, host, timeout, wait_for_workers=False, multi_tenant=True)
    store, _, _ = next(rendezvous(init_method, rank, world_size, timeout=timeout))
    found: Store = store
    found.set_timeout(timeout)
    return found


def rank_zero_hosts(init_method: str) -> bool:
    """Whether rank 0 hosts the store that an ``init_method`` stands for, so that the store dies with it.

    A file needs no host, and the store of torchrun's agent has one, which outlives the ranks.
    """
    url = urlparse(_as_address(init_method))
    if url.scheme != "tcp":
        return False
    agents = is_torchelastic_launched() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    main = os.environ.get("MASTER_ADDR", "").lower(), os.environ.get("MASTER_PORT")
    return not (agents and main == (url.hostname, str(url.port)))


def _as_address(init_method: str) -> str:
    """``env://`` as the address that it stands for; all else as it is."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not init_method.startswith("env://") or not host or not port:
        return init_method
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def delete_below(store: Store, prefix: str, choose: Callable[[str], bool] = lambda key: True) -> int:
    """Delete the keys below ``prefix`` in ``store``, or those of them that ``choose`` takes; returns their number.

    Does nothing on a torch whose stores cannot list their keys (``list_keys`` is newer than torch 2.6): a few short keys of
    each generation then stay in the store.
    """
    if not hasattr(store, "list_keys"):
        return 0
    # A prefix store puts a slash behind its prefix, so that "gen" stands for all keys that start with "gen/".
    below = PrefixStore(prefix, store)
    keys = [key for key in below.list_keys() if choose(key)]
    for key in keys:
        below.delete_key(key)
    return len(keys)


def leak(thing: object) -> None:
    """Keep ``thing`` alive for ever.

    In a forked child, the destructors of stores and groups would join threads that exist only in the parent.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
