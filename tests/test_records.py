"""Records on disk: one whole line for each event and rank, whoever starts the ranks, and never a stage that fails for them."""

import itertools
import json
import logging
import os
import pickle
import re
import resource
import sys
import threading
import time
from dataclasses import fields, replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_pgroup import LifecycleEvent, PGroupDDPStrategy, record_file, stage_call
from lightning_pgroup.record_file import BLOCK, append, read_records
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks
from tests.scripts import ROOT, run
from tests.test_stage_boundaries import Raises

EVENT = LifecycleEvent(
    what="created", why="x", generation=1, policy=("at_exit",), stage="fit", rank=0, world_size=2, backend="gloo",
    start=1.5, duration=0.25, run="", attempt=None,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _first_trainer(monkeypatch):
    """Trainers are counted from 1, whatever ran before in the process from which the ranks are forked."""
    monkeypatch.setattr(stage_call, "_counter", itertools.count(1))


def fit(strategy, **kwargs):
    make_trainer(strategy, **kwargs).fit(TinyModel(), datamodule=TinyData())


def on_disk(event, pid):
    return {"schema": 1, **json.loads(json.dumps(event.to_payload())), "host": os.uname().nodename, "pid": pid}


def without_ends(record):
    return {name: value for name, value in record.items() if name != "ended"}


def warnings_of(function):
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("lightning_pgroup")
    logger.addHandler(handler)
    try:
        function()
    finally:
        logger.removeHandler(handler)
    return lines


def test_a_folder_gets_one_file_for_each_rank_with_all_that_happened(tmp_path):
    def job(rank):
        one = PGroupDDPStrategy(destroy="on_teardown", record=tmp_path / "new" / "records")
        two = PGroupDDPStrategy(record=str(tmp_path / "new" / "records"))
        fit(one)
        with pytest.raises(ValueError, match="boom"):
            fit(two, callbacks=[Raises("on_train_start", ValueError("boom"))])
        two.barrier()
        two.close()
        return [on_disk(event, os.getpid()) for event in [*one.events, *two.events]]

    events = run_ranks(job)
    files = sorted((tmp_path / "new" / "records").iterdir())
    assert [file.name.split("-")[:2] for file in files] == [["rank", "0"], ["rank", "1"]]
    for file, expected in zip(files, events, strict=True):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [without_ends(line) for line in lines] == expected
        assert [len(line["ended"]) for line in lines] == [0, 1, 0, 1, 0, 1]
        for begin, end in itertools.pairwise(lines):
            assert all(begin["start"] + begin["duration"] <= ended <= end["start"] for ended in end["ended"])
        assert [(one["what"], one["trainer"]) for one in expected] == [
            ("created", 1), ("destroyed", 1), ("created", 2), ("aborted", 2), ("created", None), ("destroyed", None),
        ]  # fmt: skip
        assert expected[3]["why"] == "the stage raised ValueError: boom"
        assert {len(line) for line in file.read_bytes().splitlines(keepends=True)} == {BLOCK}
    both = read_records(tmp_path / "new" / "records")
    assert len(both) == 12
    assert [one["start"] for one in both] == sorted(one["start"] for one in both)


def test_a_file_gets_the_lines_of_all_ranks_and_each_event_once(tmp_path):
    path = tmp_path / "all.jsonl"

    def job(rank):
        os.chdir(tmp_path)
        first, second = (PGroupDDPStrategy(destroy="at_exit", record="all.jsonl") for _ in range(2))
        os.chdir("/")
        fit(first)
        fit(second)
        second.destroy_process_group()  # both use it, and both have it in their lists
        return first.events[-1] == second.events[-1]

    assert run_ranks(job) == [True, True]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    seen = sorted((one["rank"], one["what"], one["trainer"]) for one in lines)
    assert seen == sorted((rank, *each) for rank in range(2) for each in (("created", 1), ("reused", 2), ("destroyed", 2)))


def test_a_group_that_other_code_has_ended_and_one_that_it_has_made(tmp_path):
    def job(rank):
        strategy = PGroupDDPStrategy(destroy="at_exit", record=tmp_path)
        hook = sys.excepthook
        fit(strategy)
        dist.destroy_process_group()
        fit(strategy)
        strategy.destroy_process_group()
        dist.init_process_group("gloo", rank=rank, world_size=2)
        fit(strategy)
        dist.destroy_process_group()
        sys.excepthook = hook

    run_ranks(job)
    records = read_records(tmp_path)
    for rank in range(2):
        told = [(one["what"], one["generation"], one["run"] == "") for one in records if one["rank"] == rank]
        assert told == [
            ("created", 1, False), ("lost", 1, False), ("created", 2, False), ("destroyed", 2, False), ("adopted", 0, True),
        ]  # fmt: skip


@pytest.mark.parametrize("path", ["records", "records.jsonl"])
def test_forked_workers_write_their_lines_themselves_and_the_parent_writes_none(path, tmp_path):
    def job(_):
        strategy = PGroupDDPStrategy(start_method="fork", record=tmp_path / path)
        trainer = make_trainer(strategy)
        trainer.fit(TinyModel(), datamodule=TinyData())
        trainer.test(TinyModel(), datamodule=TinyData(), verbose=False)
        return os.getpid(), [event.what for event in strategy.events]

    ((parent, known),) = run_ranks(job, size=1, bare=True)
    records = read_records(tmp_path / path)
    assert known == ["created", "destroyed"] * 2
    for rank in range(2):
        mine = [one for one in records if one["rank"] == rank]
        assert [(one["what"], one["trainer"], one["generation"]) for one in mine] == [
            ("created", 1, 1), ("destroyed", 1, 1), ("created", 1, 2), ("destroyed", 1, 2),
        ]  # fmt: skip
    assert len(records) == 8
    assert len({one["pid"] for one in records} - {parent}) == 4


@pytest.mark.scripts
def test_spawned_workers_write_their_lines_themselves(tmp_path):
    body = """
    strategy = PGroupDDPStrategy(start_method="spawn", record="records")
    make_trainer(strategy).fit(TinyModel(), datamodule=TinyData())
    say(os.getpid(), *[event.what for event in strategy.events])
    """
    done = run(body, tmp_path, timeout=110)
    assert done.code == 0, done.err
    ((_, parent, *known),) = [line.split() for line in done.said()]
    assert known == ["created", "destroyed"]
    records = read_records(tmp_path / "records")
    assert sorted((one["rank"], one["what"]) for one in records) == [(r, w) for r in range(2) for w in known]
    assert int(parent) not in {one["pid"] for one in records}


def test_a_reader_never_meets_half_a_line(tmp_path):
    path, lines, whys = tmp_path / "all.jsonl", 250, ["short", "longer " * 30, "long, with ümläuts " * 80]

    def job(rank):
        for number in range(lines):
            append(str(path), replace(EVENT, rank=rank, why=whys[number % 3], generation=number))

    path.touch()
    reads, halves, over = 0, [], threading.Event()
    descriptor = os.open(path, os.O_RDONLY)

    def read():
        nonlocal reads
        while not over.is_set():
            if chunk := os.read(descriptor, 1 << 20):
                reads += 1
                if not chunk.endswith(b"\n"):
                    halves.append(chunk[-80:])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        run_ranks(job, size=3)
    finally:
        over.set()
        reader.join()
        os.close(descriptor)
    assert not halves
    assert reads > 20, "nobody read while they wrote"
    assert sorted((one["rank"], one["generation"]) for one in read_records(path)) == [
        (r, n) for r in range(3) for n in range(lines)
    ]


@pytest.mark.parametrize("why", ["x" * 5000, "ü" * 5000, "🙂" * 5000, "\ud800" * 900, 'a"\n\\' * 900])
def test_a_long_reason_is_cut_so_that_the_line_lies_in_one_page(why, tmp_path):
    path = str(tmp_path / "x.jsonl")
    append(path, replace(EVENT, why=why))
    (line,) = (tmp_path / "x.jsonl").read_bytes().splitlines(keepends=True)
    assert len(line) == BLOCK
    cut = json.loads(line)["why"]
    assert cut.endswith("…")
    assert why.startswith(cut[:-1])
    assert len(cut) > 50


def test_what_stood_in_the_file_before_stays_and_spoils_no_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"schema": 1, "start": 0.5, "wh')
    append(str(path), EVENT)
    append(str(path), EVENT)
    assert path.read_text().startswith('{"schema": 1, "start": 0.5, "wh  ')
    assert path.stat().st_size == 3 * BLOCK
    assert [without_ends(one) for one in read_records(path)] == [on_disk(EVENT, os.getpid())] * 2


@pytest.mark.parametrize("start", ["9" * 400, "9" * 5000, "1e999", "NaN", "[" * 100_000, '"noon"', "null"])
def test_lines_that_no_record_can_be_are_left_out(start, tmp_path):
    path = tmp_path / "x.jsonl"
    append(str(path), EVENT)
    with path.open("a") as file:
        file.write(f'{{"schema": 1, "start": {start}}}\n')
    assert len(read_records(path)) == 1


def test_no_stage_fails_for_what_can_not_be_written_and_it_is_said_once(tmp_path):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "nobody-reads")
    paths = [tmp_path / "file" / "below", "/proc/nowhere", "/dev/full", tmp_path / "nobody-reads"]

    def job(rank):
        heard = []
        for path in paths:
            strategy = PGroupDDPStrategy(destroy="on_teardown", record=path)
            heard.append(warnings_of(lambda strategy=strategy: (fit(strategy), fit(strategy))))
            assert len(strategy.events) == 4
        return heard

    for rank, heard in enumerate(run_ranks(job)):
        for path, lines in zip(paths, heard, strict=True):
            (line,) = lines
            assert line.startswith(f"[rank {rank}] records can not be written to {path}, the run goes on without: [Errno")


