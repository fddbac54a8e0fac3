"""What is built and published: an archive of the sources and a wheel, and how little the wheel needs to run."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import Distribution, distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lightning_pgroup
from tests.scripts import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_PUBLISHED = {".ci/run", ".gitignore"}
STRAYS = [
    ".mypy_cache/3.11/cache.json",
    ".venv/lib/module.py",
    ".venv-oldest/lib/module.py",
    "build/lib/lightning_pgroup/removed.py",
    "dist/lightning_pgroup-0.0.1.tar.gz",
    "docs/.ipynb_checkpoints/page.md",
    "examples/lightning_logs/version_0/hparams.yaml",
    "examples/multirun/0/config.yaml",
    "examples/outputs/config.yaml",
    "examples/checkpoints/last.ckpt",
    "lightning_logs/version_0/metrics.csv",
    "lightning_pgroup/__pycache__/removed.cpython-311.pyc",
    "lightning_pgroup/notes.txt",
    "notes.txt",
    "tests/__pycache__/test_it.cpython-311.pyc",
]
"""What lies about in the folder of someone who works on the package, and is nobody else's business."""

pytestmark = pytest.mark.scripts


def sources():
    """The files of the repository, or of an unpacked archive."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
            "\0"
        )
        return {name for name in listed if name and (ROOT / name).exists()}
    files = {path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()}
    made = re.compile(r"(PKG-INFO|setup\.cfg|[^/]*\.egg-info/.*|\..*|.*/__pycache__/.*|build/.*|dist/.*)")
    return {str(path) for path in files if not made.fullmatch(str(path))}


def python(*arguments, cwd):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(arguments, cwd=cwd, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """What `python -m build` has made in a folder: the archive of the sources and, from that, the wheel."""
    folder = tmp_path_factory.mktemp("built")
    for name in sources():
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "tree" / name)
    for name in STRAYS:
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tree" / name).touch()
    python(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(folder / "tree"), cwd=folder)
    return folder / "dist"


def test_what_is_published(built, tmp_path):
    name = f"lightning_pgroup-{lightning_pgroup.__version__}"
    wheel, archive = built / f"{name}-py3-none-any.whl", built / f"{name}.tar.gz"
    assert sorted(built.iterdir()) == [wheel, archive]
    said = python(sys.executable, "-m", "twine", "--no-color", "check", "--strict", str(wheel), str(archive), cwd=tmp_path)
    assert said.count("PASSED") == 2

    with tarfile.open(archive) as opened:
        published = {member.name.removeprefix(f"{name}/") for member in opened.getmembers() if member.isfile()}
    made = {one for one in published if one in ("PKG-INFO", "setup.cfg") or one.startswith("lightning_pgroup.egg-info/")}
    assert published - made == sources() - NOT_PUBLISHED

    with zipfile.ZipFile(wheel) as opened:
        files = set(opened.namelist())
        opened.extractall(tmp_path)
    information = {one for one in files if one.startswith(f"{name}.dist-info/")}
    assert files - information == {one for one in sources() if one.startswith("lightning_pgroup/")}
    assert all(one.endswith((".py", "/py.typed")) for one in files - information)
    kept = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    assert sorted(information) == [f"{name}.dist-info/{one}" for one in kept]

    about = Distribution.at(tmp_path / f"{name}.dist-info")
    assert (about.name, about.version) == ("lightning-pgroup", lightning_pgroup.__version__)
    assert about.metadata["License-Expression"] == "Apache-2.0"
    assert about.metadata["Requires-Python"] == ">=3.11"
    assert about.metadata["Description-Content-Type"] == "text/markdown"
    assert about.metadata["Description"].strip() == (ROOT / "README.md").read_text().strip()
    assert {(point.group, point.name, point.value) for point in about.entry_points} == {
        ("console_scripts", "lightning-pgroup", "lightning_pgroup.command_line:main"),
        ("pytest11", "lightning_pgroup", "lightning_pgroup.pytest_plugin"),
    }
    needs = [Requirement(line) for line in about.requires]
    always = {one.name: one.specifier for one in needs if one.marker is None}
    assert set(always) == {"torch", "lightning", "torchmetrics"}
    assert not any(always["lightning"].contains(version) for version in ("2.4.0", "2.6.2", "2.6.3"))
    assert all(always["lightning"].contains(version) for version in ("2.5.0", "2.6.1", "2.6.6"))
    extras = about.metadata.get_all("Provides-Extra")
    assert {"cli", "plot", "test", "docs", "ray"} <= set(extras)
    for extra in extras:
        chosen = {(one.name, str(one.specifier)) for one in needs if one.marker and one.marker.evaluate({"extra": extra})}
        listed = map(Requirement, PROJECT["optional-dependencies"][extra])
        assert chosen == {(one.name, str(one.specifier)) for one in listed}, extra


NEEDS_ONLY_THREE = """
import importlib, pkgutil, sys

