"""Forked ranks for the benchmarks, as Lightning's popen launcher, or a shell, would have started them.

A :class:`Ranks` is one set of processes that does one job after the other, and waits in between. With several sets, each with a
strategy of its own, jobs can take turns, so that whatever the machine does meanwhile hits all of them.
"""

import contextlib
import logging
import multiprocessing
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from lightning_pgroup.process_state import process_state
from lightning_pgroup.store import LOOPBACK, Endpoint, listen
from lightning_pgroup.team import ENVIRONMENT_VARIABLE, Invitation

Job = Callable[..., Any]
Serve = Callable[[int], Job]
"""Called once on each rank with its number; returns what does the jobs."""

END_TIMEOUT = 10.0
"""How long ranks may take to end when all jobs are done, seconds; then they are killed."""


class RanksFailedError(RuntimeError):
    """A rank raised, died, or did not finish its job in time."""


def be_quiet() -> None:
    """Let neither Lightning nor this package say anything: what they say is not what is measured."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_pgroup"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.set_num_threads(1)


class Ranks:
    """Some forked ranks. A context manager; at its end they end, or are killed.

    Args:
        size: How many.
        serve: What they run.
        invited: Whether they are ranks of one run of Lightning's popen launcher. Else they only have ``RANK``, ``WORLD_SIZE``,
            ``MASTER_ADDR`` and ``MASTER_PORT``, as a shell would set them.
    """

    def __init__(self, size: int, serve: Serve, *, invited: bool = True) -> None:
        self.size = size
        self._invitation: Invitation | None = None
        listener: socket.socket | None = None
        with listen(LOOPBACK) as plain:  # plain torch needs a port that was free a moment ago; ours keeps its own
            port = plain.getsockname()[1]
        if invited:
            listener = listen(LOOPBACK)
            self._invitation = Invitation.to(Endpoint(*listener.getsockname()[:2]), size, 0)
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=self._be_rank, args=(rank, port, listener, serve, pipes[rank][1]), daemon=True)
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        if listener is not None:
            listener.close()

    def do(self, *job: Any, within: float = 300.0) -> list[Any]:
        """Let all ranks do one job.

        Args:
            job: The arguments of what does it.
            within: How long it may take, seconds.

        Returns:
            What they returned, in the order of ranks.

        Raises:
            RanksFailedError: As soon as one has failed, or has not finished in time. Nothing more can be done with them.
        """
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(job)
        deadline, found = time.monotonic() + within, {}
        while len(found) < self.size:
            open_ = {self._pipes[rank]: rank for rank in range(self.size) if rank not in found}
            sentinels = [self._processes[rank].sentinel for rank in open_.values()]
            ready = connection.wait([*open_, *sentinels], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RanksFailedError(f"ranks {sorted(open_.values())} of {self.size} did not finish within {within} s")
            answers = [pipe for pipe in open_ if pipe in ready or pipe.poll()]
            if not answers:
                raise RanksFailedError(
                    self._death(next(rank for rank in open_.values() if self._processes[rank].sentinel in ready))
                )
            for pipe in answers:
                found[open_[pipe]] = self._answer(open_[pipe])
        return [found[rank] for rank in range(self.size)]

    def _answer(self, rank: int) -> Any:
        try:
            good, value = self._pipes[rank].recv()
        except (EOFError, OSError) as error:
            raise RanksFailedError(self._death(rank)) from error
        if not good:
            raise RanksFailedError(f"rank {rank} raised:\n{value}")
        return value

    def _death(self, rank: int) -> str:
        self._processes[rank].join()  # it has ended, but may not have been asked yet how
        return f"rank {rank} ended with exit code {self._processes[rank].exitcode}"

    def end(self) -> None:
        """Let them end, at most :data:`END_TIMEOUT`."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + END_TIMEOUT
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.end()
        else:
            self.kill()

    def _be_rank(self, rank: int, port: int, listener: socket.socket | None, serve: Serve, pipe: Connection) -> None:
        try:
            self._join(rank, port, listener)
            work = serve(rank)
            while (job := pipe.recv()) is not None:
                pipe.send((True, work(*job)))
            process_state().end()
        except BaseException:
            with contextlib.suppress(OSError):
                pipe.send((False, traceback.format_exc()))
        os._exit(0)  # a group of plain torch's that still lives would wait for the others

    def _join(self, rank: int, port: int, listener: socket.socket | None) -> None:
        be_quiet()
        os.environ.update(MASTER_ADDR=LOOPBACK, MASTER_PORT=str(port), WORLD_SIZE=str(self.size))
        if self._invitation is None or listener is None:
            os.environ.update(RANK=str(rank))
            return
        os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")
        if rank == 0:
            process_state().membership.host(listener)
            process_state().membership.join(self._invitation)
        else:
            listener.close()
            os.environ[ENVIRONMENT_VARIABLE] = self._invitation.to_environment()


def in_turn(count: int, rounds: int) -> list[list[int]]:
    """The order of ``count`` competitors in each round, such that none always follows the same other, or always comes first."""
    turns = []
    for number in range(rounds):
        order = [(number // 2 + place) % count for place in range(count)]
        turns.append(order[::-1] if number % 2 else order)
    return turns
