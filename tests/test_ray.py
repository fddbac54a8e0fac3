"""Ray Train makes the group before the Trainer: for us it is foreign."""

import ast
import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_pgroup import PGroupDDPStrategy
from tests.models import TinyData, TinyModel, make_trainer, whats
from tests.ranks import run_ranks
from tests.scripts import finish, start_command

pytestmark = pytest.mark.scripts

SCRIPT = """
import os, sys
import psutil, ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train():
    import torch, torch.distributed as dist
    from lightning.pytorch import Callback
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
    from lightning_pgroup import PGroupDDPStrategy
    from tests.models import TinyData, TinyModel, make_trainer, whats

    class RayPGroupStrategy(PGroupDDPStrategy, RayDDPStrategy):
        pass

    class Fault(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            raise ValueError("boom")

    def trainer_of(strategy, **kwargs):
        environment = RayLightningEnvironment()
        return prepare_trainer(make_trainer(strategy, devices="auto", plugins=[environment], limit_train_batches=50, **kwargs))

    theirs = dist.group.WORLD
    strategy = RayPGroupStrategy()
    trainer = trainer_of(strategy)
    trainer.fit(TinyModel(), datamodule=TinyData(32))
    trainer.test(TinyModel(), datamodule=TinyData(32), verbose=False)
    said = [trainer.global_rank, trainer.world_size, trainer.global_step, str(strategy.root_device), whats(strategy)]
    strategy.close()
    try:
        trainer_of(RayPGroupStrategy(), callbacks=[Fault()]).fit(TinyModel(), datamodule=TinyData(32))
    except ValueError as error:
        said.append(str(error))
    number = torch.ones(1)
    dist.all_reduce(number)
    print("SAID", said + [dist.group.WORLD is theirs, number.item()], flush=True)


ray.init(
    num_cpus=2,
    include_dashboard=False,
    object_store_memory=100 * 2**20,
    _temp_dir=sys.argv[1],
    _node_ip_address="127.0.0.1",
)
trainer = TorchTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=2),
    torch_config=TorchConfig(backend="gloo"),
    run_config=RunConfig(storage_path=os.path.join(sys.argv[1], "results"), name="run"),
)
assert trainer.fit().error is None
children = psutil.Process().children(recursive=True)
ray.shutdown()
_, left = psutil.wait_procs(children, timeout=30)  # Ray does not wait for all that it ends
print("SHUT DOWN", len(children) > 0, left, flush=True)
"""


def processes_with(text):
    return [p.info for p in psutil.process_iter(["pid", "cmdline"]) if any(text in part for part in p.info["cmdline"] or [])]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed")
@pytest.mark.timeout(180)
def test_ray_train(tmp_path, monkeypatch):
    """Fit, test and a failure in Ray's group, which lives on."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    (tmp_path / "script.py").write_text(SCRIPT)
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # the paths of Ray's sockets must be short
        done = finish(start_command([sys.executable, "script.py", folder], tmp_path, cold=True), timeout=160)
        assert done.code == 0, done.err
        assert not processes_with(folder), "Ray has left processes"
        logs = "".join(path.read_text(errors="replace") for path in Path(folder).rglob("worker-*.err"))
    assert done.out.rstrip().endswith("SHUT DOWN True []"), done.out
    said = sorted(ast.literal_eval(line) for line in re.findall(r"SAID (\[.*\])", done.out))
    events = [("fit", "adopted", 0), ("test", "adopted", 0)]
    assert said == [[rank, 2, 4, "cpu", events, "boom", True, 2.0] for rank in range(2)], done.err
    assert "Setting up process group" in logs, "not the logs of the workers"
    for word in ("lightning_pgroup/", "terminate called", "Exception ignored", "destroy_process_group"):
        assert word not in logs, logs


def test_ranks_that_see_one_device_each_are_counted_by_their_environment():
    """As with Ray's environment, which derives from Lightning's, and strategy; `devices="auto"` finds one device per rank."""

    class Environment(LightningEnvironment):
        def world_size(self):
            return 2

        def set_world_size(self, size):
            pass

        def global_rank(self):
            return int(os.environ["LOCAL_RANK"])

        def set_global_rank(self, rank):
            pass

    class Strategy(PGroupDDPStrategy):
        root_device = torch.device("cpu")

    def job(rank):
        dist.init_process_group("gloo", rank=rank, world_size=2)
        strategy = Strategy()
        trainer = make_trainer(strategy, devices=1, plugins=[Environment()], use_distributed_sampler=False)
        trainer.fit(TinyModel(), datamodule=TinyData())
        mean = strategy.reduce(torch.tensor(float(rank)))
        dist.destroy_process_group()
        return whats(strategy)[0], trainer.world_size, trainer.global_rank, mean.item()

    assert run_ranks(job, check_leaks=False) == [(("fit", "adopted", 0), 2, rank, 0.5) for rank in range(2)]
