"""Turns what a DDP strategy and its cluster environment know into the group that its stages ask for."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_pgroup.claim import GroupRequest
from lightning_pgroup.config import LifecycleConfig
from lightning_pgroup.errors import StoreLostError
from lightning_pgroup.membership import Place
from lightning_pgroup.signature import GroupSignature, describe_options
from lightning_pgroup.store import Endpoint

if TYPE_CHECKING:
    from lightning_pgroup.strategy import PGroupDDPStrategy

LIGHTNING_TIMEOUT = timedelta(minutes=30)
"""How long to wait for ranks when neither a rendezvous timeout nor one of the group is given."""


def request_group(
    strategy: "PGroupDDPStrategy", config: LifecycleConfig, backend: str, timeout: timedelta | None
) -> GroupRequest:
    """The group that a stage of ``strategy`` asks for on this rank.

    Args:
        strategy: Attached to a Trainer, so that it knows its devices and its cluster environment.
        config: What its user asked for.
        backend: The backend, as given or by the kind of device.
        timeout: Bound of each collective; ``None`` is torch's default for the backend.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    rank, size, device = strategy.global_rank, strategy.group_size, strategy.root_device

    def default_init_method() -> str:
        check_main_address(environment, rank, size)
        return f"tcp://{Endpoint(environment.main_address, environment.main_port)}"

    return GroupRequest(
        signature=GroupSignature(
            backend=backend,
            world_size=size,
            rank=rank,
            timeout=None if timeout is None else timeout.total_seconds(),
            device=str(device),
            pg_options=describe_options(config.pg_options),
            init_method=config.init_method or "",
        ),
        place=Place(
            rank=rank,
            size=size,
            nodes=strategy.num_nodes,
            init_method=config.init_method,
            default_init_method=default_init_method,
            starter=describe_starter(environment),
            timeout=config.rendezvous_timeout or timeout or LIGHTNING_TIMEOUT,
        ),
        device_id=None if device.type == "cpu" else device,
        pg_options=config.pg_options,
    )


def check_main_address(environment: ClusterEnvironment, rank: int, size: int) -> None:
    """Refuse to let each rank choose a port of its own, as Lightning's default environment does without ``MASTER_PORT``.

    Raises:
        StoreLostError: On each rank, at once.
    """
    by_hand = isinstance(environment, LightningEnvironment) and environment.creates_processes_externally
    if by_hand and "MASTER_PORT" not in os.environ:
        raise StoreLostError(
            f"Rank {rank} of {size} does not know where the ranks meet: LOCAL_RANK is set, so that somebody else than Lightning"
            " has started the ranks, but MASTER_PORT is not. Set MASTER_ADDR and MASTER_PORT to the same on all ranks; or unset"
            " LOCAL_RANK, if it was left over, and Lightning starts the ranks."
        )


def describe_starter(environment: ClusterEnvironment) -> str:
    """Who has started the ranks, as far as Lightning knows, for messages."""
    name = type(environment).__name__
    if isinstance(environment, LightningEnvironment) and environment.creates_processes_externally:
        return f"by {name}, since LOCAL_RANK is set: started by hand"
    return f"by {name}"
