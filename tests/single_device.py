"""A test on one device, in a process that has been a rank: what it measured, and all that it was warned of."""

import logging
import warnings

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from torchmetrics import SumMetric

from lightning_pgroup import PGroupDDPStrategy
from tests.models import TinyData, TinyModel, make_trainer

ROWS = 18
LOGGERS = ("", "lightning", "lightning.pytorch", "lightning.fabric", "lightning_pgroup", "torch")


class ScoredModel(TinyModel):
    """Measures its mean output, and how many rows that is over all ranks that torchmetrics knows of."""

    def __init__(self):
        super().__init__()
        self.count = SumMetric()

    def test_step(self, batch, batch_idx):
        self.count.update(len(batch[0]))
        self.log("count", self.count, on_step=False, on_epoch=True)
        self.log("score", self.layer(batch[0]).mean(), sync_dist=True)


class Notes(logging.Handler):
    """Keeps what is logged as a warning, or worse."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def evaluated(model, strategy, *, alone_by=""):
    """Test a copy of a model on one device.

    Returns whether a group was there before, the number of rows, whether the mean is right, the number of ranks, the texts of
    all warnings.
    """
    data, notes, copy = TinyData(ROWS), Notes(), ScoredModel()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = model.layer(data.rows.tensors[0]).mean().item()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(notes)
        logger.setLevel(logging.WARNING)
    alive = dist.is_initialized()
    plugins = [LightningEnvironment()] if alone_by == "plugin" else None
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = PGroupDDPStrategy(timeout=20, rendezvous_timeout=20) if strategy == "ours" else strategy
            trainer = make_trainer(made, devices=1, limit_test_batches=100, plugins=plugins)
            (values,) = trainer.test(copy, datamodule=data, verbose=False)
            if made is not strategy:
                made.close()
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(notes)
            logger.setLevel(level)
    right = abs(values["score"] - expected) < 1e-6
    return alive, values["count"], right, trainer.world_size, sorted({*notes.texts, *(str(one.message) for one in caught)})
