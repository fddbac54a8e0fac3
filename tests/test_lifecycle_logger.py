"""The callback that hands counts and durations to the Trainer's loggers."""

import csv
import logging
import pickle

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_pgroup import LifecycleLogger, PGroupDDPStrategy
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks
from tests.test_records import warnings_of
from tests.test_stage_boundaries import Raises

WHATS = ("created", "reused", "destroyed", "aborted")


def rows(folder):
    log = max(folder.rglob("metrics.csv"))  # the workers of each stage have a version of their own
    return [row for row in csv.DictReader(log.open()) if row.get("pgroup/created")]


def numbers(row):
    return [int(float(row[f"pgroup/{what}"])) for what in WHATS]


def sums(events):
    return [sum(event.duration for event in events if event.what == what) for what in WHATS]


@pytest.mark.parametrize(("destroy", "counts"), [("on_teardown", [2, 0, 2, 0]), ("at_exit", [1, 1, 0, 0])])
def test_counts_and_durations_of_all_stages_reach_the_logger(destroy, counts, tmp_path):
    def job(rank):
        strategy = PGroupDDPStrategy(destroy=destroy)
        trainer = make_trainer(strategy, logger=CSVLogger(tmp_path / str(rank)), callbacks=[LifecycleLogger()])
        trainer.fit(TinyModel(), datamodule=TinyData())
        trainer.test(TinyModel(), datamodule=TinyData(), verbose=False)
        return strategy.events

    events, _ = run_ranks(job)
    last = rows(tmp_path / "0")[-1]
    assert numbers(last) == counts
    assert [float(last[f"pgroup/{what}_seconds"]) for what in WHATS] == pytest.approx(sums(events))
    assert float(last["pgroup/created_seconds"]) > 0
    assert not list((tmp_path / "1").rglob("metrics.csv")), "rank 1 has logged too"


def test_an_abort_is_logged_although_the_stage_has_no_teardown_hook_then(tmp_path):
    def job(rank):
        callbacks = [LifecycleLogger("group"), Raises("on_train_start", ValueError("boom"))]
        trainer = make_trainer(PGroupDDPStrategy(), logger=CSVLogger(tmp_path), callbacks=callbacks)
        with pytest.raises(ValueError, match="boom"):
            trainer.fit(TinyModel(), datamodule=TinyData())

    run_ranks(job)
    (log,) = tmp_path.rglob("metrics.csv")
    row = list(csv.DictReader(log.open()))[-1]
    assert [float(row[f"group/{what}"]) for what in WHATS] == [1, 0, 0, 1]


def test_the_workers_of_each_stage_go_on_counting(tmp_path):
    """Each worker has a copy of all, and its group ends after all hooks."""

    def job(_):
        strategy = PGroupDDPStrategy(start_method="fork")
        trainer = make_trainer(strategy, logger=CSVLogger(tmp_path), callbacks=[LifecycleLogger()])
        trainer.fit(TinyModel(), datamodule=TinyData())
        first = numbers(rows(tmp_path)[-1])
        trainer.test(TinyModel(), datamodule=TinyData(), verbose=False)
        return first, numbers(rows(tmp_path)[-1]), strategy.claim().tally.total

    assert run_ranks(job, size=1, bare=True) == [([1, 0, 1, 0], [2, 0, 2, 0], 4)]


def test_a_logger_that_fails_after_the_stage_is_only_a_warning(tmp_path):
    class Full(CSVLogger):
        def log_metrics(self, metrics, step=None):
            if metrics.get("pgroup/destroyed"):
                raise OSError("no space left")

    def job(rank):
        strategy = PGroupDDPStrategy(destroy="on_teardown")
        trainer = make_trainer(strategy, logger=Full(tmp_path), callbacks=[LifecycleLogger()])
        heard = warnings_of(lambda: trainer.fit(TinyModel(), datamodule=TinyData()))
        return heard, trainer.state.finished

    (first, finished), (second, _) = run_ranks(job)
    assert finished
    assert [line for line in first if "logger" in line] == [
        "a logger did not take what became of the process group: no space left"
    ]
    assert second == []


def test_another_strategy_has_nothing_to_log_and_that_is_said_once(tmp_path):
    callback = LifecycleLogger()

    def twice():
        trainer = make_trainer("auto", devices=1, logger=CSVLogger(tmp_path), callbacks=[callback])
        trainer.fit(TinyModel(), datamodule=TinyData())
        trainer.test(TinyModel(), datamodule=TinyData(), verbose=False)

    assert warnings_of(twice) == ["LifecycleLogger has nothing to log: SingleDeviceStrategy does not own its process group"]
    assert not list(tmp_path.rglob("metrics.csv")) or not rows(tmp_path)
    assert pickle.loads(pickle.dumps(callback))._has_warned
    assert logging.getLogger("lightning_pgroup").handlers == []
