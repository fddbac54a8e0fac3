"""The walk through a user's objects: each place named, each object once."""

import torch
from lightning.pytorch import Callback
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_pgroup.places import walk
from tests.models import CountingModel


class Holder(Callback):
    def __init__(self):
        self.metrics = {"a": SumMetric(), 3: [MeanMetric()]}
        self.number = 7


def places(kind, **roots):
    return [place for place, found in walk(roots) if isinstance(found, kind)]


def test_modules_containers_and_attributes():
    model = CountingModel()
    model.plain = [SumMetric(), {"x": MeanMetric()}]
    model.collection = MetricCollection([SumMetric(), MeanMetric()])
    kinds = (SumMetric, MeanMetric)
    assert places(kinds, model=model) == [
        "model.count",
        "model.collection.SumMetric",
        "model.collection.MeanMetric",
        "model.plain[0]",
        "model.plain[1]['x']",
    ]
    assert places(kinds, callback=Holder()) == ["callback.metrics['a']", "callback.metrics[3][0]"]


def test_each_object_once_and_no_end_in_a_circle():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model.myself = [model]
    model.again = model[0]
    assert places(torch.nn.Module, model=model) == ["model", "model.0"]


def test_other_objects_are_shown_but_not_entered():
    class Other:
        def __init__(self):
            self.metric = SumMetric()

    model = CountingModel()
    model.other = Other()
    assert places(Other, model=model) == ["model.other"]
    assert places(SumMetric, model=model) == ["model.count"]
    assert places(SumMetric, other=Other()) == ["other.metric"]
