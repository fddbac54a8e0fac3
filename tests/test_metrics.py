"""Wrappers, collections and switches of torchmetrics: what they say after the group has gone."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.wrappers import (
    BootStrapper,
    ClasswiseWrapper,
    MetricTracker,
    MinMaxMetric,
    MultioutputWrapper,
    MultitaskWrapper,
    Running,
)

from lightning_pgroup import PGroupDDPStrategy
from lightning_pgroup.process_state import process_state
from tests.metric_fits import Feeds, fit, model_with, warns
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks

STEPS = 3


class OwnWrapper(Metric):
    """A user's metric with states of its own, and another metric inside."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.inner = MeanMetric()

    def update(self, value):
        self.total += value
        self.inner.update(value)

    def compute(self):
        return self.total + 100 * self.inner.compute()


class OwnSync(MeanMetric):
    """A metric that synchronises in a way of its own."""

    def _sync_dist(self, dist_sync_fn=gather_all_tensors, process_group=None):
        dist.all_reduce(self.mean_value)
        dist.all_reduce(self.weight)


class Words(Metric):
    """A metric whose states are no tensors, or have others around them."""

    def __init__(self):
        super().__init__()
        self.add_state("words", [], dist_reduce_fx=None)

    def update(self, word):
        self.words.append((word, word.encode(), [len(word), None, torch.tensor(len(word))]))

    def compute(self):
        return sorted(self.words)


def build():
    """Metrics that need a look of their own, by name."""
    return {
        "collection": MetricCollection(
            [MulticlassAccuracy(4, average="micro"), MulticlassPrecision(4), MulticlassRecall(4)], prefix="val_"
        ),
        "tracker": MetricTracker(MeanSquaredError(), maximize=False),
        "boot": BootStrapper(MeanMetric(), num_bootstraps=4, raw=True),
        "minmax": MinMaxMetric(MeanMetric()),
        "classwise": ClasswiseWrapper(MulticlassAccuracy(4, average=None)),
        "multi": MultioutputWrapper(MeanSquaredError(), 2),
        "tasks": MultitaskWrapper({"a": MeanSquaredError(), "b": MeanAbsoluteError()}),
        "running": Running(SumMetric(), window=2),
        "running_mean": RunningMean(window=2),
        "both": MeanMetric() + 2 * SumMetric(),
        "uncached": MeanMetric(compute_with_cache=False),
        "local": MeanMetric(sync_on_compute=False),
        "on_step": MeanMetric(dist_sync_on_step=True),
        "own_function": MeanMetric(dist_sync_fn=lambda tensor, group: gather_all_tensors(tensor, group)),
        "own_sync": OwnSync(),
        "own_wrapper": OwnWrapper(),
        "listed": [CatMetric(), {"deep": SumMetric(), "words": Words()}],  # Lightning moves no words to a device
    }


def feed(metrics, rank, step, forward=False):
    """One step's data of one rank."""
    make = torch.Generator().manual_seed(10 * step + rank)
    rows = 3 + 2 * rank + step
    classes = torch.rand(rows, 4, generator=make).softmax(-1), torch.randint(4, (rows,), generator=make)
    pairs = torch.randn(rows, 2, generator=make), torch.randn(rows, 2, generator=make)
    one = pairs[0][:, 0], pairs[1][:, 0]
    metrics["collection"].update(*classes)
    metrics["classwise"].update(*classes)
    metrics["tracker"].update(*one)
    metrics["multi"].update(*pairs)
    metrics["tasks"].update({"a": one[0], "b": one[0]}, {"a": one[1], "b": one[1]})
    for name in ("boot", "minmax", "running", "running_mean", "both", "uncached", "local", "own_function", "own_sync"):
        metrics[name].update(one[0])
    (metrics["on_step"] if forward else metrics["on_step"].update)(one[0])
    metrics["own_wrapper"].update(one[0].sum())
    metrics["listed"][1]["words"].update(f"{rank} {step}")
    metrics["listed"][0].update(one[0])
    metrics["listed"][1]["deep"].update(one[0])


