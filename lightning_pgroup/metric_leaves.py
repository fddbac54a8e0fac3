"""The metrics of ``torchmetrics`` that a user's objects hold, and their states.

A collection or a wrapper has no states of its own that it would synchronise: it asks the metrics inside it for their values,
and these keep what they have computed. So the inner metrics, the *leaves*, are what is looked at, one by one: what one of them
raises does not stop the rest, and a wrapper that remembers its values (``MinMaxMetric``) sees none that nobody has asked for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.wrappers import Running

from lightning_pgroup.places import walk

States = dict[str, Tensor | list[Any]]
"""The states of one metric on one rank, by their names."""


@dataclass(eq=False, slots=True)
class Leaf:
    """A metric that has states of its own, and caches its value.

    Attributes:
        place: Where it was found, for messages; equal on all ranks.
        metric: The metric.
        running: The wrapper around it, if that computes a window: the metric itself is then empty but for the moment of that.
    """

    place: str
    metric: Metric
    running: Running | None = None

    @property
    def updates(self) -> int:
        """How often it was updated since its last reset. May carry a mark of :mod:`lightning_pgroup.metric_marks`."""
        return self.metric._update_count if self.running is None else self.running._num_vals_seen

    @updates.setter
    def updates(self, count: int) -> None:
        if self.running is None:
            self.metric._update_count = count
        else:
            self.running._num_vals_seen = count

    @property
    def may_sync(self) -> bool:
        """Whether its user lets it compute over all ranks."""
        return self.metric._to_sync

    @property
    def is_cached(self) -> bool:
        """Whether it has a value that it would give without computing."""
        return self.metric._computed is not None

    @property
    def is_kept(self) -> bool:
        """Whether it computes anew at each call, so that not its value but its states must be kept."""
        return self.running is not None or not self.metric.compute_with_cache

    @property
    def has_own_way(self) -> bool:
        """Whether its user synchronises it by code of his own, which talks to the other ranks itself."""
        kind = type(self.metric)._sync_dist
        return self.metric.dist_sync_fn is not None or not kind.__module__.startswith("torchmetrics.")

    @property
    def has_own_availability(self) -> bool:
        """Whether its user says himself when other ranks are there."""
        return self.metric.distributed_available_fn is not jit_distributed_available

    def members(self, size: int) -> tuple[int, ...]:
        """The ranks over which it computes; none for a group that this rank is not in.

        Raises:
            ValueError: Its group has ended.
            TypeError: It has something else in its place, such as the name of one.
        """
        group = self.metric.process_group
        if group is None:
            return tuple(range(size))
        if isinstance(group, str):
            raise TypeError(f"its `process_group` is the text {group!r} and no group: give it `strategy.group({group!r})`")
        return () if isinstance(group, int) else tuple(dist.get_process_group_ranks(group))

    def references(self) -> States:
        """Its states themselves; lists copied, so that it shows when one grows."""
        found = {name: getattr(self.metric, name) for name in self.metric._reductions}
        return {name: list(value) if isinstance(value, list) else value for name, value in found.items()}

    def states(self) -> States:
        """What it would synchronise: its states, with each list that is concatenated anyway as one tensor."""
        return {name: _concatenated(self.metric._reductions[name], value) for name, value in self._present().items()}

    def has_data(self, states: States) -> bool:
        """Whether there is anything in its states: a rank without data has nothing to add to those of the others."""
        if self.updates > 0:
            return True
        return any(_differs(value, self.metric._defaults[name]) for name, value in states.items())

    def is_unchanged_since(self, references: States) -> bool:
        """Whether its states are still those that :meth:`references` has given."""
        now = self.references()
        return now.keys() == references.keys() and all(_is_same(now[name], one) for name, one in references.items())

    def forget_sync(self) -> None:
        """Give it back its own states, if a computation has failed with those of all ranks in their place."""
        if self.metric._cache is not None:
            for name, value in self.metric._cache.items():
                setattr(self.metric, name, value)
        self.metric._is_synced, self.metric._cache = False, None

    def _present(self) -> States:
        if self.running is None:
            return self.references()
        try:
            for slot in range(self.running.window):
                self.metric._reduce_states({name: getattr(self.running, f"{name}_{slot}") for name in self.metric._defaults})
            return self.references()
        finally:
            self.metric.reset()


def find_leaves(roots: Mapping[str, Any]) -> Iterator[Leaf]:
    """All leaves that objects hold, in an order that is the same on all ranks."""
    windows: dict[int, tuple[str, Running]] = {}
    for place, found in walk(roots):
        if isinstance(found, Running):
            windows[id(found.base_metric)] = (place, found)
        elif isinstance(found, Metric) and found._reductions and type(found)._wrap_compute is Metric._wrap_compute:
            around, running = windows.get(id(found), (place, None))
            yield Leaf(around, found, running)


def merge(metric: Metric, parts: list[States]) -> States:
    """The states of several ranks as one, as ``torchmetrics`` itself would have it, but for the empty and the uneven.

    Args:
        metric: Any rank's metric: says how its states are reduced.
        parts: The states of the ranks that have data, in rank order.
    """
    if len(parts) == 1:
        return parts[0]
    return {name: _merge(reduction, [part[name] for part in parts]) for name, reduction in metric._reductions.items()}


def _merge(reduction: Any, values: list[Any]) -> Any:
    if reduction == dim_zero_cat:
        found = [one for value in values for one in (value if isinstance(value, list) else [value])]
        return dim_zero_cat(found) if found else []
    if isinstance(values[0], list):
        longest = max(len(value) for value in values)
        found = [value[index] for index in range(longest) for value in values if index < len(value)]
        return reduction(found) if found and reduction is not None else found
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)


def _concatenated(reduction: Any, value: Tensor | list[Any]) -> Tensor | list[Any]:
    return [dim_zero_cat(value)] if reduction == dim_zero_cat and isinstance(value, list) and len(value) > 1 else value


def _differs(value: Tensor | list[Any], default: Tensor | list[Any]) -> bool:
    if isinstance(value, Tensor) and isinstance(default, Tensor):
        return not torch.equal(value, default.to(value.device))
    return len(value) > 0


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return one is other
