"""Ranks that a scheduler or a user has started: each of Lightning's cluster environments, with the variables that make it.

The processes are no ranks of anything (`bare`); what a scheduler would set is set in each of them before its first Trainer.
"""

import contextlib
import importlib.util
import os
import random
import re
import shutil
import socket
import sys
import time
import types
from datetime import timedelta
from multiprocessing import Pipe

import pytest
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import KubeflowEnvironment, mpi
from lightning.pytorch import Callback

from lightning_pgroup import PGroupDDPStrategy, RendezvousTimeoutError, StoreLostError
from lightning_pgroup.store import LOOPBACK, Endpoint, host_store, listen
from lightning_pgroup.team import ENVIRONMENT_VARIABLE, Invitation
from tests.models import TinyData, TinyModel, make_trainer, whats
from tests.ranks import free_port, run_ranks
from tests.scripts import run
from tests.test_stage_boundaries import rank_sum

HOST = socket.gethostname()


@contextlib.contextmanager
def variables(**values):
    """Environment variables for a block; ``None`` takes one away. All that changes in the block is put back."""
    before = dict(os.environ)
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = str(value)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Boom(Callback):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_rank == 1:
            raise ValueError("boom")


def stages(**kwargs):
    """A fit and a test, a second Trainer, one that fails on rank 1, and a good one."""

    def run_one(*names, callbacks=()):
        strategy = PGroupDDPStrategy(rendezvous_timeout=30)
        trainer = make_trainer(strategy, callbacks=list(callbacks), **kwargs)
        for name in names:
            getattr(trainer, name)(TinyModel(), datamodule=TinyData())
        return trainer

    first = run_one("fit", "test")
    second = run_one("fit")
    with pytest.raises((ValueError, RuntimeError)) as caught:
        run_one("fit", callbacks=[Boom()])
    last = run_one("fit")
    return {
        "environment": type(first.strategy.cluster_environment).__name__,
        "rank": first.global_rank,
        "size": first.world_size,
        "failure": "".join(caught.value.__notes__),
        "sum": rank_sum(first.global_rank),
        "events": [(what, generation) for one in (first, second, last) for _, what, generation in whats(one.strategy)],
    }


WANT = [("created", 1), ("reused", 1), ("created", 2), ("created", 4)]


def check(results, environment):
    for rank, one in enumerate(results):
        assert one["environment"] == environment
        assert (one["rank"], one["size"], one["sum"]) == (rank, 2, 1.0)
        assert "on rank 1" in one["failure"]
        assert [event for event in one["events"] if event[0] in ("created", "reused")] == WANT


def slurm(rank, port, job, nodes=1):
    return {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": 2,
        "SLURM_NTASKS_PER_NODE": 2 // nodes,
        "SLURM_NNODES": nodes,
        "SLURM_NODELIST": HOST,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank if nodes == 1 else 0,
        "SLURM_NODEID": 0 if nodes == 1 else rank,
    }


def by_hand(rank, port, job, nodes=1):
    node, local = (0, rank) if nodes == 1 else (rank, 0)
    names = {"RANK": rank, "LOCAL_RANK": local, "NODE_RANK": node, "WORLD_SIZE": 2}
    return {**names, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}


def kubeflow(rank, port, job):
    return {
        "KUBERNETES_PORT": "tcp://10.0.0.1:443",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "WORLD_SIZE": 2,
        "RANK": rank,
    }


def torchrun(rank, port, job, agent=False):
    more = {"LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": 2}
    elastic = {"RUN_ID": "none", "RESTART_COUNT": 0, "MAX_RESTARTS": 3, "USE_AGENT_STORE": agent}
    ranks = {name: value for name, value in by_hand(rank, port, job).items() if name != "NODE_RANK"}
    return {**ranks, **more, **{f"TORCHELASTIC_{name}": value for name, value in elastic.items()}}


TWO_NODES = {"devices": 1, "num_nodes": 2}


class Own(ClusterEnvironment):
    """As a user would write one for a scheduler that Lightning does not know."""

    creates_processes_externally = True
    main_address = LOOPBACK

    @property
    def main_port(self):
        return int(os.environ["MY_PORT"])

    @staticmethod
    def detect():
        return True

    def world_size(self):
        return 2

    def set_world_size(self, size):
        pass

    def global_rank(self):
        return int(os.environ["MY_RANK"])

    def set_global_rank(self, rank):
        pass

    def local_rank(self):
        return int(os.environ["MY_RANK"])

    def node_rank(self):
        return 0


