"""Hydra: strategies from configurations, and sweeps whose jobs each have ranks of their own."""

import itertools
import os
import pickle
import signal
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_pgroup import PGroupDDPStrategy, hydra_job
from lightning_pgroup.record_file import read_records
from tests.scripts import ROOT, Run, finish, listen, start_command
from tests.test_cli import OWN

EXAMPLE = ROOT / "examples" / "hydra"

EVERYTHING = """
_target_: lightning_pgroup.PGroupDDPStrategy
accelerator: {_target_: lightning.pytorch.accelerators.CPUAccelerator}
parallel_devices: [cpu, {_target_: torch.device, _args_: [cpu]}]
cluster_environment: {_target_: lightning.pytorch.plugins.environments.LightningEnvironment}
checkpoint_io: {_target_: lightning.pytorch.plugins.io.TorchCheckpointIO}
precision_plugin: {_target_: lightning.pytorch.plugins.Precision}
ddp_comm_state: {steps: [1, 2]}
ddp_comm_hook:
  _target_: hydra.utils.get_method
  path: torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook
ddp_comm_wrapper:
  _target_: hydra.utils.get_method
  path: torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_wrapper
model_averaging_period: 4
process_group_backend: gloo
timeout: 0:10:00
start_method: popen
destroy: [on_teardown, on_error]
on_error: destroy
on_mismatch: reuse
destroy_timeout: 12.5
rendezvous_timeout: 1 day, 0:00:07
init_method: null
pg_options: {_target_: tests.cli_parts.Options, threads: 3}
groups: {pair: [[0, 1]], alone: [1]}
metrics: keep
record: records.jsonl
find_unused_parameters: true
process_group: pair
"""


@pytest.mark.parametrize("convert", ["none", "partial", "object", "all"])
def test_each_argument_takes_what_hydra_hands_over_and_nothing_of_omegaconf_stays(convert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = OmegaConf.create(EVERYTHING)
    assert set(OWN) <= set(written)  # none is left out here
    strategy = instantiate(written, _convert_=convert)
    config = strategy._config
    assert config.policy_names == ("on_error", "on_teardown")
    assert (config.on_error.value, config.on_mismatch.value) == ("destroy", "reuse")
    assert (config.destroy_timeout, config.rendezvous_timeout) == (timedelta(seconds=12.5), timedelta(days=1, seconds=7))
    assert strategy._timeout == timedelta(minutes=10)
    assert config.pg_options._threads == 3
    assert config.record == str(tmp_path / "records.jsonl")
    assert {name: one.lists for name, one in strategy._groups.items()} == {"pair": ((0, 1),), "alone": ((1,),)}
    assert strategy.parallel_devices == [torch.device("cpu")] * 2
    assert type(strategy._ddp_comm_state) is dict
    assert type(strategy._ddp_comm_state["steps"]) is list
    assert strategy._ddp_kwargs == {"find_unused_parameters": True, "process_group": "pair"}
    strategy._config = None  # the options are a class of these tests
    assert b"omegaconf" not in pickle.dumps(strategy)


def test_what_is_wrong_is_said_as_without_hydra():
    with pytest.raises(Exception, match=r"`destroy` must be one of 'on_teardown'.*got 'on_tear'"):
        instantiate({"_target_": "lightning_pgroup.PGroupDDPStrategy", "destroy": ["on_tear"]})


def test_each_choice_of_each_config_group_of_the_example():
    groups = [
        sorted(path.stem for path in (EXAMPLE / "conf" / group).iterdir()) for group in ("strategy", "model", "optimizer")
    ]
    with initialize_config_dir(str(EXAMPLE / "conf"), version_base="1.3"):
        for strategy, model, optimizer in itertools.product(*groups):
            config = compose("config", [f"strategy={strategy}", f"model={model}", f"optimizer={optimizer}"])
            made = instantiate(config.trainer.strategy)
            assert isinstance(made, PGroupDDPStrategy)
            assert made._timeout == timedelta(minutes=5)
            layers = instantiate(config.model)
            assert layers(torch.zeros(2, 64)).shape == (2, 10)
            assert instantiate(config.optimizer)(layers.parameters()).param_groups


@pytest.mark.parametrize("text", ["/a b/c=d,e", "it's", "back\\slash", "end\\", "a\\'b", "${x}", "C:\\new\\'", "''", "", "[1]"])
def test_a_text_on_the_command_line_of_a_rank_comes_out_as_it_was(text):
    value = OverridesParser.create().parse_override(f"key={hydra_job._quoted(text)}").value()
    assert OmegaConf.create({"key": value}).key == text


@pytest.mark.parametrize(
    ("path", "search", "want"),
    [
        ("/home/me/project/train.py", ["/home/me/project"], ["/home/me/project/train.py"]),
        ("/home/me/project/jobs/deep/train.py", ["/home/me/project", "/home/me/project/jobs", "/lib"], ["-m", "deep.train"]),
        ("/home/me/project/train.py", ["/lib"], ["/home/me/project/train.py"]),
    ],
)
def test_the_script_in_a_worker_process_that_has_another_main_module(path, search, want, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=SimpleNamespace(origin="/lib/loky.py", name="loky")))
    monkeypatch.setattr(sys, "argv", [path])
    monkeypatch.setattr(sys, "path", search)
    assert hydra_job._script("/elsewhere") == want


