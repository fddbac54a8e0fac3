"""A process group for a block of a script without Lightning: made at its beginning, gone at its end, however it ends."""

import contextlib
import inspect
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_pgroup import c10d
from lightning_pgroup.claim import Claim, GroupRequest, Stage
from lightning_pgroup.config import Duration, LifecycleConfig, check_backend, parse_config, parse_duration
from lightning_pgroup.errors import PGroupError
from lightning_pgroup.group_request import LIGHTNING_TIMEOUT
from lightning_pgroup.interrupts import run_shielded
from lightning_pgroup.lightning_private import default_backend_for_device
from lightning_pgroup.policy import OnErrorName, OnMismatchName, Ownership
from lightning_pgroup.process_state import ProcessState, process_state
from lightning_pgroup.script_rank import find_place
from lightning_pgroup.signature import GroupSignature, describe_options
from lightning_pgroup.sweep import leave_earlier_job

NAME = "process_group"
"""What a block is called in records and messages."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def process_group(
    backend: str | None = None,
    *,
    timeout: Duration | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    pg_options: Any = None,
    device_id: torch.device | str | int | None = None,
    destroy_timeout: Duration = 30.0,
    rendezvous_timeout: Duration | None = None,
    on_error: OnErrorName | None = None,
    on_mismatch: OnMismatchName = "recreate",
) -> "ProcessGroupBlock":
    """A default process group for a ``with`` block, or for each call of a function that this decorates.

    Collective: all ranks enter their blocks, and start their stages, in the same order. Entering blocks at most
    ``rendezvous_timeout`` for ranks that do not come, and at most ``timeout`` in the creation of the group; leaving waits for
    nobody and blocks at most ``destroy_timeout``. The ``with`` statement gives the default group.

    A block has a generation of its own, also where a strategy has kept a group between its stages, which then ends. Inside
    another block, or a stage of a strategy, it shares the group that is there, and leaves it to that; so it does with a group
    of other code. When its body raises, the other ranks are told, those that wait for this one wake up, and the exception gets
    a note that names the first failure. A generator that is closed in the middle of its block ends it as its last line would.

    Args:
        backend: As for ``torch.distributed.init_process_group``. By default that of the device; without ``device_id`` gloo,
            and NCCL for CUDA where there is any.
        timeout: Bound of each collective, seconds, a ``timedelta`` or its text; by default torch's for the backend.
        init_method: ``"tcp://host:port"``, ``"file:///path"`` or ``"env://"``: where the ranks meet; by default at
            ``MASTER_ADDR`` and ``MASTER_PORT``.
        rank: This process's rank, together with ``world_size``. By default ``RANK`` and ``WORLD_SIZE`` of the environment, as
            torchrun sets them; else what the process is in the run of a strategy that has had a stage here; else the process
            is alone.
        world_size: Number of ranks.
        pg_options: Options of the backend, as ``init_process_group`` takes them.
        device_id: The device to bind the group to, as ``init_process_group`` takes it.
        destroy_timeout: How long an orderly destroy may take, seconds, a ``timedelta`` or its text; then the group is aborted.
        rendezvous_timeout: How long to wait for ranks that do not come; by default the ``timeout``, else 30 minutes.
        on_error: What happens to the group when the body raises: ``"abort"`` (the default), ``"destroy"``, or ``"keep"``: it
            stays until the next block or stage, or the end of the process.
        on_mismatch: ``"recreate"`` gives the block its own group. With ``"reuse"`` it takes over a group that a strategy has
            kept, and ends it; with ``"error"`` only one that is as asked for. Where it has to share, ``"error"`` refuses a
            group that is not as asked for; the others warn.

    Raises:
        ValueError: A wrong or contradictory value; the message lists the right ones.
        TypeError: A value of the wrong kind.
    """
    if callable(backend):
        raise TypeError("`process_group` is called before it decorates: write `@process_group()`.")
    config = parse_config(
        destroy="on_teardown",
        on_error=on_error,
        on_mismatch=on_mismatch,
        destroy_timeout=destroy_timeout,
        rendezvous_timeout=rendezvous_timeout,
        init_method=init_method,
        pg_options=pg_options,
    )
    check_backend(backend, "backend")
    _check_rank(rank, world_size)
    return ProcessGroupBlock(
        _Wish(
            config=config,
            backend=backend,
            timeout=None if timeout is None else parse_duration("timeout", timeout),
            rank=rank,
            world_size=world_size,
            device=_parse_device(device_id),
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wish:
    """What a block was asked for; ``None`` where that was left open."""

    config: LifecycleConfig
    backend: str | None
    timeout: timedelta | None
    rank: int | None
    world_size: int | None
    device: torch.device | None

    def request(self, state: ProcessState) -> GroupRequest:
        """The group to ask for; what was left open is as in the stage around, as in a group of other code, or by default."""
        config, around = self.config, state.lifecycle.surrounding_request()
        foreign = state.lifecycle.ownership() is Ownership.FOREIGN
        if around is not None:
            base = around
        else:
            place = find_place(
                self.rank,
                self.world_size,
                config.init_method,
                config.rendezvous_timeout or self.timeout or LIGHTNING_TIMEOUT,
                state.membership,
                foreign=foreign,
            )
            base = GroupRequest(
                signature=GroupSignature(
                    backend=_default_backend(self.device),
                    world_size=place.size,
                    rank=place.rank,
                    timeout=None,
                    device="cpu",
                    pg_options="",
                    init_method="",
                ),
                place=place,
                device_id=None,
                pg_options=None,
            )
        known: dict[str, Any] = {}
        if foreign:
            known = {"backend": dist.get_backend(), "rank": dist.get_rank(), "world_size": dist.get_world_size()}
        given = {
            "backend": self.backend,
            "world_size": self.world_size,
            "rank": self.rank,
            "timeout": None if self.timeout is None else self.timeout.total_seconds(),
            "device": None if self.device is None else str(self.device),
            "pg_options": describe_options(config.pg_options) or None,
            "init_method": config.init_method,
        }
        known |= {name: value for name, value in given.items() if value is not None}
        signature = replace(base.signature, **known)
        device = base.device_id if self.device is None else self.device
        return GroupRequest(
            signature=signature,
            place=replace(base.place, rank=signature.rank, size=signature.world_size),
            device_id=None if device is None or device.type == "cpu" else device,
            pg_options=base.pg_options if config.pg_options is None else config.pg_options,
        )


class ProcessGroupBlock(contextlib.ContextDecorator):
    """What :func:`process_group` returns. May be entered again and again, also inside itself."""

    def __init__(self, wish: _Wish) -> None:
        self._wish = wish
        self._open: list[_Visit] = []
        # An interrupt may come between the last line of a block and the first of its end.
        weakref.finalize(self, _end_dropped, self._open).atexit = False

    def __enter__(self) -> ProcessGroup:
        """Get the group. Collective.

        Raises:
            PGroupError: The ranks did not come, do not agree, or there are not as many as asked for.
        """
        visit = _Visit(process_state(), self._wish)
        try:
            visit.begin()
            self._open.append(visit)
            group = c10d.default_group()
            assert group is not None
            return group
        except BaseException as error:
            caught = error
            run_shielded(lambda: self._leave(visit, caught))
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """End the group, or leave it to whatever is around. Waits for no other rank."""
        visit = self._open[-1]
        try:
            visit.say_farewell(error)
            if isinstance(error, GeneratorExit):  # no failure: its reader has had enough
                self._open.pop().end_when_possible()
            else:
                run_shielded(lambda: self._leave(visit, error))
        except BaseException as interrupt:
            caught = interrupt
            if visit in self._open:  # it came before the end had begun
                run_shielded(lambda: self._leave(visit, caught))
            raise

    @override
    def __call__(self, func: _Function) -> _Function:
        """Decorate a function: each call has a block of its own.

        Raises:
            TypeError: The function returns before its body has run, as a generator does.
        """
        lazy = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(test(func) for test in lazy):
            raise TypeError(
                f"`process_group` can not decorate {getattr(func, '__qualname__', func)!r}, whose body runs only after the call"
                " has returned. Put a `with` statement into the body."
            )
        return super().__call__(func)

    def _recreate_cm(self) -> "ProcessGroupBlock":
        return ProcessGroupBlock(self._wish)  # so that calls on several threads do not mix up their visits

    def _leave(self, visit: "_Visit", error: BaseException | None) -> None:
        if visit in self._open:
            self._open.remove(visit)
        visit.end(error)


class _Visit:
    """One time that a block was entered."""

    def __init__(self, state: ProcessState, wish: _Wish) -> None:
        self._state = state
        self._lifecycle = state.lifecycle
        self._wish = wish
        self._process = os.getpid()
        self._request: GroupRequest | None = None
        self._stages: list[Stage] = []
        self._hook: Any = None

    def begin(self) -> None:
        leave_earlier_job()
        # Before all else: whatever happens from then on, the others can be told.
        run_shielded(self._enter)
        self._lifecycle.acquire(self._stages[0])
        self._hook = register_module_module_registration_hook(self._notice)

    def say_farewell(self, error: BaseException | None) -> None:
        farewell = self._stages[0].farewell if self._stages and os.getpid() == self._process else None
        if farewell is not None:
            farewell(error)

    def end(self, error: BaseException | None) -> None:
        if self._detach():
            self._lifecycle.leave(self._stages.pop(), error)

    def end_when_possible(self, error: BaseException | None = None) -> None:
        if self._detach():
            self._lifecycle.leave_when_possible(self._stages.pop(), error)

    def _enter(self) -> None:
        self._stages.append(self._lifecycle.enter(Claim(self._wish.config), NAME, None, self._ask, is_block=True))

    def _ask(self) -> GroupRequest:
        if self._request is None:
            self._request = self._wish.request(self._state)
        return self._request

    def _detach(self) -> bool:
        if self._hook is not None:
            self._hook.remove()
        # A child that was forked inside has no part in the end.
        return bool(self._stages) and os.getpid() == self._process

    def _notice(self, module: Module, name: str, submodule: Module | None) -> None:
        # No strategy tells of this wrapper; it must not be the last to let go of the group.
        if isinstance(module, DistributedDataParallel):
            self._lifecycle.hold_for(module)


def _end_dropped(visits: list[_Visit]) -> None:
    while visits:
        visits.pop().end_when_possible(PGroupError("the block was dropped without its end"))


def _check_rank(rank: int | None, world_size: int | None) -> None:
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"`{name}` must be a whole number, got {value!r}.")
    if rank is None and world_size is None:
        return
    if rank is None or world_size is None:
        raise ValueError(f"`rank` and `world_size` belong together, got rank={rank!r} and world_size={world_size!r}.")
    if not 0 <= rank < world_size:
        raise ValueError(f"`rank` must be from 0 to `world_size` - 1, got rank={rank} and world_size={world_size}.")


def _parse_device(device_id: torch.device | str | int | None) -> torch.device | None:
    if device_id is None:
        return None
    if isinstance(device_id, bool) or not isinstance(device_id, (torch.device, str, int)):
        raise TypeError(f"`device_id` must be a device or the number of one, got {device_id!r}.")
    try:
        return torch.device(device_id)
    except RuntimeError as error:
        raise ValueError(f"`device_id={device_id!r}` is no device: {error}") from None


def _default_backend(device: torch.device | None) -> str:
    if device is not None:
        return default_backend_for_device(device)
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
