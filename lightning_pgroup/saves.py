"""Checkpoints that other threads of this process are still writing: the group must not end before they have it all.

Nothing lists them. The future of ``torch.distributed.checkpoint.async_save`` belongs to its caller, and Lightning's
``AsyncCheckpointIO`` keeps its queue to itself. But whoever writes one has a function of these modules on its stack, in each
version of torch, with a thread and with a process that does the writing, and in threads of the user's own.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures.thread import _threads_queues
from datetime import timedelta
from types import FrameType

from lightning_pgroup.bounded import wait_until

WRITERS = ("torch.distributed.checkpoint", "lightning.pytorch.plugins.io.async_plugin")
"""The modules, or packages, whose functions write checkpoints."""

_WAITING = ("lightning_pgroup.bounded",)
_POOLS = ("concurrent.futures.thread", "threading")


def finish_saves(timeout: timedelta) -> tuple[str, timedelta]:
    """Wait for all checkpoints that other threads are writing. Called before an orderly destroy; not collective.

    Who waits for this end is left out: the calling thread, and the main thread where it called :func:`run_shielded`.

    Args:
        timeout: How long to wait; an interrupt of the shielded call around this one ends the wait too.

    Returns:
        What was not finished, in words, empty if all is; and how much of ``timeout`` is left.
    """
    start = time.monotonic()
    finished = wait_until(lambda: not any(_is_writing(thread, frame) for thread, frame in _others()), timeout)
    waited = timedelta(seconds=time.monotonic() - start)
    if finished:
        return "", max(timeout - waited, timedelta())
    names = [_describe(thread, frame) for thread, frame in _others() if _is_writing(thread, frame)]
    return (
        f"{' and '.join(names) or 'a checkpoint'} was still being written after {waited.total_seconds():.1f} s of the"
        f" {timeout.total_seconds():g} s that a destroy may take (`destroy_timeout`), and was not waited for any longer"
    ), timedelta()


def is_saving() -> bool:
    """Whether the calling thread is writing a checkpoint, so that it must not end a group, nor wait until nobody does."""
    return any(_belongs(frame, WRITERS) for frame in _stack(sys._getframe()))


def _others() -> Iterator[tuple[threading.Thread, FrameType]]:
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.ident in frames:
            yield thread, frames[thread.ident]


def _is_writing(thread: threading.Thread, innermost: FrameType) -> bool:
    if any(_belongs(frame, WRITERS) for frame in _stack(innermost)):
        return not any(_belongs(frame, _WAITING) for frame in _stack(innermost))
    # What was handed over to a pool a moment ago may not have begun, and nothing says what it is: it will show in a moment.
    queue = _threads_queues.get(thread)
    return queue is not None and not queue.empty() and _belongs(innermost, _POOLS)


def _belongs(frame: FrameType, modules: tuple[str, ...]) -> bool:
    name = str(frame.f_globals.get("__name__"))
    return name.startswith(modules) and any(name == module or name.startswith(f"{module}.") for module in modules)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe(thread: threading.Thread, innermost: FrameType) -> str:
    """Which checkpoint it is, as its writer's arguments say, else which thread."""
    for frame in _stack(innermost):
        seen = frame.f_locals
        for value in (seen.get("checkpoint_id"), seen.get("path"), getattr(seen.get("storage_writer"), "path", None)):
            if isinstance(value, (str, os.PathLike)) and str(value):
                return f"checkpoint {os.fspath(value)!r}"
    return f"the checkpoint of thread {thread.name!r}"
