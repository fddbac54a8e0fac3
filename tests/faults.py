"""Faults to put into the hooks of a run, and how the run ended; used by the tests of failures and of sweeps."""

import time

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import Checkpoint

from tests.models import TinyData, TinyModel, make_trainer
from tests.ranks import run_ranks

PATIENCE = 2.0  # seconds in which every surviving rank must be back


class Boom(Exception):
    """The fault itself, so that no other error can be taken for it."""


class HookedModel(TinyModel):
    """Has all the hooks that a fault may be put into."""


class HookedData(TinyData):
    def prepare_data(self):
        pass


MODULE_HOOKS = [
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "validation_step",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
]
DATA_HOOKS = ["prepare_data", "setup", "train_dataloader", "val_dataloader", "on_before_batch_transfer", "teardown"]
CALLBACK_HOOKS = [
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_batch_start",
    "on_after_backward",
    "on_train_batch_end",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
]
PLACES = (
    [("module", hook) for hook in MODULE_HOOKS if not hook.startswith("on_sanity")]
    + [("data", hook) for hook in DATA_HOOKS]
    + [("callback", hook) for hook in CALLBACK_HOOKS]
)


def inject(owner, hook, error):
    """Let a hook raise, after what it does itself."""
    original = getattr(owner, hook, None)

    def faulty(*args, **kwargs):
        if original is not None:
            original(*args, **kwargs)
        raise error

    setattr(owner, hook, faulty)


def fit(strategy, *, devices=2, faults=(), callbacks=(), rows=32):
    """Fit with some faults put in; returns the weights."""
    seed_everything(5, verbose=False)
    parts = {"module": HookedModel(), "data": HookedData(rows), "callback": Callback()}
    for part, hook, error in faults:
        inject(parts[part], hook, error)
    trainer = make_trainer(
        strategy,
        devices=devices,
        callbacks=[parts["callback"], *callbacks],
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        limit_train_batches=2,
        limit_val_batches=1,
        num_sanity_val_steps=0 if not any("sanity" in hook for _, hook, _ in faults) else 1,
    )
    trainer.fit(parts["module"], datamodule=parts["data"])
    return [tensor.detach().clone() for tensor in parts["module"].state_dict().values()]


def attempt(strategy, **kwargs):
    """Fit and say how it ended, and when, on a clock that all ranks share."""
    error: BaseException | None = None
    try:
        fit(strategy, **kwargs)
    except BaseException as caught:
        error = caught
    return {
        "kind": None if error is None else type(error).__name__,
        "text": str(error or ""),
        "notes": list(getattr(error, "__notes__", [])),
        "at": time.monotonic(),
    }


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def weights_of_a_fresh_process(strategy, size=2):
    """What the fit of :func:`fit` trains in processes that have never run a stage before."""
    return run_ranks(lambda rank: fit(strategy, devices=size), size=size)
