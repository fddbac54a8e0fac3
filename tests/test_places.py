"""The walk through a user's objects: each place named, each object once."""

import pytest
import torch
from lightning.pytorch import Callback
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_pgroup.holders import find_holdings
from lightning_pgroup.places import CONTAINER_LIMIT, place_of, replace, visit, walk
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


def test_what_is_found_can_be_replaced():
    class Other:
        pass

    model, holder, new = CountingModel(), Holder(), object()
    model.other, holder.many = Other(), {"a": [Other(), (Other(),)]}
    refused = []
    for node in list(visit([(model, None, "model"), (holder, None, "Holder")])):
        if isinstance(node[0], Other):
            try:
                replace(node, new)
            except TypeError:
                refused.append(place_of(node))
    assert model.other is holder.many["a"][0] is new
    assert refused == ["Holder.many['a'][1][0]"]


def test_data_is_not_walked():
    model = CountingModel()
    model.few, model.many = [MeanMetric()] * 2, [MeanMetric()] * (CONTAINER_LIMIT + 1)
    model.shape, model.tensors = (1, 2, None), {n: torch.zeros(1) for n in range(3)}
    assert places(MeanMetric, model=model) == ["model.few[0]"]
    assert places(tuple, model=model) == []


def test_attributes_that_were_set_before_those_of_the_module_itself():
    class Early(torch.nn.Module):
        def __init__(self):
            self.early = {"metric": MeanMetric()}
            super().__init__()
            self.late = {"metric": SumMetric()}

    assert places((MeanMetric, SumMetric), early=Early()) == ["early.early['metric']", "early.late['metric']"]


@pytest.mark.parametrize("root", [None, 3, "text", CountingModel])
def test_roots_that_hold_nothing(root):
    assert places(SumMetric, root=root) == []


@pytest.mark.parametrize("where", ["an attribute of a module", "an attribute of a root", "a dictionary", "another object"])
def test_a_thread_that_changes_what_is_looked_through_does_no_harm(where):
    """It gets its turn while the kind of something is looked at; here that is done by what is looked at."""
    number = iter(range(100))

    class Kind(type):
        def __hash__(cls):
            changed[f"new {next(number)}"] = 1
            return 0

    class Thing(metaclass=Kind):
        @property
        def __class__(self):
            return hash(type(self)) or Thing

    model, callback, other = torch.nn.Module(), Callback(), Thing()
    changed = {
        "an attribute of a module": model.__dict__,
        "an attribute of a root": callback.__dict__,
        "a dictionary": {},
        "another object": other.__dict__,
    }[where]
    callback.held = [changed, other]
    changed |= {"a": Thing(), "b": 2}
    found = find_holdings([(model, None, "model"), (callback, None, "callback")], other)
    assert found == []
    assert next(number) > 0
