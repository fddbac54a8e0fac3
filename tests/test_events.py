"""Records: frozen, complete, one log line each."""

import dataclasses
import logging
import time

import pytest

from lightning_pgroup import LifecycleEvent, PGroupDDPStrategy
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks


def test_events_are_complete_frozen_and_logged():
    def job(rank):
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logger = logging.getLogger("lightning_pgroup")
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        began = time.time()
        strategy = PGroupDDPStrategy(destroy=["on_teardown", "on_error"])
        make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
        lines = [(r.levelname, r.getMessage()) for r in records if r.name == "lightning_pgroup"]
        return began, time.time(), strategy.events, lines

    for rank, (began, ended, events, lines) in enumerate(run_ranks(job)):
        assert [event.what for event in events] == ["created", "destroyed"]
        for event in events:
            assert (event.generation, event.stage, event.rank, event.world_size) == (1, "fit", rank, 2)
            assert (event.backend, event.policy) == ("gloo", ("on_error", "on_teardown"))
            assert began <= event.start <= ended
            assert 0 < event.duration < ended - began
            assert event.why
            with pytest.raises(dataclasses.FrozenInstanceError):
                event.what = "x"
        assert len(lines) == len(events)
        for (level, line), event in zip(lines, events, strict=True):
            assert level == "INFO"
            assert line.startswith(f"[rank {rank}/2 gen 1] process group (gloo) {event.what} for fit in ")
            assert event.why in line


def test_the_list_is_a_copy_and_bounded():
    strategy = PGroupDDPStrategy()
    assert strategy.events == []
    strategy.events.append("x")
    assert strategy.events == []
    names = [field.name for field in dataclasses.fields(LifecycleEvent)]
    assert " ".join(names) == "what why generation policy stage rank world_size backend start duration run attempt trainer"
    assert strategy.claim().events.maxlen == 10_000


def test_public_names_are_frozen():
    import lightning_pgroup

    assert sorted(lightning_pgroup.__all__) == [
        "GarbledStoreError",
        "GroupLostError",
        "GroupMismatchError",
        "LifecycleEvent",
        "LifecycleLogger",
        "NoGroupError",
        "NotInGroupError",
        "PGroupDDPStrategy",
        "PGroupError",
        "RanksDisagreeError",
        "RanksFailedError",
        "RendezvousAbandonedError",
        "RendezvousTimeoutError",
        "StoreLostError",
        "StrategyClosedError",
        "WorldSizeError",
        "__version__",
        "destroy_process_group",
        "process_group",
    ]
