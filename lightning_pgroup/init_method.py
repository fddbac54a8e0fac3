"""What an ``init_method`` stands for: an address, a file, or the store of torchrun's agent.

It is the user's own, or the main address of the cluster environment in the same form.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlparse

from torch.distributed import DistError, FileStore, Store, is_torchelastic_launched

from lightning_pgroup.errors import StoreLostError
from lightning_pgroup.main_address import host_at, reach_at
from lightning_pgroup.store import Endpoint

AGENT_PATIENCE = timedelta(seconds=2)
"""How long to wait while nothing listens at the address of torchrun's agent, which listens before it starts a rank."""

HOST_PATIENCE = timedelta(seconds=2)
"""How long to wait in a store for the word of rank 0 that it is its own, before that is looked for anew."""

_LENGTH = 4

_HOSTED = "lightning_pgroup/hosted"

_NOT_OF_TORCHRUN = (
    "The environment says that torchrun started this process, whose agent hosts the store: it has ended. If torchrun did not"
    " start this process, unset what an earlier run has left: TORCHELASTIC_RUN_ID, TORCHELASTIC_USE_AGENT_STORE, RANK,"
    " LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
)


def resolve(init_method: str) -> str:
    """The ``init_method`` with ``env://`` replaced by the address that the environment names.

    Raises:
        StoreLostError: The environment names none.
    """
    if not init_method.startswith("env://"):
        return init_method
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise StoreLostError(f"`init_method='env://'` needs {' and '.join(missing)} in the environment of each rank.")
    return f"tcp://{Endpoint(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))}"


def is_hosted_by_rank_0(init_method: str) -> bool:
    """Whether the store lives in rank 0, and not in a file or in torchrun's agent."""
    endpoint = _endpoint(resolve(init_method))
    return endpoint is not None and not _is_of_agent(endpoint)


def host_of(init_method: str) -> str | None:
    """The host of the address, which is that of rank 0's node; ``None`` for a file."""
    endpoint = _endpoint(resolve(init_method))
    return None if endpoint is None else endpoint.host


def launcher_store(init_method: str, rank: int, world_size: int, timeout: timedelta, nodes: int) -> Store:
    """The store that an ``init_method`` stands for. Called on each rank, on its first contact; blocks at most ``timeout``.

    Under torchrun, at the main address, that is a client of the agent's store; else rank 0 hosts it, and does not wait for the
    others: the first round does, and names those who do not come.

    Args:
        init_method: ``tcp://host:port``, ``file://path`` or ``env://``.
        rank: This process's rank.
        world_size: Number of ranks.
        timeout: How long to wait for the host, and bound of each operation.
        nodes: Number of nodes of the run.

    Raises:
        StoreLostError: There is no such store; the message says why.
    """
    init_method = resolve(init_method)
    endpoint = _endpoint(init_method)
    if endpoint is None:
        return _file_store(Path(urlparse(init_method).path), rank, world_size, timeout)
    if _is_of_agent(endpoint):
        return reach_at(endpoint, rank, world_size, timeout, patience=AGENT_PATIENCE, hint=_NOT_OF_TORCHRUN)
    if rank == 0:
        hosted = host_at(endpoint, world_size, timeout, nodes)
        hosted.set(_HOSTED, "by rank 0")
        return hosted
    return _reach_rank_0(endpoint, rank, world_size, timeout)


def _reach_rank_0(endpoint: Endpoint, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Connect to the store of rank 0, and not to one that is about to end, as of a group that the user had at this address."""
    start = time.monotonic()
    while True:
        left = max(timeout - timedelta(seconds=time.monotonic() - start), timedelta(milliseconds=1))
        store = reach_at(endpoint, rank, world_size, left)
        try:
            store.wait([_HOSTED], min(left, HOST_PATIENCE))
        except DistError as error:
            if time.monotonic() - start < timeout.total_seconds():
                continue
            raise StoreLostError(
                f"Rank {rank} of {world_size} waited {time.monotonic() - start:.1f} s of {timeout.total_seconds():.1f} s for"
                f" the store in which the ranks meet, at {endpoint}, but the store there is not that of rank 0: look for its"
                " own error, or for another address that it was given."
            ) from error
        store.set_timeout(timeout)
        return store


def _endpoint(init_method: str) -> Endpoint | None:
    url = urlparse(init_method)
    if url.scheme != "tcp":
        return None
    if not url.hostname or not url.port:
        raise StoreLostError(f"The ranks can not meet at {init_method!r}: give a port other than 0 (MASTER_PORT).")
    return Endpoint(url.hostname, url.port)


def _is_of_agent(endpoint: Endpoint) -> bool:
    if not is_torchelastic_launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT")
    return (host.lower(), port) == (endpoint.host.lower(), str(endpoint.port))


def _file_store(path: Path, rank: int, world_size: int, timeout: timedelta) -> Store:
    # Torch would wait for the folder, with Python's lock held, and for longer than it was told.
    wrong = ""
    if not path.parent.is_dir():
        wrong = f"there is no folder {str(path.parent)!r}"
    elif path.is_dir():
        wrong = "that is a folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        wrong = "it can not be written"
    elif not _holds_a_store(path):
        wrong = "it holds something else than a store, or was torn in the middle of an entry: remove it"
    if wrong:
        raise StoreLostError(
            f"Rank {rank} of {world_size} can not meet the others in the file {str(path)!r}: {wrong}. Name a file in a folder"
            " that all ranks share and may write."
        )
    store = FileStore(str(path), world_size)
    store.set_timeout(timeout)
    return store


def _holds_a_store(path: Path) -> bool:
    """Whether a file is a store of torch's: one text after the other, each a length in four bytes and that many bytes.

    Torch would read on in anything else for ever, with Python's lock held.
    """
    if sys.platform == "win32" or not path.exists():
        return True
    import fcntl

    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # torch locks it while it writes
        size, at = os.fstat(file.fileno()).st_size, 0
        while at < size:
            at += _LENGTH + int.from_bytes(file.read(_LENGTH), sys.byteorder)
            file.seek(at)
    return at == size
