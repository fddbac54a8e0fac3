"""Gathers the states of metrics over the group, in three collectives, whatever the ranks have.

``torchmetrics`` gathers each state by itself, and counts on all ranks having the same. Where they do not, its collectives do
not fit together: with gloo the process is aborted in C++ code when a rank without data meets one with numbers of another kind.
So here the ranks first tell one another what they have, and then all send one piece of bytes.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pgroup.exceptions import describe
from lightning_pgroup.metric_leaves import Leaf, States
from lightning_pgroup.metric_marks import is_local


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What one rank says of one metric. Sent between ranks as JSON.

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
    def amounts(self) -> list[tuple[str, int, list[tuple[str, int]]]]:
        """How many tensors of which types and dimensions each state has."""
        return [
            (name, len(form.get("list", "")), [(one["dtype"], len(one["shape"])) for one in _forms(form)])
            for name, form in self.states.items()
        ]


_TOLD = [one.name for one in fields(Told)]


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
        return Offer(leaf, Told(**told, data=leaf.has_data(states), states=forms), states, references, leaf.members(size))
    except Exception as error:  # a user's metric may hold anything
        return Offer(leaf, Told(**told, problem=describe(error)), {}, {}, ())


def tell(offers: list[Offer], size: int, device: torch.device) -> list[dict[str, Told]]:
    """What each rank tells of its metrics, by their places, in rank order. Collective; bounded by the group's timeout.

    Args:
        offers: The metrics of this rank.
        size: Number of ranks.
        device: Where the group's backend can send from.
    """
    text = json.dumps([{name: getattr(one.told, name) for name in _TOLD} for one in offers]).encode()
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)], device=device))
    answers = _all_gather(mine, [int(length) for length in lengths])
    read = [[Told(**one) for one in json.loads(bytes(answer.cpu().numpy()))] for answer in answers]
    return [{told.place: told for told in of_rank} for of_rank in read]


def gather(offers: list[Offer], told: list[dict[str, Told]], device: torch.device) -> list[dict[str, States]]:
    """The states of the offered metrics on each rank, by their places. Collective; bounded by the group's timeout.

    Args:
        offers: Those that all ranks have; the same, in the same order, on all.
        told: What each rank has told of them.
        device: Where the group's backend can send from.
    """
    places = [one.told.place for one in offers]
    mine = [_bytes(tensor).to(device) for one in offers for value in one.states.values() for tensor in _tensors(value)]
    forms = [{place: by_place[place].states for place in places} for by_place in told]
    sizes = [sum(_size(one) for states in each.values() for form in states.values() for one in _forms(form)) for each in forms]
    pieces = _all_gather(torch.cat(mine) if mine else torch.empty(0, dtype=torch.uint8, device=device), sizes)
    readers = map(_Reader, pieces)
    return [{place: reader.states(each[place]) for place in places} for reader, each in zip(readers, forms, strict=True)]


def _all_gather(mine: Tensor, sizes: list[int]) -> list[Tensor]:
    longest = max(sizes)
    if longest == 0:
        return [mine] * len(sizes)
    padded = mine.new_zeros(longest)
    padded[: mine.numel()] = mine
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [one[:size] for one, size in zip(gathered, sizes, strict=True)]


def _form(value: Any) -> dict[str, Any]:
    """What has to be known to read a value from bytes, as JSON: type and shape of a tensor, each item of a list, or the value.

    Raises:
        ValueError: It is something else.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise ValueError(f"a state is a tensor of layout {value.layout}, which can not be sent")
        if value.is_meta:
            raise ValueError("a state is on the device `meta`, so that there is nothing to be sent")
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_form(one) for one in value]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if value is None or isinstance(value, (str, int, float)):
        return {"plain": value}
    raise ValueError(f"a state has a {type(value).__qualname__}, which can not be sent")


def _forms(form: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The forms of the tensors in one, in order."""
    if "dtype" in form:
        yield form
    for one in form.get("list", form.get("tuple", ())):
        yield from _forms(one)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _size(form: dict[str, Any]) -> int:
    size: int = _dtype(form).itemsize * math.prod(form["shape"])
    return size


def _dtype(form: dict[str, Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, form["dtype"])
    return dtype


class _Reader:
    """Reads values one after the other from a piece of bytes."""

    def __init__(self, piece: Tensor) -> None:
        self._piece = piece
        self._read = 0

    def states(self, forms: dict[str, Any]) -> States:
        return {name: self._value(form) for name, form in forms.items()}

    def _value(self, form: dict[str, Any]) -> Any:
        if "dtype" in form:
            first, self._read = self._read, self._read + _size(form)
            # A copy begins where numbers of any size may begin.
            return self._piece[first : self._read].clone().view(_dtype(form)).reshape(form["shape"])
        if "list" in form:
            return [self._value(one) for one in form["list"]]
        if "tuple" in form:
            return tuple(self._value(one) for one in form["tuple"])
        return bytes.fromhex(form["bytes"]) if "bytes" in form else form["plain"]
