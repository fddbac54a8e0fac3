"""``lightning-pgroup explain``: what happens to the group at each event, asked of the policy table and said in words."""

import argparse
from collections.abc import Callable, Iterable

from lightning_pgroup.policy import (
    Action,
    DestroyPolicy,
    Event,
    OnError,
    Ownership,
    Policies,
    action_for,
    parse_on_error,
    parse_policies,
)

HELP = "Say what happens to the process group at each event, for a choice of policies."

WORDS = {
    Event.STAGE_END: "a stage ends, after its last teardown hook",
    Event.STAGE_ERROR: "a stage raises, before any on_exception hook",
    Event.ERROR_HANDLED: "the Trainer has torn down a stage that raised",
    Event.NEXT_TRAINER: "another Trainer starts a stage in this process",
    Event.STRATEGY_COLLECTED: "the last strategy that used it is garbage-collected",
    Event.STRATEGY_CLOSED: "the last strategy that used it is closed",
    Event.USER_REQUEST: "destroy_process_group() is called",
    Event.WORKER_END: "a spawned or forked worker returns",
    Event.EXIT: "the interpreter exits",
}
ACTIONS = {Action.KEEP: "kept", Action.DESTROY: "destroyed", Action.ABORT: "aborted"}
GONE = "gone already"

_MEANINGS = {
    Action.KEEP: "nothing is done to it; destroy_process_group() raises, unless told foreign=True of a group of other code",
    Action.DESTROY: "an orderly end; one that takes longer than destroy_timeout becomes an abort",
    Action.ABORT: "the other ranks are told, the connections are cut, and nobody waits",
}
_SUBJECTS = (
    "A group that a strategy of ours has created",
    "One that a stage still runs in, at the end of another stage inside it for example,",
    "A group that other code has created",
)
_COLUMNS = ("when", "our group", "a stage runs in it", "of other code")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, which are those of the strategy."""
    parser.add_argument(
        "--destroy",
        nargs="+",
        metavar="POLICY",
        default=[DestroyPolicy.PER_TRAINER.value],
        help=f"when the group ends, one name or several: {_listed(DestroyPolicy)} (default: {DestroyPolicy.PER_TRAINER.value})",
    )
    parser.add_argument(
        "--on-error",
        metavar="ACTION",
        help=f"what happens to it when a stage raises: {_listed(OnError)} (default: abort, or keep with never)",
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Explain the policies that were given.

    Raises:
        ValueError: An unknown name, or a contradiction.
    """
    policies = parse_policies(arguments.destroy)
    for line in explain(policies, parse_on_error(arguments.on_error, policies)):
        say(line)
    return 0


def explain(policies: Policies, on_error: OnError) -> list[str]:
    """What happens at each event: first in words, then as a table."""
    names = [policy.value for policy in DestroyPolicy if policy in policies]
    shown = f'"{names[0]}"' if len(names) == 1 else "[" + ", ".join(f'"{name}"' for name in names) + "]"
    cells = {event: _cells(event, policies, on_error) for event in Event}
    lines = [f'destroy={shown}, on_error="{on_error.value}"', ""]
    for column, subject in enumerate(_SUBJECTS):
        lines += _sentences(subject, {event: row[column] for event, row in cells.items()})
    lines += _table([_COLUMNS, *((WORDS[event], *row) for event, row in cells.items())])
    lines += ["", *(f"{ACTIONS[action]}: {meaning}" for action, meaning in _MEANINGS.items())]
    return lines


def _cells(event: Event, policies: Policies, on_error: OnError) -> tuple[str, str, str]:
    """What happens to a group of ours, to one that a stage still runs in, and to one of other code."""

    def ask(ownership: Ownership, *, in_use: bool = False) -> str:
        def action(event: Event) -> Action:
            return action_for(event, policies, on_error, ownership, in_use=in_use)

        if event is Event.ERROR_HANDLED and action(Event.STAGE_ERROR) is not Action.KEEP:
            return GONE
        return ACTIONS[action(event)]

    return ask(Ownership.OWNED), ask(Ownership.OWNED, in_use=True), ask(Ownership.FOREIGN)


def _sentences(subject: str, outcomes: dict[Event, str]) -> list[str]:
    said = [outcome for outcome in (*ACTIONS.values(), GONE) if outcome in outcomes.values()]
    if len(said) == 1:
        return [f"{subject} is always {said[0]}.", ""]
    lines: list[str] = []
    for outcome in said:
        lines.append(f"{subject} is {outcome} when" if not lines else f"It is {outcome} when")
        lines += [f"- {WORDS[event]}" for event, found in outcomes.items() if found == outcome]
    return [*lines, ""]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _listed(kind: Iterable[DestroyPolicy] | Iterable[OnError]) -> str:
    return ", ".join(member.value for member in kind)
