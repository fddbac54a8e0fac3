"""Whole scripts under the real launchers: `python script.py` and `torchrun`."""

import re
import sys

import pytest

from lightning_pgroup.record_file import read_records
from tests.ranks import free_port
from tests.scripts import LAUNCHERS, ROOT, TORCHRUN, finish, run, start, start_command

pytestmark = pytest.mark.scripts

TWO_SIZES = """
steps = []
for devices in (1, 2):
    before = {k: os.environ.get(k) for k in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    strategy = %s
    trainer = make_trainer(strategy, devices=devices, limit_train_batches=100)
    trainer.fit(TinyModel(), datamodule=TinyData(rows=32))
    size = dist.get_world_size() if dist.is_initialized() else 0
    say("devices", devices, "group", size, "steps", trainer.global_step, "rank", trainer.global_rank)
"""


def test_f27_one_device_then_two(tmp_path):
    done = run(TWO_SIZES % "PGroupDDPStrategy(destroy='at_exit')", tmp_path)
    assert done.code == 0, done.err
    assert done.said() == [
        "- devices 1 group 1 steps 8 rank 0",
        "0 devices 2 group 2 steps 4 rank 0",
        "1 devices 1 group 1 steps 8 rank 0",
        "1 devices 2 group 2 steps 4 rank 1",
    ]


def test_f27_plain_ddp_trains_on_half_of_the_data_without_a_word(tmp_path):
    done = run(TWO_SIZES % "DDPStrategy()", tmp_path)
    assert done.code == 0
    assert done.said()[-1] == "0 devices 2 group 1 steps 4 rank 0"
    assert len(done.said()) == 2, "no second process was started"


SWEEP = """
for number in range(3):
    strategy = PGroupDDPStrategy(destroy="on_teardown", record="records")
    trainer = make_trainer(strategy)
    trainer.fit(TinyModel(), datamodule=TinyData())
    trainer.test(TinyModel(), datamodule=TinyData(), verbose=False)
    say(number, *(f"{e.what}{e.generation}" for e in strategy.events))
"""


