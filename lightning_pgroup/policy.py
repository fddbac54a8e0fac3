"""When a process group dies: the pure table from (event, policies, ownership) to an action.

Nothing here knows torch or Lightning. The part that owns the group asks :func:`action_for` at each event and carries the
answer out; what each event means for a user is said in the README and checked, line by line, by ``tests/test_policy.py``.
"""

from collections.abc import Iterable
from enum import Enum, StrEnum
from typing import Literal, TypeVar

PolicyName = Literal["on_teardown", "per_trainer", "on_destructor", "on_error", "at_exit", "never"]
"""The names of :class:`DestroyPolicy`, as type checkers and command lines show them; so are the next two."""

OnErrorName = Literal["abort", "destroy", "keep"]
OnMismatchName = Literal["recreate", "reuse", "error"]


class DestroyPolicy(StrEnum):
    """The moments at which an owned group ends. Several may be combined: whichever comes first."""

    ON_TEARDOWN = "on_teardown"
    PER_TRAINER = "per_trainer"
    ON_DESTRUCTOR = "on_destructor"
    ON_ERROR = "on_error"
    AT_EXIT = "at_exit"
    NEVER = "never"


class OnError(StrEnum):
    """What happens to an owned group when a stage raises."""

    ABORT = "abort"
    DESTROY = "destroy"
    KEEP = "keep"


class OnMismatch(StrEnum):
    """What happens when a living group differs from the one that a stage asks for."""

    RECREATE = "recreate"
    REUSE = "reuse"
    ERROR = "error"


class Event(Enum):
    """What can happen to a group."""

    STAGE_END = "the stage ended"
    STAGE_ERROR = "the stage raised"
    ERROR_HANDLED = "the failed stage was torn down"
    NEXT_TRAINER = "another Trainer started a stage"
    STRATEGY_COLLECTED = "the last strategy that used it was garbage-collected"
    STRATEGY_CLOSED = "the last strategy that used it was closed"
    USER_REQUEST = "destroy_process_group() was called"
    WORKER_END = "the worker process returns"
    EXIT = "the interpreter exits"


class Ownership(Enum):
    """Whose group it is: nobody's (there is none), ours, or that of code which created it before us."""

    NONE = "none"
    OWNED = "owned"
    FOREIGN = "foreign"


class Action(Enum):
    """What to do with the group."""

    KEEP = "keep"
    DESTROY = "destroy"
    ABORT = "abort"


Policies = frozenset[DestroyPolicy]

_ENDS_AT: dict[Event, DestroyPolicy] = {
    Event.STAGE_END: DestroyPolicy.ON_TEARDOWN,
    Event.ERROR_HANDLED: DestroyPolicy.ON_TEARDOWN,
    Event.NEXT_TRAINER: DestroyPolicy.PER_TRAINER,
    Event.STRATEGY_COLLECTED: DestroyPolicy.ON_DESTRUCTOR,
}
_LAST_CHANCE = frozenset({Event.WORKER_END, Event.EXIT})
_ON_ERROR_ACTION = {OnError.ABORT: Action.ABORT, OnError.DESTROY: Action.DESTROY, OnError.KEEP: Action.KEEP}


def action_for(event: Event, policies: Policies, on_error: OnError, ownership: Ownership, *, in_use: bool = False) -> Action:
    """Say what an event does to the group of this process.

    Args:
        event: What happened.
        policies: The policies of the strategy that used the group last.
        on_error: What that strategy wants after an exception.
        ownership: Whose group it is.
        in_use: Whether a stage that still runs, or another strategy, uses the group. Only the end of the process is
            stronger than that.

    Returns:
        The action to carry out. A group that is not ours, or not there, is always kept as it is.
    """
    if ownership is not Ownership.OWNED:
        return Action.KEEP
    if event is Event.USER_REQUEST:
        return Action.KEEP if in_use else Action.DESTROY
    if event in _LAST_CHANCE:
        return Action.KEEP if DestroyPolicy.NEVER in policies else Action.DESTROY
    if in_use:
        return Action.KEEP
    if event is Event.STAGE_ERROR:
        return _ON_ERROR_ACTION[on_error]
    if event is Event.STRATEGY_CLOSED:
        return Action.KEEP if DestroyPolicy.NEVER in policies else Action.DESTROY
    return Action.DESTROY if _ENDS_AT[event] in policies else Action.KEEP


def reason(event: Event) -> str:
    """Why a group ended at ``event``, in words, with the policy that asked for it."""
    policy = _ENDS_AT.get(event)
    return event.value if policy is None else f"{policy.value}: {event.value}"


def parse_policies(value: str | DestroyPolicy | Iterable[str | DestroyPolicy]) -> Policies:
    """Turn the ``destroy`` argument into a set of policies.

    Args:
        value: One name or several.

    Returns:
        The policies, at least one.

    Raises:
        ValueError: An unknown name, no name at all, or ``"never"`` together with another.
        TypeError: Something that is neither a name nor a collection of names.
    """
    if isinstance(value, str):
        names: list[str | DestroyPolicy] = [value]
    elif isinstance(value, Iterable):
        names = list(value)
    else:
        raise TypeError(f"`destroy` must be a name or a list of names from {_choices(DestroyPolicy)}, got {value!r}.")
    policies = frozenset(_parse(DestroyPolicy, "destroy", name) for name in names)
    if not policies:
        raise ValueError(f"`destroy` is empty. Name at least one of {_choices(DestroyPolicy)}.")
    if DestroyPolicy.NEVER in policies and len(policies) > 1:
        others = ", ".join(sorted(repr(p.value) for p in policies - {DestroyPolicy.NEVER}))
        raise ValueError(f"`destroy='never'` stands alone, but it came together with {others}. Drop one or the other.")
    return policies


def parse_on_error(value: str | OnError | None, policies: Policies) -> OnError:
    """Turn the ``on_error`` argument into its enum; ``None`` takes the default that fits ``policies``.

    Raises:
        ValueError: An unknown name, or ``"keep"`` although the policies destroy on errors.
    """
    if value is None:
        return OnError.KEEP if DestroyPolicy.NEVER in policies else OnError.ABORT
    on_error = _parse(OnError, "on_error", value)
    if on_error is OnError.KEEP and DestroyPolicy.ON_ERROR in policies:
        raise ValueError(
            "`destroy` has 'on_error' but `on_error='keep'` keeps the group after an error. Use `on_error='abort'` or"
            " `on_error='destroy'`, or take 'on_error' out of `destroy`."
        )
    return on_error


def parse_on_mismatch(value: str | OnMismatch) -> OnMismatch:
    """Turn the ``on_mismatch`` argument into its enum.

    Raises:
        ValueError: An unknown name.
    """
    return _parse(OnMismatch, "on_mismatch", value)


_E = TypeVar("_E", bound=Enum)


def _parse(kind: type[_E], argument: str, value: object) -> _E:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"`{argument}` must be one of {_choices(kind)}, got {value!r}.") from None


def _choices(kind: type[Enum]) -> str:
    return ", ".join(repr(member.value) for member in kind)
