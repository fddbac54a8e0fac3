"""Fit on all devices, then test on one, as Lightning's documentation advises: the other ranks leave, rank 0 goes on alone."""

import json

import pytest
import torch.distributed as dist

from lightning_pgroup import PGroupDDPStrategy
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks
from tests.scripts import TORCHRUN, run
from tests.single_device import ROWS, ScoredModel, evaluated

STRATEGIES = ["auto", "ours", "ddp"]
"""Plain DDP last, since it leaves its group behind."""


def evaluate_all(model):
    found = {strategy: evaluated(model, strategy) for strategy in STRATEGIES}
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def in_a_process_of_its_own():
    """What a process that has never been a rank measures, and is warned of."""
    return run_ranks(lambda _: evaluate_all(ScoredModel()), size=1, bare=True, check_leaks=False)[0]


def check(found, expected):
    """The same numbers, and no other warning than there is in a process that has never been a rank."""
    assert list(found) == STRATEGIES
    for strategy, (alive, count, right, size, warnings) in found.items():
        *numbers, usual = expected[strategy]
        assert numbers == [False, ROWS, True, 1]
        assert [alive, count, right, size] == numbers, strategy
        assert set(warnings) <= set(usual), strategy


def test_before_its_first_stage_a_strategy_for_two_ranks_has_nobody_to_talk_to_after_a_stage_of_one_rank():
    def work(_):
        make_trainer(devices=1).fit(TinyModel(), TinyData())
        strategy = PGroupDDPStrategy(timeout=5)
        make_trainer(strategy)
        strategy.barrier()
        return strategy.broadcast(3)

    assert run_ranks(work, size=1, bare=True) == [3]


SCRIPT = """
import json
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.WARNING)
from tests.single_device import ScoredModel, evaluated
model = ScoredModel()
trainer = make_trainer(PGroupDDPStrategy(destroy="on_teardown"))
trainer.fit(model, datamodule=TinyData())
{leave}
if trainer.is_global_zero:
    say("found", json.dumps({{name: evaluated(model, name{how}) for name in {strategies}}}))
"""

RUNS = {
    "python": (None, "if not trainer.is_global_zero: sys.exit(0)", ""),
    # There Lightning refuses a strategy for ranks with one device, unless it is told not to look at what torchrun says.
    "torchrun": (TORCHRUN, "", ", alone_by='plugin'"),
}


@pytest.mark.scripts
@pytest.mark.parametrize("name", RUNS)
def test_f34_the_other_ranks_leave_and_rank_0_tests_alone(name, tmp_path, in_a_process_of_its_own):
    launcher, leave, how = RUNS[name]
    done = run(SCRIPT.format(leave=leave, how=how, strategies=STRATEGIES), tmp_path, launcher=launcher)
    assert done.code == 0, done.err
    (line,) = done.said()
    check(json.loads(line.split(" ", 2)[2]), in_a_process_of_its_own)
    assert done.err == ""


@pytest.mark.parametrize("end", ["destroy_process_group", "close"])
def test_f34_so_it_does_with_the_default_policy_after_a_destroy_by_hand(end, in_a_process_of_its_own):
    def job(rank):
        model, strategy = ScoredModel(), PGroupDDPStrategy()
        make_trainer(strategy).fit(model, datamodule=TinyData())
        getattr(strategy, end)()
        if rank == 0:
            return evaluate_all(model)
        return None

    found, _ = run_ranks(job, check_leaks=False)
    check(found, in_a_process_of_its_own)


def test_f34_so_does_the_parent_of_workers(in_a_process_of_its_own):
    def job(_):
        model = ScoredModel()
        make_trainer(PGroupDDPStrategy(start_method="fork")).fit(model, datamodule=TinyData())
        return evaluate_all(model)

    check(run_ranks(job, size=1, bare=True, check_leaks=False)[0], in_a_process_of_its_own)
