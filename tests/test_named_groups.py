"""Named groups: made on first use by their members only, the same in each generation, ended one by one."""

import copy as copying
import os
import pickle
import sys

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_pgroup import (
    NoGroupError,
    NotInGroupError,
    PGroupDDPStrategy,
    StrategyClosedError,
    WorldSizeError,
    c10d,
    lineage,
)
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks

PAIRS = {"pairs": [[0, 1], [2, 3]]}


def total(rank, group):
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


class InStage(Callback):
    """Calls a function in the middle of a stage, on all ranks."""

    def __init__(self, function):
        self.function, self.found = function, []

    def on_train_start(self, trainer, pl_module):
        self.found.append(self.function(trainer.strategy))


def fit(strategy, *functions, devices=4):
    callbacks = [InStage(function) for function in functions]
    make_trainer(strategy, devices=devices, callbacks=callbacks).fit(TinyModel(), datamodule=TinyData())
    return [callback.found[0] for callback in callbacks]


WRONG = {
    "no dictionary": ([[0, 1]], TypeError, "`groups` must be a dictionary"),
    "a name that is none": ({"a b": [[0]]}, ValueError, r"letters, digits, '_', '-' and '\.', got 'a b'"),
    "an empty name": ({"": [[0]]}, ValueError, "got ''"),
    "a number for a name": ({1: [[0]]}, TypeError, "must be a text, got 1"),
    "no list": ({"a": 3}, TypeError, r"`groups\['a'\]` must be a list of lists of ranks, got 3"),
    "an empty list": ({"a": []}, ValueError, r"`groups\['a'\]` must have at least one"),
    "an empty list in it": ({"a": [[0], []]}, ValueError, r"`groups\['a'\]\[1\]` must have at least one of its ranks"),
    "a rank twice": ({"a": [[0, 1, 0]]}, ValueError, r"`groups\['a'\]\[0\]` has rank 0 twice"),
    "a negative rank": ({"a": [[0], [-1]]}, ValueError, r"`groups\['a'\]\[1\]\[0\]` must be a rank, 0 or more, got -1"),
    "a rank that is none": ({"a": [[0, "1"]]}, TypeError, r"`groups\['a'\]\[0\]\[1\]` must be a rank, a whole number, got '1'"),
    "a truth value": ({"a": [[0, True]]}, TypeError, "got True"),
    "a rank between lists": ({"a": [[0, 1], 2]}, TypeError, r"`groups\['a'\]\[1\]` must be a list of ranks, got 2"),
    "overlapping lists": (
        {"a": [[0, 1], [1, 2]]},
        ValueError,
        r"Rank 1 is in two lists of one group, `groups\['a'\]\[0\]` and",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_at_construction(case):
    groups, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        PGroupDDPStrategy(groups=groups)


def test_an_unknown_process_group_is_named_at_construction():
    with pytest.raises(ValueError, match="`process_group` names the group 'pair', which is not there: 'pairs', 'all'"):
        PGroupDDPStrategy(groups={**PAIRS, "all": [0, 1, 2, 3]}, process_group="pair")
    with pytest.raises(ValueError, match="none is defined"):
        PGroupDDPStrategy(process_group="pairs")


@pytest.mark.parametrize("given", [["pairs"], [0, 1], PAIRS])
def test_a_process_group_that_is_neither_a_name_nor_a_group(given):
    with pytest.raises(TypeError, match="`process_group` must be the name of a group, or a process group, got"):
        PGroupDDPStrategy(groups=PAIRS, process_group=given)


@pytest.mark.parametrize("ranks", [range(2), torch.arange(2), torch.arange(2).numpy(), [torch.arange(2).numpy()]])
def test_ranks_may_be_any_whole_numbers(ranks):
    strategy = PGroupDDPStrategy(groups={"all": ranks})
    assert strategy._groups == PGroupDDPStrategy(groups={"all": [0, 1]})._groups
    assert [type(rank) for rank in strategy._groups["all"].lists[0]] == [int, int]


def test_definitions_travel_with_the_strategy_and_nothing_else_does():
    strategy = PGroupDDPStrategy(groups=PAIRS)
    assert strategy.new_group("one", [3, 0], timeout=5) is None
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy._groups == strategy._groups
    assert copy.new_group("one", [[0, 3]], timeout=5) is None
    for arguments in (
        {"ranks": [[0, 2]], "timeout": 5},
        {"ranks": [[0, 3]]},
        {"ranks": [0, 3], "timeout": 5, "backend": "gloo"},
    ):
        with pytest.raises(ValueError, match=r"The group 'one' is defined already, with \[0, 3\]"):
            copy.new_group("one", **arguments)
    with pytest.raises(ValueError, match=r"`backend='gluon'` names 'gluon'.* does not have"):
        copy.new_group("two", [0, 3], backend="gluon")
    with pytest.raises(TypeError, match=r"`strategy\.group` takes the name of a group, got \[0, 3\]"):
        copy.group([0, 3])
    with pytest.raises(NoGroupError, match="there is no process group"):
        copy.group("one")
    with pytest.raises(ValueError, match=r"`strategy\.group` names the group 'three', which is not there: 'pairs', 'one'"):
        copy.group("three")
    with pytest.raises(ValueError, match=r"`strategy.destroy_group` names"):
        copy.destroy_group("three")
    copy.destroy_group("one")
    shallow = copying.copy(strategy)
    shallow.new_group("later", [0, 3])
    assert list(strategy.defined_groups) == ["pairs", "one"]


def test_from_yaml(tmp_path):
    pytest.importorskip("typeshed_client", reason="needs jsonargparse[signatures]")
    from lightning.pytorch.cli import LightningCLI

    (tmp_path / "config.yaml").write_text("""
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 1
  strategy:
    class_path: lightning_pgroup.PGroupDDPStrategy
    init_args:
      groups:
        all: [[0, 1]]
        some: [1, 0]
        single: [[0], [1]]
      process_group: single
""")

    def job(rank):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
        arguments = ["--config", str(tmp_path / "config.yaml")]
        cli = LightningCLI(TinyModel, run=False, save_config_callback=None, trainer_defaults=quiet, args=arguments)
        cli.trainer.fit(cli.model, datamodule=TinyData())
        strategy = cli.trainer.strategy
        return [(name, strategy.group(name).size()) for name in ("all", "some", "single")]

    assert run_ranks(job) == [[("all", 2), ("some", 2), ("single", 1)]] * 2


def test_groups_over_generations():
    """Four ranks, three generations: values, names, what is shared, ended and made anew, and errors that cost no time."""

    def job(rank):
        pair = (0, 1) if rank < 2 else (2, 3)
        strategy = PGroupDDPStrategy(groups={**PAIRS, "three": [2, 0, 1], "same": [[2, 3], [0, 1]]}, destroy="on_teardown")
        names = set()

        def use(strategy):
            group = strategy.group("pairs")
            assert strategy.group("pairs") is group
            assert total(rank, group) == sum(pair)
            assert lineage.name_of(group) == "pairs"
            assert dist.get_process_group_ranks(group) == list(pair)
            assert group.group_name not in names
            names.add(group.group_name)
            if rank == 3:
                with pytest.raises(NotInGroupError, match=r"Rank 3 of 4 .* 'three', but is in none of its lists"):
                    strategy.group("three")
            else:
                assert total(rank, strategy.group("three")) == 3
            strategy.destroy_group("pairs")
            strategy.destroy_group("pairs")
            assert not c10d.is_alive(group)
            again = strategy.group("pairs")
            assert again is not group
            assert again.group_name not in names
            names.add(again.group_name)
            assert total(rank, again) == sum(pair)
            assert total(rank, strategy.group("same")) == sum(pair)
            odd = strategy.new_group("odd", [1, 3], timeout=9)
            assert (odd is None) == (rank % 2 == 0)
            if odd is not None:
                assert total(rank, odd) == 4
                assert strategy.new_group("odd", [[3, 1]], timeout=9) is odd
            with pytest.raises(WorldSizeError, match=r"'far' .* \[3, 4\], but the process group has ranks 0 to 3"):
                strategy.new_group("far", [3, 4])
            return again

        for _ in range(3):
            (kept,) = fit(strategy, use)
            with pytest.raises(RuntimeError, match=r"gloo|[Cc]onnection"):
                dist.all_reduce(torch.ones(1), group=kept)
            with pytest.raises(NoGroupError, match="Ask for it inside a stage; or between stages"):
                strategy.group("pairs")
            copy = pickle.loads(pickle.dumps(strategy))
            assert list(copy._groups) == ["pairs", "three", "same", "odd"]
        assert len(names) == 6
        strategy.close()
        with pytest.raises(StrategyClosedError):
            strategy.group("pairs")
        with pytest.raises(StrategyClosedError):
            strategy.new_group("more", [0])

    run_ranks(job, size=4)


def test_names_in_different_orders_do_not_wait_in_a_circle():
    """Of nested groups each rank may ask for any first; those outside are not waited for, whatever else they are members of."""

    def made():
        return sorted(name for name in map(lineage.name_of, c10d.all_groups()) if name)

    def job(rank):
        groups = {"all": [0, 1, 2, 3], "b": [0, 1], "a": [0, 1], "two": [0, 2]}
        strategy = PGroupDDPStrategy(groups=groups, timeout=20, destroy="on_teardown")

        def two_of_them(strategy):
            if rank < 2:
                strategy.group("ab"[rank])
            before = made()
            dist.barrier()
            return before

        def from_both_ends(strategy):
            names = [name for name, ranks in groups.items() if rank in ranks]
            sizes = [strategy.group(name).size() for name in (names if rank % 2 else reversed(names))]
            return sorted(sizes), total(rank, strategy.group("all"))

        return fit(strategy, two_of_them) + fit(strategy, from_both_ends)

    results = run_ranks(job, size=4, deadline=40)
    assert [names for names, _ in results] == [["a", "b"], ["a", "b"], [], []]
    assert [sizes for _, sizes in results] == [([2, 2, 2, 4], 6), ([2, 2, 4], 6), ([2, 4], 6), ([4], 6)]


def test_between_stages_as_long_as_the_group_lives():
    def job(rank):
        strategy = PGroupDDPStrategy(groups={"all": [0, 1]})
        trainer = make_trainer(strategy)
        trainer.fit(TinyModel(), datamodule=TinyData())
        group = strategy.group("all")
        assert total(rank, group) == 1
        other = PGroupDDPStrategy(groups={"all": [0, 1]})
        assert other.group("all") is group, "as the default group is shared"
        strategy.destroy_process_group()
        with pytest.raises(NoGroupError):
            strategy.group("all")
        strategy.barrier()
        assert total(rank, strategy.group("all")) == 1

    run_ranks(job)


def test_ranks_that_a_stage_does_not_have_are_named_before_it_starts():
    def job(rank):
        started = []
        for groups, process_group, message in (
            (
                {"far": [[0, 1], [2]]},
                None,
                r"'far' is for the ranks \[0, 1\], \[2\], but this stage has ranks 0 to 1: there is no rank 2",
            ),
            ({"one": [1]}, "one", r"`process_group='one'` lets each rank reduce .* rank 0 is in none of them"),
        ):
            strategy = PGroupDDPStrategy(groups=groups, process_group=process_group)
            trainer = make_trainer(strategy, callbacks=[InStage(started.append)])
            with pytest.raises(WorldSizeError, match=message):
                trainer.fit(TinyModel(), datamodule=TinyData())
        fit(PGroupDDPStrategy(groups={"all": [0, 1]}, process_group="all"), lambda strategy: None, devices=2)
        return started

    assert run_ranks(job) == [[], []]


def test_in_a_group_of_other_code(tmp_path):
    """Which that code makes anew, under the same name of its own."""

    def job(rank):
        strategy = PGroupDDPStrategy(groups={"all": [0, 1]}, timeout=20)
        for number in range(2):
            hook = sys.excepthook
            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{number}", rank=rank, world_size=2)
            sys.excepthook = hook
            trainer = make_trainer(strategy)
            trainer.fit(TinyModel(), datamodule=TinyData())
            group = strategy.group("all")
            strategy.destroy_group("all")
            with pytest.raises((RuntimeError, ValueError)):
                dist.all_reduce(torch.ones(1), group=group)
            assert total(rank, strategy.group("all")) == 1
            dist.destroy_process_group()
            with pytest.raises(NoGroupError):
                strategy.group("all")

    run_ranks(job)


def test_in_forked_workers(tmp_path):
    def job(_):
        def use(strategy):
            assert strategy.new_group("mine", [0, 1]) is strategy.group("mine")
            (tmp_path / f"{strategy.generation}-{strategy.global_rank}").write_text(str(total(1, strategy.group("all"))))

        strategy = PGroupDDPStrategy(groups={"all": [0, 1]}, process_group="all", start_method="fork")
        for _ in range(2):
            make_trainer(strategy, callbacks=[InStage(use)]).fit(TinyModel(), datamodule=TinyData())
            with pytest.raises(NoGroupError):
                strategy.group("all")
        return list(strategy._groups)

    assert run_ranks(job, size=1, bare=True) == [["all"]]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {f"{n}-{r}": "2.0" for n in (1, 2) for r in (0, 1)}


def test_a_child_that_was_forked_in_a_stage_has_no_group():
    """It has a copy of the group, whose connections are its parent's."""

    def job(rank):
        def use(strategy):
            strategy.group("all")
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    strategy.group("all")
                except BaseException as error:
                    os.write(writer, type(error).__name__.encode())
                os._exit(0)
            os.close(writer)
            with os.fdopen(reader) as said:
                answer = said.read()
            os.waitpid(child, 0)
            return answer, total(rank, strategy.group("all"))

        return fit(PGroupDDPStrategy(groups={"all": [0, 1]}), use, devices=2)

    assert run_ranks(job) == [[("NoGroupError", 1.0)]] * 2
