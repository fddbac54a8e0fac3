"""A job that dies and goes on from its last checkpoint, as a user of torchrun writes one; in a folder of its own.

Everything that happens stands in ``journal.jsonl``, one line each: ``start`` of an attempt, its ``resumed`` fit, its first
``step`` (all with ``--until-stop``), each ``death``, and the ``end``. The number of deaths so far says which one comes next.
"""

import argparse
import json
import os
import signal
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="use DDPStrategy")
parser.add_argument("--timeout", type=float, default=60.0, help="timeout of the group, seconds")
parser.add_argument("--deaths", nargs="*", default=[], choices=["kill", "raise"], help="how rank 1 dies, in each attempt once")
parser.add_argument("--after", type=int, default=2, help="after how many steps of the attempt it dies")
parser.add_argument("--steps", type=int, default=6, help="how many steps there are in all")
parser.add_argument("--until-stop", action="store_true", help="train until there is a file `stop`")
parser.add_argument("--uncounted", type=int, nargs="*", default=[], help="nodes whose agents count no restarts (F26)")

JOURNAL = Path("journal.jsonl")


def read(folder: Path = Path()) -> list[dict]:
    """The journal; a line that is just being written is left out."""
    path = folder / JOURNAL
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write(what: str, **more: object) -> None:
    """Write one line. One operation, so that the lines of two ranks do not mix."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    line = json.dumps({"what": what, "rank": rank, "size": size, "time": time.time(), **more}) + "\n"
    file = os.open(JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


def main() -> None:
    arguments = parser.parse_args()
    if int(os.environ["GROUP_RANK"]) in arguments.uncounted:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    write("start", count=count, run=os.environ["TORCHELASTIC_RUN_ID"])
    warnings.filterwarnings("ignore")

    import torch
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    from lightning_pgroup import PGroupDDPStrategy
    from tests.models import TinyData, TinyModel

    torch.set_num_threads(1)
    deaths = [line for line in read() if line["what"] == "death"]
    fate = arguments.deaths[len(deaths)] if len(deaths) < len(arguments.deaths) else None

    class Journal(Callback):
        """Writes down how the attempt goes, and lets rank 1 die."""

        def on_train_start(self, trainer, pl_module):
            self.begun = trainer.global_step
            write("resumed", step=self.begun)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_rank == 1 and fate and trainer.global_step == self.begun + arguments.after:
                write("death", step=trainer.global_step, how=fate)
                if fate == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("boom")

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if arguments.until_stop or trainer.global_step == self.begun + 1:
                write("step", step=trainer.global_step)
            if arguments.until_stop:
                threading.Event().wait(0.05)  # a step that leaves the processors to those who start
                trainer.should_stop = Path("stop").exists()

    timeout = timedelta(seconds=arguments.timeout)
    strategy = DDPStrategy(timeout=timeout) if arguments.plain else PGroupDDPStrategy(timeout=timeout)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=-1 if arguments.until_stop else arguments.steps,
        max_epochs=-1,
        callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=1, save_last=True), Journal()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(TinyModel(), datamodule=TinyData(), ckpt_path="last")  # "last" is no error when there is none yet
    events = [] if arguments.plain else [(event.what, event.run, event.attempt, event.world_size) for event in strategy.events]
    write("end", step=trainer.global_step, count=count, events=events)


if __name__ == "__main__":
    main()
