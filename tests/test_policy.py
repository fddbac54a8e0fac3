"""The policy table, exhaustively, against the contract written out a second time, by hand."""

import itertools

import pytest

from lightning_pgroup.policy import (
    Action,
    DestroyPolicy,
    Event,
    OnError,
    OnMismatch,
    Ownership,
    action_for,
    parse_on_error,
    parse_on_mismatch,
    parse_policies,
)

NAMES = ["on_teardown", "per_trainer", "on_destructor", "on_error", "at_exit"]
COMBINATIONS = [{"never"}] + [
    set(names) for count in range(1, len(NAMES) + 1) for names in itertools.combinations(NAMES, count)
]

# event -> names of the policies that end the group then; None: all but "never"
CONTRACT = {
    Event.STAGE_END: {"on_teardown"},
    Event.ERROR_HANDLED: {"on_teardown"},
    Event.NEXT_TRAINER: {"per_trainer"},
    Event.STRATEGY_COLLECTED: {"on_destructor"},
    Event.STRATEGY_CLOSED: None,
    Event.WORKER_END: None,
    Event.EXIT: None,
}


def expected(event: Event, names: set[str], on_error: str, ownership: Ownership, in_use: bool) -> Action:
    if ownership is not Ownership.OWNED:
        return Action.KEEP
    if event is Event.USER_REQUEST:
        return Action.KEEP if in_use else Action.DESTROY
    if in_use and event not in (Event.EXIT, Event.WORKER_END):
        return Action.KEEP
    if event is Event.STAGE_ERROR:
        return {"abort": Action.ABORT, "destroy": Action.DESTROY, "keep": Action.KEEP}[on_error]
    ending = CONTRACT[event]
    ends = "never" not in names if ending is None else bool(ending & names)
    return Action.DESTROY if ends else Action.KEEP


@pytest.mark.parametrize("event", Event)
def test_table_is_the_contract(event):
    cells = itertools.product(COMBINATIONS, OnError, Ownership, (False, True))
    for names, on_error, ownership, in_use in cells:
        got = action_for(event, parse_policies(sorted(names)), on_error, ownership, in_use=in_use)
        want = expected(event, names, on_error.value, ownership, in_use)
        assert got is want, (event, names, on_error, ownership, in_use)


def test_contract_names_every_event():
    assert set(CONTRACT) | {Event.USER_REQUEST, Event.STAGE_ERROR} == set(Event)


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("ownership", [Ownership.FOREIGN, Ownership.NONE])
def test_a_group_that_is_not_ours_is_never_touched(event, ownership):
    for names, on_error in itertools.product(COMBINATIONS, OnError):
        assert action_for(event, parse_policies(sorted(names)), on_error, ownership) is Action.KEEP


@pytest.mark.parametrize("names", COMBINATIONS, ids=lambda names: "+".join(sorted(names)))
def test_every_policy_but_never_ends_the_group_at_exit(names):
    action = action_for(Event.EXIT, parse_policies(sorted(names)), OnError.ABORT, Ownership.OWNED)
    assert (action is Action.KEEP) == (names == {"never"})


def test_parse_policies_takes_a_name_a_list_and_the_enum():
    assert parse_policies("on_teardown") == {DestroyPolicy.ON_TEARDOWN}
    assert parse_policies(["on_error", "at_exit"]) == {DestroyPolicy.ON_ERROR, DestroyPolicy.AT_EXIT}
    assert parse_policies(DestroyPolicy.NEVER) == {DestroyPolicy.NEVER}
    assert parse_policies(("at_exit", "at_exit")) == {DestroyPolicy.AT_EXIT}


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("on_tear_down", ValueError, r"`destroy` must be one of 'on_teardown', .*'never', got 'on_tear_down'"),
        (["at_exit", "x"], ValueError, "got 'x'"),
        ([], ValueError, "`destroy` is empty"),
        (["never", "at_exit"], ValueError, "'never'` stands alone, but it came together with 'at_exit'"),
        (None, TypeError, "name or a list of names"),
        (3, TypeError, "name or a list of names"),
    ],
)
def test_parse_policies_refuses(value, error, message):
    with pytest.raises(error, match=message):
        parse_policies(value)


def test_default_of_on_error_depends_on_the_policy():
    for names in COMBINATIONS:
        want = OnError.KEEP if names == {"never"} else OnError.ABORT
        assert parse_on_error(None, parse_policies(sorted(names))) is want


def test_on_error_policy_contradicts_keep():
    with pytest.raises(ValueError, match=r"on_error='abort'` or `on_error='destroy'"):
        parse_on_error("keep", parse_policies(["on_error", "at_exit"]))


def test_unknown_names_list_the_right_ones():
    with pytest.raises(ValueError, match="`on_error` must be one of 'abort', 'destroy', 'keep', got 'ignore'"):
        parse_on_error("ignore", parse_policies("at_exit"))
    with pytest.raises(ValueError, match="`on_mismatch` must be one of 'recreate', 'reuse', 'error', got 'x'"):
        parse_on_mismatch("x")
    assert parse_on_mismatch("reuse") is OnMismatch.REUSE
