"""A notebook, in a real kernel: the example, and then what a user may do to it in the same session."""

import json
import re
from types import SimpleNamespace

import nbformat
import pytest
from lightning.pytorch.trainer import call

from tests.notebook import PATH, error_of, run_cells, said, sources, stored, without_differences
from tests.ranks import run_ranks
from tests.scripts import ROOT
from tests.snippets import blocks_of, run_blocks

pytestmark = pytest.mark.scripts

FAILING = 5
"""Number of the cell that fails, among those with code."""

AFTER_AN_INTERRUPT = "SystemExit" if hasattr(call, "sys") else "NameError"
"""Before 2.6 Lightning calls `exit`, which a kernel does not have."""

SETUP = """
import json, multiprocessing, signal, threading
from pathlib import Path
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.models import TinyData, TinyModel, whats
from tests.models import make_trainer as tiny_trainer

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
here = Path.cwd()

def tell(**facts):
    left = {"group": torch.distributed.is_initialized(), "children": len(psutil.Process().children()),
            "variables": [v for v in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v in os.environ]}
    print(json.dumps({**facts, "left": left}))

def fit(strategy="pgroup_ddp_notebook", model=None, **kwargs):
    trainer, model = tiny_trainer(strategy, **kwargs), model or TinyModel()
    before = model.layer.weight.detach().clone()
    trainer.fit(model, datamodule=TinyData())
    return [what for _, what, _ in whats(trainer.strategy)], not model.layer.weight.equal(before)
"""

THREADS = """
os.environ["OMP_NUM_THREADS"] = "2"
torch.set_num_threads(2)
large = torch.randn(1000, 1000)
loss = torch.nn.Linear(1000, 1000)(large @ large).exp().sum()
loss.backward()

class Large(TinyModel):
    def training_step(self, batch, batch_idx):
        (large @ large).exp().sum()
        Path(f"rank-{self.global_rank}").write_text(f"{torch.get_num_threads()} {os.getpid() != kernel}")
        return super().training_step(batch, batch_idx)

kernel = os.getpid()
events, learned = fit(model=Large())
tell(events=events, learned=learned, ranks=[path.read_text() for path in sorted(here.glob("rank-*"))])
"""

COMES_BACK = """
class Sets(TinyModel):
    def on_train_end(self):
        self.attribute = "set in a rank"

model, checkpoint = Sets(), ModelCheckpoint("checkpoints", monitor="val")
trainer = tiny_trainer("pgroup_ddp_notebook", callbacks=[checkpoint], enable_checkpointing=True, limit_val_batches=1)
trainer.fit(model, datamodule=TinyData())
best = Path(checkpoint.best_model_path)
weights = torch.load(best, weights_only=False)["state_dict"]["layer.weight"]
tell(best=best.is_file(), weights=weights.equal(model.layer.weight), metrics=sorted(trainer.callback_metrics),
     attribute=hasattr(model, "attribute"), predictions=trainer.predict(model, datamodule=TinyData()))
"""

SHARED = """
strategy = PGroupDDPStrategy(start_method="fork", destroy="on_teardown")
for _ in range(2):
    fit(strategy)
    tiny_trainer("auto", devices=1).fit(TinyModel(), datamodule=TinyData())
    fit(devices=1)
tell(shared=whats(strategy))
"""

LONG = """
class Long(TinyModel):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.global_step == 20:
            Path("{mark}").touch()
        return super().training_step(batch, batch_idx)

running = tiny_trainer("pgroup_ddp_notebook", max_epochs=-1)
running.fit(Long(), datamodule=TinyData())
"""

AFTER_INTERRUPT = """
left = [what for _, what, _ in whats(running.strategy)]
ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
tell(interrupted=left, ignored=ignored, **dict(zip(("events", "learned"), fit())))
"""

CELLS = {
    "setup": SETUP,
    "threads": THREADS,
    "comes back": COMES_BACK,
    "a Trainer twice": "trainer.fit(model, datamodule=TinyData())",
    "after it": "tell(**dict(zip(('events', 'learned'), fit())))",
    "shared": SHARED,
    "popen": "Trainer(strategy='pgroup_ddp', accelerator='cpu', devices=2)",
    "spawn": "Trainer(strategy='pgroup_ddp_spawn', accelerator='cpu', devices=2)",
    "group": LONG.format(mark="group.mark"),
    "after group": AFTER_INTERRUPT,
    "kernel": LONG.format(mark="kernel.mark"),
    "after kernel": AFTER_INTERRUPT,
}
NOTHING = {"group": False, "children": 0, "variables": []}
WELL = {"events": ["created", "destroyed"], "learned": True, "left": NOTHING}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """One kernel for all tests of this file: the example's outputs, and those of the cells after it, by name."""
    folder = tmp_path_factory.mktemp("notebook")
    cells = [{"source": source} for source in sources()]
    for name, source in CELLS.items():
        interrupt = {"interrupt": name, "when": str(folder / f"{name}.mark")} if name in ("group", "kernel") else {}
        cells.append({"source": source, **interrupt})
    outputs, _ = run_cells(cells, folder)
    example, rest = outputs[: -len(CELLS)], outputs[-len(CELLS) :]
    return SimpleNamespace(example=example, cells=dict(zip(CELLS, rest, strict=True)))


