"""What a metric remembers of a stage that has ended: that it is incomplete, that it was complete, or what all ranks had.

The mark is the metric's own count of updates, of a kind that vanishes at the right moment by itself: ``reset()`` sets it to 0,
and ``update()`` adds 1. It survives copies and pickles. The metric asks whether other ranks are there before it synchronises,
which is where the mark is read; as soon as they are, a mark of what is missing is lifted.
"""

import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from lightning_pgroup.metric_leaves import Leaf, States


class LocalCount(int):
    """The count of updates of a metric that has missed its computation over all ranks. It stays so with further updates.

    Args:
        count: The number of updates.
        why: What is wrong with its value, for the warning.
    """

    why: str

    def __new__(cls, count: int, why: str) -> "LocalCount":
        """A number with a reason."""
        mark = super().__new__(cls, count)
        mark.why = why
        return mark

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]  # an ``int`` has one argument
        return int(self), self.why

    def __add__(self, other: Any) -> Any:
        return LocalCount(int(self) + other, self.why)


class CompleteCount(int):
    """The count of updates of a metric that was computed over all ranks. With any further update it has missed that one.

    Args:
        count: The number of updates.
        later: What is wrong with its value after a further update, for the warning.
        states: The states of all ranks as one, if it computes anew at each call; else its value is in its cache.
    """

    later: str
    states: States | None

    def __new__(cls, count: int, later: str, states: States | None) -> "CompleteCount":
        """A number with a reason and states."""
        mark = super().__new__(cls, count)
        mark.later, mark.states = later, states
        return mark

    def __getnewargs__(self) -> tuple[int, str, States | None]:  # type: ignore[override]
        return int(self), self.later, self.states

    def __add__(self, other: Any) -> Any:
        return LocalCount(int(self) + other, self.later)


class Memory:
    """Stands before a metric's question whether other ranks are there, and before its synchronisation.

    Args:
        metric: The metric.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._ask = metric.distributed_available_fn

    def others_are_there(self) -> bool:
        """For the metric, before it synchronises. Warns if its value will lack what the other ranks had.

        With the states of all ranks at hand it has to ask nobody, group or not, as with a value in its cache.
        """
        mark = self._metric._update_count
        if isinstance(mark, CompleteCount) and mark.states is not None:
            return True
        if self._ask():
            self.lift()
            return True
        if isinstance(mark, LocalCount):
            warnings.warn(mark.why, UserWarning, stacklevel=2)
        return False

    def recall(self, *args: Any, **kwargs: Any) -> None:
        """For the metric, in place of a synchronisation: its states become those that all ranks had."""
        mark = self._metric._update_count
        if isinstance(mark, CompleteCount) and mark.states is not None:
            put_states(self._metric, mark.states)
        else:  # its user has asked for a synchronisation without asking whether others are there
            type(self._metric)._sync_dist(self._metric, *args, **kwargs)

    def lift(self) -> None:
        """Let the metric ask and synchronise by itself again."""
        self._metric.distributed_available_fn = self._ask
        del self._metric._sync_dist
        self._metric._update_count = int(self._metric._update_count)

    def install(self) -> None:
        """Stand there from now on."""
        self._metric.distributed_available_fn = self.others_are_there
        self._metric._sync_dist = self.recall  # type: ignore[method-assign]


def put_states(metric: Metric, states: States) -> None:
    """Give a metric the states of all ranks; called by it, after it has put its own aside."""
    for name, value in states.items():
        held = isinstance(value, list)
        setattr(metric, name, [_at(metric, one) for one in value] if held else _at(metric, value))


def mark_local(leaves: Iterable[Leaf], why: str) -> None:
    """Let ``compute()`` warn that its value is this rank's only, unless ranks are there again by then. Local.

    Args:
        leaves: The metrics; those without updates have nothing to lose.
        why: Why they were not computed over all ranks.
    """
    for leaf in leaves:
        lift(leaf)
        if leaf.updates and not leaf.has_own_availability:
            leaf.updates = LocalCount(leaf.updates, _text(leaf, why))
            Memory(leaf.metric).install()


def mark_complete(leaf: Leaf, later: str, states: States | None = None) -> None:
    """Let ``compute()`` go on to give the value over all ranks, until the metric is updated or reset. Local.

    Args:
        leaf: The metric.
        later: What has become of it if it is updated again, and asked without a group.
        states: The states of all ranks, unless it has its value in its cache.
    """
    lift(leaf)
    if not leaf.has_own_availability:
        leaf.updates = CompleteCount(leaf.updates, _text(leaf, later), states)
        Memory(leaf.metric).install()


def is_local(leaf: Leaf) -> bool:
    """Whether a metric has missed a computation over all ranks, so that what it has cached is this rank's only."""
    return isinstance(leaf.updates, LocalCount)


def lift(leaf: Leaf) -> None:
    """Take any mark from a metric."""
    memory = getattr(leaf.metric.distributed_available_fn, "__self__", None)
    if isinstance(memory, Memory):
        memory.lift()
    leaf.updates = int(leaf.updates)


def _text(leaf: Leaf, why: str) -> str:
    return f"`compute()` of {leaf.place} gives the value of this rank only: {why}. Reset it before it is used again."


def _at(metric: Metric, value: Any) -> Any:
    return value.to(metric.device) if isinstance(value, Tensor) else value
