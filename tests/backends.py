"""A process group written in Python, for what a real backend does only on a bad day: a shutdown that hangs."""

import threading
from typing import ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

NAME = "stubborn"


class StubbornGroup(dist.ProcessGroup):
    """A group of one rank whose `shutdown` does not return before `abort` is called, or never."""

    released = threading.Event()
    deaf = False
    calls: ClassVar[list[str]] = []

    def __init__(self, rank, size):
        super().__init__(rank, size)

    def getBackendName(self):
        return NAME

    def shutdown(self):
        self.calls.append("shutdown")
        self.released.wait(60)

    def abort(self):
        self.calls.append("abort")
        if self.deaf:
            self.released.wait(60)
        self.released.set()

    def _done(self, result):
        future = Future()
        future.set_result(result)
        return _create_work_from_future(future)

    def allreduce(self, tensors, opts=None):
        return self._done(tensors)

    def broadcast(self, tensors, opts=None):
        return self._done(tensors)

    def allgather(self, outputs, inputs, opts=None):
        for out, tensor in zip(outputs, inputs, strict=True):
            out[0].copy_(tensor)
        return self._done(outputs)

    def barrier(self, opts=None):
        return self._done([torch.zeros(1)])


def register_stubborn_backend() -> None:
    """Make ``process_group_backend="stubborn"`` known to torch, in this process."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, lambda store, rank, size, timeout: StubbornGroup(rank, size), devices=["cpu"])
    StubbornGroup.released = threading.Event()
    StubbornGroup.calls = []


BLOCKING = "blocking"


class BlockingGroup(dist.ProcessGroup):
    """A group that talks by gloo, but whose barrier, once armed, blocks until its `abort` is called: nothing else wakes it."""

    armed = threading.Event()
    freed = threading.Event()
    calls: ClassVar[list[str]] = []

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.real = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):
        return BLOCKING

    def shutdown(self):
        self.calls.append("shutdown")

    def abort(self):
        self.calls.append("abort")
        self.freed.set()

    def allreduce(self, tensors, opts=None):
        return self.real.allreduce(tensors, opts)

    def broadcast(self, tensors, opts=None):
        return self.real.broadcast(tensors, opts)

    def allgather(self, outputs, inputs, opts=None):
        return self.real.allgather(outputs, inputs, opts)

    def barrier(self, opts=None):
        if self.armed.is_set():
            self.freed.wait(60)
            raise RuntimeError("the collective was aborted")
        return self.real.barrier(opts)


def register_blocking_backend() -> None:
    """Make ``process_group_backend="blocking"`` known to torch, in this process."""
    if BLOCKING not in dist.Backend.backend_list:
        dist.Backend.register_backend(BLOCKING, BlockingGroup, devices=["cpu"])
    BlockingGroup.armed, BlockingGroup.freed = threading.Event(), threading.Event()
    BlockingGroup.calls = []
