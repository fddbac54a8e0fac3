"""Ranks as further runs of the user's script (``start_method="popen"``), or as processes that somebody else started."""

import atexit
import contextlib
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import MPIEnvironment
from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_pgroup import environment, gloo_interface
from lightning_pgroup.errors import WorldSizeError
from lightning_pgroup.hydra_job import rank_command
from lightning_pgroup.lightning_private import (
    SubprocessScriptLauncher,
    dismiss_process_observers,
    hydra_command,
    set_num_threads_if_needed,
)
from lightning_pgroup.process_state import process_state
from lightning_pgroup.stage_call import StageCall, check_devices
from lightning_pgroup.sweep import job_of_ranks, leave_earlier_job, run_watched
from lightning_pgroup.team import ENVIRONMENT_VARIABLE

if TYPE_CHECKING:
    from lightning_pgroup.strategy import PGroupDDPStrategy


class PGroupSubprocessLauncher(SubprocessScriptLauncher):
    """Lightning's launcher for scripts, which also hosts the store, counts the processes and marks where a stage ends.

    Args:
        strategy: The strategy that it launches for.
        cluster_environment: As for Lightning's launcher.
        num_processes: Ranks on this node.
        num_nodes: Number of nodes.
    """

    def __init__(
        self,
        strategy: "PGroupDDPStrategy",
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks, if that is this launcher's task, and run ``function`` as one stage of this rank.

        Called by the Trainer on each rank, at the start of each stage.

        Raises:
            WorldSizeError: There are not as many processes as the stage asks for.
        """
        leave_earlier_job()
        call = StageCall(self._strategy, function, trainer, in_worker=False)
        state = process_state()
        if isinstance(self.cluster_environment, MPIEnvironment):
            # Its ranks find the address by a collective of their own, a new one for each Trainer: here all are, and later
            # perhaps only some.
            state.membership.keep_main_address(self._strategy.request().place)
        try:
            self._check(trainer)
        except WorldSizeError:
            state.lifecycle.refuse(self._strategy.claim())
            raise
        if self._strategy.group_size == 1:
            return self._launch_alone(call, *args, **kwargs)
        if state.membership.children:
            # So that `kill` reaches the ranks that an earlier Trainer has started.
            self.procs = list(state.membership.children)
        if job_of_ranks(self.num_nodes) is None:
            return super().launch(call, *args, trainer=trainer, **kwargs)
        return super().launch(run_watched, state.membership, call, *args, trainer=trainer, **kwargs)

    def _check(self, trainer: Trainer | None) -> None:
        size = self._strategy.group_size
        check_devices(trainer, self._strategy)
        if self._strategy.starts_ranks_itself:
            process_state().membership.check_size(size)
        if size > 1:
            process_state().membership.check_children()

    def _launch_alone(self, call: StageCall, *args: Any, **kwargs: Any) -> Any:
        """Run a stage of one rank: there is no process to start, and the environment shows no rank afterwards (F27)."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        set_num_threads_if_needed(num_processes=self.num_processes)
        if self.cluster_environment.creates_processes_externally:
            return call(*args, **kwargs)
        with environment.restored_afterwards():
            os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
            os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
            os.environ["NODE_RANK"] = str(self.cluster_environment.node_rank())
            os.environ["LOCAL_RANK"] = str(self.cluster_environment.local_rank())
            os.environ["WORLD_SIZE"] = "1"
            return call(*args, **kwargs)

    @override
    def kill(self, signum: int) -> None:
        """Hand a signal on to the ranks that this one has started; called by Lightning's handler, and after Ctrl-C.

        On SIGTERM the handler goes on to a broadcast, which hangs unless all ranks are in it (F28): the group is dropped first.
        """
        hand_on = partial(super().kill, signum)
        if signum == signal.SIGTERM:
            process_state().lifecycle.terminate(self._strategy.claim(), hand_on)
            return
        hand_on()
        if signum == signal.SIGKILL:
            # Lightning ends the other ranks so after Ctrl-C; neither its thread nor we may take that for a failure of theirs.
            dismiss_process_observers()
            process_state().membership.children.killed = True

    @override
    def _call_children_scripts(self) -> None:
        before = environment.snapshot()
        state = process_state()
        membership = state.membership
        # Over several nodes each node starts its own ranks, and all meet at the main address.
        invitation = membership.invite(self.num_processes, state.lifecycle.highest_generation) if self.num_nodes == 1 else None
        job = job_of_ranks(self.num_nodes)
        try:
            if invitation is not None:
                os.environ[ENVIRONMENT_VARIABLE] = invitation.to_environment()
            with gloo_interface.hidden(), contextlib.nullcontext() if job is None else hydra_command(rank_command):
                super()._call_children_scripts()
        except BaseException:
            for child in self.procs:
                child.kill()
            environment.restore(before)
            raise
        finally:
            os.environ.pop(ENVIRONMENT_VARIABLE, None)
        membership.children.processes = tuple(self.procs)
        membership.job, membership.before = job, before
        # Once this process exits, another rank that fails hurts nobody, and must not take its exit code.
        atexit.register(dismiss_process_observers)
        if invitation is not None:
            membership.join(invitation)
