"""Which groups come from us: known as long as anything holds them, also when they have ended."""

import gc
import sys
import weakref

import torch.distributed as dist
from torch.distributed import HashStore

from lightning_pgroup import c10d, lineage
from tests.ranks import run_ranks


def test_a_group_is_known_as_long_as_anything_holds_it():
    def job(rank):
        hook = sys.excepthook
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        sys.excepthook = hook
        default, sub, foreign = dist.group.WORLD, dist.new_group([0]), dist.new_group([0])
        assert not lineage.known(default)
        lineage.remember(default, None)
        lineage.remember(sub, "pairs")
        assert [lineage.known(group) for group in (default, sub, foreign)] == [True, True, False]
        for group in c10d.take_all_groups():
            group.shutdown()
        assert [lineage.known(group) for group in (default, sub, foreign)] == [True, True, False]
        assert [lineage.name_of(group) for group in (default, sub, foreign)] == [None, "pairs", None]
        one, count = weakref.ref(sub), len(lineage._names)
        del group, sub
        gc.collect()
        assert one() is None
        assert len(lineage._names) == count - 1

    run_ranks(job, size=1)