def test_a_script_that_is_a_symbolic_link_starts_as_the_link_in_each_rank(monkeypatch):
    """Python then searches the folder of the file itself; as a module of another folder it would not find its neighbours."""
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None, __file__="/project/bin/train.py"))
    monkeypatch.setattr(sys, "argv", ["bin/train.py"])
    monkeypatch.setattr(sys, "path", ["/project/source", "/project", "/lib"])
    assert hydra_job._script("/project") == ["/project/bin/train.py"]


SCRIPT = """
import logging, os, sys, warnings
warnings.filterwarnings("ignore")
import hydra, torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch import Callback
from tests.models import CountingModel, TinyData, TinyModel, make_trainer

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def say(*words):
    print(" ".join(["SAY", os.environ.get("LOCAL_RANK", "0"), *map(str, words)]) + "\\n", end="", flush=True)


class Fault(Callback):
    def __init__(self, where, lr):
        self.where, self.lr = where, lr

    def on_train_start(self, trainer, module):
        module.optimizers().param_groups[0]["lr"] = self.lr

    def on_train_batch_end(self, trainer, module, *_):
        timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        lr, names = module.optimizers().param_groups[0]["lr"], ",".join(trainer.strategy._config.policy_names)
        ranks = trainer.strategy.reduce(torch.tensor(1), reduce_op="sum").item()
        job = HydraConfig.get().job
        say(self.where, "trained", job.num, job.name, names, lr, timeout, ranks, trainer.strategy.generation)
        if self.where == "interrupted":
            while True:
                trainer.strategy.barrier()
        if self.where == "failing" and trainer.global_rank == 1:
            raise ValueError("boom")


@hydra.main(version_base="1.3", config_path="conf", config_name="setup")
def main(config):
    name = config.name
    strategy = instantiate(config.strategy)
    trainer = make_trainer(strategy, config.devices, callbacks=[Fault(name, config.lr)], limit_test_batches=None)
    module = CountingModel()
    trainer.strategy.barrier()  # local: no rank is there yet
    trainer.fit(module, TinyData())
    if name == "between" and trainer.global_rank == 0:
        raise ValueError("boom")
    say(name, "tested", int(trainer.test(module, TinyData(), verbose=False)[0]["count"]), trainer.world_size)
    say(name, "in", HydraConfig.get().runtime.output_dir, *sorted({event.what for event in strategy.events}))
    return 1.0


if __name__ == "__main__":
    main()
"""

SETUP = """
defaults: [job: first, _self_]
strategy:
  _target_: lightning_pgroup.PGroupDDPStrategy
  record: records
  timeout: ${timeout}
  destroy: ${destroy}
"""

JOBS = {  # devices, learning rate, timeout, policies
    "first": (2, 0.1, "0:01:00", "per_trainer"),
    "failing": (2, 0.1, 61, "per_trainer"),
    "between": (2, 0.1, 62, "never"),
    "alone": (1, 0.1, 63, "at_exit"),
    "last": (2, 0.2, 64.0, "[on_teardown, on_error]"),
    "interrupted": (2, 0.1, 65, "per_trainer"),
}


