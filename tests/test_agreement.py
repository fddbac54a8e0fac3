"""What the ranks decide together, without ranks."""

import json

import pytest

from lightning_pgroup.agreement import ADOPT, CREATE, REFUSE, REUSE, Decision, Report, decide, reports_of


def report(rank, generation=0, highest=None, **kwargs):
    wanted = {"backend": "gloo", "world_size": 3}
    defaults = {"stage": "fit", "wanted": wanted}
    highest = generation if highest is None else highest
    return Report(generation=generation, highest=highest, **{**defaults, **kwargs})


def test_no_group_anywhere_creates_the_first():
    assert decide([report(0), report(1)]) == Decision(action=CREATE, generation=1, why="there was no group")


def test_same_group_everywhere_is_reused():
    decision = decide([report(0, 4), report(1, 4)])
    assert (decision.action, decision.generation) == (REUSE, 4)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_one_rank_has_lost_its_group(lost):
    decision = decide([report(rank, 0 if rank == lost else 5, 5) for rank in range(3)])
    assert (decision.action, decision.generation) == (CREATE, 6)
    assert f"rank {lost}: no group" in decision.why
    assert "generation 5" in decision.why


def test_next_generation_is_one_above_the_highest_of_all():
    assert decide([report(0, 0, 9), report(1, 3, 3)]).generation == 10


def test_one_rank_that_asks_for_a_fresh_group_is_enough():
    decision = decide([report(0, 2), report(1, 2, fresh="per_trainer: another Trainer")])
    assert (decision.action, decision.generation) == (CREATE, 3)
    assert decision.why == "per_trainer: another Trainer"


@pytest.mark.parametrize(
    ("wishes", "action", "generation"),
    [
        (["recreate", "recreate"], CREATE, 3),
        (["reuse", "reuse"], REUSE, 2),
        (["error", "error"], REFUSE, 0),
        (["reuse", "recreate"], CREATE, 3),
        (["reuse", "error"], REFUSE, 0),
        (["recreate", "error"], REFUSE, 0),
    ],
)
def test_mismatch_follows_the_strictest_wish(wishes, action, generation):
    difference = ("timeout: 0:30:00 -> 0:00:20",)
    reports = [report(r, 2, differences=difference, on_mismatch=wish) for r, wish in enumerate(wishes)]
    decision = decide(reports)
    assert (decision.action, decision.generation) == (action, generation)
    assert "timeout: 0:30:00 -> 0:00:20" in decision.why
    assert "ranks 0, 1" in decision.why
    assert decision.mismatch == (action == REFUSE)


def test_a_difference_on_one_rank_is_enough():
    assert decide([report(0, 2), report(1, 2, differences=("device: 'cuda:0' -> 'cuda:1'",))]).action == CREATE


def test_foreign_group_on_all_ranks_is_adopted():
    assert decide([report(0, foreign=True), report(1, foreign=True)]).action == ADOPT


def test_foreign_group_on_some_ranks_is_refused():
    decision = decide([report(0, foreign=True), report(1)])
    assert decision.action == REFUSE
    assert not decision.mismatch
    assert "rank 0: a group of other code" in decision.why


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"stage": "test"}, "stage (ranks 0, 2: 'fit'; rank 1: 'test')"),
        ({"wanted": {"backend": "nccl", "world_size": 3}}, "backend (ranks 0, 2: 'gloo'; rank 1: 'nccl')"),
        ({"wanted": {"backend": "gloo", "world_size": 2}}, "world_size (ranks 0, 2: 3; rank 1: 2)"),
    ],
)
def test_ranks_that_want_different_things_are_refused(change, named):
    decision = decide([report(0), report(1, **change), report(2)])
    assert decision.action == REFUSE
    assert named in decision.why


@pytest.mark.parametrize(
    ("held", "groups", "made"),
    [
        ([["pairs"], [], []], [{"pairs": "x"}] * 3, ("pairs",)),
        ([["pairs"], ["all", "pairs"], []], [{"pairs": "x", "all": "y", "odd": "z"}] * 3, ("all", "pairs")),
        ([[], [], []], [{"pairs": "x"}] * 3, ()),
        ([["pairs"], ["pairs"], []], [{"pairs": "x"}, {"pairs": "x"}, {}], ()),
        ([["pairs"], ["pairs"], []], [{"pairs": "x"}, {"pairs": "x"}, {"pairs": "y"}], ()),
        ([["pairs"], [], []], [{}] * 3, ()),
    ],
)
def test_groups_that_any_rank_holds_are_made_if_all_know_the_same(held, groups, made):
    for generation, action in ((0, CREATE), (5, REUSE)):
        reports = [report(rank, generation, held=tuple(held[rank]), groups=groups[rank]) for rank in range(3)]
        decision = decide(reports)
        assert (decision.action, decision.held) == (action, made)
        assert Decision.from_json(decision.to_json()) == decision
        assert Report.from_payload(json.loads(json.dumps(reports[0].to_payload()))) == reports[0]


def test_many_ranks_are_named_shortly():
    why = decide([report(rank, stage="fit" if rank else "test") for rank in range(1000)]).why
    assert "and 991 more" in why
    assert len(why) < 200


def test_reports_and_decisions_travel_as_json():
    one = report(1, 3, differences=("a", "b"), fresh="x", foreign=True)
    assert Report.from_payload(json.loads(json.dumps(one.to_payload()))) == one
    decision = Decision(action=CREATE, generation=3, why="because", mismatch=True)
    assert Decision.from_json(decision.to_json()) == decision


def test_ranks_that_say_the_same_share_a_report_and_the_decision_is_the_same():
    said = [report(0, 4).to_payload(), report(2, 3).to_payload()]
    shared = reports_of([said[0], said[0], said[1], said[0]])
    assert shared[0] is shared[1] is shared[3]
    single = [report(0, 4), report(1, 4), report(2, 3), report(3, 4)]
    assert shared == single
    assert decide(shared) == decide(single)
    assert "ranks 0, 1, 3: generation 4; rank 2: generation 3" in decide(shared).why
    for change in ({"stage": "test"}, {"wanted": {"backend": "nccl"}}, {"foreign": True}, {"differences": ["x"]}):
        odd = said[0] | change
        assert decide(reports_of([said[0], odd, said[0]])) == decide([Report(**one) for one in (said[0], odd, said[0])])
