"""The strategy: Lightning's DDP, with an owner for the process group."""

import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_pgroup.claim import Claim, GroupRequest
from lightning_pgroup.config import (
    Duration,
    MetricsName,
    check_backend,
    check_ddp_arguments,
    parse_config,
    parse_devices,
    parse_duration,
    plain,
)
from lightning_pgroup.environment import launched_size_kept
from lightning_pgroup.group_definitions import Ranks
from lightning_pgroup.group_names import GroupNames
from lightning_pgroup.group_request import request_group
from lightning_pgroup.heirs import holders_follow
from lightning_pgroup.lent_parts import LentParts
from lightning_pgroup.lightning_private import get_rank_zero_rank, is_interactive, reset_seed, set_rank_zero_rank
from lightning_pgroup.multiprocessing_launcher import PGroupMultiProcessingLauncher
from lightning_pgroup.policy import OnErrorName, OnMismatchName, PolicyName
from lightning_pgroup.process_state import existing_process_state, process_state
from lightning_pgroup.records import LifecycleEvent
from lightning_pgroup.strategy_collectives import StrategyCollectives
from lightning_pgroup.subprocess_launcher import PGroupSubprocessLauncher

_START_METHODS = ("popen", "spawn", "fork", "forkserver")


class PGroupDDPStrategy(StrategyCollectives, GroupNames, LentParts):
    """``DDPStrategy`` that owns the default process group: it creates it, and destroys it by an explicit policy.

    Args:
        accelerator: The accelerator; by default that of the Trainer.
        parallel_devices: The devices of the ranks on this node, or their names; by default those of the Trainer.
        cluster_environment: Who starts the ranks, and where they meet; by default what Lightning finds.
        checkpoint_io: How checkpoints are written and read.
        precision_plugin: The precision; by default that of the Trainer.
        ddp_comm_state: What a hook for the communication of DDP keeps between its calls.
        ddp_comm_hook: Such a hook, in place of the mean of the gradients.
        ddp_comm_wrapper: Wraps such a hook.
        model_averaging_period: After how many steps a model averager works, which post-local SGD needs.
        process_group_backend: Name of the backend, such as ``"gloo"``, ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``; by default that
            of the device.
        timeout: Bound of each collective: seconds, a ``timedelta``, or the text of one such as ``"0:10:00"``; ``None`` is the
            default of torch for the backend.
        start_method: How Lightning starts the other ranks: ``"popen"`` runs the script again for each, the others make
            processes for each stage.
        destroy: When the group ends: ``"on_teardown"`` (at the end of each stage), ``"per_trainer"`` (when another Trainer
            starts a stage), ``"on_destructor"`` (when the last strategy that used it is collected or closed),
            ``"on_error"`` (when a stage raises), ``"at_exit"``, ``"never"``; or a list: whichever comes first.
        on_error: What happens to the group when a stage raises, before any ``on_exception`` hook: ``"abort"``,
            ``"destroy"`` or ``"keep"``. The default is ``"abort"``, for ``destroy="never"`` it is ``"keep"``.
        on_mismatch: What happens when the living group is another than the one a stage asks for: ``"recreate"``,
            ``"reuse"`` (with a warning) or ``"error"``.
        destroy_timeout: How long an orderly destroy may take, in the same forms; then the group is aborted. It first waits for
            checkpoints that are being written in the background.
        rendezvous_timeout: How long to wait at the start of a stage for ranks that do not come, in the same forms; ``None``
            takes the group's ``timeout``.
        init_method: ``"file://…"``, ``"tcp://…"`` or ``"env://"``: where the ranks meet, instead of the launcher's way.
        pg_options: Options of the backend, as ``torch.distributed.init_process_group`` takes them.
        groups: Named groups: lists of ranks by name, such as ``{"pairs": [[0, 1], [2, 3]]}``; see ``group``.
        metrics: What happens to metrics of ``torchmetrics`` at the end of a stage: ``"compute"`` (computed over all ranks, so
            that their values stay right without the group) or ``"keep"`` (nothing).
        record: A folder, or a file that ends in ``.jsonl``, to which each rank appends one JSON line for each thing that was
            done with the group. What can not be written is said once in the log.
        **ddp_kwargs: Arguments of ``DistributedDataParallel``. ``process_group`` may be a name of ``groups``.

    Raises:
        ValueError: A wrong or contradictory value; the message lists the right ones.
        TypeError: An argument that nobody knows, or a value of the wrong kind.
    """

    strategy_name = "pgroup_ddp"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | list[str] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: Duration | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        *,
        destroy: PolicyName | Iterable[PolicyName] = "per_trainer",
        on_error: OnErrorName | None = None,
        on_mismatch: OnMismatchName = "recreate",
        destroy_timeout: Duration = 30.0,
        rendezvous_timeout: Duration | None = None,
        init_method: str | None = None,
        pg_options: Any = None,
        groups: Mapping[str, Ranks] | None = None,
        metrics: MetricsName = "compute",
        record: str | os.PathLike[str] | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        self._config = parse_config(
            destroy=destroy,
            on_error=on_error,
            on_mismatch=on_mismatch,
            destroy_timeout=destroy_timeout,
            rendezvous_timeout=rendezvous_timeout,
            init_method=init_method,
            pg_options=pg_options,
            metrics=metrics,
            record=record,
        )
        check_backend(process_group_backend)
        if start_method not in _START_METHODS:
            choices = ", ".join(map(repr, _START_METHODS))
            raise ValueError(f"`start_method` must be one of {choices}, got {start_method!r}.")
        ddp_kwargs = {name: plain(value) for name, value in ddp_kwargs.items()}
        check_ddp_arguments(ddp_kwargs, own=set(inspect.signature(PGroupDDPStrategy.__init__).parameters))
        self._define_groups(groups, ddp_kwargs.get("process_group"))
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parse_devices(parallel_devices),
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=plain(ddp_comm_state),
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=None if timeout is None else parse_duration("timeout", timeout),
            start_method=start_method,
            **ddp_kwargs,
        )
        self._claim: Claim | None = None
        self._own_devices = parallel_devices is not None
        self._is_built = True

    @property
    @override
    def has_own_devices(self) -> bool:
        return self._own_devices

    @property
    def generation(self) -> int | None:
        """Number of the living generation that this process owns; ``None`` without one, or for a group of other code."""
        state = existing_process_state()
        return None if state is None else state.lifecycle.generation

    @property
    def events(self) -> list[LifecycleEvent]:
        """What was done with the group while this strategy used it, oldest first; at most the last 10,000 records.

        With workers that are spawned or forked, the parent has those of rank 0, after the stage.
        """
        return [] if self._claim is None else list(self._claim.events)

    def destroy_process_group(self) -> None:
        """End the group now; nothing happens without one. The next stage or collective creates it anew.

        To be called between stages, on each rank; not collective; blocks at most ``destroy_timeout``.

        Raises:
            PGroupError: A stage is running, or the group belongs to other code.
        """
        state = existing_process_state()
        if state is not None:
            state.lifecycle.destroy()

    def close(self) -> None:
        """Give up this strategy's claim to the group for good: it ends, unless another strategy uses it too.

        The policy ``"never"`` keeps it all the same. To be called between stages, on each rank; may be called again; not
        collective; blocks at most ``destroy_timeout``. Stages and collectives of a closed strategy raise.

        Raises:
            PGroupError: One of its stages is running.
        """
        process_state().lifecycle.close(self.claim())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @override
    def claim(self) -> Claim:
        """This strategy's stake in the group of this process, made on the first call. For the launchers."""
        if self._claim is None:
            self._claim = Claim(self._config)
            weakref.finalize(self, _give_up, self._claim).atexit = False
        return self._claim

    @property
    def starts_ranks_itself(self) -> bool:
        """Whether Lightning starts the ranks, so that their number is known to us. For the launchers."""
        environment = self.cluster_environment
        # Ray's environment derives from Lightning's, but has ranks of its own.
        counts = getattr(type(environment), "world_size", None) is LightningEnvironment.world_size
        return isinstance(environment, LightningEnvironment) and counts

    @override
    def ranks_are_there(self) -> bool:
        """Whether the other ranks of a stage run already. Those that Lightning starts do so from their first stage on."""
        environment = self.cluster_environment
        started = environment is not None and environment.creates_processes_externally
        return started or not self.starts_ranks_itself or self.group_size == 1

    @property
    @override
    def group_size(self) -> int:
        """Number of ranks of a stage: what the Trainer asks for where Lightning starts them, else what their launcher says.

        With Ray Train a rank may see nothing but its own device, so that its Trainer knows of one.
        """
        return self.num_nodes * self.num_processes if self.starts_ranks_itself else self.world_size

    @property
    def _runs_alone(self) -> bool:
        """Whether this is a stage of one rank, which each process of a run with more of them runs for itself."""
        # Asked several times in each step, through `root_device`, so what costs less comes first.
        return self.num_nodes * self.num_processes == 1 and self.starts_ranks_itself

    @property
    @override
    def local_rank(self) -> int:
        rank = super().local_rank
        return 0 if rank and self._runs_alone else rank

    @override
    def set_world_ranks(self) -> None:
        rank = get_rank_zero_rank()
        super().set_world_ranks()
        if self._runs_alone and super().local_rank != 0:
            # The process goes on to be a higher rank of its run for all that only rank 0 shows or logs.
            set_rank_zero_rank(rank)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if is_interactive() and self._start_method != "fork":  # Lightning refuses it next, but names a strategy of its own
            raise MisconfigurationException(
                "A notebook or an interactive shell has no script that ranks could run, so that"
                f" start_method={self._start_method!r} does not work here. Use `Trainer(strategy='pgroup_ddp_notebook')`, or"
                " `PGroupDDPStrategy(start_method='fork', ...)`, which forks this process, or run the code as a script."
            )
        if self._start_method == "popen":
            self._launcher = PGroupSubprocessLauncher(self, self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = PGroupMultiProcessingLauncher(self, start_method=self._start_method)

    @override
    def setup_distributed(self) -> None:
        """Get the group of this stage. Collective; called by the Trainer on each rank at the start of each stage."""
        reset_seed()
        self.set_world_ranks()
        self._check_groups()
        self._process_group_backend = self._get_process_group_backend()
        with holders_follow(self), self._collective("setup_distributed"):
            pass

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write a checkpoint, on rank 0. Refused, before anything is written, once the strategy is closed."""
        process_state().lifecycle.check_open(self.claim(), "save_checkpoint")
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def teardown(self) -> None:
        """Unwrap the model. The group lives on: Lightning calls this before ``on_fit_end`` and the ``teardown`` hooks (F8)."""
        try:
            with launched_size_kept():
                super().teardown()
        finally:
            state = existing_process_state()
            if self._claim is not None and state is not None:
                state.lifecycle.finish(self._claim)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_claim": None, "_groups": dict(self._groups)}

    @override
    def request(self) -> GroupRequest:
        """The group that a stage of this strategy asks for. For the launchers."""
        return request_group(self, self._config, self._get_process_group_backend(), self._timeout)


def _give_up(claim: Claim) -> None:
    state = existing_process_state()
    if state is not None:
        state.lifecycle.collected(claim)
