"""Finds what a user's objects hold, and names the place: ``model.encoder.norm.process_group``.

Walks modules, dictionaries, lists and the attributes of the given objects, but not into objects of other kinds: they may lead
anywhere. Nor into sets, whose order differs between ranks.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

_CONTAINERS = (list, tuple)
_REGISTERED = ("_modules", "_parameters", "_buffers")
_PRIVATE_OF_MODULES = frozenset({*vars(Module()), "_trainer", "_fabric"}) - set(_REGISTERED)


def walk(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All that ``roots`` hold, the outer before the inner, each object once, in an order that is the same on all ranks.

    Args:
        roots: Objects by their names. Of these the attributes are walked, whatever their kind.

    Yields:
        The place and what is there, the roots included. Tensors, numbers and texts are left out.
    """
    seen: set[int] = set()
    # A stack rather than recursion: a chain of modules may be long. Reversed, so that the first comes first.
    stack = [(name, root, True) for name, root in reversed(list(roots.items()))]
    while stack:
        place, found, is_root = stack.pop()
        if found is None or isinstance(found, (str, bytes, int, float, complex, Tensor)) or id(found) in seen:
            continue
        seen.add(id(found))
        yield place, found
        stack += [(name, one, False) for name, one in reversed(list(_inside(place, found, is_root)))]


def _inside(place: str, found: Any, is_root: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(found, Mapping):
        for key, one in found.items():
            yield f"{place}[{key!r}]", one
    elif isinstance(found, _CONTAINERS):
        for index, one in enumerate(found):
            yield f"{place}[{index}]", one
    elif isinstance(found, Module):
        for name, child in found._modules.items():
            yield f"{place}.{name}", child
    if isinstance(found, Module) or is_root:
        for name, one in getattr(found, "__dict__", {}).items():
            if not (isinstance(found, Module) and name in (*_REGISTERED, *_PRIVATE_OF_MODULES)):
                yield f"{place}.{name}", one