def is_missing(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return error.name in (name, "pytest")

assert all(map(is_missing, ["pytest", "psutil", "sklearn", "jsonargparse", "matplotlib", "ray", "build", "twine"]))
import lightning_pgroup
for module in pkgutil.iter_modules(lightning_pgroup.__path__, "lightning_pgroup."):
    if module.name in ("lightning_pgroup.pytest_plugin", "lightning_pgroup.leak_guard"):
        assert is_missing(module.name), module.name
    elif module.name != "lightning_pgroup.__main__":
        importlib.import_module(module.name)
assert all(getattr(lightning_pgroup, name) is not None for name in lightning_pgroup.__all__)

import torch
from lightning.pytorch import LightningModule, Trainer
from torchmetrics import MeanMetric

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).pow(2).mean()
        self.mean.update(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
for strategy in (lightning_pgroup.PGroupDDPStrategy(destroy="on_teardown", record="records"), "pgroup_ddp"):
    model = Model()
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **quiet)
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4))
    print(*(event.what for event in trainer.strategy.events), float(model.mean.compute()) > 0)
"""


def test_three_dependencies_are_enough(built, tmp_path):
    """In an environment of its own, which has the installed wheel and what it needs: links to what is installed here."""
    venv.create(tmp_path / "venv", symlinks=True)
    site = sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "venv")})
    for name in needed(PROJECT["dependencies"]):
        link(distribution(name), site)
    binaries = tmp_path / "venv" / "bin"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(binaries / "python")]
    python(*pip, "install", "--quiet", "--no-index", "--no-deps", *map(str, built.glob("*.whl")), cwd=tmp_path)
    assert "No broken requirements found" in python(*pip, "check", cwd=tmp_path)

    (tmp_path / "script.py").write_text(NEEDS_ONLY_THREE)
    said = python(str(binaries / "python"), "script.py", cwd=tmp_path)
    assert said.splitlines()[-2:] == ["created destroyed True", "created True"]
    [records] = (tmp_path / "records").iterdir()
    assert len(records.read_text().splitlines()) == 2
    assert python(str(binaries / "lightning-pgroup"), "--version", cwd=tmp_path).split()[-1] == lightning_pgroup.__version__
    assert "explain" in python(str(binaries / "lightning-pgroup"), "--help", cwd=tmp_path)
    assert "a stage ends" in python(str(binaries / "lightning-pgroup"), "explain", "--destroy=on_teardown", cwd=tmp_path)


def needed(requirements):
    """The names of all distributions that these requirements lead to here."""
    found, left = set(), [Requirement(line) for line in requirements]
    while left:
        one = left.pop()
        for extra in one.extras | {""}:
            if (key := (canonicalize_name(one.name), extra)) not in found:
                found.add(key)
                lines = map(Requirement, distribution(one.name).requires or [])
                left += [line for line in lines if line.marker is None or line.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def link(one, site):
    """Link what a distribution has in its ``site-packages`` to that of another environment."""
    for top in {file.parts[0] for file in one.files} - {"..", "__pycache__"}:
        if not os.path.lexists(os.path.join(site, top)):
            os.symlink(one.locate_file(top), os.path.join(site, top))


def test_the_oldest_versions_that_are_tested_are_those_that_are_admitted():
    """`make test-oldest` installs the first release that each of Lightning's requirements lets in."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    oldest = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins |= dict(line.split("==") for line in oldest if "==" in line)
    for requirement in map(Requirement, PROJECT["dependencies"]):
        if requirement.name != "torch":
            [bound] = [one.version for one in requirement.specifier if one.operator == ">="]
            assert pins[requirement.name].removesuffix(".0") == bound, requirement.name