def facts(outputs):
    assert error_of(outputs) == ("", ""), error_of(outputs)
    return json.loads(said(outputs).splitlines()[-1])


def test_the_example_shows_what_a_run_gives(session):
    shown = stored()
    assert len(shown) == len(session.example)
    for number, (ours, theirs) in enumerate(zip(session.example, shown, strict=True)):
        if number != FAILING:
            assert accuracies(ours) == pytest.approx(accuracies(theirs), abs=0.04)
            assert as_text(without_differences(ours)) == as_text(without_differences(theirs)), number


def test_the_failing_cell_raises_the_first_failure_with_its_note(session):
    for outputs in (session.example[FAILING], stored()[FAILING]):
        kind, message = error_of(outputs)
        *_, line, error, note = message.strip().splitlines()
        assert kind == "ProcessRaisedException"
        assert "-- Process 1 terminated with the following error" in message
        assert line.strip() == 'raise ValueError("a scan of rank 1 is broken")' or set(line.strip()) == {"^"}
        assert error == "ValueError: a scan of rank 1 is broken"
        assert note.startswith("The first failure of generation 5 was on rank 1 (pid ")
        assert note.endswith("in 'fit', hook 'training_step': ValueError: a scan of rank 1 is broken")


def test_only_the_failing_cell_fails(session):
    assert [number for number, outputs in enumerate(session.example) if error_of(outputs) != ("", "")] == [FAILING]
    notebook = nbformat.read(PATH, as_version=4)
    tagged = [cell for cell in notebook.cells if "raises-exception" in cell.metadata.get("tags", ())]
    assert [cell.source for cell in tagged] == [sources()[FAILING]]


def test_the_example_tells_nothing_of_the_machine_that_ran_it():
    text = PATH.read_text()
    assert not re.search(r"/(home|tmp|usr|root|work|Users)/|site-packages|pid \d|\d\d:\d\d:\d\d", text)
    notebook = nbformat.read(PATH, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec == {"display_name": "Python 3", "language": "python", "name": "python3"}
    for outputs in stored():
        assert [without_differences([output]) for output in outputs] == [[output] for output in outputs]


def test_threads_that_the_notebook_has_computed_on_stop_no_rank(session):
    """Without our care the ranks wait for ever in their first large computation: GNU OpenMP does not survive a fork."""
    assert facts(session.cells["threads"]) == {**WELL, "ranks": ["2 True", "2 True"]}


def test_what_comes_back_from_the_ranks(session):
    expected = {"best": True, "weights": True, "metrics": ["val"], "attribute": False, "predictions": None, "left": NOTHING}
    assert facts(session.cells["comes back"]) == expected


def test_a_trainer_fits_once_and_the_next_one_goes_on(session):
    kind, message = error_of(session.cells["a Trainer twice"])
    assert kind == "NotImplementedError"
    assert "creating a new Trainer" in message
    assert facts(session.cells["after it"]) == WELL


def test_a_strategy_for_two_trainers_with_stages_of_one_device_in_between(session):
    told = facts(session.cells["shared"])
    (first, what_1, a), (_, ended_1, b), (second, what_2, c), (_, ended_2, d) = told["shared"]
    assert (first, what_1, ended_1, second, what_2, ended_2) == ("fit", "created", "destroyed", "fit", "created", "destroyed")
    assert a == b < c == d
    assert told["left"] == NOTHING


@pytest.mark.parametrize("method", ["popen", "spawn"])
def test_what_can_not_work_in_a_notebook_names_what_does(session, method):
    kind, message = error_of(session.cells[method])
    assert kind == "MisconfigurationException"
    assert f"start_method={method!r}" in message
    assert "strategy='pgroup_ddp_notebook'" in message


@pytest.mark.parametrize("who", ["group", "kernel"])
def test_an_interrupt_ends_the_ranks_and_the_next_fit_works(session, who):
    """Jupyter interrupts the ranks too; a front end that only reaches the kernel leaves that to us."""
    assert error_of(session.cells[who])[0] == AFTER_AN_INTERRUPT, "Lightning's way to end after Ctrl-C"
    told = facts(session.cells[f"after {who}"])
    assert told == {**WELL, "interrupted": ["created", "aborted"], "ignored": False}


def test_the_page_names_the_example():
    assert "examples/notebook.ipynb" in (ROOT / "docs" / "notebooks.md").read_text()


def test_the_snippet_of_the_page_runs(tmp_path):
    assert run_ranks(lambda _: run_blocks(blocks_of("docs/notebooks.md"), tmp_path), size=1, bare=True) == [[""]]


def accuracies(outputs):
    return [float(value) for value in re.findall(r"accuracy (0\.\d+)", said(outputs))]


def as_text(outputs):
    return re.sub(r"accuracy 0\.\d+", "accuracy …", json.dumps(outputs, indent=1, ensure_ascii=False, sort_keys=True))
