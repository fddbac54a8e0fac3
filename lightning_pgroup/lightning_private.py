"""The private names of Lightning that this package needs, all of them.

A Lightning release that moves one breaks this file and no other; ``tests/test_lightning_private.py`` says which name moved.
"""

import contextlib
import os
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver as ChildProcessObserver
from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device as default_backend_for_device
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.call import _call_and_handle_interrupt as call_and_handle_interrupt
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExitException
from lightning.pytorch.utilities.rank_zero import rank_zero_only as lightning_rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from typing_extensions import override

__all__ = [
    "ChildProcessObserver",
    "MultiProcessingLauncher",
    "PatientObserver",
    "SIGTERMException",
    "SubprocessScriptLauncher",
    "TunerExitException",
    "default_backend_for_device",
    "dismiss_process_observers",
    "failing_hook",
    "get_rank_zero_rank",
    "hydra_command",
    "in_error_handling",
    "is_interactive",
    "requested_devices",
    "reset_seed",
    "set_num_threads_if_needed",
    "set_rank_zero_rank",
]


def requested_devices(trainer: Trainer) -> int | None:
    """How many devices per node the user gave to ``Trainer(devices=…)``, or ``None`` if that can not be known."""
    flag = getattr(trainer._accelerator_connector, "_devices_flag", None)
    if isinstance(flag, int):
        return flag
    return len(flag) if isinstance(flag, Sequence) and not isinstance(flag, str) else None


def is_interactive() -> bool:
    """Whether this process is a notebook or an interactive shell, as Lightning has found when it was imported."""
    return bool(_IS_INTERACTIVE)


def get_rank_zero_rank() -> int | None:
    """The rank by which ``rank_zero_only`` decides what this process shows and logs."""
    rank: int | None = getattr(utilities_rank_zero_only, "rank", None)
    return rank


def set_rank_zero_rank(rank: int | None) -> None:
    """Set the rank by which ``rank_zero_only`` decides, in both places that have one."""
    for function in (lightning_rank_zero_only, utilities_rank_zero_only):
        function.rank = rank  # type: ignore[attr-defined]


def in_error_handling() -> bool:
    """Whether this thread is somewhere inside a Trainer's stage, its handling of an exception included.

    Walks the stack; to be called only after a stage has raised.
    """
    code = call_and_handle_interrupt.__code__
    return any(frame.f_code is code for frame, _ in traceback.walk_stack(None))


def dismiss_process_observers() -> None:
    """Let the threads that kill this process, with SIGKILL, when a rank that it has started has failed do so no more."""
    for thread in threading.enumerate():
        if isinstance(thread, ChildProcessObserver):
            thread._child_processes = []


@contextlib.contextmanager
def hydra_command(command: Callable[[int], tuple[Sequence[str], str]]) -> Iterator[None]:
    """During the block, let Lightning start the other ranks of a job of Hydra by ``command`` instead of its own."""
    module: Any = subprocess_script
    own = module._hydra_subprocess_cmd
    module._hydra_subprocess_cmd = command
    try:
        yield
    finally:
        module._hydra_subprocess_cmd = own


class PatientObserver(ChildProcessObserver):
    """Lightning's thread that kills all ranks when one has failed, but only those that have not noticed it themselves.

    Args:
        child_processes: The ranks that this process has started.
        patience: How long this process may take to leave its stage once one of them has failed, seconds.
    """

    def __init__(self, child_processes: Sequence["subprocess.Popen[bytes]"], patience: float) -> None:
        super().__init__(main_pid=os.getpid(), child_processes=list(child_processes), sleep_period=1)
        self._patience = patience
        self._failed_at: float | None = None

    @override
    def _run(self) -> bool:
        if any(child.poll() for child in self._child_processes):
            self._failed_at = self._failed_at or time.monotonic()
            if time.monotonic() - self._failed_at < self._patience:
                return False
        return super()._run()


_CALLERS = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_lightning_datamodule_hook", "_call_strategy_hook")


def failing_hook(error: BaseException) -> str:
    """The innermost of Lightning's hooks that ``error`` came through; empty if it came through none."""
    hooks = [
        str(frame.f_locals.get("hook_name", ""))
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name in _CALLERS
    ]
    return hooks[-1] if hooks else ""
