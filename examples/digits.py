"""Handwritten digits on two DDP ranks: fit, then test, and what became of the process group in each stage.

The data are the scans that ship with scikit-learn, so that nothing is downloaded. Run it as a script:

    python examples/digits.py --destroy on_teardown
"""

import argparse
import logging
import warnings

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_pgroup import PGroupDDPStrategy


class Digits(LightningDataModule):
    """1,797 scans of 8 by 8 pixels; a fifth of them is kept for the test."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Split the scans, in the same way on all ranks."""
        images, labels = load_digits(return_X_y=True)
        split = train_test_split(images / 16.0, labels, test_size=0.2, random_state=0, stratify=labels)
        x_train, x_test, y_train, y_test = (torch.as_tensor(part) for part in split)
        self.train = TensorDataset(x_train.float(), y_train.long())
        self.test = TensorDataset(x_test.float(), y_test.long())

    def train_dataloader(self) -> DataLoader:
        """Batches for training; Lightning gives each rank its share."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader:
        """Batches for the test."""
        return DataLoader(self.test, batch_size=self.batch_size)


class Network(LightningModule):
    """A small convolutional network; its accuracy counts the scans of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """One step of training."""
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """One step of the test."""
        images, labels = batch
        self.accuracy(self.layers(images), labels)
        self.log("test accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    """Train, test, and tell what was done with the process group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--destroy",
        nargs="+",
        default=["on_teardown"],
        choices=["on_teardown", "per_trainer", "on_destructor", "on_error", "at_exit", "never"],
        help="when the process group ends, one policy or several (default: on_teardown)",
    )
    parser.add_argument(
        "--start-method", default="popen", choices=["popen", "spawn", "fork"], help="how the ranks start (default: popen)"
    )
    parser.add_argument("--devices", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of training (default: 5, enough for an accuracy of 0.95)")
    arguments = parser.parse_args()

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*DistributedSampler.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*")
    seed_everything(0, verbose=False)
    strategy = PGroupDDPStrategy(destroy=arguments.destroy, start_method=arguments.start_method)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, digits = Network(), Digits()
    trainer.fit(model, datamodule=digits)
    results = trainer.test(model, datamodule=digits, verbose=False)
    strategy.close()

    if trainer.is_global_zero:
        accuracy = results[0]["test accuracy"]
        print(f"test accuracy {accuracy:.4f}, all {arguments.devices} ranks together; destroy={arguments.destroy}")
        for event in strategy.events:
            print(f"  {event.stage or '-':5} generation {event.generation}: {event.what:9} because {event.why}")
        if accuracy < 0.95:
            raise SystemExit(f"The test accuracy is {accuracy:.4f}, less than the expected 0.95. Did it train long enough?")


if __name__ == "__main__":
    main()
