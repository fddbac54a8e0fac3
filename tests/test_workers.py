"""Ranks that are forked or spawned: where their stages end, and what the parent gets to know (F22, F23)."""

import multiprocessing
import os
import signal
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_pgroup import PGroupDDPStrategy, multiprocessing_launcher
from lightning_pgroup.process_state import process_state
from tests.models import TinyData, TinyModel, make_trainer, whats
from tests.ranks import run_ranks
from tests.scripts import run
from tests.test_stage_boundaries import Raises, rank_sum


class Writes(Callback):
    """Notes, in files, what each worker sees in the last hook."""

    def __init__(self, folder):
        self.folder = folder

    def teardown(self, trainer, pl_module, stage):
        total = rank_sum(trainer.global_rank)
        (self.folder / f"{stage.value}-{trainer.global_rank}").write_text(f"{total} {trainer.strategy.generation}")


@pytest.mark.parametrize("destroy", ["on_teardown", "per_trainer", "at_exit", "on_destructor"])
def test_f22_forked_workers_have_the_group_in_the_last_hook_and_the_parent_gets_the_records(destroy, tmp_path):
    def job(_):
        strategy = PGroupDDPStrategy(destroy=destroy, start_method="fork")
        trainer = make_trainer(strategy, callbacks=[Writes(tmp_path)])
        model = TinyModel()
        before = model.layer.weight.detach().clone()
        trainer.fit(model, datamodule=TinyData())
        trainer.test(model, datamodule=TinyData(), verbose=False)
        learned = not model.layer.weight.equal(before)
        hosted = process_state().membership._hosted
        return whats(strategy), [e.why for e in strategy.events], learned, dist.is_initialized(), hosted.num_keys()

    events, whys, learned, alive, keys = run_ranks(job, size=1, bare=True)[0]
    stages = ("fit", "test") if destroy == "on_teardown" else ("", "")
    assert events == [
        ("fit", "created", 1),
        (stages[0], "destroyed", 1),
        ("test", "created", 2),
        (stages[1], "destroyed", 2),
    ]
    assert whys[1] == ("on_teardown: the stage ended" if destroy == "on_teardown" else "the worker process returns")
    assert learned
    assert not alive
    assert keys <= 1, "the runs have left keys in the parent's store"
    seen = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert seen == {"fit-0": "1.0 1", "fit-1": "1.0 1", "test-0": "1.0 2", "test-1": "1.0 2"}


def test_f22_on_exception_and_teardown_run_only_in_the_parent_and_the_worker_ends_its_group(tmp_path):
    """The worker gets neither hook, so that the launcher has to end the group, and does."""

    class Who(PGroupDDPStrategy):
        def on_exception(self, exception):
            (tmp_path / f"on_exception-{os.getpid()}").touch()
            super().on_exception(exception)

    class Look(Raises):
        def _raise(self, trainer, *args, **kwargs):
            (tmp_path / f"worker-{os.getpid()}").touch()
            raise ValueError("in a worker")

    def job(_):
        strategy = Who(start_method="fork", destroy="on_teardown")
        trainer = make_trainer(strategy, callbacks=[Look("on_fit_end", None)])
        with pytest.raises(Exception, match="in a worker"):
            trainer.fit(TinyModel(), datamodule=TinyData())
        assert [what for _, what, _ in whats(strategy)] == ["created", "aborted"]
        # The parent goes on; the next stage follows the generations of the failed one.
        second = PGroupDDPStrategy(start_method="fork", destroy="on_teardown")
        make_trainer(second).fit(TinyModel(), datamodule=TinyData())
        return os.getpid(), whats(second), dict(os.environ).get("LOCAL_RANK")

    parent, events, local_rank = run_ranks(job, size=1, bare=True)[0]
    assert [path.name for path in tmp_path.glob("on_exception-*")] == [f"on_exception-{parent}"]
    assert not (tmp_path / f"worker-{parent}").exists()
    assert events == [("fit", "created", 2), ("fit", "destroyed", 2)]
    assert local_rank is None


def test_f27_fork_after_a_stage_of_one_rank():
    """Plain DDP hangs here past any timeout: the workers inherit the parent's group of size 1."""

    def job(_):
        make_trainer(PGroupDDPStrategy(destroy="at_exit"), devices=1).fit(TinyModel(), datamodule=TinyData())
        inherited = dist.is_initialized()
        strategy = PGroupDDPStrategy(destroy="on_teardown", start_method="fork")
        trainer = make_trainer(strategy)
        trainer.fit(TinyModel(), datamodule=TinyData())
        world_sizes = {event.world_size for event in strategy.events}
        return inherited, world_sizes, whats(strategy), trainer.world_size

    events = [("fit", "created", 2), ("fit", "destroyed", 2)]
    assert run_ranks(job, size=1, bare=True, deadline=30) == [(True, {2}, events, 2)]


def test_per_trainer_ends_the_parents_group_before_it_forks():
    def job(_):
        first = PGroupDDPStrategy()
        make_trainer(first, devices=1).fit(TinyModel(), datamodule=TinyData())
        make_trainer(PGroupDDPStrategy(start_method="fork")).fit(TinyModel(), datamodule=TinyData())
        return whats(first), dist.is_initialized()

    assert run_ranks(job, size=1, bare=True) == [([("fit", "created", 1), ("", "destroyed", 1)], False)]