TABLE = {
    "slurm": (slurm, {}, "SLURMEnvironment"),
    "slurm on two nodes": (lambda *a: slurm(*a, nodes=2), TWO_NODES, "SLURMEnvironment"),
    "slurm with a port": (lambda r, port, j: {**slurm(r, port, j), "MASTER_PORT": port}, {}, "SLURMEnvironment"),
    "kubeflow": (kubeflow, {**TWO_NODES, "plugins": [KubeflowEnvironment()]}, "KubeflowEnvironment"),
    "torchrun without its store": (torchrun, {}, "TorchElasticEnvironment"),
    "by hand": (by_hand, {}, "LightningEnvironment"),
    "by hand on two nodes": (lambda *a: by_hand(*a, nodes=2), TWO_NODES, "LightningEnvironment"),
    "a user's own": (lambda rank, port, j: {"MY_RANK": rank, "MY_PORT": port}, {"plugins": [Own()]}, "Own"),
}


def free_job(modulus, base):
    """The id of a job from which a scheduler's environment computes a port that is free."""
    while True:
        job = random.randrange(10**6, 10**7)
        with contextlib.suppress(OSError):
            listen(LOOPBACK, job % modulus + base).close()
            return job


@pytest.mark.parametrize("name", TABLE)
def test_ranks_of_a_scheduler(name):
    make, kwargs, environment = TABLE[name]
    job_id = free_job(10_000, 15_000)
    with free_port() as port:

        def job(rank):
            with variables(**make(rank, port, job_id)):
                return stages(**kwargs)

        check(run_ranks(job, bare=True), environment)


def test_ranks_of_lsf(tmp_path):
    job_id = free_job(1_000, 10_000)
    hosts = tmp_path / "rankfile"
    hosts.write_text("\n".join(["launch-node", HOST, HOST]))

    def job(rank):
        names = {"LSB_JOBID": job_id, "LSB_DJOB_RANKFILE": hosts}
        jsm = {"LOCAL_RANK": rank, "RANK": rank, "SIZE": 2}
        with variables(**names, **{f"JSM_NAMESPACE_{name}": value for name, value in jsm.items()}):
            return stages()

    check(run_ranks(job, bare=True), "LSFEnvironment")


def test_ranks_of_torchrun_with_the_store_of_its_agent():
    listener = listen(LOOPBACK)
    port = listener.getsockname()[1]
    agent = host_store(listener, timedelta(seconds=30))

    def job(rank):
        with variables(**torchrun(rank, port, 0, agent=True)):
            return stages()

    check(run_ranks(job, bare=True), "TorchElasticEnvironment")
    assert any("lightning_pgroup" in key for key in agent.list_keys())


class Communicator:
    """What `MPIEnvironment` needs of MPI, for two ranks on one host, over a pipe."""

    def __init__(self, rank, pipe):
        self._rank, self._pipe = rank, pipe

    def Get_rank(self):
        return self._rank

    def Get_size(self):
        return 2

    def bcast(self, value, root):
        if self._rank != root:
            return self._pipe.recv()
        self._pipe.send(value)
        return value

    def gather(self, value, root):
        if self._rank != root:
            self._pipe.send(value)
            return None
        return [value, self._pipe.recv()]

    def Split(self, color):
        return self


@contextlib.contextmanager
def mpi_of(rank, pipes):
    module = types.ModuleType("mpi4py")
    module.MPI = types.SimpleNamespace(COMM_WORLD=Communicator(rank, pipes[rank]), Comm=Communicator)
    with pytest.MonkeyPatch.context() as patch, variables():
        patch.setitem(sys.modules, "mpi4py", module)
        patch.setattr(mpi, "_MPI4PY_AVAILABLE", True)
        yield


def test_ranks_of_mpi_as_a_stand_in_has_it():
    pipes = Pipe()

    def job(rank):
        with mpi_of(rank, pipes):
            return stages()

    check(run_ranks(job, bare=True), "MPIEnvironment")
    for pipe in pipes:
        pipe.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_stage_that_fails_before_its_rendezvous_frees_ranks_of_mpi(failing):
    """Their environment finds its address by a collective, which the rank that has failed would never come to."""
    pipes = Pipe()

    def job(rank):
        with mpi_of(rank, pipes):
            kinds = []
            for path in ("best" if rank == failing else None, None):
                trainer = make_trainer(PGroupDDPStrategy(rendezvous_timeout=20))
                try:
                    trainer.validate(TinyModel(), datamodule=TinyData(), ckpt_path=path, verbose=False)
                    kinds.append("fine")
                except Exception as error:
                    kinds.append(type(error).__name__)
            return kinds

    results = run_ranks(job, bare=True, deadline=30)
    assert results[1 - failing] == ["RendezvousAbandonedError", "fine"]
    assert results[failing][1] == "fine"
    for pipe in pipes:
        pipe.close()


SWEEP = """
for number in range(2):
    strategy = PGroupDDPStrategy(destroy="on_teardown", rendezvous_timeout=30)
    trainer = make_trainer(strategy)
    trainer.fit(TinyModel(), datamodule=TinyData())
    trainer.test(TinyModel(), datamodule=TinyData(), verbose=False)
    say(trainer.global_rank, trainer.world_size, *(f"{e.what}{e.generation}" for e in strategy.events))
"""


