"""Jobs under torchrun: many stages, restarts, and nodes that come and go. Nodes are agents on this host."""

import signal
import threading
import time

import psutil
import pytest

from tests.ranks import free_port
from tests.scripts import TORCHRUN, finish, kill, listen, processes_of, run, start_command
from tests.torchrun import MODES, Journal, c10d, start_agent, start_job

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
import os
from datetime import timedelta
import torch
import torch.distributed as dist

for cycle in range(1, 4):
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    print(f"SAY {os.environ['RANK']} cycle {cycle}\\n", end="", flush=True)
"""


def test_f2_plain_recreation_fails_in_the_second_cycle(tmp_path):
    (tmp_path / "script.py").write_text(CYCLES)
    done = finish(start_command([*TORCHRUN, "script.py"], tmp_path), timeout=60)
    assert done.code != 0
    assert done.said() == ["0 cycle 1", "1 cycle 1"]


def check_end(journal, step):
    """Both ranks have ended at ``step``, with groups that carry the run and the attempt."""
    ends = journal.of("end")
    assert [(end["rank"], end["step"]) for end in sorted(ends, key=lambda end: end["rank"])] == [(0, step), (1, step)]
    (run_id,) = {start["run"] for start in journal.of("start")}
    attempt = journal.of("end", 0)[0]["count"]
    for end in ends:
        assert end["events"], "no group was made"
        assert all(event[1:] == [run_id, attempt, 2] for event in end["events"])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", MODES)
def test_f24_a_job_goes_on_from_its_last_checkpoint_after_a_kill_and_an_exception(mode, tmp_path):
    """With two agents and c10d, the agent of rank 0 counts no restart (F26)."""
    differ = ("--uncounted", "0") if mode == "c10d, two agents" else ()
    with free_port() as port:
        runs = [finish(agent, 200) for agent in start_job(mode, port, tmp_path, "--deaths", "kill", "raise", *differ)]
    errors = "\n".join(run.err for run in runs)
    assert [run.code for run in runs] == [0] * MODES[mode].agents, errors
    journal = Journal(tmp_path)
    assert [(death["how"], death["step"]) for death in journal.of("death")] == [("kill", 2), ("raise", 4)]
    for rank in range(2):
        assert [line["step"] for line in journal.of("resumed", rank)] == [0, 2, 4], errors
    check_end(journal, 6)
    counts = [journal.of("end", rank)[0]["count"] for rank in range(2)]
    if differ:
        assert counts[0] == 0 < counts[1]


def wait_for_steps(folder, size, after, agents):
    """Wait until ranks of a job of ``size`` make a step after the line number ``after``; returns the journal."""
    until, pause = time.monotonic() + 60, threading.Event()
    while True:
        journal = Journal(folder)
        if any(line["what"] == "step" and line["size"] == size for line in journal.lines[after:]):
            return journal
        ended = [agent for agent in agents if agent.poll() is not None]
        if ended or time.monotonic() > until:
            for agent in agents:
                kill(agent)
            errors = "\n".join(agent.communicate()[1] for agent in agents)
            raise AssertionError(f"no step with {size} ranks, {len(ended)} agents ended: {journal.lines[-9:]}\n{errors}")
        pause.wait(0.05)


@pytest.mark.timeout(240)
def test_a_second_node_joins_and_leaves_again(tmp_path):
    """The world size changes at each restart, and training goes on from the checkpoint."""
    conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"

    def agent(node, port):
        place = [f"--rdzv-conf={conf},is_host={int(node == 0)}", f"--local-addr=127.0.0.{node + 1}"]
        options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=10", "--rdzv-id=elastic", *c10d(port), *place]
        return start_agent(options, tmp_path, "--until-stop")

    with free_port() as port:
        first = agent(0, port)
        alone = wait_for_steps(tmp_path, 1, 0, [first])
        second = agent(1, port)
        both = wait_for_steps(tmp_path, 2, len(alone.lines), [first, second])
        second.send_signal(signal.SIGTERM)
        wait_for_steps(tmp_path, 1, len(both.lines) + 20, [first])
        left = finish(second, 40)
        (tmp_path / "stop").touch()
        done = finish(first, 40)
    assert done.code == 0, done.err
    assert left.code != 0, "the agent that was told to leave"
    journal = Journal(tmp_path)
    assert [line["size"] for line in journal.of("resumed", 0)] == [1, 2, 1], done.err
    best = 0
    for line in journal.of("resumed", 0):
        assert line["step"] >= best, "an attempt began before the last checkpoint"
        steps = [step["step"] for step in journal.of("step", 0) if step["time"] >= line["time"]]
        assert steps[:1] == [line["step"] + 1]
        best = max([line["step"], *(step["step"] for step in steps if step["size"] == line["size"])])
    (end,) = journal.of("end")
    assert end["size"] == 1


HANGS = """
import os, threading
print(f"SAY {os.environ['RANK']} here {os.getpid()}\\n", end="", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("orphans", [False, True], ids=["all", "orphans"])
def test_no_worker_is_left_behind_by_these_tests(orphans, tmp_path):
    """Each worker of torchrun has a session of its own, and goes on when its agent is killed."""
    (tmp_path / "script.py").write_text(HANGS)
    process = start_command([*TORCHRUN, "script.py"], tmp_path)
    workers = [psutil.Process(int(pid)) for (pid,) in listen(process, "here").values()]
    assert set(workers) < set(processes_of(process))
    if orphans:
        process.kill()
    with pytest.raises(AssertionError, match="hung"):
        finish(process, 0.5)
    assert not processes_of(process)
    assert not [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]
