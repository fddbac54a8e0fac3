"""What can not get the next group is named in one warning, before it fails; ranks that hold different things do not hang."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torchmetrics import SumMetric

from lightning_pgroup import PGroupDDPStrategy, c10d, lineage
from tests.holding import Recorder
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks


class Warnings(logging.Handler):
    """What the package has warned of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("lightning_pgroup").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


class Helper:
    __slots__ = ("__dict__", "group")

    def __init__(self):
        self.group = self.other = dist.group.WORLD


LEFT = "model.metric.process_group: the ranks did not make 'pairs' anew: use `strategy.group('pairs')` on all of its members"


UNKNOWN = "model.metric.process_group: this strategy has no group 'pairs': give it `groups={'pairs': …}`"


def fit(strategy, model, start, callback=None, devices=2):
    model.on_train_start = start
    callbacks = [] if callback is None else [callback]
    make_trainer(strategy, devices=devices, callbacks=callbacks).fit(model, datamodule=TinyData())


def test_what_is_left_is_named_once_and_fails():
    def job(rank):
        warnings, strategy = Warnings(), PGroupDDPStrategy(destroy="on_teardown", groups={"both": [[0, 1]]})
        model, callback, errors = TinyModel(), Recorder(), []

        def hold():
            model.own = dist.new_group([0, 1])
            model.named = strategy.group("both")
            model.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
            model.metric = SumMetric(process_group=dist.new_group([0, 1]))
            model.right = SumMetric(process_group=dist.group.WORLD)
            callback.helper = Helper()
            callback.of_meshes = SimpleNamespace(mesh=model.mesh)
            callback.fixed = ["a", (dist.group.WORLD,)]
            callback.wrapper = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))

        def use():
            number = torch.ones(1)
            dist.all_reduce(number, group=model.right.process_group)
            dist.all_reduce(number, group=model.named)
            for group in (model.own, model.metric.process_group, callback.helper.group, callback.fixed[1][0]):
                with pytest.raises((ValueError, RuntimeError)):
                    dist.all_reduce(number, group=group)
            errors.append(number.item())

        def replace():
            del (
                model.named,
                model.own,
                model.mesh,
                model.metric,
                callback.helper,
                callback.of_meshes,
                callback.fixed,
                callback.wrapper,
            )

        fit(strategy, model, hold, callback)
        before = list(warnings.texts)
        fit(strategy, model, use, callback)
        replace()
        fit(strategy, model, lambda: None, callback)
        return before, warnings.texts, errors

    for rank, (before, texts, errors) in enumerate(run_ranks(job)):
        assert before == []
        (text,) = texts
        first, *places = text.splitlines()
        assert first.startswith(f"[rank {rank}/2 gen 2] fit starts with objects that hold a process group which has ended")
        reasons = dict(place.removeprefix("- ").split(": ", 1) for place in places)
        assert list(reasons) == [
            "model.metric.process_group",
            "model.own",
            "model.mesh",
            "Recorder.helper.other",
            "Recorder.helper.group",
            "Recorder.of_meshes.mesh",
            "Recorder.fixed[1][0]",
            "Recorder.wrapper.process_group",
        ]
        assert "torch.distributed.new_group" in reasons["model.own"] == reasons["model.metric.process_group"]
        assert "a DeviceMesh belongs to its groups" in reasons["model.mesh"] == reasons["Recorder.of_meshes.mesh"]
        assert "a Helper" in reasons["Recorder.helper.group"] == reasons["Recorder.helper.other"]
        assert "put it into an attribute" in reasons["Recorder.fixed[1][0]"]
        assert "DistributedDataParallel" in reasons["Recorder.wrapper.process_group"]
        assert errors == [4.0]


@pytest.mark.parametrize("holder", [0, 1, 3])
def test_a_group_that_one_rank_holds_is_made_by_its_members(holder):
    """And none is made where one rank does not know it."""

    def job(rank):
        warnings, seen, made = Warnings(), [], []
        groups = {"pairs": [[0, 1], [2, 3]], "all": [[0, 1, 2, 3]], "odd": [[1, 3]]}
        strategy = PGroupDDPStrategy(destroy="on_teardown", groups=groups)
        model = TinyModel()

        def start():
            made.append(list(map(lineage.name_of, c10d.all_groups())))
            pairs, default = strategy.group("pairs"), dist.group.WORLD
            if rank == holder and not hasattr(model, "metric"):
                model.metric = SumMetric(process_group=pairs)
            seen.append(rank != holder or model.metric.process_group is pairs)
            dist.barrier(default)

        for _ in range(2):
            fit(strategy, model, start, devices=4)
        knows_no_name = PGroupDDPStrategy(destroy="on_teardown", groups=groups if rank != 2 else None)
        alive = []
        fit(knows_no_name, model, lambda: alive.extend(map(lineage.name_of, c10d.all_groups())), devices=4)
        fit(PGroupDDPStrategy(destroy="on_teardown"), model, lambda: None, devices=4)
        return seen, made, alive, warnings.texts

    for rank, (seen, made, alive, texts) in enumerate(run_ranks(job, 4)):
        assert seen == [True, True]
        assert made == [[None], ["pairs", None]]
        assert alive == [None]
        assert [text.split("\n- ")[1:] for text in texts] == ([[LEFT], [UNKNOWN]] if rank == holder else [])


def test_another_size_and_back():
    """What belongs to a rank and a number of ranks is left alone by a group of another size."""

    def job(rank):
        warnings, model = Warnings(), TinyModel()
        strategies = [PGroupDDPStrategy(destroy="on_teardown") for _ in range(3)]
        sizes = []

        def hold():
            model.metric = SumMetric(process_group=dist.group.WORLD)
            model.sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

        def look():
            sizes.append((model.metric.process_group.size(), model.sharded.process_group.size()))
            sizes.append(model.sharded.process_group is dist.group.WORLD)

        fit(strategies[0], model, hold)
        fit(strategies[1], model, look, devices=1)
        fit(strategies[2], model, look)
        return sizes, warnings.texts

    for sizes, (text,) in run_ranks(job):
        assert sizes == [(1, 2), False, (2, 2), True]
        assert "- model.sharded.process_group: ZeroRedundancyOptimizer was made for rank" in text
        assert "of 2, and this is now rank 0 of 1" in text
        assert text.count("\n- ") == 1


def test_after_a_failure_and_after_groups_of_other_code(tmp_path):
    """The group of the failed stage was aborted; the others were made and destroyed by the user, and by us."""

    def job(rank):
        warnings, model, follows, hook = Warnings(), TinyModel(), [], sys.excepthook
        strategy = PGroupDDPStrategy(groups={"both": [[0, 1]]})

        def start():
            if not hasattr(model, "metric"):
                model.metric = SumMetric(process_group=dist.group.WORLD)
                model.named = SumMetric(process_group=strategy.group("both"))
            held = [metric.process_group for metric in (model.metric, model.named)]
            follows.append(held == [dist.group.WORLD, strategy.group("both")])
            for group in held:
                dist.barrier(group)
            if len(follows) == 1 and rank == 1:
                raise KeyError("on purpose")

        with pytest.raises((KeyError, RuntimeError)):
            fit(strategy, model, start)
        fit(strategy, model, start)
        dist.destroy_process_group()
        fit(strategy, model, start)
        strategy.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        sys.excepthook = hook
        fit(strategy, model, start)
        dist.destroy_process_group()
        fit(strategy, model, start)
        return follows, [text for text in warnings.texts if "starts with" in text]

    for follows, texts in run_ranks(job):
        assert follows == [True] * 5
        assert texts == []