@pytest.mark.scripts
@pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None, reason="there is no MPI with mpi4py here"
)
def test_ranks_of_a_real_mpi(tmp_path):
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    done = run(SWEEP, tmp_path, launcher=launcher, cold=True)
    assert done.code == 0, done.err
    want = [f"created{n} destroyed{n} created{n + 1} destroyed{n + 1}" for n in (1, 3)]
    assert sorted(done.said("-")) == sorted(f"{rank} 2 {one}" for rank in (0, 1) for one in want)


SHELL = {"SLURM_NTASKS": 2, "SLURM_JOB_ID": 4711, "SLURM_NNODES": 1, "SLURM_NTASKS_PER_NODE": 2, "SLURM_NODELIST": HOST}
LEFT_OVER = {
    "srun --pty bash": {**SHELL, "SLURM_JOB_NAME": "bash", "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0},
    "salloc, and an earlier run": {
        **SHELL,
        "SLURM_JOB_NAME": "interactive",
        "RANK": 1,
        "WORLD_SIZE": 4,
        "MASTER_ADDR": LOOPBACK,
        ENVIRONMENT_VARIABLE: Invitation.to(Endpoint(LOOPBACK, 9), 4, 7).to_environment(),
    },
}


@pytest.mark.scripts
@pytest.mark.parametrize("name", LEFT_OVER)
def test_what_a_shell_has_left_over_does_not_confuse_a_script(name, tmp_path):
    values = {key: str(value) for key, value in LEFT_OVER[name].items()}
    with contextlib.closing(listen(LOOPBACK)) as taken:
        if "earlier run" in name:
            values["MASTER_PORT"] = str(taken.getsockname()[1])  # by somebody else, meanwhile
        setting = ["env", *(f"{key}={value}" for key, value in values.items()), sys.executable]
        done = run(SWEEP, tmp_path, launcher=setting)
    assert done.code == 0, done.err
    for rank in range(2):
        assert done.said(rank) == [f"{rank} 2 created{n} destroyed{n} created{n + 1} destroyed{n + 1}" for n in (1, 3)]


def start_alone(timeout, **values):
    """What a fit says that believes to be a rank, in a process that nobody else has started; and how long that took."""

    def job(rank):
        start = time.monotonic()
        with variables(**values), pytest.raises((StoreLostError, RendezvousTimeoutError)) as caught:
            make_trainer(PGroupDDPStrategy(rendezvous_timeout=timeout)).fit(TinyModel(), datamodule=TinyData())
        return str(caught.value), time.monotonic() - start

    return run_ranks(job, 1, bare=True, deadline=40)[0]


@pytest.mark.scripts
@pytest.mark.parametrize("rank", [0, 1])
def test_all_variables_of_torchrun_left_over_are_an_error_within_seconds(rank):
    with free_port() as port:
        text, took = start_alone(60, **torchrun(rank, port, 0, agent=True))
    assert f"Rank {rank} of 2" in text
    assert f"at {LOOPBACK}:{port}, but nothing listens there" in text
    assert "If torchrun did not start this process, unset" in text
    assert took < 10


def test_a_local_rank_left_over_without_an_address_is_an_error_at_once():
    text, took = start_alone(60, LOCAL_RANK=0, MASTER_PORT=None)
    assert "LOCAL_RANK is set, so that somebody else than Lightning has started the ranks, but MASTER_PORT is not" in text
    assert took < 5


def test_an_invitation_left_over_with_a_local_rank_is_an_error_at_once():
    with free_port() as port:
        invitation = Invitation.to(Endpoint(LOOPBACK, port), 2, 0).to_environment()
        text, took = start_alone(60, LOCAL_RANK=1, **{ENVIRONMENT_VARIABLE: invitation})
    assert "s of 60.0 s for the store in which the ranks meet, at " + f"{LOOPBACK}:{port}" in text
    assert "has ended" in text
    assert f"unset {ENVIRONMENT_VARIABLE}" in text
    assert took < 5


@pytest.mark.parametrize("rank", [0, 1])
def test_all_that_a_hand_sets_left_over_is_an_error_that_says_so(rank):
    """Nothing tells these from a run of which the other rank is late."""
    with free_port() as port:
        text, _ = start_alone(1, **by_hand(rank, port, 0))
    assert re.search(rf"Rank {rank} of 2 waited 1\.\d s of 1\.0 s", text)
    assert f"{LOOPBACK}:{port}" in text
    if rank == 0:
        assert "the main address by LightningEnvironment, since LOCAL_RANK is set: started by hand" in text
        assert "rank 1 (never seen)" in text


def test_a_batch_script_of_slurm_without_srun_says_who_did_not_come():
    text, _ = start_alone(1, **slurm(0, 0, free_job(10_000, 15_000)))
    assert "the main address by SLURMEnvironment" in text
    assert "rank 1 (never seen)" in text
