"""The private side of ``torch.distributed`` that this package touches, all of it.

``torch.distributed.destroy_process_group`` shuts down and forgets in one step. A shutdown that hangs and returns later would
then forget the groups of the *next* generation. So the two steps are separate here; ``tests/test_c10d.py`` compares the
outcome with torch's own and names what moved when a new torch changes it.
"""

import contextlib
import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store, distributed_c10d
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

_LOCAL_NAME = "_hash_ranks_to_str"
"""The function of torch that names a group which only its members create."""

_torchs_local_name: Callable[[list[int]], str] = getattr(distributed_c10d, _LOCAL_NAME)
_default_name = _label = ""
_attempts: "weakref.WeakKeyDictionary[ProcessGroup, Counter[tuple[str, tuple[int, ...]]]]" = weakref.WeakKeyDictionary()


def default_group() -> ProcessGroup | None:
    """The default group of this process, or ``None``."""
    return distributed_c10d._world.default_pg


def name_groups_after(generation: int) -> None:
    """Let the names of the groups to come start at a number that belongs to ``generation``.

    Torch names groups by counting from 0 and starts anew after a destroy, so that an old handle, which looks its group up by
    name, finds a different group (F31 of the design). All ranks agree on the generation, so they agree on the names.

    It names a group that only its members create (``use_local_synchronization=True``) after their ranks and the number of
    groups on this rank, which comes back too, and differs between members that have different other groups. While a generation
    lives, these are named after the generation and how often these ranks have begun to create a group in it.
    """
    global _default_name
    distributed_c10d._world.group_count = generation * _NAMES_PER_GENERATION
    _default_name = str(generation * _NAMES_PER_GENERATION)
    setattr(distributed_c10d, _LOCAL_NAME, _local_name)


def reset_names() -> None:
    """Let names start at 0 again, as they do before the first group and after torch's own destroy."""
    distributed_c10d._world.group_count = 0
    restore_local_names()


def restore_local_names() -> None:
    """Let torch name groups again that only their members create. For a generation that other code has destroyed."""
    if getattr(distributed_c10d, _LOCAL_NAME) is _local_name:
        setattr(distributed_c10d, _LOCAL_NAME, _torchs_local_name)


def _local_name(ranks: list[int]) -> str:
    world = distributed_c10d._world
    default = world.default_pg
    if not _label and (default is None or world.pg_names.get(default) != _default_name):
        return _torchs_local_name(ranks)  # other code has destroyed the generation, and made a group of its own
    return _fresh_name(_label, ranks)


def _fresh_name(label: str, ranks: Sequence[int]) -> str:
    """A name that the default group has not seen, the same on all ``ranks``.

    Attempts are counted, and not groups: of one that has failed the keys are still in the store.
    """
    default = distributed_c10d._get_default_group()
    count = _attempts.setdefault(default, Counter())
    count[label, tuple(ranks)] += 1
    text = f"{label}/{'_'.join(map(str, ranks))}/{count[label, tuple(ranks)]}"
    digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return "-".join(part for part in (distributed_c10d._world.pg_names[default], label, digest) if part)


def new_local_group(label: str, ranks: Sequence[int], *, backend: str | None, timeout: timedelta | None) -> ProcessGroup:
    """Create a group of ``ranks``, this one among them, to be called on these ranks only. Blocks at most ``timeout``.

    Args:
        label: Becomes a part of its name in torch. Members wait for one another by it.
        ranks: Ranks of the default group, in ascending order.
        backend: Its backend; ``None`` is that of the default group.
        timeout: Of its collectives; ``None`` is torch's default for the backend.

    Raises:
        Exception: What torch raised.
    """
    default = distributed_c10d._get_default_group()
    with _named(label), _unbound(default) as device:
        group: ProcessGroup = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True, group_desc=label)
    group.bound_device_id = device
    return group


@contextlib.contextmanager
def _named(label: str) -> Iterator[None]:
    global _label
    world = distributed_c10d._world
    default, count = world.default_pg, world.group_count
    is_ours = getattr(distributed_c10d, _LOCAL_NAME) is _local_name
    _label = label
    setattr(distributed_c10d, _LOCAL_NAME, _local_name)
    try:
        yield
    finally:
        _label = ""
        if world.default_pg is default:  # and was not ended by the handler of a signal
            # A torch after 2.13 counts here too, but only on the members: the names of groups to come would differ.
            world.group_count = count
        if not is_ours:
            restore_local_names()


@contextlib.contextmanager
def _unbound(default: ProcessGroup) -> Iterator[torch.device | None]:
    """Off a default group that is bound to a device torch splits NCCL groups, which waits for all ranks, members or not."""
    device = default.bound_device_id
    if device is None:
        yield None
        return
    default.bound_device_id = None
    try:
        yield device
    finally:
        default.bound_device_id = device


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
    names, default = distributed_c10d._world.pg_names, distributed_c10d._world.default_pg
    return sorted(names, key=lambda group: (group is not default, names[group]), reverse=True)


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


def is_alive_mesh(mesh: DeviceMesh) -> bool:
    """Whether torch knows all groups of ``mesh``, which has their names."""
    names = getattr(mesh, "_dim_group_names", None)
    if names is None:  # before torch 2.8; in a rank that the mesh leaves out there is neither
        names = [info[-1] for info in getattr(mesh, "_dim_group_infos", ())]
    return group_names().issuperset(names)


def group_names(which: Callable[[ProcessGroup], bool] = lambda group: True) -> frozenset[str]:
    """The names of the groups of this process, or of some of them."""
    return frozenset(name for group, name in distributed_c10d._world.pg_names.items() if which(group))


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


def own_address_keys(group: ProcessGroup) -> tuple[Store, list[list[str]]]:
    """The store of one group, and where it leaves its addresses there; as in :func:`address_keys`."""
    store: Store = distributed_c10d._world.pg_map[group][1]
    return store, [[f"{device}//0/{rank}" for rank in range(group.size())] for device in ("cpu", "cuda")]


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


def was_used(group: ProcessGroup) -> bool:
    """Whether a collective has begun in ``group`` on this rank. ``False`` where its backend does not count them."""
    try:
        return bool(group._get_sequence_number_for_group() > 0)  # type: ignore[attr-defined]  # torch's stubs lack it
    except RuntimeError:
        return False


def serves_cpu(group: ProcessGroup) -> bool:
    """Whether ``group`` has a backend for tensors in main memory."""
    try:
        return group._get_backend(torch.device("cpu")) is not None
    except RuntimeError:
        return False


def gloo_workers(group: ProcessGroup) -> int | None:
    """How many threads gloo has for the collectives of ``group``; ``None`` where it does not say."""
    try:
        return int(group._get_backend(torch.device("cpu")).options._threads)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return None


def finish_hooks(group: ProcessGroup) -> None:
    """Wait for pending completion hooks of ``group``, as torch does before it shuts a group down."""
    if type(group) is ProcessGroup and group._has_hooks():
        group._wait_for_pending_works()
