"""The runtime state of this process: made on first use, ended at exit, and clean again after a fork.

Importing the package or building a strategy makes none of it.
"""

import atexit
import os
import sys
import weakref
from datetime import timedelta

from torch.distributed import ProcessGroup

from lightning_pgroup import c10d, interrupts
from lightning_pgroup.bounded import run_bounded
from lightning_pgroup.lifecycle import Lifecycle
from lightning_pgroup.membership import LEAVE_TIMEOUT, Membership
from lightning_pgroup.named_groups import NamedGroups
from lightning_pgroup.policy import Event
from lightning_pgroup.store import leak


class ProcessState:
    """What one process has: its membership in a run, the owner of its group, and the named groups in that."""

    def __init__(self, inherited: "weakref.ref[ProcessGroup] | None" = None) -> None:
        self.membership = Membership()
        self.lifecycle = Lifecycle(self.membership, inherited)
        self.named_groups = NamedGroups(self.lifecycle)

    def end(self) -> None:
        """End the group and leave the run. Bounded by ``destroy_timeout`` and 5 s."""
        try:
            self.lifecycle.end_of_process(Event.EXIT)
        finally:
            self._leave()

    def _leave(self) -> None:
        # On a thread, since an operation on the store of a stopped process does not return.
        run_bounded(self.membership.leave, LEAVE_TIMEOUT + timedelta(seconds=1), "leave")


class _ExitCode:
    """Ends the process with a code of its own when the interpreter drops it, which is after all exit handlers."""

    def __init__(self, code: int) -> None:
        self._code = code
        self._exit = os._exit  # the module may have lost its names by then

    def __del__(self) -> None:
        self._exit(self._code)


_exit_code: _ExitCode | None = None
_state: ProcessState | None = None
_inherited: "weakref.ref[ProcessGroup] | None" = None
_registered = False


def process_state() -> ProcessState:
    """The state of this process, made on the first call."""
    global _state, _registered
    if _state is None:
        _state = ProcessState(_inherited)
    if not _registered:
        _registered = True
        atexit.register(_at_exit)
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
    return _state


def existing_process_state() -> ProcessState | None:
    """The state of this process, if it was needed before."""
    return _state


def _at_exit() -> None:
    global _exit_code
    if _state is None:
        return
    _state.end()
    code = _state.membership.children.wait(LEAVE_TIMEOUT)
    if code and not _ends_with_traceback():
        # The run has failed, so that the process that started it must not end as if all were well.
        _exit_code = _ExitCode(code)


def _ends_with_traceback() -> bool:
    """Whether this process ends by an exception that nobody has caught, and so with an exit code of its own that is not 0."""
    trace = getattr(sys, "last_traceback", None)
    # Also set where C code prints an exception and goes on, but not with the bottom of the stack in it.
    return trace is not None and trace.tb_frame.f_back is None


def _before_fork() -> None:
    # The child would have half a destructor, and whatever lock that holds.
    if _state is not None:
        _state.lifecycle.finish_releases()


def _after_fork_in_child() -> None:
    global _state, _inherited
    interrupts.forget()
    # Stores and groups have threads, which stay behind in the parent. Torch's own bookkeeping is left as it is: the workers of
    # a data loader ask it for their rank.
    if _state is not None:
        leak(_state)
        _state = None
    group = c10d.default_group()
    if group is not None:
        leak(group)
        _inherited = weakref.ref(group)
