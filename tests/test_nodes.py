"""Two nodes: two network namespaces on this machine that reach each other by one cable, with two ranks in each."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.scripts import finish, start

pytestmark = pytest.mark.scripts

SCRIPT = str(Path(__file__).parent / "namespaces.sh")
IP = shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
PORT = 29500  # in namespaces of our own, so that nobody else can have it
ADDRESSES = ("10.77.0.1", "10.77.0.2")


class Nodes:
    """Both nodes."""

    def __init__(self, name):
        self.names = [f"{name}-0", f"{name}-1"]

    def run(self, body, folder, launcher, environment=lambda node: {}, timeout=90):
        """Run one script on both nodes at the same moment; returns both runs. ``launcher`` and ``environment`` get the node."""
        jobs = []
        for node, name in enumerate(self.names):
            (folder / str(node)).mkdir()
            variables = environment(node)
            inside = [IP, "netns", "exec", name, "env", *(f"{key}={value}" for key, value in variables.items())]
            jobs.append(start(body, folder / str(node), launcher=[*inside, *launcher(node)]))
        with ThreadPoolExecutor() as pool:
            runs = list(pool.map(lambda job: finish(job, timeout), jobs))
        assert not self.kill(), "processes were left behind"
        return runs

    def kill(self):
        """End what still runs on the nodes; returns the ids."""
        listed = [subprocess.run([IP, "netns", "pids", name], capture_output=True, text=True).stdout for name in self.names]
        found = [int(pid) for text in listed for pid in text.split()]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found


@pytest.fixture
def nodes():
    name = f"pgroup-{uuid.uuid4().hex[:12]}"
    if IP is None:
        pytest.skip("two nodes need `ip` (Debian: iproute2)")
    made = subprocess.run([SCRIPT, "up", name], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"network namespaces can not be made here: {made.stderr.strip()}")
    try:
        yield Nodes(name)
    finally:
        subprocess.run([SCRIPT, "down", name], check=True)


def torchrun(node):
    # Where the name of a host is loopback, an agent can tell neither whether it is the one that hosts the agents' store, nor
    # under which address its node is known.
    place = [f"--rdzv-conf=is_host={int(node == 0)}", f"--local-addr={ADDRESSES[node]}", "--rdzv-id=two"]
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}", *place]
    return [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--max-restarts=1", *meet]


def python(node):
    return [sys.executable]


def by_hand(node):
    return {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "NODE_RANK": node}


JOB = """
import psutil

class Fault(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 3 and batch_idx == 3:
            self.fail()

    def fail(self):
        raise ValueError("boom")

def trainer_of(strategy, **kwargs):
    return make_trainer(strategy, num_nodes=2, limit_train_batches=50, **kwargs)

def job():
    first = PGroupDDPStrategy(timeout=60)
    trainer = trainer_of(first)
    trainer.fit(TinyModel(), datamodule=TinyData(96))
    rank = trainer.global_rank
    trainer.test(TinyModel(), datamodule=TinyData(96), verbose=False)
    say(rank, "first", trainer.global_step, whats(first))
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    say(rank, "listening", [address.ip for address in listening if address.port == int(os.environ["MASTER_PORT"])])
    second = PGroupDDPStrategy(timeout=60)
    try:
        trainer_of(second, callbacks=[Fault()]).fit(TinyModel(), datamodule=TinyData(96))
    except (ValueError, RuntimeError) as error:
        say(rank, "second", type(error).__name__, *error.__notes__)
    third = PGroupDDPStrategy(timeout=60)
    trainer = trainer_of(third)
    trainer.fit(TinyModel(), datamodule=TinyData(96))
    say(rank, "third", trainer.global_step, whats(third))
"""


def check_job(runs):
    """Two Trainers, a failure of the last rank, which is on another node than the first, and a Trainer after it."""
    errors = "\n".join(run.err for run in runs)
    said = {}
    for line in [line for run in runs for line in run.said()]:
        _, rank, what, rest = line.split(" ", 3)
        said[what, int(rank)] = rest
    for rank in range(4):
        assert said.get(("first", rank)) == "6 [('fit', 'created', 1), ('test', 'reused', 1)]", errors
        assert said["second", rank].startswith("ValueError" if rank == 3 else "RuntimeError")
        assert "The first failure of generation 2 was on rank 3 (pid" in said["second", rank]
        assert "hook 'on_train_batch_start': ValueError: boom" in said["second", rank]
        assert said["third", rank] == "6 [('fit', 'created', 3)]"
    return [said["listening", rank] for rank in range(4)]


BY_HAND = """
job()
trainer_of(PGroupDDPStrategy(timeout=60), callbacks=[Fault()]).fit(TinyModel(), datamodule=TinyData(96))
"""


def test_two_nodes_by_hand(nodes, tmp_path):
    """Lightning starts the second rank of each node, and the first rank of all hosts the store, at the address given."""
    runs = nodes.run(JOB + BY_HAND, tmp_path, python, by_hand)
    assert check_job(runs) == [f"['{ADDRESSES[0]}']", "[]", "[]", "[]"]
    assert [run.code for run in runs] == [1, 1], "a run does not end well when a rank on another node has failed"


RESTARTED = """
from lightning.pytorch.callbacks import ModelCheckpoint

class Killed(Fault):
    def fail(self):
        if last is None:
            os.kill(os.getpid(), 9)

last = "../last.ckpt" if os.path.exists("../last.ckpt") else None  # torchrun's count may differ between nodes
if last is None:
    job()
keep = ModelCheckpoint("..", save_last=True, every_n_train_steps=1)
trainer = trainer_of(PGroupDDPStrategy(timeout=60), callbacks=[Killed(), keep], enable_checkpointing=True)
step = torch.load(last, weights_only=False)["global_step"] if last else 0
trainer.fit(TinyModel(), datamodule=TinyData(96), ckpt_path=last)
trainer.test(TinyModel(), datamodule=TinyData(96), verbose=False)
say(trainer.global_rank, "restarted", "from", step, "to", trainer.global_step)
"""


def test_two_nodes_under_torchrun(nodes, tmp_path):
    """The same, and then a rank on the other node is killed: the job goes on from its last checkpoint."""
    runs = nodes.run(JOB + RESTARTED, tmp_path, torchrun)
    assert check_job(runs) == ["[]"] * 4, "the store is the agent's"
    ends = sorted(line.split(" ", 1)[1] for run in runs for line in run.said() if " restarted " in line)
    assert ends == [f"{rank} restarted from 3 to 6" for rank in range(4)], "\n".join(run.err for run in runs)
    assert [run.code for run in runs] == [0, 0]
