"""What holds a group gets the next one at the start of a stage, and what can not get it is named before it fails."""

import contextlib
import importlib
import io
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torchmetrics import SumMetric

from lightning_pgroup import PGroupDDPStrategy, c10d, heirs, holders
from tests.holding import Recorder, fill, pairs, world
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks

GROUPS = {2: {"pairs": [[0, 1]]}, 4: {"pairs": [[0, 1], [2, 3]]}}


def ours(size):
    return PGroupDDPStrategy(destroy="on_teardown", groups=GROUPS[size])


def plain(size):
    return DDPStrategy()


@pytest.mark.parametrize("sub_group", [False, True])
@pytest.mark.parametrize("make", [plain, ours])
def test_f14_a_metric_with_a_group_after_a_re_creation(make, sub_group, tmp_path):
    """Plain DDP runs into the fault at the second fit; its groups meet in files, since F3 would come first otherwise."""

    def job(rank):
        model, values = TinyModel(), []

        def start():
            if not hasattr(model, "metric"):
                group = dist.group.WORLD
                if sub_group:
                    group = dist.new_group([0, 1]) if make is plain else pairs(model.trainer.strategy)
                model.metric = SumMetric(process_group=group)
            model.metric.update(rank + 1)

        model.on_train_start = start
        model.on_train_end = lambda: values.append(model.metric.compute().item())
        for number in range(3):
            if make is plain:
                dist.init_process_group("gloo", init_method=f"file://{tmp_path / str(number)}", rank=rank, world_size=2)
            try:
                make_trainer(make(2)).fit(model, datamodule=TinyData())
            except ValueError as error:
                return values, str(error)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        return values, ""

    for values, error in run_ranks(job, check_leaks=make is ours):
        assert values == ([3.0] if make is plain else [3.0, 6.0, 9.0])
        assert ("is not registered" in error) == (make is plain), error


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("group_of", [world, pairs])
def test_every_kind_of_holder_follows_over_three_generations(size, group_of):
    def job(rank):
        strategy, model, callback = ours(size), TinyModel(), Recorder()
        seen, readers = [], {}

        def start():
            if not readers:
                readers.update(fill(model, callback, group_of(strategy)))
            held = {name: read() for name, read in readers.items()}
            wrong = [name for name, group in held.items() if group is not group_of(strategy)]
            sums = []
            for group in held.values():
                number = torch.tensor([float(rank + 1)])
                dist.all_reduce(number, group=group)
                sums.append(number.item())
            model.metric.update(rank + 1)
            seen.append((strategy.generation, wrong, set(sums), model.metric.compute().item()))
            model.metric._computed = None

        model.on_train_start = start
        for _ in range(3):
            make_trainer(strategy, devices=size, callbacks=[callback]).fit(model, datamodule=TinyData())
        return seen

    for rank, seen in enumerate(run_ranks(job, size)):
        members = range(size) if group_of is world else (rank // 2 * 2, rank // 2 * 2 + 1)
        total = float(sum(member + 1 for member in members))
        assert seen == [(number, [], {total}, total * number) for number in (1, 2, 3)]


def test_holders_follow_in_every_kind_of_stage():
    def job(rank):
        strategy, model, seen = ours(2), TinyModel(), []
        model.held = []

        def start():
            groups = [dist.group.WORLD, pairs(strategy)]
            if not model.held:
                model.held = [SumMetric(process_group=group) for group in groups]
            seen.append((model.trainer.state.fn.value, [one.process_group for one in model.held] == groups))

        model.on_train_start = model.on_validation_start = model.on_test_start = model.on_predict_start = start
        for stage in ("fit", "validate", "test", "predict"):
            quiet = {} if stage in ("fit", "predict") else {"verbose": False}
            getattr(make_trainer(strategy, limit_predict_batches=1, limit_val_batches=1), stage)(
                model, datamodule=TinyData(), **quiet
            )
        return seen, strategy.events[-1].generation

    kinds = ["fit", "fit", "fit", "validate", "test", "predict"]  # a fit validates before it begins, and in its epoch
    assert run_ranks(job) == [([(kind, True) for kind in kinds], 4)] * 2


class CommState:
    """The state of a communication hook of a user's own."""

    __slots__ = ("__dict__", "where")

    def __init__(self, group):
        self.where = self.also = group


def test_what_the_strategy_itself_holds_follows():
    def job(rank):
        model, seen = TinyModel(), []
        make_trainer(ours(2)).fit(model, datamodule=TinyData())
        first = PGroupDDPStrategy(destroy="per_trainer", groups=GROUPS[2])
        make_trainer(first).fit(model, datamodule=TinyData())
        state = CommState(dist.group.WORLD)
        strategy = PGroupDDPStrategy(
            destroy="on_teardown", ddp_comm_state=state, process_group=first.group("pairs"), groups=GROUPS[2]
        )

        def look():
            world, named = dist.group.WORLD, strategy.group("pairs")
            seen.append((strategy.generation, strategy.model.process_group is named, state.where is state.also is world))

        model.on_train_start = look
        for _ in range(2):
            make_trainer(strategy).fit(model, datamodule=TinyData())
        strategy._ddp_comm_state = state.where
        model.on_train_start = lambda: seen.append(strategy._ddp_comm_state is dist.group.WORLD)
        make_trainer(strategy).fit(model, datamodule=TinyData())
        return seen

    assert run_ranks(job) == [[(3, True, True), (4, True, True), True]] * 2


@pytest.mark.parametrize("destroy", ["at_exit", "on_teardown"])
def test_what_ends_nothing_and_holds_nothing_is_not_looked_through(destroy):
    """As long as the group of the first stage lives, nobody looks; afterwards only while something holds an ended one."""

    def job(rank):
        looked, find = [], heirs.find_holdings
        heirs.find_holdings = lambda start, state: looked.append(c10d.may_be_held()) or find(start, state)
        for _ in range(2):
            trainer, model = make_trainer(PGroupDDPStrategy(destroy=destroy)), TinyModel()
            trainer.fit(model, datamodule=TinyData())
            trainer.test(model, datamodule=TinyData(), verbose=False)
        return looked

    for looked in run_ranks(job):
        assert looked == [] if destroy == "at_exit" else all(looked)


@pytest.mark.parametrize("kind", [*holders._ATTRIBUTES, *holders._INNER])
def test_a_kind_that_is_known_by_its_name_is_there(kind):
    module, name = kind.rsplit(".", 1)
    assert isinstance(getattr(importlib.import_module(module), name), type), f"{kind} has moved: mend holders.py"


def test_the_example_of_the_page_runs_as_it_stands():
    page = (Path(__file__).parent.parent / "docs" / "holders.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    def job(rank):
        names = {"Model": TinyModel, "data": TinyData(), "Trainer": lambda **given: make_trainer(**given)}
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(block, names)
        return out.getvalue().splitlines()

    assert run_ranks(job, 4) == [re.findall(r"^# (.*)$", block, re.MULTILINE)] * 4
