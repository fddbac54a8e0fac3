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