@pytest.mark.parametrize("launcher", ["python", "torchrun", "torchrun, static"])
def test_a_sweep(launcher, tmp_path):
    """As users start it: cold."""
    with free_port() as port:
        static = [*TORCHRUN[:-1], "--master-addr=127.0.0.1", f"--master-port={port}"]
        done = run(SWEEP, tmp_path, launcher={**LAUNCHERS, "torchrun, static": static}[launcher], cold=True)
    assert done.code == 0, done.err
    for rank in range(2):
        assert done.said(rank) == [
            f"{n} created{2 * n + 1} destroyed{2 * n + 1} created{2 * n + 2} destroyed{2 * n + 2}" for n in range(3)
        ]
        kept = [one for one in read_records(tmp_path / "records") if one["rank"] == rank]
        assert [(one["generation"], one["trainer"]) for one in kept] == [(n // 2 + 1, n // 4 + 1) for n in range(12)]
        assert len({(one["pid"], one["run"]) for one in kept}) == 1


def test_f34_a_single_device_test_after_a_fit(tmp_path):
    """With "on_teardown" the group is gone, so that each process tests alone and counts each sample once."""
    done = run(
        """
        from tests.models import CountingModel
        model = CountingModel()
        make_trainer(PGroupDDPStrategy(destroy="on_teardown")).fit(model, datamodule=TinyData())
        single = make_trainer("auto", devices=1, limit_test_batches=100)
        say(single.test(model, datamodule=TinyData(16), verbose=False)[0]["count"])
        """,
        tmp_path,
    )
    assert done.code == 0, done.err
    assert done.said() == ["0 16.0", "1 16.0"]


def test_the_main_job(tmp_path):
    """What `make demo` runs."""
    path = ROOT / "examples" / "digits.py"
    done = finish(start_command([sys.executable, str(path), "--destroy", "on_teardown"], tmp_path, cold=True))
    assert done.code == 0, done.err
    accuracy = float(re.search(r"test accuracy (\S+),", done.out).group(1))
    assert accuracy >= 0.95
    lines = [" ".join(line.split()) for line in done.out.splitlines() if line.startswith("  ")]
    assert lines == [
        "fit generation 1: created because there was no group",
        "fit generation 1: destroyed because on_teardown: the stage ended",
        "test generation 2: created because there was no group",
        "test generation 2: destroyed because on_teardown: the stage ended",
    ]


def test_four_jobs_at_the_same_moment(tmp_path):
    jobs = []
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        jobs.append(start(SWEEP, tmp_path / str(number)))
    for job in jobs:
        done = finish(job, timeout=110)
        assert done.code == 0, done.err
        assert len(done.said()) == 6
        assert "in use" not in done.err


def test_a_rank_that_has_ended_is_noticed_by_the_one_that_needs_it(tmp_path):
    done = run(
        """
        make_trainer(PGroupDDPStrategy(destroy="on_teardown")).fit(TinyModel(), datamodule=TinyData())
        if os.environ["LOCAL_RANK"] == "1":
            sys.exit(0)
        try:
            make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
        except WorldSizeError as error:
            say(error)
        """,
        tmp_path,
        timeout=60,
    )
    assert done.code == 0, done.err
    assert "have ended: local rank 1 (exit code 0)" in done.said(0)[0]


def test_the_store_and_all_else_of_ours_listens_on_loopback_only(tmp_path):
    done = run(
        """
        import psutil
        from lightning_pgroup.process_state import process_state
        make_trainer(PGroupDDPStrategy(destroy="at_exit")).fit(TinyModel(), datamodule=TinyData())
        hosted = process_state().membership._hosted
        if hosted is not None:
            listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
            say([address.ip for address in listening if address.port == hosted.port])
        """,
        tmp_path,
    )
    assert done.said() == ["0 ['127.0.0.1']"], done.err


def test_a_port_of_the_users_own_stays_free_for_him(tmp_path):
    """Our store does not sit on MASTER_PORT: a group that the user makes by `env://` after the last stage works."""
    done = run(
        """
        make_trainer(PGroupDDPStrategy(destroy="on_teardown")).fit(TinyModel(), datamodule=TinyData())
        rank = int(os.environ["LOCAL_RANK"])
        dist.init_process_group("gloo", rank=rank, world_size=2)
        one = torch.ones(1)
        dist.all_reduce(one)
        trainer = make_trainer(PGroupDDPStrategy(destroy="on_teardown"))
        trainer.fit(TinyModel(), datamodule=TinyData())
        say(one.item(), [e.what for e in trainer.strategy.events], dist.is_initialized())
        dist.destroy_process_group()
        """,
        tmp_path,
    )
    assert done.code == 0, done.err
    assert done.said() == ["0 2.0 ['adopted'] True", "1 2.0 ['adopted'] True"]


FAILS = """
class Fault(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1:
            raise ValueError('boom')

strategy = PGroupDDPStrategy(timeout=40)
try:
    make_trainer(strategy, callbacks=[Fault()], limit_train_batches=50).fit(TinyModel(), datamodule=TinyData(512))
except BaseException as error:
    say(type(error).__name__, *getattr(error, "__notes__", []))
make_trainer(PGroupDDPStrategy()).fit(TinyModel(), datamodule=TinyData())
say("trained again")
"""


@pytest.mark.parametrize("launcher", [None, TORCHRUN], ids=["python", "torchrun"])
def test_a_failing_rank_under_each_launcher(launcher, tmp_path):
    done = run(FAILS, tmp_path, launcher=launcher, timeout=60)
    assert done.code == 0, done.err
    for rank, kind in ((0, "RuntimeError"), (1, "ValueError")):
        first, second = done.said(rank)
        assert first.startswith(kind)
        assert "on rank 1 (pid" in first
        assert "ValueError: boom" in first
        assert second == "trained again"
