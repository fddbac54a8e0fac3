"""What a process holds: memory, descriptors, sockets, threads, wrappers of ``sys.excepthook``, and what a GPU holds for it."""

import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_pgroup import c10d
from lightning_pgroup.process_state import process_state

SELF = Path("/proc/self")


def resident() -> int:
    """Resident memory of this process, bytes, with what it shares with others."""
    return int((SELF / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def anonymous() -> int:
    """Memory of this process that is no file's, bytes, with what a fork shares with its parent until it writes to it."""
    for line in (SELF / "smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell how much memory of a process is no file's")


def descriptors() -> list[str]:
    """What the open descriptors of this process lead to."""
    found = []
    for name in os.listdir(SELF / "fd"):
        try:
            found.append(os.readlink(SELF / "fd" / name))
        except FileNotFoundError:
            continue  # that of the listing itself
    return found


def sockets() -> int:
    """How many sockets are open."""
    return sum(target.startswith("socket:") for target in descriptors())


def threads() -> list[str]:
    """The names of all threads of this process, Python's and others."""
    found = []
    for task in (SELF / "task").iterdir():
        try:
            found.append((task / "comm").read_text().strip())
        except FileNotFoundError:
            continue  # it has just ended
    return found


def hook_depth() -> int:
    """How many hooks lie on top of one another in ``sys.excepthook``: torch keeps the one before in a closure."""
    depth, hook = 0, sys.excepthook
    seen: set[int] = set()
    while id(hook) not in seen:
        seen.add(id(hook))
        cells: tuple[Any, ...] = getattr(hook, "__closure__", None) or ()
        inner: list[Callable[..., Any]] = [cell.cell_contents for cell in cells if callable(cell.cell_contents)]
        if not inner:
            break
        depth, hook = depth + 1, inner[0]
    return depth


def store_keys() -> int:
    """How many keys are in the store of this run, those of all ranks; 0 before the ranks have met."""
    team = process_state().membership.invited_team
    return 0 if team is None else team.store.num_keys()


def communicators() -> int:
    """How many groups that torch knows of have an NCCL communicator. One that is out of torch's books is not counted."""
    if not dist.is_available() or not dist.is_initialized() or not dist.is_nccl_available():
        return 0
    found = 0
    for group in c10d.all_groups():
        if "nccl" in str(dist.get_backend_config(group)):
            backend = group._get_backend(torch.device("cuda"))
            # Older torch can not tell; a group that was used has one.
            found += not hasattr(backend, "_is_initialized") or bool(backend._is_initialized())
    return found


def on_device(index: int | None) -> dict[str, int]:
    """What a GPU holds for this process, and for all; empty without one.

    NCCL gives its threads names if ``NCCL_SET_THREAD_NAME=1``; they live as long as a communicator of several ranks, also one
    that torch has lost sight of. ``device_used`` is what the device has given away to all processes, with the buffers of
    communicators, which torch's allocator does not know of.
    """
    if index is None:
        return {}
    torch.cuda.synchronize(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "cuda_allocated": torch.cuda.memory_allocated(index),
        "cuda_reserved": torch.cuda.memory_reserved(index),
        "device_used": total - free,
        "communicators": communicators(),
        "nccl_threads": sum(name.startswith("NCCL") for name in threads()),
    }


def forget_parent() -> None:
    """Let the garbage collector leave alone what a forked process has from its parent: to look at it would copy its pages."""
    gc.freeze()


def settle() -> None:
    """Collect garbage, and wait for the threads that release groups that have ended, which is a matter of milliseconds.

    The C library keeps freed memory for later, which is no leak: it is asked to give that back.
    """
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("lightning-pgroup-release"):
            thread.join(5.0)
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def sample() -> dict[str, int]:
    """What this process holds now, when all that has ended is gone."""
    settle()
    return {
        "resident": resident(),
        "anonymous": anonymous(),
        "descriptors": len(descriptors()) - 1,  # without that of the listing
        "sockets": sockets(),
        "threads": len(threads()),
        "hooks": hook_depth(),
        "keys": store_keys(),
    }
