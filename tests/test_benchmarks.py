"""The benchmarks run, from the first rank to the page of results. How fast anything is, is no matter here.

All of it runs in forked processes: the files of benchmarks/ are scripts, whose names would be in the way of others.
"""

import importlib
import importlib.util
import json
import math
import os
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from lightning_pgroup import process_group
from tests.ranks import run_ranks

FOLDER = Path(__file__).parent.parent / "benchmarks"


def alone(job, **kwargs):
    """Run ``job(load)`` in a process of its own, where ``load`` imports a file of benchmarks/."""

    def inside(rank):
        sys.path.insert(0, str(FOLDER))
        return job(importlib.import_module)

    (found,) = run_ranks(inside, 1, bare=True, check_leaks=False, **kwargs)
    return found


def ended(pids, timeout=10.0):
    """Whether processes of others end within a time. A zombie has ended: whoever has inherited it may not ask for it."""
    pause, until = threading.Event(), time.monotonic() + timeout
    while (left := [pid for pid in pids if psutil.pid_exists(pid) and not is_zombie(pid)]) and time.monotonic() < until:
        pause.wait(0.02)
    return not left


def is_zombie(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def refuse(text):
    raise ValueError(f"{text} is no finite number")


def numbers_in(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for one in value for number in numbers_in(one)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_all_of_them_run_and_leave_results(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- benchmark table -->\nold\n<!-- end of benchmark table -->\nafter\n")

    def job(load):
        runner = load("run")
        code = runner.main(["--quick", "--into", str(tmp_path / "results"), "--readme", str(readme)])
        return code, [one.name for one in runner.available()]

    code, names = alone(job, deadline=110)
    results = json.loads((tmp_path / "results" / "results.json").read_text(), parse_constant=refuse)
    assert code == 0, {name: found.get("failed") for name, found in results["benchmarks"].items()}

    assert list(results["benchmarks"]) == names
    assert {"step", "stage", "cycle", "agreement", "failure", "leaks", "memory"} <= set(names)
    assert results["quick"]
    assert {"lightning-pgroup", "torch", "lightning", "Python"} <= set(results["versions"])
    assert {"processor", "cores", "memory", "system", "load"} <= set(results["hardware"])

    page = (tmp_path / "results" / "results.md").read_text()
    for name, found in results["benchmarks"].items():
        assert found["tables"], name
        for table in found["tables"]:
            assert table["rows"], name
            assert {len(row) for row in table["rows"]} == {len(table["columns"])}, name
        assert numbers_in(found["figures"]), name
        assert f"## {found['title']}\n" in page
    assert all(map(math.isfinite, numbers_in(results)))

    figures = {name: found["figures"] for name, found in results["benchmarks"].items()}
    assert set(figures["step"]) == {"small", "large"}
    for model in figures["step"].values():
        assert set(model["ratio"]) == {"DDPStrategy again", "PGroupDDPStrategy"}
        assert all(ratio["low"] <= ratio["median"] <= ratio["high"] for ratio in model["ratio"].values())
    policies = {"at_exit", "per_trainer", "on_teardown", "on_destructor", "on_error", "never"}
    assert policies | {"DDPStrategy", "DDPStrategy again"} <= set(figures["stage"]["fit"]) == set(figures["stage"]["test"])
    assert figures["cycle"]["2"]["ratio"] > 0
    assert figures["cycle"]["long"] == {"cycles": 6, "failed": None, "ms": figures["cycle"]["long"]["ms"]}
    assert figures["failure"]["2"]["PGroupDDPStrategy"]["recovered"] == 2
    assert figures["failure"]["2"]["DDPStrategy"]["step_ms"] is None
    for rank in figures["leaks"]["samples"]["on_teardown"]:
        assert rank["stage"] == [2, 4, 6, 8]
        assert set(rank["hooks"]) == {0}
        assert max(rank["keys"]) > 0
    assert [rank["stage"]["hooks"] for rank in figures["memory"]["on_teardown"]] == [0, 0]
    assert [rank["stage"]["hooks"] for rank in figures["memory"]["DDPStrategy"]] == [1, 1]
    assert all(rank["stage"]["threads"] > 0 for rank in figures["memory"]["DDPStrategy"])
    assert all(rank["stage"]["threads"] == 0 for rank in figures["memory"]["on_teardown"])

    shown = readme.read_text()
    assert shown.startswith("before\n<!-- benchmark table -->\n\n| what |")
    assert shown.endswith("<!-- end of benchmark table -->\nafter\n")
    assert "old" not in shown
    assert "[results/results.md](results/results.md)" in shown
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "results" / "results.png").read_bytes().startswith(b"\x89PNG")
        assert "![The main figures](results.png)" in page
        assert "![The main figures](results/results.png)" in shown


def test_what_fails_or_hangs_is_ended_and_said(tmp_path):
    (tmp_path / "raises.py").write_text("def main(arguments):\n    raise ValueError('boom')\n")
    (tmp_path / "silent.py").write_text("def main(arguments):\n    pass\n")
    (tmp_path / "hangs.py").write_text(
        "import os, signal\nfrom pathlib import Path\nfrom ranks import Ranks\n\n"
        "def serve(rank):\n"
        f"    return lambda: Path({str(tmp_path)!r}, str(os.getpid())).with_suffix('.pid').touch() or signal.pause()\n\n"
        "def main(arguments):\n    with Ranks(2, serve) as ranks:\n        ranks.do()\n"
    )

    def job(load):
        runner = load("run")
        sys.path.insert(0, str(tmp_path))
        runner.HERE = tmp_path
        runner.BENCHMARKS = tuple(runner.Benchmark(name, 3) for name in ("raises", "silent", "hangs", "not_there"))
        return runner.main(["--quick", "--into", str(tmp_path / "results")])

    assert alone(job) == 1
    found = json.loads((tmp_path / "results" / "results.json").read_text())["benchmarks"]
    assert {name: one["failed"] for name, one in found.items()} == {
        "raises": "ended with exit code 1",
        "silent": "has left no figures",
        "hangs": "did not end within 3 s",
    }
    assert "**`benchmarks/hangs.py` did not end within 3 s" in (tmp_path / "results" / "results.md").read_text()
    started = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(started) == 2
    assert ended(started)


@pytest.mark.parametrize("fault", ["raise", "die", "hang"])
def test_ranks_that_fail_are_told_apart_from_those_that_work(fault):
    def job(load):
        ranks = load("ranks")

        def serve(rank):
            def do(what):
                if rank == 1 and what == "raise":
                    raise ValueError("boom")
                if rank == 1 and what == "die":
                    os._exit(3)
                if rank == 1 and what == "hang":
                    os.read(os.pipe()[0], 1)
                return (rank, what, os.getpid())

            return do

        with ranks.Ranks(2, serve) as team:
            good = team.do("work")
            with pytest.raises(ranks.RanksFailedError) as failed:
                team.do(fault, within=0.5 if fault == "hang" else 30)
            team.kill()
        return good, str(failed.value)

    good, said = alone(job)
    assert [one[:2] for one in good] == [(0, "work"), (1, "work")]
    assert {
        "raise": "ValueError: boom",
        "die": "rank 1 ended with exit code 3",
        "hang": "ranks [1] of 2 did not finish within 0.5 s",
    }[fault] in said


def test_turns_slopes_and_marks():
    def job(load):
        run, ranks, leaks, report = (load(name) for name in ("run", "ranks", "leaks", "report"))
        turns = ranks.in_turn(3, 6)
        assert all(sorted(turn) == [0, 1, 2] for turn in turns)
        assert {turn[0] for turn in turns} == {turn[-1] for turn in turns} == {0, 1, 2}

        assert leaks.slope([(x, 3 * x + 1) for x in range(10)]) == (pytest.approx(3), pytest.approx(0, abs=1e-12))
        rise, error = leaks.slope([(x, x % 2) for x in range(100)])
        assert abs(rise) < error
        rise, error = leaks.slope([(x, x // 25) for x in range(100)])
        assert rise > 2 * error > 0

        half = report.Spread.of([3.0, 1.0, 2.0, 5.0, 4.0], 10)
        assert (half.low, half.median, half.high, half.count) == (20, 30, 40, 5)
        with pytest.raises(ValueError, match=r"one\.figures\.a\[1\] is inf"):
            report.Report("one", "", figures={"a": [1.0, math.inf]}).as_json()
        for page in ("no marks", f"{run.END} {run.BEGIN}", f"{run.BEGIN} {run.END} {run.BEGIN} {run.END}"):
            with pytest.raises(ValueError, match="needs one"):
                run.put_between(page, "table")
        assert json.loads(run.compact(json.dumps({"a": [1, 2.5, -3e-9], "b": "[1,\n2]"}, indent=1))) == {
            "a": [1, 2.5, -3e-9],
            "b": "[1,\n2]",
        }

    alone(job)


def test_the_excepthook_of_each_group_is_counted():
    def job(load):
        resources = load("resources")
        depths = [resources.hook_depth()]
        for _ in range(2):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            dist.destroy_process_group()
            depths.append(resources.hook_depth() - depths[0])
        with process_group("gloo"):
            depths.append(resources.hook_depth() - depths[0])
        depths.append(resources.hook_depth() - depths[0])
        return depths[1:]

    assert alone(job) == [1, 2, 3, 2]
