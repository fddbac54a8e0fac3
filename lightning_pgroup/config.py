"""What a user asked of a strategy, checked once, when it is built."""

import difflib
import functools
import inspect
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_pgroup.policy import (
    DestroyPolicy,
    OnError,
    OnMismatch,
    Policies,
    parse_on_error,
    parse_on_mismatch,
    parse_policies,
)
from lightning_pgroup.record_file import parse_record

_SET_BY_LIGHTNING = frozenset({"module", "device_ids"})
_DDP_ARGUMENTS = frozenset(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "kwargs"}
_NO_CHOICE = ("undefined", "fake")

COMPUTE = "compute"
KEEP = "keep"

MetricsName = Literal["compute", "keep"]
"""What may happen to metrics at the end of a stage."""

Duration = float | str | timedelta
"""A time span: seconds, a ``timedelta``, or the text of one, such as ``"0:00:30"`` or ``"1 day, 12:00:00"``."""

_DURATION_TEXT = re.compile(r"(?:(\d+) days?, )?(\d+):([0-5]\d):([0-5]\d(?:\.\d{1,6})?)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LifecycleConfig:
    """The arguments of :class:`~lightning_pgroup.PGroupDDPStrategy` that concern the life of the group."""

    policies: Policies
    on_error: OnError
    on_mismatch: OnMismatch
    destroy_timeout: timedelta
    rendezvous_timeout: timedelta | None
    init_method: str | None
    pg_options: Any
    compute_metrics: bool = True
    record: str | None = None

    @property
    def policy_names(self) -> tuple[str, ...]:
        """The names of the policies, sorted, for records and messages."""
        return _names_of(self.policies)


@functools.cache
def _names_of(policies: Policies) -> tuple[str, ...]:
    return tuple(sorted(policy.value for policy in policies))


def parse_config(
    *,
    destroy: str | DestroyPolicy | Iterable[str | DestroyPolicy],
    on_error: str | OnError | None,
    on_mismatch: str | OnMismatch,
    destroy_timeout: Duration,
    rendezvous_timeout: Duration | None,
    init_method: str | None,
    pg_options: Any,
    metrics: str = COMPUTE,
    record: str | os.PathLike[str] | None = None,
) -> LifecycleConfig:
    """Check the arguments of a strategy against each other. Touches neither network nor processes.

    Raises:
        ValueError: A wrong or contradictory value; the message lists the right ones.
        TypeError: A value of the wrong kind.
    """
    policies = parse_policies(destroy)
    return LifecycleConfig(
        policies=policies,
        on_error=parse_on_error(on_error, policies),
        on_mismatch=parse_on_mismatch(on_mismatch),
        destroy_timeout=parse_duration("destroy_timeout", destroy_timeout),
        rendezvous_timeout=(None if rendezvous_timeout is None else parse_duration("rendezvous_timeout", rendezvous_timeout)),
        init_method=_parse_init_method(init_method),
        pg_options=_check_options(plain(pg_options)),
        compute_metrics=_parse_metrics(metrics),
        record=parse_record(record),
    )


def plain(value: Any) -> Any:
    """Turn the containers of OmegaConf, which Hydra hands over, into plain ones; all else stays what it is."""
    if not type(value).__module__.startswith("omegaconf."):
        return value
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, Sequence) else value


