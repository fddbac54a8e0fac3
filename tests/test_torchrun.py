"""Jobs under torchrun: many stages, restarts, and nodes that come and go. Nodes are agents on this host."""

import signal
import threading
import time

import psutil
import pytest

from lightning_pgroup.team import Team
from tests.ranks import free_port
from tests.scripts import TORCHRUN, finish, kill, listen, processes_of, run, start_command
from tests.torchrun import MODES, Journal, c10d, finish_job, start_agent, start_job

pytestmark = pytest.mark.scripts

STAGES = """
import random, threading

class Lines(logging.Handler):
    lines = []
    def emit(self, record):
        self.lines.append(record.getMessage())

logging.getLogger("lightning_pgroup").addHandler(Lines())
logging.getLogger("lightning_pgroup").setLevel(logging.INFO)
rank, size, run = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"))
chance, pause, data, generation = random.Random(int(rank)), threading.Event(), TinyData(4), 0
while generation < {stages}:
    strategy, first = PGroupDDPStrategy(timeout=30, destroy="on_teardown"), generation + 1
    trainer, model = make_trainer(strategy, limit_val_batches=1, num_sanity_val_steps=0), TinyModel()
    for stage in ["fit"] + 9 * ["validate"]:
        pause.wait(chance.uniform(0, 0.01))
        if stage == "fit":
            trainer.fit(model, datamodule=data)
        else:
            trainer.validate(model, datamodule=data, verbose=False)
        generation += 1
    numbers = [number for number in range(first, generation + 1) for _ in range(2)]
    assert [event.generation for event in strategy.events] == numbers
    assert [event.what for event in strategy.events] == ["created", "destroyed"] * 10
    assert {{(event.run, event.attempt) for event in strategy.events}} == {{(run, 0)}}
prefixes = [f"[run {{run}} attempt 0 rank {{rank}}/{{size}} gen {{n}}] process group (gloo) " for n in range(1, generation + 1)]
lines = [line for line in Lines.lines if "process group" in line]
assert len(lines) == 2 * generation
for number, prefix in enumerate(prefixes):
    assert lines[2 * number].startswith(prefix + "created for "), lines[2 * number]
    assert lines[2 * number + 1].startswith(prefix + "destroyed "), lines[2 * number + 1]
say("stages", generation, trainer.world_size, "run", run)
"""


def test_500_stages_with_a_group_each_and_random_delays_between_the_ranks(tmp_path):
    done = run(STAGES.format(stages=500), tmp_path, launcher=TORCHRUN, timeout=110)
    assert done.code == 0, done.err
    run_id = done.said(0)[0].split()[-1]
    assert run_id not in ("none", "run")
    assert done.said() == [f"{rank} stages 500 2 run {run_id}" for rank in range(2)]


CYCLES = """
import os, threading
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist

rank, pause, ended, tried = os.environ["RANK"], threading.Event(), Path("rank 0 has ended"), Path("rank 1 has tried")
for cycle, timeout in enumerate((30, 1, 1), start=1):
    if cycle == 2 and rank == "0":
        ended.touch()
    while cycle == 2 and not (tried if rank == "0" else ended).exists():
        pause.wait(0.02)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    finally:
        if cycle == 2 and rank == "1":
            tried.touch()
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    print(f"SAY {rank} cycle {cycle}\\n", end="", flush=True)
"""


def test_f2_plain_recreation_fails_in_the_second_cycle(tmp_path):
    """A rank that comes first finds the address of the other from the first cycle, and calls it in vain."""
    (tmp_path / "script.py").write_text(CYCLES)
    done = finish(start_command([*TORCHRUN, "script.py"], tmp_path), timeout=60)
    assert done.code != 0
    assert done.said() == ["0 cycle 1", "1 cycle 1"]
    assert "[rank1]: RuntimeError: Gloo connectFullMesh failed" in done.err, done.err


def check_end(journal, size):
    """All ranks have ended at the same step, with groups that carry the run and the attempt as rank 0 counts it."""
    ends = journal.of("end")
    assert sorted(end["rank"] for end in ends) == list(range(size))
    assert len({end["step"] for end in ends}) == 1
    (run_id,) = {start["run"] for start in journal.of("start")}
    attempt = journal.of("end", 0)[0]["count"]
    for end in ends:
        assert end["events"], "no group was made"
        assert all(event[1:] == [run_id, attempt, size] for event in end["events"])
    return ends[0]["step"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "static"])  # two agents of it show more
