"""F31: what still holds a group that has ended fails loudly, and no name of it ever leads to a living one."""

import contextlib
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.distributed import HashStore, distributed_c10d
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import SumMetric

from lightning_pgroup import PGroupDDPStrategy, c10d, destroy_process_group, lineage, transport
from lightning_pgroup.process_state import process_state
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks


class Keeps(Callback):
    """Keeps whatever can hold a group."""

    raises = False

    def on_train_start(self, trainer, pl_module):
        everyone = [0, 1, 2, 3]
        self.groups = {
            "default": dist.group.WORLD,
            "named": trainer.strategy.group("pairs"),
            "torch's": dist.new_group(everyone),
            "torch's, local": dist.new_group(everyone, use_local_synchronization=True),
        }
        for group in self.groups.values():
            dist.all_reduce(torch.ones(1), group=group)
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        self.wrapper = DistributedDataParallel(torch.nn.Linear(4, 1))
        self.lightnings = trainer.strategy.model
        self.metrics = {name: SumMetric(process_group=group) for name, group in self.groups.items()}
        for metric in self.metrics.values():
            metric.update(1.0)
        if self.raises:
            raise ValueError("on purpose")


def fit(strategy, *callbacks):
    make_trainer(strategy, devices=4, callbacks=list(callbacks)).fit(TinyModel(), datamodule=TinyData())


