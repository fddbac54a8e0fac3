"""Our bookkeeping against torch's own: a new torch that keeps its groups elsewhere is noticed here, by name."""

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, distributed_c10d

from lightning_pgroup import c10d

KNOWN = {*c10d.BOOKKEEPING, "comms", "default_pg", "group_count", "pg_config_info"}
NAMES = ("_world", "_get_default_group", "_update_default_pg", "_unregister_all_process_groups", "_hash_ranks_to_str")


@pytest.mark.parametrize("name", NAMES)
def test_private_name_of_torch_is_there(name):
    assert hasattr(distributed_c10d, name), f"torch has moved {name}: mend lightning_pgroup/c10d.py"


def test_torch_keeps_groups_nowhere_else():
    public = {name for name in dir(distributed_c10d._world) if not name.startswith("_")}
    assert public <= KNOWN, f"torch keeps {public - KNOWN} too: should lightning_pgroup/c10d.py clear it?"
    assert set(c10d.BOOKKEEPING) <= public


def world():
    distributed = distributed_c10d._world
    state = {name: dict(getattr(distributed, name)) for name in c10d.BOOKKEEPING}
    return state, distributed.default_pg, distributed.group_count, dist.is_initialized()


def make_groups():
    hook = __import__("sys").excepthook
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    __import__("sys").excepthook = hook
    dist.new_group([0])


def test_taking_all_groups_leaves_what_torchs_destroy_leaves():
    make_groups()
    dist.destroy_process_group()
    want = world()
    make_groups()
    groups = c10d.take_all_groups()
    assert [group.group_name for group in groups] == ["1", "0"]
    assert world() == want
    for group in groups:
        group.shutdown()


def test_without_a_group_there_is_nothing_to_take():
    assert c10d.default_group() is None
    assert c10d.take_all_groups() == []


def test_names_belong_to_a_generation():
    c10d.name_groups_after(3)
    try:
        make_groups()
        names = {group.group_name for group in c10d.take_all_groups()}
    finally:
        c10d.reset_names()
    assert names == {str(3 << 20), str((3 << 20) + 1)}


def test_the_default_group_is_the_last_whatever_the_others_are_called():
    c10d.name_groups_after(9)
    c10d.restore_local_names()
    try:
        hook = __import__("sys").excepthook
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        __import__("sys").excepthook = hook
        default, local = dist.group.WORLD, dist.new_group([0], use_local_synchronization=True)
        assert local.group_name < default.group_name, "torch hashes otherwise by now: find ranks with a lower hash"
        assert c10d.all_groups() == [local, default]
    finally:
        for group in c10d.take_all_groups():
            group.shutdown()
