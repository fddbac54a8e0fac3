"""A checkpoint that was written under one policy, or by plain DDP, resumes under every other, bit for bit."""

import itertools

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from lightning_pgroup import PGroupDDPStrategy
from lightning_pgroup.policy import DestroyPolicy
from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks

POLICIES = [policy.value for policy in DestroyPolicy]
WHOLE = "plain-whole"
"""Two epochs without a break."""


class AdamModel(TinyModel):
    """Its optimizer has a state that decides where the next step leads."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def train(strategy, folder, name, *, epochs=1, resume=None):
    """Train, from the start or on from a checkpoint, and write one at the end."""
    seed_everything(3, verbose=False)
    callback = ModelCheckpoint(folder, filename=name, save_on_train_epoch_end=True, every_n_epochs=epochs)
    trainer = make_trainer(strategy, callbacks=[callback], enable_checkpointing=True, max_epochs=epochs, limit_train_batches=3)
    trainer.fit(AdamModel(), datamodule=TinyData(32), ckpt_path=None if resume is None else folder / f"{resume}.ckpt")


def contents(folder, name):
    """What counts of a checkpoint: the weights, the state of the optimizer, and how far it came."""
    checkpoint = torch.load(folder / f"{name}.ckpt", weights_only=False)
    (optimizer,) = checkpoint["optimizer_states"]
    tensors = dict(checkpoint["state_dict"])
    for number, state in optimizer["state"].items():
        tensors |= {f"{number}.{key}": value for key, value in state.items()}
    return tensors, checkpoint["global_step"], checkpoint["epoch"]


def assert_same(folder, name, expected):
    tensors, *progress = contents(folder, name)
    wanted, *far = expected
    assert progress == far, name
    assert tensors.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(tensors[key], wanted[key])] == [], name


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What plain DDP has written: after one epoch, and after two without a break."""
    folder = tmp_path_factory.mktemp("plain")

    def job(rank):
        train(DDPStrategy(), folder, "plain")
        train(DDPStrategy(), folder, WHOLE, epochs=2)
        dist.destroy_process_group()

    run_ranks(job, check_leaks=False)
    return folder


def link(plain, folder):
    for path in plain.iterdir():
        (folder / path.name).symlink_to(path)


def test_a_checkpoint_of_each_policy_resumes_under_each_other_and_under_plain_ddp(plain, tmp_path):
    link(plain, tmp_path)
    ours = {policy: lambda policy=policy: PGroupDDPStrategy(destroy=policy) for policy in POLICIES}

    def first(rank):
        for policy, strategy in ours.items():
            made = strategy()
            train(made, tmp_path, policy)
            end(made)

    def second(rank):
        for policy, strategy in ours.items():
            for writer in [*POLICIES, "plain"]:
                made = strategy()
                train(made, tmp_path, f"{writer}-{policy}", epochs=2, resume=writer)
                end(made)

    def third(rank):
        for writer in POLICIES:
            train(DDPStrategy(), tmp_path, f"{writer}-plain", epochs=2, resume=writer)
        dist.destroy_process_group()

    def end(strategy):
        strategy.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    run_ranks(first, check_leaks=False)
    run_ranks(second, check_leaks=False)
    run_ranks(third, check_leaks=False)
    half, whole = contents(tmp_path, "plain"), contents(tmp_path, WHOLE)
    assert (half[1:], whole[1:]) == ((3, 0), (6, 1))
    assert not torch.equal(half[0]["layer.weight"], whole[0]["layer.weight"])
    for policy in POLICIES:
        assert_same(tmp_path, policy, half)
        assert_same(tmp_path, f"{policy}-plain", whole)
    for writer, reader in itertools.product([*POLICIES, "plain"], POLICIES):
        assert_same(tmp_path, f"{writer}-{reader}", whole)


def test_and_under_each_way_to_start_the_ranks(plain, tmp_path):
    link(plain, tmp_path)

    def workers(_):
        train("pgroup_ddp_fork", tmp_path, "fork")
        for writer, reader in (("plain", "pgroup_ddp_fork"), ("fork", "ddp_fork")):
            train(reader, tmp_path, f"{writer}-{reader}", epochs=2, resume=writer)

    def ranks(rank):
        train("pgroup_ddp", tmp_path, "fork-pgroup_ddp", epochs=2, resume="fork")

    run_ranks(workers, size=1, bare=True, check_leaks=False)
    run_ranks(ranks)
    assert_same(tmp_path, "fork", contents(tmp_path, "plain"))
    for name in ("plain-pgroup_ddp_fork", "fork-ddp_fork", "fork-pgroup_ddp"):
        assert_same(tmp_path, name, contents(tmp_path, WHOLE))