def heard(function):
    """What a use of an old handle raised; empty if it worked."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def uses(keeps):
    found = {
        name: heard(lambda group=group: dist.all_reduce(torch.ones(1), group=group)) for name, group in keeps.groups.items()
    }
    found["mesh"] = heard(lambda: keeps.mesh.get_group("inner"))
    found["mesh, by its names"] = heard(lambda: all_reduce(torch.ones(1), "sum", (keeps.mesh, 0)).sum())
    for name in ("wrapper", "lightnings"):
        wrapper = getattr(keeps, name)
        found[name] = heard(lambda wrapper=wrapper: wrapper(torch.ones(2, 4)).sum().backward())
    for name, metric in keeps.metrics.items():
        metric.update(1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # without a group a metric has nobody to ask, and says so
            found[f"a metric of the {name} one"] = heard(metric.compute)
    return found


ENDS = {
    "on_teardown": ("on_teardown", lambda strategy: None),
    "by the strategy": ("at_exit", lambda strategy: strategy.destroy_process_group()),
    "by the function": ("at_exit", lambda strategy: destroy_process_group()),
    "by close": ("at_exit", lambda strategy: strategy.close()),
    "by an error": ("at_exit", lambda strategy: None),
}


@pytest.mark.parametrize("end", ENDS)
def test_f31_old_handles_fail_loudly(end):
    """On all four ranks, without a group and in the next generation, however the group has ended."""
    destroy, finish = ENDS[end]

    def job(rank):
        keeps, seen = Keeps(), []
        strategy = PGroupDDPStrategy(destroy=destroy, groups={"pairs": [[0, 1], [2, 3]]}, timeout=20)
        keeps.raises = end == "by an error"
        with pytest.raises(ValueError, match="on purpose") if keeps.raises else contextlib.nullcontext():
            fit(strategy, keeps)
        finish(strategy)
        seen.append(uses(keeps))

        class Look(Callback):
            def on_train_start(self, trainer, pl_module):
                seen.append(uses(keeps))
                dist.barrier()

        fit(PGroupDDPStrategy(), Look())
        return seen

    for rank, (without, within) in enumerate(run_ranks(job, size=4, deadline=60)):
        for found in (without, within):
            silent = [name for name, error in found.items() if not error]
            assert not silent, f"rank {rank}: {silent} went on as if nothing had happened"


@pytest.mark.parametrize("destroy", [destroy_process_group, "destroy_group"])
def test_f31_an_old_sub_group_fails_loudly_and_the_others_live_on(destroy):
    def job(rank):
        seen = {}

        class Ends(Callback):
            def on_train_start(self, trainer, pl_module):
                old = trainer.strategy.group("pair")
                other = dist.new_group([0, 1], use_local_synchronization=True)
                dist.all_reduce(torch.ones(1), group=old)
                if destroy is destroy_process_group:
                    destroy_process_group(old)
                else:
                    trainer.strategy.destroy_group("pair")
                seen["old"] = heard(lambda: dist.all_reduce(torch.ones(1), group=old))
                for group in (None, other, trainer.strategy.group("pair")):
                    dist.all_reduce(torch.ones(1), group=group)

        strategy = PGroupDDPStrategy(groups={"pair": [0, 1]}, timeout=20)
        make_trainer(strategy, callbacks=[Ends()]).fit(TinyModel(), datamodule=TinyData())
        return seen

    for seen in run_ranks(job):
        assert seen["old"]


def test_f31_a_foreign_group_that_we_end_fails_loudly():
    def job(rank):
        dist.init_process_group("gloo", rank=rank, world_size=2)
        default, sub = dist.group.WORLD, dist.new_group([0, 1])
        for group in (default, sub):
            dist.all_reduce(torch.ones(1), group=group)
        destroy_process_group(foreign=True)
        sys.excepthook = sys.__excepthook__
        return [heard(lambda group=group: dist.all_reduce(torch.ones(1), group=group)) for group in (default, sub)]

    for seen in run_ranks(job, check_leaks=False):
        assert all(seen)


def test_f36_what_a_rank_has_sent_arrives_although_it_ends_its_group():
    """A rank that has sent its part ends the group at once, which something still holds; the other one still reads."""

    def job(rank):
        kept, right = [], []

        class Last(Callback):
            def teardown(self, trainer, pl_module, stage):
                kept.append(dist.group.WORLD)
                sender = len(kept) % 2
                tensor = torch.full((1_000_000,), float(len(kept) if rank == sender else 0))
                dist.broadcast(tensor, src=sender)
                right.append(bool((tensor == len(kept)).all()))

        for _ in range(20):
            strategy = PGroupDDPStrategy(destroy="on_teardown", timeout=20)
            make_trainer(strategy, callbacks=[Last()]).fit(TinyModel(), datamodule=TinyData())
        return right

    assert run_ranks(job) == [[True] * 20] * 2


def test_a_group_may_end_as_soon_as_a_rank_has_it():
    """While others may still connect, and without any use of it; something holds it: ours then fail loudly at once.

    A group of the user's own does so when all ranks have met again: until then nobody knows whether all members have it.
    """

    def works(group):
        return not heard(lambda: group.allreduce([torch.ones(1)]).wait())

    def job(rank):
        strategy = PGroupDDPStrategy(destroy="on_teardown", groups={"all": [0, 1, 2, 3]}, timeout=20)
        make_trainer(strategy, devices=4)
        lifecycle, ours, users = process_state().lifecycle, [], []
        for number in range(100):
            stage = lifecycle.enter(strategy.claim(), "nothing", None, strategy.request)
            lifecycle.acquire(stage)
            default = dist.group.WORLD
            if number % 5 == 0:
                named = strategy.group("all")
                strategy.destroy_group("all")
                ours.append(works(named))
            if number % 5 > 1:
                users.append(dist.new_group([0, 1, 2, 3]))
            lifecycle.leave(stage)
            if number % 5 == 1:
                ours.append(works(default))
        stage = lifecycle.enter(strategy.claim(), "nothing", None, strategy.request)
        lifecycle.acquire(stage)
        users = [works(group) for group in users]
        lifecycle.leave(stage)
        return ours, users

    assert run_ranks(job, size=4, deadline=60) == [([False] * 40, [False] * 60)] * 4


def test_f31_the_fault_itself():
    """Without the cut the old sockets go on working; torch finds the name of an old local group again."""

    def job(rank):
        def end(group):
            real, transport.cut = transport.cut, lambda *args: None
            with contextlib.ExitStack() as stack:
                stack.callback(setattr, transport, "cut", real)
                destroy_process_group(group)
            return heard(lambda: dist.all_reduce(torch.ones(1), group=group))

        found = []

        class Ends(Callback):
            def on_train_start(self, trainer, pl_module):
                group = dist.new_group([0, 1])
                dist.all_reduce(torch.ones(1), group=group)
                found.append(end(group))
                dist.barrier()

        make_trainer(PGroupDDPStrategy(), callbacks=[Ends()]).fit(TinyModel(), datamodule=TinyData())
        return found

    assert run_ranks(job) == [[""], [""]]


def plain_names():
    names = []
    for _ in range(2):
        hook = sys.excepthook
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        sys.excepthook = hook
        names.append(dist.new_group([0], use_local_synchronization=True).group_name)
        dist.destroy_process_group()
    return names


def test_f31_names_of_local_groups_never_come_back():
    """Not in later generations, not when one is made anew; also for members that have different numbers of other groups."""

    def job(rank):
        before = plain_names()
        names, torchs = [], c10d._torchs_local_name

        class Makes(Callback):
            def on_train_start(self, trainer, pl_module):
                if rank == 0:
                    dist.new_group([0], use_local_synchronization=True)
                for _ in range(2):
                    group = dist.new_group([0, 1], use_local_synchronization=True)
                    dist.all_reduce(torch.ones(1), group=group)
                    names.append(group.group_name)
                    dist.destroy_process_group(group)
                assert not lineage.known(group)

        strategy = PGroupDDPStrategy(destroy="on_teardown", timeout=20)
        for _ in range(3):
            make_trainer(strategy, callbacks=[Makes()]).fit(TinyModel(), datamodule=TinyData())
            assert distributed_c10d._hash_ranks_to_str is torchs, "not given back at the end of the generation"
        assert before[0] == before[1], "torch names local groups otherwise by now"
        assert plain_names() == before
        return names

    one, other = run_ranks(job)
    assert one == other
    assert len(set(one)) == 6


def test_a_group_of_other_code_after_ours_keeps_torchs_own_names():
    """Its ranks may have noticed at different times that ours is gone: their names must not depend on that."""

    def job(rank):
        fit_once = make_trainer(PGroupDDPStrategy(destroy="at_exit"), devices=1)
        plain = plain_names()
        fit_once.fit(TinyModel(), datamodule=TinyData())
        assert distributed_c10d._hash_ranks_to_str is not c10d._torchs_local_name
        dist.destroy_process_group()
        after = plain_names()
        make_trainer(PGroupDDPStrategy(destroy="on_teardown"), devices=1).fit(TinyModel(), datamodule=TinyData())
        assert distributed_c10d._hash_ranks_to_str is c10d._torchs_local_name
        return plain == after

    assert run_ranks(job, size=1) == [True]


def test_a_group_that_is_bound_to_a_device_is_not_split():
    """NCCL's split waits for all ranks of the default group, which are not all members."""

    def job(rank):
        hook = sys.excepthook
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        sys.excepthook = hook
        default, device = dist.group.WORLD, torch.device("cuda:0")
        default.bound_device_id = device

        def refuse(group):
            raise AssertionError("split")

        distributed_c10d._get_split_source = refuse
        with pytest.raises(AssertionError, match="split"):
            dist.new_group([0], use_local_synchronization=True)
        count = distributed_c10d._world.group_count
        group = c10d.new_local_group("one", [0], backend=None, timeout=None)
        assert distributed_c10d._world.group_count == count, "only the members have counted"
        assert group.bound_device_id == default.bound_device_id == device
        assert group.group_desc == "one"
        destroy_process_group(foreign=True)

    run_ranks(job, size=1)
