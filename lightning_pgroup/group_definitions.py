"""Named groups as a user defines them: which ranks belong together, under which name. Checked once."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from numbers import Integral
from typing import Any

from lightning_pgroup.config import Duration, check_backend, parse_duration
from lightning_pgroup.errors import WorldSizeError

Ranks = Sequence[Sequence[int]] | Sequence[int]
"""The lists of ranks of one named group; or one list."""

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupDefinition:
    """One named group: each of its lists is a process group of its own, and no rank is in two of them.

    Attributes:
        name: Its name.
        lists: The ranks, ascending, in an order that does not depend on the order in which they were given.
        backend: The backend; ``None`` is that of the default group.
        timeout: Bound of its collectives; ``None`` is that of the default group.
    """

    name: str
    lists: tuple[tuple[int, ...], ...]
    backend: str | None = None
    timeout: timedelta | None = None

    def ranks_with(self, rank: int) -> tuple[int, ...]:
        """The list of which ``rank`` is a member; empty if it is in none."""
        return next((ranks for ranks in self.lists if rank in ranks), ())

    def with_timeout(self, default: timedelta | None) -> "GroupDefinition":
        """The same, with a timeout for a group that was given none."""
        return replace(self, timeout=self.timeout or default)

    def check_fits(self, size: int, what: str) -> None:
        """Refuse ranks that ``what``, with ``size`` ranks, does not have.

        Raises:
            WorldSizeError: On all ranks alike, at once.
        """
        beyond = sorted(rank for rank in chain(*self.lists) if rank >= size)
        if beyond:
            there = "rank 0 only" if size == 1 else f"ranks 0 to {size - 1}"
            raise WorldSizeError(
                f"The group {self.name!r} is for the ranks {self.describe()}, but {what} has {there}: there is no rank"
                f" {', '.join(map(str, beyond))}. Give it other lists, or run on more ranks."
            )

    def check_covers(self, size: int) -> None:
        """Refuse a stage of ``size`` ranks in which a rank has no list, because each of them needs one for its gradients.

        Raises:
            WorldSizeError: On all ranks alike, at once.
        """
        missing = sorted(set(range(size)) - set(chain(*self.lists)))
        if missing:
            raise WorldSizeError(
                f"`process_group={self.name!r}` lets each rank reduce its gradients over its list of {self.describe()}, but"
                f" rank {', '.join(map(str, missing))} is in none of them. Put each of the {size} ranks into one."
            )

    def fingerprint(self) -> str:
        """A short text that is the same for the same lists, and only for these."""
        return hashlib.sha1(self.describe().encode(), usedforsecurity=False).hexdigest()[:16]

    def describe(self) -> str:
        """The lists, as a user would write them."""
        return ", ".join(str(list(ranks)) for ranks in self.lists)


def parse_groups(groups: Mapping[str, Ranks] | None) -> dict[str, GroupDefinition]:
    """Check the argument ``groups`` of a strategy. Touches neither network nor processes.

    Raises:
        ValueError: A wrong name or value; the message says where it stands.
        TypeError: A value of the wrong kind.
    """
    if groups is None:
        return {}
    if not isinstance(groups, Mapping):
        raise TypeError(f"`groups` must be a dictionary of names and lists of ranks, got {groups!r}.")
    return {name: parse_group("groups", name, ranks) for name, ranks in groups.items()}


def parse_group(
    argument: str, name: str, ranks: Any, *, backend: str | None = None, timeout: Duration | None = None
) -> GroupDefinition:
    """Check one definition.

    Args:
        argument: Where it was given, for messages.
        name: Its name.
        ranks: Lists of ranks, or one list.
        backend: Its backend.
        timeout: Bound of its collectives.

    Raises:
        ValueError: A wrong name or value; the message says where it stands.
        TypeError: A value of the wrong kind.
    """
    if not isinstance(name, str):
        raise TypeError(f"The name of a group in `{argument}` must be a text, got {name!r}.")
    if not _NAME.fullmatch(name):
        raise ValueError(f"The name of a group in `{argument}` may have letters, digits, '_', '-' and '.', got {name!r}.")
    where = f"{argument}[{name!r}]"
    given = _items(where, ranks, "lists of ranks")
    if any(_is_list(one) for one in given):
        lists = [_parse_list(f"{where}[{number}]", one) for number, one in enumerate(given)]
    else:
        lists = [_parse_list(where, given)]
    seen: dict[int, int] = {}
    for number, one in enumerate(lists):
        for rank in one:
            if rank in seen:
                raise ValueError(
                    f"Rank {rank} is in two lists of one group, `{where}[{seen[rank]}]` and `{where}[{number}]`: {given!r}."
                    " Give one of the lists a name of its own."
                )
            seen[rank] = number
    check_backend(backend, "backend")
    return GroupDefinition(
        name=name,
        lists=tuple(sorted(lists)),
        backend=None if backend is None else backend.lower(),
        timeout=None if timeout is None else parse_duration("timeout", timeout),
    )


def find(definitions: Mapping[str, GroupDefinition], name: object, what: str) -> GroupDefinition:
    """The definition of a name.

    Raises:
        TypeError: It is no text.
        ValueError: There is none; the message lists those that there are.
    """
    if not isinstance(name, str):
        raise TypeError(f"{what} takes the name of a group, got {name!r}.")
    if name not in definitions:
        known = ", ".join(map(repr, definitions)) or "none is defined"
        raise ValueError(
            f"{what} names the group {name!r}, which is not there: {known}. Define it by `groups={{{name!r}: [[0, 1], ...]}}`"
            " or `strategy.new_group`."
        )
    return definitions[name]


def _parse_list(where: str, ranks: Any) -> tuple[int, ...]:
    found = _items(where, ranks, "ranks")
    for number, rank in enumerate(found):
        if isinstance(rank, bool) or not isinstance(rank, Integral):
            raise TypeError(f"`{where}[{number}]` must be a rank, a whole number, got {rank!r}.")
        if rank < 0:
            raise ValueError(f"`{where}[{number}]` must be a rank, 0 or more, got {rank!r}.")
        if rank in found[:number]:
            raise ValueError(f"`{where}` has rank {rank} twice: {found!r}.")
    return tuple(sorted(map(int, found)))


def _items(where: str, values: Any, what: str) -> list[Any]:
    values = values.tolist() if hasattr(values, "tolist") else values  # tensors and arrays
    if not _is_list(values):
        raise TypeError(f"`{where}` must be a list of {what}, got {values!r}.")
    found = list(values)
    if not found:
        raise ValueError(f"`{where}` must have at least one of its {what}, got {values!r}.")
    return found


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
