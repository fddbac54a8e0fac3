"""Short fits in which metrics are fed, and what was said of them, for the tests of metrics."""

import contextlib
import logging
import warnings

from lightning.pytorch import Callback

from lightning_pgroup import PGroupDDPStrategy
from tests.models import TinyData, TinyModel, make_trainer


class Feeds(Callback):
    """Calls a function with the model after the batch."""

    def __init__(self, function):
        self.function = function

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.function(pl_module)


class Hook(Callback):
    """Calls a function in the last hook of a stage."""

    def __init__(self, function):
        self.function = function

    def teardown(self, trainer, pl_module, stage):
        self.function()


def model_with(**parts):
    """A model with these attributes."""
    model = TinyModel()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def fit(model, function, *, callbacks=(), devices=2, **arguments):
    """Fit, and end the group with that unless told otherwise; returns the model."""
    strategy = PGroupDDPStrategy(**{"destroy": "on_teardown", **arguments})
    trainer = make_trainer(strategy, devices=devices, callbacks=[Feeds(function), *callbacks])
    trainer.fit(model, datamodule=TinyData())
    return model


@contextlib.contextmanager
def reports():
    """The warnings in our log that are about metrics."""
    found, logger = [], logging.getLogger("lightning_pgroup")

    class Collector(logging.Handler):
        def emit(self, record):
            if "was not computed" in record.getMessage():
                found.append(record.getMessage())

    handler = Collector(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def warns(metric):
    """What a metric says, and whether it warns that this is one rank's only."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = metric.compute()
    return value, any("of this rank only" in str(one.message) for one in caught)
