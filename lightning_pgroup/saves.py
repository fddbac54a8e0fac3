"""Checkpoints that are being written in the background: the group must not end before they have it all.

Nothing lists them: the future of ``torch.distributed.checkpoint.async_save`` belongs to its caller, and Lightning's
``AsyncCheckpointIO`` keeps its queue to itself. So what starts them is wrapped, once it is imported, and their futures are kept
here until they are done. This file has the private names of ``torch.distributed.checkpoint`` and of that plugin.
"""

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from datetime import timedelta
from typing import Any

from lightning_pgroup.bounded import wait_until

_STARTERS = (
    ("torch.distributed.checkpoint._async_thread_executor", "_ThreadBasedAsyncCheckpointExecutor", "execute_save"),
    ("torch.distributed.checkpoint._async_process_executor", "_ProcessBasedAsyncCheckpointExecutor", "execute_save"),
    ("lightning.pytorch.plugins.io.async_plugin", "AsyncCheckpointIO", "save_checkpoint"),
)
_WRITERS = ("torch.distributed.checkpoint", "lightning.pytorch.plugins.io.async_plugin")
_THREADS = "AsyncCheckpointExecutor"
"""How the names of the threads of ``_ThreadBasedAsyncCheckpointExecutor`` begin."""

_saves: list[tuple[int, "Future[Any]", str]] = []


def watch_saves() -> None:
    """Wrap what starts saves in the background, as far as it is imported. Called at the start of each stage."""
    for module, name, method in _STARTERS:
        kind = getattr(sys.modules.get(module), name, None)
        start = getattr(kind, method, None)
        if start is not None and not hasattr(start, "_lightning_pgroup"):
            setattr(kind, method, _watched(start))


def finish_saves(timeout: timedelta) -> tuple[str, timedelta]:
    """Wait for all checkpoints that are being written in the background. Called before an orderly destroy; not collective.

    Args:
        timeout: How long to wait; an interrupt of the shielded call around this one ends the wait too.

    Returns:
        What was not finished, in words, empty if all is; and how much of ``timeout`` is left.
    """
    start = time.monotonic()
    finished = wait_until(lambda: not _in_flight(), timeout)
    waited = timedelta(seconds=time.monotonic() - start)
    names = [] if finished else _in_flight()
    if not names:
        return "", max(timeout - waited, timedelta())
    return (
        f"{' and '.join(names)} was still being written after {waited.total_seconds():.1f} s of the"
        f" {timeout.total_seconds():g} s that a destroy may take (`destroy_timeout`), and was not waited for any longer"
    ), timedelta()


def is_saving() -> bool:
    """Whether the calling thread is writing a checkpoint, so that it must not end a group, nor wait until nobody does."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if str(frame.f_globals.get("__name__")).startswith(_WRITERS):
            return True
    return False


def _watched(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = None
        try:
            result = start(self, *args, **kwargs)
        finally:
            # The plugin returns nothing, and may raise what an earlier save has raised after it has queued this one. It works
            # off its queue in turn: what is queued now is done when all before it is.
            queue = None if isinstance(result, Future) else getattr(self, "_executor", None)
            future = result if queue is None else _end_of(queue)
            _in_flight()  # forgets those that are done, with all that they hold
            if future is not None:
                _saves.append((os.getpid(), future, _name(args, kwargs)))
        return result

    wrapper._lightning_pgroup = True  # type: ignore[attr-defined]
    return wrapper


def _end_of(queue: Executor) -> Future[None] | None:
    """What is done when all is done that is queued now; ``None`` if the queue takes no more, and has so taken nothing now."""
    try:
        return queue.submit(_nothing)
    except RuntimeError:  # the plugin has raised the same, for its caller to see
        return None


def _in_flight() -> list[str]:
    names = []
    for save in tuple(_saves):  # no lock, which a fork could copy while it is held
        process, future, name = save
        # After a fork the saves of the parent are none of the child's: nobody there would ever finish them.
        if process == os.getpid() and not future.done():
            names.append(name)
        else:
            with contextlib.suppress(ValueError):  # another thread was faster
                _saves.remove(save)
    # What was first imported in the middle of a stage is not wrapped, but its threads have a name, and end with their save.
    return names or ["a checkpoint" for thread in threading.enumerate() if thread.name.startswith(_THREADS)]


def _name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = (kwargs.get("checkpoint_id"), getattr(kwargs.get("storage_writer"), "path", None), *args[1:2], kwargs.get("path"))
    paths = [os.fspath(one) for one in given if isinstance(one, (str, os.PathLike))]
    return f"checkpoint {paths[0]!r}" if paths else "a checkpoint"


def _nothing() -> None:
    pass
