"""The environment variables with which Lightning describes a rank, set for a stage and put back after it."""

import contextlib
import os
from collections.abc import Iterator, Mapping

RANK_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def snapshot() -> dict[str, str | None]:
    """The present values of the variables that describe a rank; ``None`` for one that is not set."""
    return {name: os.environ.get(name) for name in RANK_VARIABLES}


def restore(values: Mapping[str, str | None]) -> None:
    """Put variables back to what :func:`snapshot` has seen."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def restored_afterwards() -> Iterator[None]:
    """Put the variables that describe a rank back when the block ends."""
    before = snapshot()
    try:
        yield
    finally:
        restore(before)


@contextlib.contextmanager
def launched_size_kept() -> Iterator[None]:
    """Keep ``WORLD_SIZE`` during the block if ``RANK`` is there too, so that the rank was launched with both.

    Lightning deletes ``WORLD_SIZE`` at the end of a stage, as if it had set it itself, and ``RANK`` alone says nothing.
    """
    size = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    try:
        yield
    finally:
        if size is not None:
            os.environ["WORLD_SIZE"] = size
