"""Reads what stands in the store: JSON of a known shape and a bounded size, or else an error that names the key.

PyTorch's store has no password: whoever reaches it can write there, by mistake or not. So no rank acts on a value before its
form is checked, and no value is ever unpickled or evaluated. What is only for messages is left out if it can not be read.
"""

import functools
import json
import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from lightning_pgroup.errors import GarbledStoreError

LIMIT = 1 << 20
"""The longest value that is read, bytes."""

WHOLE_LIMIT = 1 << 40
"""No rank, number of ranks, generation, round or process is as large as this; none is negative."""

_TIME_LIMIT = 200_000_000_000.0
_SHOWN = 60

_Shape = TypeVar("_Shape")
_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)


def read(value: bytes | str, key: str, shape: type[_Shape], limit: int = LIMIT) -> _Shape:
    """Read a JSON object. Local.

    Args:
        value: What stood in the store.
        key: Where, for messages.
        shape: A dataclass or a ``TypedDict`` of strings, whole numbers, times, and the few types that this module knows. Fields
            that it does not have are left out.
        limit: The longest value to read, bytes.

    Raises:
        GarbledStoreError: It is none, or a field is missing or has another type.
    """
    return fill(parse(value, key, limit), key, shape)


def fill(parsed: object, key: str, shape: type[_Shape]) -> _Shape:
    """The same for an object that was part of a value that is parsed already."""
    hints = _hints(shape)  # type: ignore[arg-type]  # a class can be hashed
    if not isinstance(parsed, dict) or not parsed.keys() >= getattr(shape, "__required_keys__", hints.keys()):
        raise garbled(key, f"an object with {', '.join(hints)}", parsed)
    fields = {}
    for name in hints.keys() & parsed.keys():
        try:
            fields[name] = _READERS[hints[name]](parsed[name])
        except ValueError as error:
            raise garbled(key, f"an object in which {name!r} is {error}", parsed) from None
    return shape(**fields)


def read_text(value: bytes | str, key: str) -> str:
    """Read a JSON string.

    Raises:
        GarbledStoreError: It is none.
    """
    parsed = parse(value, key)
    if not isinstance(parsed, str):
        raise garbled(key, "a string", parsed)
    return _text(parsed)


def read_number(value: bytes | str, key: str) -> int:
    """Read a whole number that is not negative.

    Raises:
        GarbledStoreError: It is none.
    """
    parsed = parse(value, key)
    try:
        return _whole(parsed)
    except ValueError as error:
        raise garbled(key, str(error), parsed) from None


def parse(value: bytes | str, key: str, limit: int = LIMIT) -> Any:
    """Parse JSON of bounded size, without the numbers that are none.

    Raises:
        GarbledStoreError: It is none.
    """
    if len(value) > limit:
        raise garbled(key, f"at most {limit} bytes", f"{len(value)} bytes")
    try:
        text = value if isinstance(value, str) else value.decode()
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        raise garbled(key, "JSON", value) from None


def parse_object(value: bytes | str, key: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        GarbledStoreError: It is none.
    """
    parsed = parse(value, key)
    if not isinstance(parsed, dict):
        raise garbled(key, "an object", parsed)
    return parsed


def if_readable(reader: Callable[[], _Result]) -> _Result | None:
    """What ``reader`` reads, or nothing if that is garbled. For what is only good to know: it must not stop a run."""
    try:
        return reader()
    except GarbledStoreError as error:
        logger.debug("left out: %s", error)
        return None


def garbled(key: str, expected: str, found: object) -> GarbledStoreError:
    """The error for a value that no rank of ours has written."""
    shown = repr(found[:_SHOWN] if isinstance(found, bytes | str) else found)
    shown = f"{shown[:_SHOWN]} …" if len(shown) > _SHOWN else shown
    return GarbledStoreError(
        f"the store in which the ranks meet has a value that no rank wrote, under {key!r}: {expected} was expected, and {shown}"
        " was found. Another program writes to this store, which has no password. Give this run a port of its own, and let"
        " nobody else reach it (a firewall, a private network): see docs/security.md."
    )


def clean(text: str) -> str:
    """The text without what could move a cursor or can not be encoded, for terminals and logs."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


@functools.cache
def _hints(shape: type) -> dict[str, Any]:
    return get_type_hints(shape)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _whole(value: object) -> int:
    if type(value) is int and 0 <= value < WHOLE_LIMIT:
        return value
    raise ValueError(f"a whole number from 0 to {WHOLE_LIMIT - 1}")


def _time(value: object) -> float:
    if type(value) in (int, float) and 0 <= value <= _TIME_LIMIT:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise ValueError("a number of seconds")


def _text(value: object) -> str:
    if isinstance(value, str):
        return clean(value)
    raise ValueError("a string")


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("true or false")


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, list | tuple):
        return tuple(map(_text, value))
    raise ValueError("a list of strings")


def _wholes(value: object) -> tuple[int, ...]:
    if isinstance(value, list | tuple):
        return tuple(map(_whole, value))
    raise ValueError("a list of whole numbers")


def _object(value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError("an object")


_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)
"""One for all, since making one takes longer than what it does."""

_READERS: dict[Any, Callable[[object], Any]] = {
    int: _whole,
    int | None: lambda value: None if value is None else _whole(value),
    float: _time,
    str: _text,
    bool: _flag,
    tuple[str, ...]: _texts,
    tuple[int, ...]: _wholes,
    dict[str, Any]: _object,
}