def sweep(folder, *overrides):
    """Start a sweep over jobs, in a folder whose name Hydra has to quote."""
    folder = folder / "a b,c='d'"
    (folder / "conf" / "job").mkdir(parents=True)
    (folder / "conf" / "setup.yaml").write_text(SETUP)
    for name, (devices, lr, timeout, destroy) in JOBS.items():
        text = f"# @package _global_\nname: {name}\ndevices: {devices}\nlr: {lr}\ntimeout: {timeout}\ndestroy: {destroy}\n"
        (folder / "conf" / "job" / f"{name}.yaml").write_text(text)
    (folder / "sweep.py").write_text(SCRIPT)
    return folder, start_command([sys.executable, "sweep.py", "--multirun", "hydra.sweep.dir=out", *overrides], folder)


def of_job(done: Run, rank: int, job: str) -> list[str]:
    return [line.split(" ", 1)[1] for line in done.said(rank) if line.split()[0] == job]


@pytest.mark.scripts
@pytest.mark.timeout(280)
def test_each_job_of_a_sweep_has_its_own_ranks_policy_timeout_and_learning_rate(tmp_path):
    """One rank fails in the second job and the other in the third, one job in between is for one rank."""
    folder, process = sweep(tmp_path, "job=first,failing,between,alone,last")
    done = finish(process, timeout=250)
    assert done.code == 1, done.err  # as Hydra has it, at the end of a sweep of which a job has failed
    assert "was ended: it was still running" not in done.err
    words = {rank: " ".join(done.said(rank)) for rank in (0, 1)}
    for rank in (0, 1):
        assert of_job(done, rank, "first")[:2] == ["trained 0 sweep per_trainer 0.1 60.0 2 1", "tested 16 2"], done.err
        assert of_job(done, rank, "failing") == ["trained 1 sweep per_trainer 0.1 61.0 2 2"], (words, done.err)
        assert of_job(done, rank, "between") == ["trained 2 sweep never 0.1 62.0 2 3"], (words, done.err)
        last = of_job(done, rank, "last")
        assert last[:2] == ["trained 4 sweep on_error,on_teardown 0.2 64.0 2 5", "tested 16 2"], (
            words,
            done.err,
        )
        assert last[2] == f"in {folder}/out/4 created destroyed"
    assert of_job(done, 0, "alone")[:2] == ["trained 3 sweep at_exit 0.1 63.0 1 4", "tested 16 1"], (words, done.err)
    assert of_job(done, 1, "alone") == []
    assert "ValueError: boom" in done.err
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["0", "1", "2", "3", "4", "multirun.yaml"]
    for number in range(5):
        files = sorted(path.name for path in (folder / "out" / str(number)).iterdir())
        assert files == [".hydra", "sweep.log"] + ["sweep_rank_1.log"] * (number != 3)
    made = [
        (one["rank"], one["generation"], one["run"]) for one in read_records(folder / "records") if one["what"] == "created"
    ]
    runs = {generation: run for _, generation, run in made}
    assert len({runs[generation] for generation in (1, 2, 3, 5)}) == 4
    assert {rank for rank, generation, _ in made if generation == 5} == {0, 1}


@pytest.mark.scripts
@pytest.mark.timeout(200)
def test_an_interrupt_in_the_second_job_ends_the_sweep(tmp_path):
    _, process = sweep(tmp_path, "job=first,interrupted,last")
    listen(process, "first", timeout=90)
    listen(process, "interrupted", timeout=90)
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process, timeout=60)
    assert done.code not in (0, None)
    assert of_job(done, 0, "last") == []


@pytest.mark.scripts
@pytest.mark.timeout(250)
def test_jobs_in_worker_processes_of_joblib_each_with_ranks_of_its_own(tmp_path):
    """Three jobs in two processes, so that one of them gets a second job."""
    folder, process = sweep(tmp_path, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "job=first,last,first", "+extra=1")
    done = finish(process, timeout=220)
    assert done.code == 0, done.err
    for rank in (0, 1):
        trained = sorted(line for line in done.said(rank) if line.split()[1] == "trained")
        assert [line.rsplit(" ", 1)[0] for line in trained] == [
            "first trained 0 sweep per_trainer 0.1 60.0 2",
            "first trained 2 sweep per_trainer 0.1 60.0 2",
            "last trained 1 sweep on_error,on_teardown 0.2 64.0 2",
        ], done.err
        assert sum("tested 16 2" in line for line in done.said(rank)) == 3
    assert len(list(folder.glob("out/*/sweep_rank_1.log"))) == 3
