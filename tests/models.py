"""A small model and Trainers that say nothing, for tests."""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from lightning_pgroup import PGroupDDPStrategy


class TinyModel(LightningModule):
    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(features, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch[0]).mean(), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test", self.layer(batch[0]).mean(), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CountingModel(TinyModel):
    """Logs how many rows were tested, over all ranks that torchmetrics knows of."""

    def __init__(self):
        super().__init__()
        self.count = SumMetric()

    def test_step(self, batch, batch_idx):
        self.count.update(len(batch[0]))

    def on_test_epoch_end(self):
        self.log("count", self.count.compute())


class TinyData(LightningDataModule):
    def __init__(self, rows: int = 16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.rows = TensorDataset(torch.randn(rows, 4, generator=generator))

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def make_trainer(strategy: Any = None, devices: int = 2, **kwargs: Any) -> Trainer:
    quiet = {
        "accelerator": "cpu",
        "devices": devices,
        "max_epochs": 1,
        "limit_train_batches": 1,
        "limit_val_batches": 0,
        "limit_test_batches": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(strategy=PGroupDDPStrategy() if strategy is None else strategy, **{**quiet, **kwargs})


def whats(strategy: PGroupDDPStrategy) -> list[tuple[str, str, int]]:
    """What was done in which stage with which generation."""
    return [(event.stage, event.what, event.generation) for event in strategy.events]