def feed_all(metrics, ranks, forward=False):
    for step in range(STEPS):
        metrics["tracker"].increment()
        for rank in ranks:
            feed(metrics, rank, step, forward)


def say(metrics):
    """What they say. A list of the same shape for each of them."""
    said = {name: metric.compute() for name, metric in metrics.items() if name != "listed"}
    said["all_steps"] = metrics["tracker"].compute_all()
    said["listed"] = metrics["listed"][0].compute().sort().values
    said |= {name: metric.compute() for name, metric in metrics["listed"][1].items()}
    return said


def close(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    return one == other if isinstance(one, list) else torch.allclose(one, other, atol=1e-5)


def test_wrappers_collections_and_switches():
    wanted_of = build()
    feed_all(wanted_of, [0, 1])
    wanted = say(wanted_of)
    sums = [[feed_one(rank, step).sum() for step in range(STEPS)] for rank in range(2)]
    lengths = [[len(feed_one(rank, step)) for step in range(STEPS)] for rank in range(2)]
    wanted["running"] = sum(sums[rank][step] for rank in range(2) for step in (1, 2))  # the last two of each rank
    wanted["running_mean"] = wanted["running"] / sum(lengths[rank][step] for rank in range(2) for step in (1, 2))

    def job(rank):
        metrics = build()
        model = model_with(**metrics)
        fit(model, lambda _: feed_all(metrics, [rank], forward=True))
        assert not dist.is_initialized()
        first, second = say(metrics), say(metrics)
        copies = [copy.deepcopy(metrics["running"]), pickle.loads(pickle.dumps(metrics["uncached"]))]
        copied = [one.compute() for one in copies]
        parts = [(one.mean_value.clone(), one.weight.clone()) for one in metrics["boot"].metrics]
        # From here on it is this rank's again, as it would be without us.
        metrics["uncached"].update(1000.0)
        later = metrics["uncached"].compute()
        metrics["running"].reset()
        metrics["running"].update(5.0)
        return first, second, copied, parts, later, metrics["running"].compute()

    ranks = run_ranks(job)
    names = [name for name in wanted if name not in ("boot", "local")]
    for rank, (first, second, copied, _, later, running) in enumerate(ranks):
        assert [name for name in names if not close(first[name], wanted[name])] == []
        assert [name for name in names if not close(second[name], wanted[name])] == []
        assert close(copied[0], wanted["running"])
        assert close(copied[1], wanted["uncached"])
        own, count = sum(sums[rank]), sum(lengths[rank])
        assert close(first["local"], own / count)
        assert close(later, (own + 1000.0) / (count + 1))
        assert running == 5.0
    for index in range(4):
        total, weight = (sum(ranks[rank][3][index][part] for rank in range(2)) for part in range(2))
        assert all(close(ranks[rank][0]["boot"]["raw"][index], total / weight) for rank in range(2))


def feed_one(rank, step):
    """The plain numbers that one rank has in one step."""
    seen = []

    class Sees:
        def __getitem__(self, name):
            return self

        def update(self, *values):
            seen.append(values)

    feed(Sees(), rank, step)
    return seen[4 + 1][0]


def test_one_rank_alone_may_ask_after_the_stage_also_while_the_group_lives():
    def job(rank):
        model = model_with(
            mean=MeanMetric(), uncached=MeanMetric(compute_with_cache=False), running=Running(SumMetric(), window=2)
        )

        def feed(model):
            for metric in (model.mean, model.uncached, model.running):
                metric.update(float(rank))

        fit(model, feed, destroy="at_exit")
        assert dist.is_initialized()
        if rank == 0:
            return [metric.compute().item() for metric in (model.mean, model.uncached, model.running)]
        return None

    assert run_ranks(job)[0] == [0.5, 0.5, 1.0]


class Holder(Callback):
    def __init__(self):
        self.metrics = {"a": SumMetric()}


def test_metrics_of_callbacks_wherever_they_stand():
    def job(rank):
        holder, again = Holder(), Holder()
        # A callback that only one rank has moves no other; its class has no metrics.
        more = [Feeds(lambda model: None)] if rank else []

        def feed(model):
            holder.metrics["a"].update(1.0 + rank)
            again.metrics["a"].update(10.0 + rank)

        fit(TinyModel(), feed, callbacks=[*more, holder, again])
        return [one.metrics["a"].compute().item() for one in (holder, again)]

    assert run_ranks(job) == [[3.0, 21.0]] * 2


def test_a_metric_with_a_group_of_its_own_stays_within_that():
    def job(rank):
        model = model_with(pair=SumMetric(), all=SumMetric(), some=SumMetric())

        def feed(model):
            pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            model.pair.process_group, model.some.process_group = pairs[rank // 2], dist.new_group([0, 2, 3])
            for metric in (model.pair, model.all, model.some):
                metric.update(10.0**rank)

        fit(model, feed, devices=4)
        return model.pair.compute().item(), model.all.compute().item(), model.some.compute().item()

    pairs, everybody, some = zip(*run_ranks(job, size=4), strict=True)
    assert pairs == (11.0, 11.0, 1100.0, 1100.0)
    assert everybody == (1111.0,) * 4
    assert some == (1101.0, 10.0, 1101.0, 1101.0)


def test_the_order_is_the_same_on_all_ranks_however_they_hold_them():
    """Those that synchronise themselves would meet in collectives that do not belong together."""

    def job(rank):
        sizes = {"one": 1, "two": 2, "three": 3}
        model = TinyModel()
        own = {name: CatMetric(dist_sync_fn=gather_all_tensors) for name in (sizes if rank else reversed(sizes))}
        for name, metric in own.items():
            setattr(model, name, metric)

        def feed(model):
            for name, size in sizes.items():
                own[name].update(torch.full((size,), float(rank)))

        fit(model, feed, timeout=20)
        return {name: own[name].compute().tolist() for name in sizes}

    for found in run_ranks(job, deadline=40):
        assert found == {"one": [0, 1], "two": [0, 0, 1, 1], "three": [0, 0, 0, 1, 1, 1]}


def test_a_stage_inside_another_leaves_its_metrics_to_that():
    def job(rank):
        inner = model_with(count=SumMetric())

        class Nests(Callback):
            def on_fit_end(self, trainer, pl_module):
                strategy = PGroupDDPStrategy(destroy="on_teardown")
                make_trainer(strategy, callbacks=[Feeds(lambda model: model.count.update(1.0))]).fit(
                    inner, datamodule=TinyData()
                )

        fit(TinyModel(), lambda model: None, callbacks=[Nests()])
        assert not dist.is_initialized()
        return inner.count.compute().item()

    assert run_ranks(job) == [2.0] * 2


@pytest.mark.parametrize("metrics", ["compute", "keep"])
def test_keep_leaves_them_alone(metrics):
    def job(rank):
        model = model_with(mean=MeanMetric())
        fit(model, lambda model: model.mean.update(float(rank)), metrics=metrics)
        before = set(vars(model.mean))
        value, warned = warns(model.mean)
        return value.item(), warned, set(vars(model.mean)) == before, process_state().lifecycle.highest_generation

    values = [0.5, 0.5] if metrics == "compute" else [0.0, 1.0]
    assert run_ranks(job) == [(value, False, True, 1) for value in values]


def test_a_wrong_word_is_refused():
    with pytest.raises(ValueError, match="`metrics` must be one of 'compute', 'keep', got 'sometimes'"):
        PGroupDDPStrategy(metrics="sometimes")


def test_the_store_does_not_grow():
    def job(rank):
        model, kept = model_with(mean=MeanMetric()), []
        trainer = make_trainer(PGroupDDPStrategy(), callbacks=[Feeds(lambda model: model.mean.update(1.0) if rank else None)])
        for number in range(12):
            if number % 3:
                trainer.fit(model, datamodule=TinyData())
            else:
                trainer.test(TinyModel(), datamodule=TinyData(), verbose=False)
            if rank == 0:  # the host of the store, whom listing its keys does not stop
                kept.append([key for key in process_state().lifecycle._notices.team.store.list_keys() if "hands/" in key])
        return kept

    kept, _ = run_ranks(job)
    assert all(1 <= len(keys) <= 5 for keys in kept), kept
