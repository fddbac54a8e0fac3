"""A model and a callback that hold a process group in every kind of place, for the tests of what follows a re-creation."""

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torchmetrics import BootStrapper, ClasswiseWrapper, MeanMetric, MetricCollection, MetricTracker, MinMaxMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import MultioutputWrapper, MultitaskWrapper, Running


class Recorder(Callback):
    """A callback whose attributes, dictionaries and lists hold something."""


def world(strategy):
    return dist.group.WORLD


def pairs(strategy):
    return strategy.group("pairs")


def fill(model, callback, group):
    """Let a model and a callback hold ``group`` in every kind of place; returns, for each, what reads it from there."""
    model.metric = SumMetric(process_group=group)
    model.collection = MetricCollection({"sum": SumMetric(process_group=group), "mean": MeanMetric(process_group=group)})
    model.bootstrap = BootStrapper(SumMetric(), num_bootstraps=2)
    model.tracker = MetricTracker(MeanMetric(), maximize=True)
    model.tracker.increment()
    for copied in (model.bootstrap.metrics[1], model.tracker[-1]):
        copied.process_group = group  # only now, as a group can not be copied
    model.running = Running(SumMetric(process_group=group), window=2)
    model.minmax = MinMaxMetric(MeanMetric(process_group=group))
    model.classwise = ClasswiseWrapper(MulticlassAccuracy(num_classes=2, average=None, process_group=group))
    model.both = SumMetric(process_group=group) + 2
    model.tasks = MultitaskWrapper({"a": MeanMetric(process_group=group)})
    model.outputs = MultioutputWrapper(MeanMetric(), 1)
    model.outputs.metrics[0].process_group = group
    callback.norm = torch.nn.SyncBatchNorm(3, process_group=group)  # DDP takes a model that has one to GPUs only
    model.plain = group
    model.deep = [{"here": [group]}]
    model.power = PowerSGDState(group)
    model.local = PostLocalSGDState(group, group, start_localSGD_iter=3)
    model.averager = PeriodicModelAverager(period=2, process_group=group)
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(group.size())]
    model.sharded = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, process_group=group, lr=0.1)
    model.averaged = PostLocalSGDOptimizer(torch.optim.SGD(parameters, lr=0.1), PeriodicModelAverager(2, process_group=group))
    callback.group = group
    callback.metrics = {"a": SumMetric(process_group=group), 3: [MeanMetric(process_group=group)]}
    return {
        "metric": lambda: model.metric.process_group,
        "collection": lambda: model.collection["sum"].process_group,
        "collection 2": lambda: model.collection["mean"].process_group,
        "bootstrap": lambda: model.bootstrap.metrics[1].process_group,
        "tracker": lambda: model.tracker[-1].process_group,
        "running": lambda: model.running.base_metric.process_group,
        "minmax": lambda: model.minmax._base_metric.process_group,
        "classwise": lambda: model.classwise.metric.process_group,
        "both": lambda: model.both.metric_a.process_group,
        "tasks": lambda: model.tasks.task_metrics["a"].process_group,
        "outputs": lambda: model.outputs.metrics[0].process_group,
        "norm": lambda: callback.norm.process_group,
        "plain": lambda: model.plain,
        "deep": lambda: model.deep[0]["here"][0],
        "power": lambda: model.power.process_group,
        "local": lambda: model.local.process_group,
        "local 2": lambda: model.local.subgroup,
        "averager": lambda: model.averager.process_group,
        "sharded": lambda: model.sharded.process_group,
        "averaged": lambda: model.averaged.averager.process_group,
        "callback": lambda: callback.group,
        "callback 2": lambda: callback.metrics["a"].process_group,
        "callback 3": lambda: callback.metrics[3][0].process_group,
    }
