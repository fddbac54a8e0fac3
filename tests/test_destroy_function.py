"""`lightning_pgroup.destroy_process_group`: at any time, as often as one likes, bounded."""

import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.distributed import HashStore

from lightning_pgroup import PGroupDDPStrategy, PGroupError, c10d, destroy_process_group
from tests.backends import NAME, StubbornGroup, register_stubborn_backend
from tests.models import TinyData, TinyModel, make_trainer, whats
from tests.ranks import run_ranks


def create_foreign(backend="gloo"):
    """A default group of other code, of one rank."""
    hook = sys.excepthook
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    sys.excepthook = hook
    return dist.group.WORLD


def test_f16_without_a_group_nothing_happens():
    with pytest.raises((AssertionError, ValueError)):
        dist.destroy_process_group()
    for group in (None, dist.group.WORLD, dist.GroupMember.NON_GROUP_MEMBER):
        destroy_process_group(group)
        destroy_process_group(group, timeout=1)


def test_a_group_of_other_code_is_refused_unless_told():
    def job(rank):
        foreign = create_foreign()
        dist.new_group([0])
        for group in (None, foreign):
            with pytest.raises(PGroupError, match="created by other code"):
                destroy_process_group(group)
        assert dist.is_initialized()
        destroy_process_group(foreign=True)
        assert not dist.is_initialized()
        assert c10d.all_groups() == []
        destroy_process_group(foreign, foreign=True)

    run_ranks(job, size=1)


def test_a_sub_group_alone():
    def books():
        maps = [dict(getattr(dist.distributed_c10d._world, name)) for name in c10d.BOOKKEEPING]
        return [{key: value for key, value in one.items() if value != []} for one in maps]

    def job(rank):
        create_foreign()
        before = books()
        one, other = dist.new_group([0]), dist.new_group([0])
        destroy_process_group(one)
        destroy_process_group(one)
        assert not c10d.is_alive(one)
        dist.all_reduce(torch.ones(1), group=other)
        destroy_process_group(other, timeout=2)
        assert books() == before
        dist.all_reduce(torch.ones(1))
        destroy_process_group(foreign=True)

    run_ranks(job, size=1)


@pytest.mark.parametrize("group", ["pairs", 5, [0, 1]])
def test_what_is_no_group_is_an_error_and_no_silence(group):
    with pytest.raises(TypeError, match=r"must be a process group or None, got .* `strategy\.destroy_group\(name\)`"):
        destroy_process_group(group)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "soon"])
def test_a_timeout_that_is_none(timeout):
    with pytest.raises((ValueError, TypeError), match="timeout"):
        destroy_process_group(timeout=timeout)


@pytest.mark.parametrize("which", ["sub-group", "default"])
def test_a_shutdown_that_hangs_is_given_up_and_aborted(which):
    def job(rank):
        register_stubborn_backend()
        create_foreign("gloo" if which == "sub-group" else NAME)
        group = dist.new_group([0], backend=NAME)
        start = time.monotonic()
        destroy_process_group(group if which == "sub-group" else None, timeout=0.5, foreign=True)
        took, alive = time.monotonic() - start, dist.is_initialized()
        destroy_process_group(foreign=True)
        for thread in threading.enumerate():
            if thread.name == "lightning-pgroup-shutdown":
                thread.join(10)  # the abort has released it
        return took, alive, "abort" in StubbornGroup.calls

    ((took, alive, aborted),) = run_ranks(job, size=1)
    assert 0.4 < took < 3
    assert alive == (which == "sub-group")
    assert aborted


def test_the_group_of_a_strategy():
    def job(rank):
        inside = []

        class Try(Callback):
            def on_train_start(self, *args):
                sub = dist.new_group([0, 1])
                destroy_process_group(sub)
                try:
                    destroy_process_group()
                except PGroupError as error:
                    inside.append(str(error))

        strategy = PGroupDDPStrategy(destroy="at_exit")
        make_trainer(strategy, callbacks=[Try()]).fit(TinyModel(), datamodule=TinyData())
        destroy_process_group(timeout=5)
        destroy_process_group()
        alive = dist.is_initialized()
        make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
        return inside, alive, whats(strategy)

    for inside, alive, events in run_ranks(job):
        assert "'fit' is running. Destroy the process group between stages" in inside[0]
        assert not alive
        assert events == [("fit", "created", 1), ("", "destroyed", 1)]
