"""What makes one process group differ from another, in a form that can be compared, sent and read."""

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

SHARED_FIELDS = ("backend", "world_size", "timeout", "init_method")
"""The fields in which all ranks of one group must agree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSignature:
    """The properties of a group that its users rely on.

    Attributes:
        backend: Name of the backend, possibly mixed (``"cpu:gloo,cuda:nccl"``).
        world_size: Number of ranks.
        rank: This process's rank.
        timeout: Bound of each collective, in seconds; ``None`` is torch's default for the backend.
        device: This rank's device.
        pg_options: Text form of the backend options; empty without any.
        init_method: As given by the user; empty if not.
    """

    backend: str
    world_size: int
    rank: int
    timeout: float | None
    device: str
    pg_options: str
    init_method: str

    def differences(self, wanted: "GroupSignature") -> tuple[str, ...]:
        """Name each field in which ``wanted`` differs, with its old and new value."""
        if self == wanted:
            return ()
        old, new = asdict(self), asdict(wanted)
        return tuple(f"{name}: {_show(name, old[name])} -> {_show(name, new[name])}" for name in old if old[name] != new[name])

    def shared(self) -> dict[str, Any]:
        """The fields that all ranks of one group must have in common, ready for JSON."""
        return {name: getattr(self, name) for name in SHARED_FIELDS}


def describe_options(options: object) -> str:
    """Turn backend options into a text that is equal for equal options.

    The option classes of torch compare by identity, so their plain attributes are listed instead.
    """
    if options is None:
        return ""
    if isinstance(options, (str, int, float, bool, dict, list, tuple)):
        return repr(options)
    plain = (str, int, float, bool, timedelta, type(None))
    parts = []
    for name in sorted(dir(options)):
        if name.startswith("__"):
            continue
        value = getattr(options, name, None)
        if isinstance(value, plain):
            parts.append(f"{name}={value!r}")
    return f"{type(options).__name__}({', '.join(parts)})"


def _show(name: str, value: Any) -> str:
    if name == "timeout":
        return "default" if value is None else str(timedelta(seconds=value))
    return repr(value) if value != "" else "none"
