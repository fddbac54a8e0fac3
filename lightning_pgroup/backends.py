"""What differs between backends when a group is aborted. The only file that knows one backend from another.

A third party adds its own with :func:`register_backend_transport`. One that is not known gets ``abort()`` and the monitor.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.distributed import ProcessGroup

from lightning_pgroup import c10d
from lightning_pgroup.exceptions import text_of
from lightning_pgroup.sockets import count_connections, shut_down_connections


class BackendTransport:
    """How the connections of one backend are cut. The base class leaves that to the backend's own ``abort()``.

    Attributes:
        peers_notice: Whether a rank that waits in a collective wakes up when a peer is cut off. If not, each rank watches the
            store for a failure of the others.
        waits_in_store: Whether a rank that makes a group waits for the others in the store only, on the thread that makes it,
            and asks nothing of the store later. Its waits then end as soon as another rank has failed.
    """

    peers_notice = False
    waits_in_store = False

    def blames_a_peer(self, error: BaseException) -> bool:
        """Whether ``error`` says that another rank has gone, so that the cause is to be looked for there."""
        return False

    def settle(self, group: ProcessGroup) -> None:
        """Return once no member is in the creation of ``group`` any more, if the end of a group could disturb one that is.

        Called by all members when they have made it; bounded by the group's timeout.
        """

    def count_peers(self, addresses: Sequence[bytes]) -> int | None:
        """How many connections to other ranks a group has, as far as this backend can tell; it loses those to ranks that end.

        Args:
            addresses: The values that the group has in the store.
        """
        return None

    def cut(self, addresses: Sequence[bytes]) -> None:
        """Cut all connections of this process's groups. Called on a failing rank, before ``abort()``; must not wait.

        Args:
            addresses: The values that the groups have in the store.
        """


class GlooTransport(BackendTransport):
    """Gloo: its ``abort()`` leaves the sockets open as long as anything holds the group, so they are shut down."""

    peers_notice = True
    waits_in_store = True

    def blames_a_peer(self, error: BaseException) -> bool:
        """Whether it comes from gloo, whose own errors are all about connections."""
        return isinstance(error, RuntimeError) and any(word in text_of(error) for word in _GLOO_ERRORS)

    def settle(self, group: ProcessGroup) -> None:
        """One collective: a member that still connects would fail if another one ended the group by then."""
        if group.size() > 1 and c10d.serves_cpu(group):
            group.allreduce([torch.zeros(1)]).wait()

    def count_peers(self, addresses: Sequence[bytes]) -> int | None:
        """The number of its sockets: gloo connects each rank to each, and closes the socket of one that is gone."""
        return count_connections(addresses)

    def cut(self, addresses: Sequence[bytes]) -> None:
        """Shut down the sockets: the peers wake up within milliseconds."""
        shut_down_connections(addresses)


_GLOO_ERRORS = ("gloo/transport/", "Gloo connectFullMesh", "monitoredBarrier")

_transports: dict[str, BackendTransport] = {"gloo": GlooTransport()}
_default = BackendTransport()


def register_backend_transport(backend: str, transport: BackendTransport) -> None:
    """Say how the connections of a backend are cut.

    Args:
        backend: Its name, as ``torch.distributed`` knows it.
        transport: Its way.
    """
    _transports[backend.lower()] = transport


def transports(backends: Iterable[str]) -> list[BackendTransport]:
    """The transports of some backends, named as torch names them, also mixed (``"cpu:gloo,cuda:nccl"``)."""
    names = {part.rsplit(":", 1)[-1].strip().lower() for text in backends for part in text.split(",")}
    return [_transports.get(name, _default) for name in sorted(names)]


def peers_notice(backends: Iterable[str]) -> bool:
    """Whether a peer of any of these backends wakes up by itself when this rank is cut off."""
    return all(transport.peers_notice for transport in transports(backends))


def wait_in_store(backends: Iterable[str]) -> bool:
    """Whether all of these backends wait in the store, and there only, while a group is made."""
    return all(transport.waits_in_store for transport in transports(backends))


def blames_a_peer(error: BaseException) -> bool:
    """Whether any known backend would raise ``error`` because another rank has gone."""
    return any(transport.blames_a_peer(error) for transport in _transports.values())
