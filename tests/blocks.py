"""Helpers for the tests of `process_group` blocks."""

import logging

import torch
import torch.distributed as dist

from lightning_pgroup import process_group
from lightning_pgroup.process_state import process_state


def block(rank, size=2, **kwargs):
    """A block for ranks of :func:`tests.ranks.run_ranks`."""
    return process_group(rank=rank, world_size=size, **{"timeout": 20, **kwargs})


def generation():
    return process_state().lifecycle.generation


def rank_sum(rank):
    """A collective of the user's own: 0 + 1 + … over all ranks."""
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    return tensor.item()


class Lines(logging.Handler):
    """What the package logs in a ``with`` block."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        self.logger = logging.getLogger("lightning_pgroup")
        self.before = self.logger.level
        self.logger.setLevel(logging.DEBUG)
        self.logger.addHandler(self)
        return self

    def __exit__(self, *args):
        self.logger.removeHandler(self)
        self.logger.setLevel(self.before)

    def about(self, *words):
        return [line for line in self.lines if all(word in line for word in words)]