def test_f24_a_job_goes_on_from_its_last_checkpoint_after_a_kill_and_an_exception(mode, tmp_path):
    """With two agents and c10d, the agent of rank 0 counts no restart (F26). This job starts cold, as users start it."""
    differ = ("--uncounted", "0") if mode == "c10d, two agents" else ()
    with free_port() as port:
        runs = finish_job(start_job(mode, port, tmp_path, "--deaths", "kill", "raise", *differ, cold=bool(differ)), 200)
    errors = "\n".join(run.err for run in runs)
    assert [run.code for run in runs] == [0] * MODES[mode].agents, errors
    journal = Journal(tmp_path)
    assert [(death["how"], death["step"]) for death in journal.of("death")] == [("kill", 2), ("raise", 4)]
    for rank in range(2):
        assert [line["step"] for line in journal.of("resumed", rank)] == [0, 2, 4], errors
    assert check_end(journal, 2) == 6
    counts = [journal.of("end", rank)[0]["count"] for rank in range(2)]
    if differ:
        assert counts[0] == 0 < counts[1]


def wait_for_steps(folder, size, after, agents):
    """Wait until a job makes three steps with ``size`` ranks after the line number ``after``; returns the number of lines."""
    until, pause = time.monotonic() + 60, threading.Event()
    while True:
        lines = Journal(folder).lines
        steps = [line for line in lines[after:] if (line["what"], line["rank"], line["size"]) == ("step", 0, size)]
        if len(steps) >= 3:
            return len(lines)
        ended = [agent for agent in agents if agent.poll() is not None]
        if ended or time.monotonic() > until:
            for agent in agents:
                kill(agent)
            errors = "\n".join(agent.communicate()[1] for agent in agents)
            raise AssertionError(f"no steps with {size} ranks, {len(ended)} agents ended: {lines[-9:]}\n{errors}")
        pause.wait(0.05)


@pytest.mark.timeout(240)
def test_a_second_node_joins_and_leaves_again(tmp_path, monkeypatch):
    """The world size changes at each restart, and training goes on from the checkpoint."""
    # Else an agent of torch 2.13 that joins later waits for an address that the first has only told those of its first round.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # A node that is silent for five seconds is taken for gone, also one that is only slow.
    conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"

    def agent(node, port):
        place = [f"--rdzv-conf={conf},is_host={int(node == 0)}", f"--local-addr=127.0.0.{node + 1}"]
        options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=10", "--rdzv-id=elastic", *c10d(port), *place]
        return start_agent(options, tmp_path, "--until-stop")

    with free_port() as port:
        first = agent(0, port)
        alone = wait_for_steps(tmp_path, 1, 0, [first])
        second = agent(1, port)
        both = wait_for_steps(tmp_path, 2, alone, [first, second])
        second.send_signal(signal.SIGTERM)
        wait_for_steps(tmp_path, 1, both, [first])
        left = finish(second, 40)
        (tmp_path / "stop").touch()
        done = finish(first, 40)
    assert done.code == 0, done.err
    assert left.code != 0, "the agent that was told to leave"
    journal = Journal(tmp_path)
    resumed = journal.of("resumed", 0)
    assert [line["size"] for line in resumed] == [1, 2, 1], done.err
    saved = 0
    for number, begin in enumerate(resumed):
        assert begin["step"] >= saved, "it began before the last checkpoint"
        until = resumed[number + 1]["time"] if number < 2 else float("inf")
        steps = [line["step"] for line in journal.of("step", 0) if begin["time"] <= line["time"] < until]
        assert steps == list(range(begin["step"] + 1, begin["step"] + 1 + len(steps)))
        saved = steps[-1] - 1  # a step is written down before it is saved
    assert check_end(journal, 1) == steps[-1]


def test_a_run_of_one_rank_carries_run_and_attempt_too(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert (Team.alone().run, Team.alone().attempt) == ("job", 2)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert Team.alone().attempt is None


HANGS = """
import os, threading
print(f"SAY {os.environ['RANK']} here {os.getpid()}\\n", end="", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("orphans", [False, True], ids=["all", "orphans"])
def test_no_worker_is_left_behind_by_these_tests(orphans, cold, tmp_path):
    """Each worker of torchrun has a session of its own, and goes on when its agent is killed."""
    (tmp_path / "script.py").write_text(HANGS)
    process = start_command([*TORCHRUN, "script.py"], tmp_path, cold=cold)
    workers = [psutil.Process(int(pid)) for (pid,) in listen(process, "here").values()]
    assert set(workers) < set(processes_of(process))
    if orphans:
        process.kill()
    with pytest.raises(AssertionError, match="hung"):
        finish(process, 0.5)
    assert not processes_of(process)
    assert not [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]
