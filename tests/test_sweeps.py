"""Sweeps with failures: 50 Trainers in one script, of which every third fails somewhere, under each policy."""

import pytest
import torch

from lightning_pgroup import PGroupDDPStrategy
from tests.faults import fit
from tests.ranks import run_ranks
from tests.scripts import LAUNCHERS, run

pytestmark = pytest.mark.scripts

POLICIES = ("on_teardown", "per_trainer", "on_destructor", "on_error", "at_exit", "never")
SWEEP = 50

BODY = """
import random
from tests.faults import Boom, PLACES, attempt, fit, same

fresh = torch.load("fresh.pt")
rank = int(os.environ.get("LOCAL_RANK", "0"))  # known before the first stage in a child and under torchrun; 0 else
for destroy in {policies}:
    chance, right, failed, wrong = random.Random(destroy), 0, 0, []
    for number in range({sweep}):
        failing, (part, hook) = chance.randrange(2), chance.choice(PLACES)
        failing = 0 if hook == "prepare_data" else failing
        strategy = PGroupDDPStrategy(timeout=60, destroy=destroy, on_error="abort")
        if number % 3 == 2:
            ended = attempt(strategy, faults=[(part, hook, Boom())] if rank == failing else [])["kind"]
            failed += 1
            if ended not in (["Boom"] if rank == failing else ["RuntimeError", "RendezvousAbandonedError", None]):
                wrong.append((number, part, hook, ended))
        else:
            right += same(fresh, fit(strategy))
    say(destroy, "right", right, "failed", failed, "wrong", wrong)
say("alive", dist.is_initialized())
dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_sweep_of_fifty_trainers_of_which_every_third_fails(launcher, tmp_path):
    """The last policy, "never", leaves its group for other code to end."""
    fresh = run_ranks(lambda rank: fit(PGroupDDPStrategy(destroy="on_teardown")))
    torch.save(fresh[0], tmp_path / "fresh.pt")
    done = run(BODY.format(policies=POLICIES, sweep=SWEEP), tmp_path, launcher=LAUNCHERS[launcher], timeout=280)
    assert done.code == 0, done.err
    failed = sum(number % 3 == 2 for number in range(SWEEP))
    want = [f"{destroy} right {SWEEP - failed} failed {failed} wrong []" for destroy in POLICIES]
    for rank in range(2):
        assert done.said(rank) == [*want, "alive True"], done.err