def parse_duration(argument: str, value: Duration) -> timedelta:
    """Turn seconds, a ``timedelta`` or the text of one into a ``timedelta``.

    Raises:
        ValueError: Zero, negative, infinite or not a number: every wait has a bound. Or a text in another form.
        TypeError: Neither a number nor a ``timedelta`` nor a text.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str, timedelta)):
        raise TypeError(f"`{argument}` must be a number of seconds, a `timedelta` or a text such as '0:00:30', got {value!r}.")
    seconds = _seconds(argument, value)
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"`{argument}` must be more than 0 seconds and finite, got {value!r}.")
    try:
        return timedelta(seconds=seconds)
    except OverflowError:
        raise ValueError(f"`{argument}` must be at most {timedelta.max.days} days, got {value!r}.") from None


def _seconds(argument: str, value: Duration) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if not isinstance(value, str):
        return float(value)
    match = _DURATION_TEXT.fullmatch(value.strip())
    if match is None:
        raise ValueError(
            f"`{argument}` must be a number of seconds, or hours:minutes:seconds such as '0:00:30', with days before it such as"
            f" '1 day, 12:00:00', got {value!r}."
        )
    days, hours, minutes, seconds = match.groups()
    return float(days or 0) * 86400 + float(hours) * 3600 + float(minutes) * 60 + float(seconds)


def parse_devices(devices: Sequence[torch.device | str] | None) -> list[torch.device] | None:
    """Turn names of devices, as they stand in a configuration, into devices.

    Raises:
        ValueError: A name that torch does not know.
        TypeError: Neither a list nor ``None``, or something in it that is no device.
    """
    if devices is None:
        return None
    if isinstance(devices, str) or not all(isinstance(device, (torch.device, str)) for device in devices):
        raise TypeError(f"`parallel_devices` must be a list of devices or of their names, got {devices!r}.")
    try:
        return [torch.device(device) for device in devices]
    except RuntimeError as error:
        raise ValueError(f"`parallel_devices` has the name of no device: {error}") from None


def check_backend(backend: str | None, argument: str = "process_group_backend") -> None:
    """Refuse a backend that this build of torch does not have.

    Args:
        backend: A name such as ``"gloo"``, a mixed form such as ``"cpu:gloo,cuda:nccl"``, or ``None`` for the default of
            the device.
        argument: The name of the argument, for messages.

    Raises:
        ValueError: At least one part is unknown or not built in; the message lists those that are there.
        TypeError: Not a string.
    """
    if backend is None:
        return
    if not isinstance(backend, str):
        raise TypeError(f"`{argument}` must be a string or None, got {backend!r}.")
    names = [part.rsplit(":", 1)[-1].strip() for part in backend.split(",")]
    missing = [name for name in names if not name or not dist.is_backend_available(name)]
    if missing:
        known = [n for n in dist.Backend.backend_list if n not in _NO_CHOICE and dist.is_backend_available(n)]
        raise ValueError(
            f"`{argument}={backend!r}` names {', '.join(map(repr, missing))}, which this build of torch does"
            f" not have. It has: {', '.join(map(repr, known))}."
        )


def check_ddp_arguments(arguments: Mapping[str, Any], own: Set[str]) -> None:
    """Refuse keyword arguments that ``DistributedDataParallel`` does not take.

    Args:
        arguments: What would be handed on to it.
        own: The parameters of the strategy, for a hint at what may have been meant.

    Raises:
        TypeError: The message lists what both take.
    """
    taken = sorted(_SET_BY_LIGHTNING & set(arguments))
    if taken:
        raise TypeError(f"{', '.join(map(repr, taken))} of `DistributedDataParallel` is set by Lightning, do not give it.")
    unknown = sorted(set(arguments) - _DDP_ARGUMENTS)
    if not unknown:
        return
    ours, ddp = own - {"self", "ddp_kwargs"}, _DDP_ARGUMENTS - _SET_BY_LIGHTNING
    near = [one for name in unknown for one in difflib.get_close_matches(name, ours | ddp, 1)]
    hint = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
    raise TypeError(
        f"Neither `PGroupDDPStrategy` nor `DistributedDataParallel` knows {', '.join(map(repr, unknown))}.{hint} The former"
        f" takes: {', '.join(sorted(ours))}; the latter: {', '.join(sorted(ddp))}."
    )


def _check_options(pg_options: object) -> object:
    if isinstance(pg_options, Mapping) and "class_path" in pg_options:
        path = pg_options["class_path"]
        raise TypeError(
            f"`pg_options` still is {dict(pg_options)!r}: the configuration could not build {path!r}. Name a class of your own,"
            " in Python, that derives from the options of the backend and takes as arguments what it shall set."
        )
    return pg_options


def _parse_metrics(metrics: str) -> bool:
    if metrics not in (COMPUTE, KEEP):
        raise ValueError(f"`metrics` must be one of {COMPUTE!r}, {KEEP!r}, got {metrics!r}.")
    return metrics == COMPUTE


def _parse_init_method(init_method: str | None) -> str | None:
    if init_method is None:
        return None
    if not isinstance(init_method, str):
        raise TypeError(f"`init_method` must be a string or None, got {init_method!r}.")
    if not _is_complete(init_method):
        raise ValueError(
            f"`init_method` must be 'env://', 'tcp://' with host:port, or 'file://' with a path on a file system that all"
            f" ranks share, got {init_method!r}."
        )
    return init_method


def _is_complete(init_method: str) -> bool:
    try:
        url = urlparse(init_method)
        complete = {"env": True, "tcp": bool(url.hostname and url.port), "file": bool(url.path)}
    except ValueError:  # a port that is no number, or an address that is none
        return False
    return complete.get(url.scheme, False) and "://" in init_method
