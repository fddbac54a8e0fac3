"""The private side of ``torch.distributed`` that this package touches, all of it.

``torch.distributed.destroy_process_group`` shuts down and forgets in one step. A shutdown that hangs and returns later would
then forget the groups of the *next* generation. So the two steps are separate here; ``tests/test_c10d.py`` compares the
outcome with torch's own and names what moved when a new torch changes it.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

BOOKKEEPING = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)
"""The maps of ``_World`` that hold groups."""

_NAMES_PER_GENERATION = 1 << 20


def default_group() -> ProcessGroup | None:
    """The default group of this process, or ``None``."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return distributed_c10d._get_default_group()


def name_groups_after(generation: int) -> None:
    """Let the names of the groups to come start at a number that belongs to ``generation``.

    Torch names groups by counting from 0 and starts anew after a destroy, so that an old handle, which looks its group up by
    name, finds a different group (F31 of the design). All ranks agree on the generation, so they agree on the names.
    """
    distributed_c10d._world.group_count = generation * _NAMES_PER_GENERATION


def reset_names() -> None:
    """Let names start at 0 again, as they do before the first group and after torch's own destroy."""
    distributed_c10d._world.group_count = 0


def take_all_groups() -> list[ProcessGroup]:
    """Take all groups out of torch's bookkeeping; ``torch.distributed`` is uninitialised afterwards.

    Returns:
        The groups in the order in which torch shuts them down: the youngest first, the default group last. The list holds
        the last references that torch had.
    """
    world = distributed_c10d._world
    names = world.pg_names
    groups = sorted(names, key=lambda group: names[group], reverse=True)
    comms: list[Any] = getattr(world, "comms", [])
    comms.clear()
    distributed_c10d._update_default_pg(None)
    for attribute in BOOKKEEPING:
        getattr(world, attribute).clear()
    distributed_c10d._unregister_all_process_groups()
    reset_names()
    return groups


def finish_hooks(group: ProcessGroup) -> None:
    """Wait for pending completion hooks of ``group``, as torch does before it shuts a group down."""
    if type(group) is ProcessGroup and group._has_hooks():
        group._wait_for_pending_works()