def test_collectives_in_the_parent_are_local_for_it_is_no_rank(tmp_path):
    def job(_):
        strategy = PGroupDDPStrategy(start_method="fork")
        trainer = make_trainer(strategy)
        trainer.fit(TinyModel(), datamodule=TinyData())
        strategy.barrier()
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        return strategy.broadcast("parent"), dist.is_initialized()

    assert run_ranks(job, size=1, bare=True, deadline=30) == [("parent", False)]


def test_one_worker():
    def job(_):
        strategy = PGroupDDPStrategy(start_method="fork", destroy="on_teardown")
        trainer = make_trainer(strategy, devices=1)
        trainer.fit(TinyModel(), datamodule=TinyData())
        trainer.validate(TinyModel(), datamodule=TinyData(), verbose=False)
        return whats(strategy)

    want = [("fit", "created", 1), ("fit", "destroyed", 1), ("validate", "created", 2), ("validate", "destroyed", 2)]
    assert run_ranks(job, size=1, bare=True) == [want]


def test_a_closed_strategy_starts_no_workers():
    def job(_):
        from lightning_pgroup import StrategyClosedError

        strategy = PGroupDDPStrategy(start_method="fork")
        strategy.close()
        with pytest.raises(StrategyClosedError):
            make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())

    run_ranks(job, size=1, bare=True)


SPAWN = """
class Total(Callback):
    def teardown(self, trainer, pl_module, stage):
        total = torch.tensor([float(trainer.global_rank)])
        dist.all_reduce(total)
        print(f"SAY {trainer.global_rank} {stage.value} {total.item()} {trainer.strategy.generation}\\n", end="", flush=True)

strategy = PGroupDDPStrategy(start_method="spawn", destroy="%s")
trainer = make_trainer(strategy, callbacks=[Total()])
trainer.fit(TinyModel(), datamodule=TinyData())
trainer.test(TinyModel(), datamodule=TinyData(), verbose=False)
print("EVENTS", whats(strategy), os.environ.get("LOCAL_RANK"), os.environ.get("MASTER_PORT"))
"""


@pytest.mark.scripts
def test_f22_f23_spawned_workers(tmp_path):
    # A class in `main` can not be pickled, so the body goes to the top of a module of its own.
    (tmp_path / "callbacks.py").write_text(
        "import torch, torch.distributed as dist\nfrom lightning.pytorch import Callback\n"
        + SPAWN[SPAWN.index("class Total") : SPAWN.index("strategy = ")]
    )
    body = "from callbacks import Total\n" + SPAWN[SPAWN.index("strategy = ") :] % "per_trainer"
    done = run(body, tmp_path, timeout=110)
    assert done.code == 0, done.err
    assert done.said() == ["0 fit 1.0 1", "0 test 1.0 2", "1 fit 1.0 1", "1 test 1.0 2"]
    want = [("fit", "created", 1), ("", "destroyed", 1), ("test", "created", 2), ("", "destroyed", 2)]
    assert f"EVENTS {want} None None" in done.out
    assert "Error" not in done.err


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_parent_raises_the_first_failure_however_late_its_worker_ends(culprit):
    """The worker that fails because of it has ended long before, and would be the one whose exception the parent sees."""

    class Fails(TinyModel):
        def training_step(self, batch, batch_idx):
            if self.global_rank == culprit:
                multiprocessing.util.Finalize(None, threading.Event().wait, args=(0.5,), exitpriority=1)
                raise ValueError("the cause")
            return super().training_step(batch, batch_idx)

    def job(_):
        with pytest.raises(Exception, match="the cause") as caught:
            make_trainer(PGroupDDPStrategy(start_method="fork")).fit(Fails(), datamodule=TinyData())
        return str(caught.value)

    (message,) = run_ranks(job, size=1, bare=True)
    assert f"Process {culprit} terminated" in message
    assert message.splitlines()[-2:][0] == "ValueError: the cause"
    assert "Connection" not in message


@pytest.mark.parametrize("deaf", [False, True])
def test_an_interrupt_of_the_parent_alone_ends_the_workers(deaf, tmp_path):
    """Their parent waits for them, so that nothing of theirs is left; one that does not hear it is killed."""

    class Long(TinyModel):
        def training_step(self, batch, batch_idx):
            if self.global_step == 5 and self.global_rank == 0:
                os.kill(parent, signal.SIGINT)
            elif self.global_step == 5 and deaf:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                threading.Event().wait()
            return super().training_step(batch, batch_idx)

    def job(_):
        nonlocal parent
        parent = os.getpid()
        if deaf:
            multiprocessing_launcher.INTERRUPTED_END = timedelta(seconds=0.5)
        strategy = PGroupDDPStrategy(start_method="fork")
        with pytest.raises(SystemExit):
            make_trainer(strategy, max_epochs=-1).fit(Long(), datamodule=TinyData())
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it from then on
        left = multiprocessing.active_children()
        after = PGroupDDPStrategy(start_method="fork")
        make_trainer(after).fit(TinyModel(), datamodule=TinyData())
        return left, [what for _, what, _ in whats(strategy)], [what for _, what, _ in whats(after)]

    parent, told = 0, [] if deaf else ["created", "aborted"]  # who is killed leaves no records
    assert run_ranks(job, size=1, bare=True, deadline=40) == [([], told, ["created", "destroyed"])]
