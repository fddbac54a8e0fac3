"""What the benchmarks train: a perceptron of a chosen size, on data that costs nothing to get."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader, Dataset

RANKS = 2


class Perceptron(LightningModule):
    """Some square layers."""

    def __init__(self, width: int = 4, depth: int = 1) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """One step."""
        return self.layers(batch).pow(2).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """One batch."""
        self.layers(batch)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Repeated(Dataset[torch.Tensor]):
    """The same batch again and again."""

    def __init__(self, width: int = 4, rows: int = 4, count: int = 1) -> None:
        self._batch, self._count = torch.randn(rows, width), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._batch


def batches(width: int = 4, rows: int = 4, count: int = 1) -> DataLoader[torch.Tensor]:
    """A loader of ``count`` batches."""
    return DataLoader(Repeated(width, rows, count), batch_size=None)


def quiet_trainer(strategy: Strategy, devices: int = RANKS, **more: Any) -> Trainer:
    """A Trainer that only trains: it writes nothing and shows nothing."""
    chosen: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "use_distributed_sampler": False,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(strategy=strategy, devices=devices, **{**chosen, **more})
