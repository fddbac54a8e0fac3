"""Turns what a DDP strategy and its cluster environment know into the group that its stages ask for."""

from datetime import timedelta
from typing import TYPE_CHECKING

from lightning_pgroup.claim import GroupRequest
from lightning_pgroup.config import LifecycleConfig
from lightning_pgroup.membership import Place
from lightning_pgroup.signature import GroupSignature, describe_options

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
        address = environment.main_address
        host = f"[{address}]" if ":" in address else address
        return f"tcp://{host}:{environment.main_port}"

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
            timeout=config.rendezvous_timeout or timeout or LIGHTNING_TIMEOUT,
        ),
        device_id=None if device.type == "cpu" else device,
        pg_options=config.pg_options,
    )
