"""A study of Optuna on several ranks: rank 0 decides, all ranks run the same trials, some are pruned and some fail.

    python examples/optuna_study.py
    torchrun --nproc-per-node=2 examples/optuna_study.py

The data are the scans that ship with scikit-learn, so that nothing is downloaded.
"""

import argparse
import logging
import os
import warnings
from typing import Any

import optuna
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from optuna.trial import TrialState
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_pgroup import PGroupDDPStrategy


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    """What a trial is about. Called on rank 0 only."""
    return {"width": trial.suggest_int("width", 8, 64, log=True), "lr": trial.suggest_float("lr", 1e-5, 1e3, log=True)}


class SharedTrial(Callback):
    """One trial, which only rank 0 knows from Optuna: the others hear from it what to run, and whether to stop.

    All of it happens inside a stage: there the ranks are together, the first time too, and one that fails frees the others.
    """

    def __init__(self, trial: optuna.Trial | None) -> None:
        self.trial = trial
        self.number: int | None = None
        self.params: dict[str, Any] = {}
        self.pruned = False

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Draw the parameters on rank 0, and hand them to all ranks before the layers are made."""
        told = None if self.trial is None else (self.trial.number, suggest(self.trial))
        self.number, self.params = trainer.strategy.broadcast(told)
        module.params = self.params

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Report to Optuna on rank 0; all ranks stop together, and in good order, if the trial is pruned."""
        if trainer.sanity_checking:
            return
        if self.trial is not None:
            self.trial.report(float(trainer.callback_metrics["accuracy"]), trainer.current_epoch)
            self.pruned = self.trial.should_prune()
        self.pruned = trainer.strategy.broadcast(self.pruned)
        trainer.should_stop = trainer.should_stop or self.pruned


class Network(LightningModule):
    """One hidden layer. A learning rate that is too high ends the training with an error."""

    def __init__(self) -> None:
        super().__init__()
        self.params: dict[str, Any] = {}
        self.layers: nn.Module = nn.Identity()
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def configure_model(self) -> None:
        """Make the layers, once the parameters are known."""
        width = self.params["width"]
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """One step of training, which a rank may fail alone: its batches are its own."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        if loss > 50:
            raise FloatingPointError(f"the loss is {loss:.0f}")
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """The accuracy over all ranks, so that it is the same on each."""
        images, labels = batch
        self.accuracy(self.layers(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return torch.optim.SGD(self.parameters(), lr=self.params["lr"], momentum=0.9)


def loaders() -> tuple[DataLoader, DataLoader]:
    """Batches for training and for validation; Lightning gives each rank its share."""
    images, labels = load_digits(return_X_y=True)
    scans = TensorDataset(torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels))
    train, val = random_split(scans, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, 64, shuffle=True), DataLoader(val, 64)


class Study:
    """A study of Optuna on rank 0, and on each rank what became of the trials.

    Args:
        storage: Where rank 0 keeps it, such as ``"sqlite:///study.db"``; by default in its memory.
        epochs: How many epochs a trial has.
    """

    def __init__(self, storage: str | None, epochs: int) -> None:
        self.storage = storage
        self.epochs = epochs
        self.study: optuna.Study | None = None
        self.seen: list[tuple[int | None, dict[str, Any], str]] = []

    def run(self) -> Trainer:
        """Run the next trial, on all ranks. Returns its Trainer."""
        devices = int(os.environ.get("LOCAL_WORLD_SIZE", "2"))  # as torchrun has it
        strategy = PGroupDDPStrategy(destroy="per_trainer", on_error="abort", timeout=120)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=devices, max_epochs=self.epochs, **quiet)
        trial = self._ask() if trainer.is_global_zero else None
        shared = SharedTrial(trial)
        trainer.callbacks.append(shared)
        seed_everything(len(self.seen), verbose=False)
        well = True
        try:
            trainer.fit(Network(), *loaders())
        except Exception as error:  # whichever rank has failed, the others get an error too; an interrupt ends the study
            if shared.number is None:
                raise  # before it was known what to run
            logging.getLogger(__name__).warning("The trial has failed: %s", error)
            well = False
        # One that fails in the last moment leaves the others without an error, so all ask each other.
        well = trainer.strategy.reduce_boolean_decision(well)
        state = TrialState.FAIL if not well else TrialState.PRUNED if shared.pruned else TrialState.COMPLETE
        self.seen.append((shared.number, shared.params, state.name))
        if self.study is not None and trial is not None:
            value = float(trainer.callback_metrics["accuracy"]) if state is TrialState.COMPLETE else None
            self.study.tell(trial, value, state)
        return trainer

    def best(self, trainer: Trainer) -> tuple[int, float] | None:
        """Number and value of the best trial, on all ranks: a collective, after all stages."""
        mine = None
        if self.study is not None and self.study.get_trials(states=[TrialState.COMPLETE]):
            mine = (self.study.best_trial.number, self.study.best_value)
        return trainer.strategy.broadcast(mine)

    def _ask(self) -> optuna.Trial:
        if self.study is None:
            pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
            sampler = optuna.samplers.TPESampler(seed=0)
            self.study = optuna.create_study(storage=self.storage, sampler=sampler, pruner=pruner, direction="maximize")
            for lr in (0.1, 0.03, 1e-5, 1e3):  # two that work, one to be pruned, and one that fails
                self.study.enqueue_trial({"width": 32, "lr": lr})
        return self.study.ask()


def main() -> None:
    """Run the trials, and tell on each rank which ones it has seen and which is the best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10, help="number of trials (default: 10)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each (default: 3)")
    parser.add_argument("--storage", help="where rank 0 keeps the study, such as sqlite:///study.db (default: in memory)")
    arguments = parser.parse_args()

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = Study(arguments.storage, arguments.epochs)
    for _ in range(arguments.trials):
        trainer = study.run()
    best = study.best(trainer)
    lines = [f"rank {trainer.global_rank}: trial {number} {state} {params}" for number, params, state in study.seen]
    print("\n".join([*lines, f"rank {trainer.global_rank}: best {best}\n"]), end="", flush=True)
    trainer.strategy.close()


if __name__ == "__main__":
    main()
