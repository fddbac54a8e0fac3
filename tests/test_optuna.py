"""The example of a study: all ranks see the same trials, of which some are pruned and some fail."""

import importlib.util
import sys

import pytest

from tests.ranks import run_ranks
from tests.scripts import LAUNCHERS, ROOT, finish, start_command

EXAMPLE = ROOT / "examples" / "optuna_study.py"


@pytest.mark.scripts
@pytest.mark.timeout(200)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_all_ranks_see_the_same_ten_trials_and_the_same_best_one(launcher, tmp_path):
    storage = ["--storage", f"sqlite:///{tmp_path}/study.db"] if launcher == "python" else []
    command = [*(LAUNCHERS[launcher] or [sys.executable]), str(EXAMPLE), "--epochs", "1", *storage]
    done = finish(start_command(command, tmp_path), timeout=170)
    assert done.code == 0, done.err
    said = [
        [line.removeprefix(f"rank {rank}: ") for line in done.out.splitlines() if line.startswith(f"rank {rank}: ")]
        for rank in (0, 1)
    ]
    assert said[0] == said[1], done.err
    states = [line.split()[2] for line in said[0][:-1]]
    assert [line.split()[:2] for line in said[0][:-1]] == [["trial", str(number)] for number in range(10)]
    assert states[:4] == ["COMPLETE", "COMPLETE", "PRUNED", "FAIL"]  # those that were asked for
    assert said[0][-1].startswith("best (")
    assert (tmp_path / "study.db").exists() is bool(storage)


def load_example():
    spec = importlib.util.spec_from_file_location("optuna_study", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_alone_fails_the_trial_on_all_and_the_next_one_is_well(failing, monkeypatch):
    """In its last hook, where the other rank has come to the end of its stage without an error; and in the first step."""
    for name, value in (("KMP_DUPLICATE_LIB_OK", "True"), ("KMP_INIT_AT_FORK", "FALSE")):
        monkeypatch.setenv(name, value)  # scikit-learn sets them when it is first imported
    example = load_example()

    def study(rank):
        def fail(trainer, module):
            if trainer.global_rank == failing:
                raise RuntimeError("boom")

        one = example.Study(storage=None, epochs=1)
        for hook in (None, "on_fit_end", "on_train_start", None):
            if hook:
                setattr(example.SharedTrial, hook, lambda self, trainer, module: fail(trainer, module))
            trainer = one.run()
            if hook:
                delattr(example.SharedTrial, hook)
        best = one.best(trainer)
        trainer.strategy.close()
        return one.seen, best

    first, second = run_ranks(study)
    assert first == second
    seen, best = first
    assert [number for number, _, _ in seen] == [0, 1, 2, 3]
    assert [state for _, _, state in seen] == ["COMPLETE", "FAIL", "FAIL", "FAIL"]  # the last by its learning rate
    assert best[0] == 0
