"""Finds what a user's objects hold, and names the place: ``model.encoder.norm.process_group``.

Walks modules, dictionaries, lists and the attributes of the given objects, but not into objects of other kinds: they may lead
anywhere. Nor into sets, whose order differs between ranks, nor into long containers: these are data.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module, Parameter

Node: TypeAlias = tuple[Any, "tuple[Any, Any, Any] | None", Any]
"""What was found, the node that holds it (``None`` for a root), and where it is in there: the name of an attribute, or the
key or index in a tuple of one."""

CONTAINER_LIMIT = 1000
"""Containers that are longer are not entered."""

_CONTAINERS = (dict, list, tuple)
_OWN = tuple(vars(Module()))
_LAST_OWN = len(_OWN) - 1
_PRIVATE_OF_MODULES = frozenset({*_OWN, "_trainer", "_fabric"})
_NONE: dict[str, Any] = {}
_NOTHING = ("", None)
_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes, Tensor, Parameter, torch.dtype, torch.device})


def walk(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All that ``roots`` hold, the outer before the inner, each object once, in an order that is the same on all ranks.

    Args:
        roots: Objects by their names. Of these the attributes are walked, whatever their kind.

    Yields:
        The place and what is there, the roots included. Tensors, numbers and texts are left out.
    """
    seen: set[int] = set()
    for node in visit((root, None, name) for name, root in roots.items()):
        found = node[0]
        if id(found) not in seen and not isinstance(found, (str, bytes, int, float, complex, Tensor)):
            seen.add(id(found))
            yield place_of(node), found


def visit(start: Iterable[Node]) -> Iterator[Node]:
    """The same as nodes, from which the place can be had and its content replaced. In a hurry: each stage begins with it.

    What is not entered comes once for each place that holds it, and all else once.
    """
    seen: set[int] = set()
    # A stack rather than recursion: a chain of modules may be long. Reversed, so that the first comes first.
    stack = list(start)
    stack.reverse()
    while stack:
        node = stack.pop()
        found = node[0]
        inside: Callable[[Any, Node], list[Node]]
        if isinstance(found, Module):
            inside = _inside_module
        elif isinstance(found, _CONTAINERS):
            inside = _inside_container
        elif node[1] is None:
            inside = _inside_root
        else:
            yield node
            continue
        if id(found) not in seen:
            seen.add(id(found))
            yield node
            if inner := inside(found, node):
                inner.reverse()
                stack += inner


def place_of(node: Node) -> str:
    """Where it was found, from its root on."""
    found: list[str] = []
    outer: Node | None = node
    while outer is not None:
        _, holder, where = outer
        if holder is None:
            found.append(where)
        else:
            found.append(f"[{where[0]!r}]" if isinstance(where, tuple) else f".{where}")
        outer = holder
    return "".join(reversed(found))


def replace(node: Node, new: Any) -> None:
    """Put something else into the place of a node.

    Raises:
        TypeError: It is in a tuple.
        AttributeError: Its holder does not let its attributes be set.
    """
    _, holder, where = node
    assert holder is not None
    if isinstance(where, tuple):
        holder[0][where[0]] = new
    else:
        setattr(holder[0], where, new)


def _inside_module(module: Module, node: Node) -> list[Node]:
    attributes = module.__dict__.copy()  # a user's thread may change it meanwhile; so may it each other dictionary
    children = attributes.get("_modules")
    inner: list[Node] = [(child, node, name) for name, child in list(children.items()) if child is not None] if children else []
    # A module's own attributes come first, and these are the most, since its constructor sets them before a user's can.
    pairs: Iterator[tuple[str, Any]] = islice(attributes.items(), _LAST_OWN, None)
    if next(pairs, _NOTHING)[0] != _OWN[-1]:
        pairs = iter(attributes.items())
    for name, one in pairs:
        kind = type(one)
        if kind in _LEAVES or name in _PRIVATE_OF_MODULES or (kind is tuple and _LEAVES.issuperset(map(type, one))):
            continue
        inner.append((one, node, name))
    return inner


def _inside_container(found: dict[Any, Any] | list[Any] | tuple[Any, ...], node: Node) -> list[Node]:
    if len(found) > CONTAINER_LIMIT:
        return []
    pairs = list(found.items()) if isinstance(found, dict) else enumerate(found)
    return [(one, node, (key,)) for key, one in pairs if type(one) not in _LEAVES]


def _inside_root(root: Any, node: Node) -> list[Node]:
    return [(one, node, name) for name, one in list(getattr(root, "__dict__", _NONE).items()) if type(one) not in _LEAVES]
