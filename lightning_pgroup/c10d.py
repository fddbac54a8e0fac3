"""The private side of ``torch.distributed`` that this package touches, all of it.

``torch.distributed.destroy_process_group`` shuts down and forgets in one step. A shutdown that hangs and returns later would
then forget the groups of the *next* generation. So the two steps are separate here; ``tests/test_c10d.py`` compares the
outcome with torch's own and names what moved when a new torch changes it.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

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

_MESHES_HOLD_GROUPS = "_pg_registry" in getattr(DeviceMesh, "__annotations__", ())
"""Whether a mesh keeps its groups, as it does in newer torch, so that a group that nothing holds is in no mesh."""

_ended: "weakref.WeakSet[ProcessGroup]" = weakref.WeakSet()


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
    groups = all_groups()
    comms: list[Any] = getattr(world, "comms", [])
    comms.clear()
    distributed_c10d._update_default_pg(None)
    for attribute in BOOKKEEPING:
        getattr(world, attribute).clear()
    distributed_c10d._unregister_all_process_groups()
    reset_names()
    _ended.update(groups)
    return groups


def all_groups() -> list[ProcessGroup]:
    """All groups of this process, in the order of :func:`take_all_groups`, which stay where they are."""
    names = distributed_c10d._world.pg_names
    return sorted(names, key=lambda group: names[group], reverse=True)


def is_alive(group: ProcessGroup) -> bool:
    """Whether torch knows ``group``, so that it was not destroyed."""
    return group in distributed_c10d._world.pg_names


def take_group(group: ProcessGroup) -> None:
    """Take one sub-group out of torch's bookkeeping; the others stay. The caller then has the last reference that torch had."""
    world = distributed_c10d._world
    name = world.pg_names[group]
    _ended.add(group)
    tag = world.pg_to_tag.get(group)
    for attribute in BOOKKEEPING:
        if attribute != "tags_to_pg":
            getattr(world, attribute).pop(group, None)
    for one in {tag or "", ""}:
        if group in world.tags_to_pg.get(one, []):
            world.tags_to_pg[one].remove(group)
    distributed_c10d._unregister_process_group(name)


def may_be_held() -> bool:
    """Whether anything may hold a group that we have ended, or a mesh of it. Costs nothing."""
    return len(_ended) > 0 or not _MESHES_HOLD_GROUPS


def has_ended(mesh: DeviceMesh) -> bool:
    """Whether a group of ``mesh`` was destroyed; it knows them by their names."""
    names = getattr(mesh, "_dim_group_names", None)
    if names is None:  # before torch 2.8; in a rank that the mesh leaves out there is neither
        names = [info[-1] for info in getattr(mesh, "_dim_group_infos", ())]
    return not group_names().issuperset(names)


def group_names() -> frozenset[str]:
    """The names of all groups of this process."""
    return frozenset(distributed_c10d._world.pg_names.values())


def backends_in_use() -> frozenset[str]:
    """The backends of all groups of this process, as torch names them, possibly mixed."""
    return frozenset(str(config) for config in distributed_c10d._world.pg_backend_config.values())


def backends_of(group: ProcessGroup) -> frozenset[str]:
    """The backends of one group, as torch names them, possibly mixed."""
    return frozenset({str(distributed_c10d._world.pg_backend_config[group])})


def address_keys(groups: list[ProcessGroup]) -> list[list[str]]:
    """Where the groups of one generation leave their addresses, below the store of that generation.

    One list for each group and kind of device; a list of which not all keys are there belongs to no backend with addresses.
    Computed rather than listed: in torch 2.13 ``list_keys`` waits with Python's lock held.
    """
    if not groups:
        return []
    names = distributed_c10d._world.pg_names
    default = names[groups[-1]]
    keys = []
    for group in groups:
        path = default if names[group] == default else f"{default}//{names[group]}"
        keys += [[f"{path}//{device}//0/{rank}" for rank in range(group.size())] for device in ("cpu", "cuda")]
    return keys


def abort_groups(groups: list[ProcessGroup]) -> list[Exception]:
    """Call ``abort()`` on groups, grouped as torch does it for NCCL, whose aborts could else wait for one another.

    Returns:
        What backends raised.
    """
    problems: list[Exception] = []
    nccl = next((backend for group in groups if (backend := _nccl(group)) is not None), None)
    if nccl is not None:
        nccl._group_start()
    for group in groups:
        try:
            group.abort()
        except Exception as error:
            problems.append(error)
    if nccl is not None:
        nccl._group_end()
    return problems


def _nccl(group: ProcessGroup) -> Any:
    if not dist.is_nccl_available():
        return None
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None


def finish_hooks(group: ProcessGroup) -> None:
    """Wait for pending completion hooks of ``group``, as torch does before it shuts a group down."""
    if type(group) is ProcessGroup and group._has_hooks():
        group._wait_for_pending_works()
