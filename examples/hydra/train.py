"""Handwritten digits on two DDP ranks, put together from a configuration: one job, or a sweep of jobs one after the other.

    python examples/hydra/train.py strategy=on_teardown optimizer.lr=0.01
    python examples/hydra/train.py --multirun strategy=per_trainer,on_teardown optimizer.lr=0.001,0.01
    python examples/hydra/train.py --multirun hydra/launcher=joblib hydra.launcher.n_jobs=2 optimizer=adam,sgd

The data are the scans that ship with scikit-learn, so that nothing is downloaded.
"""

import warnings
from collections.abc import Callable, Iterable

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch import LightningModule, seed_everything
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy


class Network(LightningModule):
    """Layers for images of 8 by 8 pixels; its accuracy counts the scans of all ranks."""

    def __init__(self, layers: nn.Module, optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.layers = layers
        self.optimizer = optimizer
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
        """The optimizer, as the configuration names it."""
        return self.optimizer(self.parameters())


def loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Batches for training and for the test; Lightning gives each rank its share."""
    images, labels = load_digits(return_X_y=True)
    scans = TensorDataset(torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels))
    train, test = random_split(scans, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> float:
    """Run one job, on each rank; a sweep reads the accuracy that it returns."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*DistributedSampler.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*")
    seed_everything(config.seed, verbose=False)
    trainer = instantiate(config.trainer)
    model = Network(instantiate(config.model), instantiate(config.optimizer))
    train, test = loaders(config.batch_size)
    trainer.fit(model, train)
    (result,) = trainer.test(model, test, verbose=False)
    if trainer.is_global_zero:
        words = " ".join(HydraConfig.get().overrides.task)
        print(f"accuracy {result['test accuracy']:.3f} on {trainer.world_size} ranks with {words or 'the defaults'}")
        for event in trainer.strategy.events:
            print(f"  {event.stage or '-':5} generation {event.generation}: {event.what:9} because {event.why}")
    return result["test accuracy"]


if __name__ == "__main__":
    main()
