"""Forked ranks for the benchmarks, as Lightning's popen launcher would have started them."""

import os
import socket

from lightning_pgroup.process_state import process_state
from lightning_pgroup.store import LOOPBACK, Endpoint, listen
from lightning_pgroup.team import ENVIRONMENT_VARIABLE, Invitation


def prepare(size: int) -> tuple[Invitation, socket.socket]:
    """Invite ``size`` ranks, to be forked from this process; also finds the port that plain DDP needs."""
    with listen(LOOPBACK) as plain:
        os.environ["MASTER_PORT"] = str(plain.getsockname()[1])
    listener = listen(LOOPBACK)
    return Invitation.to(Endpoint(*listener.getsockname()[:2]), size, 0), listener


def become_rank(rank: int, invitation: Invitation, listener: socket.socket) -> None:
    """Be one of the ranks, in a process that was just forked."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(invitation.size), MASTER_ADDR=LOOPBACK)
    if rank == 0:
        process_state().membership.host(listener)
        process_state().membership.join(invitation)
    else:
        os.environ[ENVIRONMENT_VARIABLE] = invitation.to_environment()
