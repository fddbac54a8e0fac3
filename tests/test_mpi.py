"""Ranks that `mpirun` starts: Lightning's environment for MPI says who is who and where rank 0 is."""

import importlib.util
import shutil
import sys

import pytest

from tests.scripts import run

MPIRUN = shutil.which("mpirun")

pytestmark = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None, reason="Open MPI's `mpirun` or mpi4py is not installed"
)

JOB = """
from lightning.pytorch.plugins.environments import MPIEnvironment

class Fault(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 1:
            raise ValueError("boom")

first = PGroupDDPStrategy(timeout=60)
trainer = make_trainer(first, limit_train_batches=50)
rank, environment = trainer.global_rank, type(first.cluster_environment).__name__
trainer.fit(TinyModel(), datamodule=TinyData(32))
trainer.test(TinyModel(), datamodule=TinyData(32), verbose=False)
say(rank, "first", environment, trainer.global_step, whats(first))
try:
    make_trainer(PGroupDDPStrategy(timeout=60), callbacks=[Fault()], limit_train_batches=50).fit(
        TinyModel(), datamodule=TinyData(32)
    )
except (ValueError, RuntimeError) as error:
    say(rank, "second", type(error).__name__, *error.__notes__)
third = PGroupDDPStrategy(timeout=60)
make_trainer(third).fit(TinyModel(), datamodule=TinyData(32))
say(rank, "third", whats(third))
"""


def test_mpirun(tmp_path):
    launcher = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable]
    done = run(JOB, tmp_path, launcher=launcher, timeout=80, cold=True)
    assert done.code == 0, done.err
    said = {tuple(line.split(" ", 3)[1:3]): line.split(" ", 3)[3] for line in done.said()}
    for rank in "01":
        assert said[rank, "first"] == "MPIEnvironment 4 [('fit', 'created', 1), ('test', 'reused', 1)]"
        assert said[rank, "second"].startswith("ValueError" if rank == "1" else "RuntimeError")
        assert "was on rank 1 (pid" in said[rank, "second"]
        assert said[rank, "third"] == "[('fit', 'created', 3)]"
