"""Records on disk: one JSON line for each event and rank, appended by the process to which it happened.

The form of a line is said in docs/records.md. No file stays open between two lines, so that there is nothing to close, to hand
on at a fork, or to pickle.
"""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_pgroup.bounded import run_bounded
from lightning_pgroup.records import LifecycleEvent, logger

SCHEMA = 1
"""Version of the form of a line."""

BLOCK = 1024
"""Each line is as long as this, or a multiple. The system makes what is written visible page by page, in any case up to the
end of a page, so that a line which lies in two of them could be met when half of it is there. These lie in one."""

WRITE_TIMEOUT = timedelta(seconds=5)
"""How long to wait for a file system that hangs, which is then given up."""

_SUFFIXES = (".jsonl", ".ndjson", ".json")

_MOST_ENDS = 16

_ends: dict[tuple[int, str], list[float]] = {}
_troubled: set[str] = set()
_given_up: set[str] = set()


def parse_record(path: str | os.PathLike[str] | None) -> str | None:
    """Turn the ``record`` argument into an absolute path, since a script may change its folder. Touches no file.

    Raises:
        ValueError: An empty path, or one with a null character.
        TypeError: No path.
    """
    if path is None:
        return None
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        raise TypeError(f"`record` must be the path of a file or a folder, got {path!r}.")
    if not text or "\0" in text:
        raise ValueError(f"`record` must be the path of a file or a folder, got {path!r}.")
    return os.path.abspath(os.path.expanduser(text)) + ("/" if text.endswith("/") else "")


def note_end(path: str) -> None:
    """A stage whose group stands in this file or folder has ended: the next line of this process says when. Local, no wait.

    A line of its own would be an event that nothing has happened to the group in.
    """
    ends = _ends.setdefault((os.getpid(), path), [])
    ends.append(time.time())
    del ends[:-_MOST_ENDS]  # so many only if no line could be written in between


def append(path: str, event: LifecycleEvent) -> None:
    """Write one line. Local; called by the process to which it happened, which may be in the middle of a stage.

    Blocks at most :data:`WRITE_TIMEOUT`; never raises. The first time that a path can not be written a warning is logged.

    Args:
        path: From :func:`parse_record`: a folder, in which each rank and process has a file of its own, or a file.
        event: What happened.
    """
    if path in _given_up:
        return
    ended = tuple(_ends.get((os.getpid(), path), ()))
    try:
        if not run_bounded(lambda: _write(path, event, ended), WRITE_TIMEOUT, "record"):
            _given_up.add(path)
            raise TimeoutError(errno.ETIMEDOUT, f"it hangs for {WRITE_TIMEOUT.total_seconds():g} s, and is given up")
        _ends.pop((os.getpid(), path), None)
    except Exception as error:  # whatever it is: a stage does not fail because of it
        if path not in _troubled:
            _troubled.add(path)
            logger.warning("[rank %d] records can not be written to %s, the run goes on without: %s", event.rank, path, error)


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read all lines of a file, or of all files of a folder, sorted by the time at which each event began.

    A line that is no JSON object with a schema, because a disk was full for example, is left out.

    Raises:
        OSError: It is not there, or can not be read.
    """
    where = Path(path)
    files = sorted(one for one in where.iterdir() if one.suffix in _SUFFIXES) if where.is_dir() else [where]
    return sorted((record for file in files for record in _records_of(file)), key=lambda record: float(record["start"]))


def _records_of(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        start = record.get("start") if isinstance(record, dict) and record.get("schema") == SCHEMA else None
        if isinstance(start, (int, float)) and abs(start) <= sys.float_info.max:
            yield record


def _write(path: str, event: LifecycleEvent, ended: Sequence[float]) -> None:
    host = socket.gethostname()
    own = not _is_file(path)
    if own:
        os.makedirs(path, exist_ok=True)
        path = os.path.join(path, f"rank-{event.rank}-{host}-{os.getpid()}.jsonl")
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    # Without waiting, so that a pipe which nobody reads is an error.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        _write_line(descriptor, _line(event, host, ended))
    finally:
        os.close(descriptor)


def _write_line(descriptor: int, line: bytes) -> None:
    gap = -os.fstat(descriptor).st_size % BLOCK
    if gap:  # something else stands there, or a piece of a line: it becomes a line of its own
        line = b" " * (gap - 1) + b"\n" + line
    written = os.write(descriptor, line)
    if written < len(line):
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if os.fstat(descriptor).st_size == end:
            os.ftruncate(descriptor, end - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _is_file(path: str) -> bool:
    if os.path.isdir(path) or path.endswith("/"):
        return False
    return os.path.exists(path) or path.endswith(_SUFFIXES)


def _line(event: LifecycleEvent, host: str, ended: Sequence[float]) -> bytes:
    record: dict[str, Any] = {"schema": SCHEMA, **event.to_payload(), "host": host, "pid": os.getpid(), "ended": ended}
    text, why = json.dumps(record), event.why[:BLOCK]
    while len(text) >= BLOCK and why:
        record["why"] = why if why == event.why else why + "…"
        text = json.dumps(record)
        why = why[: -max(1, (len(text) - BLOCK) // 12)]  # of a character JSON makes up to twelve
    length = -(-(len(text) + 1) // BLOCK) * BLOCK
    return text.ljust(length - 1).encode() + b"\n"
