"""Gathers the states of metrics over the group, in three collectives, whatever the ranks have.

``torchmetrics`` gathers each state by itself, and counts on all ranks having the same. Where they do not, its collectives do
not fit together: with gloo the process is aborted in C++ code when a rank without data meets one with numbers of another kind.
So here the ranks first tell one another what they have, and then all send one piece of bytes.
"""

import itertools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pgroup.exceptions import describe
from lightning_pgroup.metric_leaves import Leaf, States
from lightning_pgroup.metric_marks import is_local


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What one rank says of one metric. Sent between ranks, as a pickle, like all that Lightning's ``broadcast`` sends.

    Attributes:
        place: Where it was found.
        kind: The name of its class.
        own_way: Whether its user synchronises it by code of his own.
        updates: How often it was updated.
        cached: Whether it has a value that counts for all ranks already.
        data: Whether there is anything in its states.
        states: The form of its states, by their names; see :func:`_form`.
        problem: Why it can not be gathered; empty if it can.
    """

    place: str
    kind: str
    own_way: bool
    updates: int
    cached: bool
    data: bool = False
    states: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def amounts(self) -> list[tuple[str, int, list[tuple[torch.dtype, int]]]]:
        """How many tensors of which types and dimensions each state has."""
        return [
            (name, len(form) if isinstance(form, list) else -1, [(one.dtype, len(one.shape)) for one in _forms(form)])
            for name, form in self.states.items()
        ]


@dataclass(eq=False, slots=True)
class Offer:
    """A metric of this rank, with what it tells and what it would send.

    Attributes:
        leaf: The metric.
        told: What the others are told of it.
        states: Its states, lists concatenated.
        references: Its states themselves, to see later that they are still the same.
        members: The ranks over which it computes.
    """

    leaf: Leaf
    told: Told
    states: States
    references: States
    members: tuple[int, ...]


def offer(leaf: Leaf, size: int) -> Offer:
    """Look at a metric. Local; never raises."""
    kind = type(leaf.metric)
    told: dict[str, Any] = {"place": leaf.place, "kind": f"{kind.__module__}.{kind.__qualname__}", "own_way": leaf.has_own_way}
    told |= {"updates": int(leaf.updates), "cached": leaf.is_cached and not is_local(leaf)}
    try:
        states, references = leaf.states(), leaf.references()
        forms = {name: _form(value) for name, value in states.items()}
        pickle.dumps(forms)
        return Offer(leaf, Told(**told, data=leaf.has_data(states), states=forms), states, references, leaf.members(size))
    except Exception as error:  # a user's metric may hold anything
        return Offer(leaf, Told(**told, problem=describe(error)), {}, {}, ())


def tell(offers: list[Offer], size: int) -> list[dict[str, Told]]:
    """What each rank tells of its metrics, by their places, in rank order. Collective; bounded by the group's timeout."""
    answers: list[Any] = [None] * size
    dist.all_gather_object(answers, [one.told for one in offers])
    return [{told.place: told for told in answer} for answer in answers]


def gather(offers: list[Offer], told: list[dict[str, Told]], device: torch.device) -> list[dict[str, States]]:
    """The states of the offered metrics on each rank, by their places. Collective; bounded by the group's timeout.

    Args:
        offers: Those that all ranks have; the same, in the same order, on all.
        told: What each rank has told of them.
        device: Where the group's backend can send from.
    """
    places = [one.told.place for one in offers]
    mine = [_bytes(tensor).to(device) for one in offers for tensor in _tensors(one.states)]
    sizes = [sum(_size(form) for place in places for form in _forms(by_place[place].states)) for by_place in told]
    pieces = _all_gather(torch.cat(mine) if mine else torch.empty(0, dtype=torch.uint8, device=device), sizes)
    forms = [{place: by_place[place].states for place in places} for by_place in told]
    return list(map(_unpack, pieces, forms))


def _all_gather(mine: Tensor, sizes: list[int]) -> list[Tensor]:
    longest = max(sizes)
    if longest == 0:
        return [mine] * len(sizes)
    padded = mine.new_zeros(longest)
    padded[: mine.numel()] = mine
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [one[:size] for one, size in zip(gathered, sizes, strict=True)]


def _form(value: Any) -> Any:
    """What has to be known to read a value from bytes: type and shape of a tensor, each item of a list, or the value."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise ValueError(f"a state is a tensor of layout {value.layout}, which can not be sent")
        return _Tensor(value.dtype, tuple(value.shape))
    return [_form(one) for one in value] if isinstance(value, list) else value


def _forms(form: Any) -> Iterator[_Tensor]:
    if isinstance(form, _Tensor):
        yield form
    elif isinstance(form, (list, dict)):
        for one in form.values() if isinstance(form, dict) else form:
            yield from _forms(one)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _size(form: _Tensor) -> int:
    size: int = form.dtype.itemsize
    for length in form.shape:
        size *= length
    return size


def _unpack(piece: Tensor, forms: dict[str, Any]) -> dict[str, Any]:
    start = itertools.accumulate((_size(form) for form in _forms(forms)), initial=0)

    def build(form: Any) -> Any:
        if isinstance(form, _Tensor):
            first = next(start)
            # A copy begins where numbers of any size may begin.
            return piece[first : first + _size(form)].clone().view(form.dtype).reshape(form.shape)
        if isinstance(form, dict):
            return {name: build(one) for name, one in form.items()}
        return [build(one) for one in form] if isinstance(form, list) else form

    result: dict[str, Any] = build(forms)
    return result