def test_a_full_disk_leaves_no_piece_of_a_line(tmp_path):
    path = tmp_path / "x.jsonl"

    def job(_):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BLOCK + 300, limits[1]))
        heard = warnings_of(lambda: [append(str(path), EVENT) for _ in range(5)])
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        append(str(path), EVENT)
        return len(heard), size

    assert run_ranks(job, size=1) == [(1, 2 * BLOCK)]
    assert len(read_records(path)) == 3
    assert path.stat().st_size == 3 * BLOCK


def test_a_file_system_that_hangs_is_given_up_in_time(tmp_path, monkeypatch):
    path, back, calls = str(tmp_path / "hangs"), threading.Event(), []
    monkeypatch.setattr(record_file, "WRITE_TIMEOUT", timedelta(seconds=0.1))
    monkeypatch.setattr(record_file, "_write", lambda *_: (calls.append(1), back.wait(30)))
    began = time.monotonic()
    heard = warnings_of(lambda: [append(path, EVENT) for _ in range(4)])
    assert time.monotonic() - began < 10
    back.set()
    assert len(calls) == 1
    (line,) = heard
    assert "it hangs for 0.1 s, and is given up" in line


def test_building_and_pickling_a_strategy_touches_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strategy = PGroupDDPStrategy(record="records")
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy._config.record == strategy._config.record == str(tmp_path / "records")
    assert PGroupDDPStrategy(record="~/x/")._config.record == os.path.expanduser("~/x/")
    assert PGroupDDPStrategy()._config.record is None
    assert not list(tmp_path.iterdir())


def test_the_page_names_each_field_of_a_line(tmp_path):
    text = (ROOT / "docs" / "records.md").read_text()
    documented = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert documented == ["schema", *(field.name for field in fields(LifecycleEvent)), "host", "pid", "ended"]
