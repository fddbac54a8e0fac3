"""LightningCLI: each argument in YAML, on the command line and in the help; wrong values fail before anything starts."""

import contextlib
import inspect
import io
import os
import re
import typing
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_pgroup import PGroupDDPStrategy
from lightning_pgroup.config import MetricsName
from lightning_pgroup.policy import DestroyPolicy, OnError, OnErrorName, OnMismatch, OnMismatchName, PolicyName
from lightning_pgroup.record_file import read_records
from tests.models import TinyData, TinyModel, whats
from tests.ranks import run_ranks

OWN = [name for name in inspect.signature(PGroupDDPStrategy.__init__).parameters if name not in ("self", "ddp_kwargs")]
STRATEGY = "--trainer.strategy=lightning_pgroup.PGroupDDPStrategy"
QUIET = {
    "max_epochs": 1,
    "limit_train_batches": 1,
    "limit_val_batches": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

EVERYTHING = """
accelerator: {class_path: lightning.pytorch.accelerators.CPUAccelerator}
parallel_devices: null
cluster_environment: {class_path: lightning.pytorch.plugins.environments.LightningEnvironment}
checkpoint_io: {class_path: lightning.pytorch.plugins.io.TorchCheckpointIO}
precision_plugin: {class_path: lightning.pytorch.plugins.Precision}
ddp_comm_state: null
ddp_comm_hook: torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook
ddp_comm_wrapper: torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_wrapper
model_averaging_period: 4
process_group_backend: gloo
timeout: 0:10:00  # 600 seconds for YAML 1.1 already
start_method: popen
destroy: [on_teardown, on_error]
on_error: destroy
on_mismatch: reuse
destroy_timeout: 12.5
rendezvous_timeout: 1 day, 0:00:07
init_method: null
pg_options: {class_path: tests.cli_parts.Options, init_args: {threads: 3}}
groups: {pair: [[0, 1]], alone: [1]}
metrics: keep
record: records.jsonl
find_unused_parameters: true
process_group: pair
"""


def build(*args, run=False):
    """A command line, in this process; returns it with what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli = LightningCLI(TinyModel, TinyData, save_config_callback=None, args=[*args], run=run, seed_everything_default=1)
        except SystemExit as end:
            cli = end.code
    return cli, out.getvalue(), err.getvalue()


def configure(folder, strategy, **trainer):
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {**QUIET, **trainer, "strategy": strategy}}))
    return f"--config={path}"


def ours(arguments):
    return {"class_path": "lightning_pgroup.PGroupDDPStrategy", "init_args": arguments}


def test_the_names_that_a_command_line_shows_are_those_of_the_policies():
    for names, kind in ((PolicyName, DestroyPolicy), (OnErrorName, OnError), (OnMismatchName, OnMismatch)):
        assert typing.get_args(names) == tuple(member.value for member in kind)


def test_every_argument_in_yaml_trains_on_two_ranks(tmp_path):
    arguments = yaml.safe_load(EVERYTHING)
    assert set(OWN) <= set(arguments), "an argument of the strategy is not in this test"
    config = configure(tmp_path, ours({**arguments, "timeout": "0:10:00"}), devices=2)

    def job(rank):
        os.chdir(tmp_path)
        cli, _, err = build("fit", config, run=True)
        strategy = cli.trainer.strategy
        options, config_of = strategy._config.pg_options._threads, replace(strategy._config, pg_options=None)
        return whats(strategy), config_of, options, strategy._timeout, [*strategy.defined_groups], strategy._ddp_kwargs, err

    for events, config_of, options, timeout, groups, kwargs, err in run_ranks(job):
        assert events == [("fit", "created", 1), ("fit", "destroyed", 1)], err
        assert config_of.policy_names == ("on_error", "on_teardown")
        assert (config_of.on_error, config_of.on_mismatch) == (OnError.DESTROY, OnMismatch.REUSE)
        assert (config_of.destroy_timeout, timeout) == (timedelta(seconds=12.5), timedelta(minutes=10))
        assert config_of.rendezvous_timeout == timedelta(days=1, seconds=7)
        assert (options, config_of.compute_metrics) == (3, False)
        assert sorted(groups) == ["alone", "pair"]
        assert len(read_records(tmp_path / "records.jsonl")) == 4
        assert (kwargs["find_unused_parameters"], kwargs["process_group"]) == (True, "pair")


def test_what_is_printed_as_the_configuration_gives_the_same_one(tmp_path):
    arguments = yaml.safe_load(EVERYTHING)
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    code, printed, _ = build(configure(tmp_path, ours(arguments)), "--print_config")
    assert code == 0
    first.write_text(printed)
    code, again, _ = build(f"--config={first}", "--print_config")
    assert (code, again) == (0, printed)
    told = yaml.safe_load(printed)["trainer"]["strategy"]["init_args"]
    for name in ("destroy", "on_error", "on_mismatch", "metrics", "groups", "destroy_timeout", "rendezvous_timeout"):
        assert told[name] == arguments[name], name
    second.write_text(again)
    assert build(f"--config={second}")[0].trainer.strategy._config.policy_names == ("on_error", "on_teardown")


def test_on_the_command_line_and_as_a_plain_string(tmp_path):
    def job(rank):
        quiet = configure(tmp_path / str(rank), "pgroup_ddp", accelerator="cpu", devices=2)
        plain = build("fit", quiet, run=True)[0].trainer.strategy
        options = ["destroy=on_teardown", "destroy_timeout=0:00:20", "timeout=40", "groups.all=[0,1]"]
        args = [f"--trainer.strategy.{option}" for option in options]
        told = build("fit", quiet, STRATEGY, *args, run=True)[0].trainer.strategy
        return type(plain).__name__, whats(plain), whats(told), told._config.destroy_timeout, told._timeout, [*told._groups]

    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for kind, plain, told, destroy_timeout, timeout, groups in run_ranks(job):
        assert (kind, plain) == ("PGroupDDPStrategy", [("fit", "created", 1), ("fit", "destroyed", 1)])
        assert told == [("fit", "destroyed", 1), ("fit", "created", 2), ("fit", "destroyed", 2)]
        assert (destroy_timeout, timeout, groups) == (timedelta(seconds=20), timedelta(seconds=40), ["all"])


def test_devices_by_name():
    cli, _, err = build(STRATEGY, "--trainer.strategy.parallel_devices=[cpu, cpu]")
    assert cli.trainer.strategy.parallel_devices == [torch.device("cpu")] * 2, err


def test_the_help_lists_the_strategy_and_no_part_of_it_and_its_name_alone_is_enough():
    text = build("--help")[1]
    known = re.search(r"--trainer\.strategy STRATEGY\n(.*?)\n  --", text, re.DOTALL)[1].split()
    assert [name.strip(",)") for name in known if "lightning_pgroup" in name] == ["lightning_pgroup.PGroupDDPStrategy"]
    cli, _, err = build("--trainer.strategy=PGroupDDPStrategy", "--trainer.strategy.init_method=file:///tmp/x")
    assert cli.trainer.strategy._config.init_method == "file:///tmp/x", err


def test_policies_one_after_the_other_on_the_command_line():
    add = "--trainer.strategy.destroy+="
    cli, _, err = build("--trainer.accelerator=cpu", STRATEGY, f"{add}on_teardown", f"{add}on_error")
    assert cli.trainer.strategy._config.policy_names == ("on_error", "on_teardown"), err


def test_the_help_shows_each_argument_with_its_choices_and_its_meaning():
    code, text, _ = build("--trainer.strategy.help", "lightning_pgroup.PGroupDDPStrategy")
    assert code == 0
    shown = {}
    for part in re.split(r"\n  (?=--)", text):
        name = re.match(r"--trainer\.strategy\.(\w+) ", part)
        if name:
            shown[name[1]] = " ".join(part.split())
    documented = re.findall(r"^ {4}(\w+): ", inspect.getdoc(PGroupDDPStrategy).split("**ddp")[0], re.MULTILINE)
    assert documented == OWN, "an argument has no line in the docstring, or stands at another place there"
    for name in OWN:
        meaning = shown[name].split("(type:")[0].split(name.upper())[-1].split("}")[-1]
        assert len(meaning.split()) > 2, (name, shown[name])
    choices = {
        "destroy": typing.get_args(PolicyName),
        "on_error": typing.get_args(OnErrorName),
        "on_mismatch": typing.get_args(OnMismatchName),
        "metrics": typing.get_args(MetricsName),
        "start_method": ("popen", "spawn", "fork", "forkserver"),
    }
    for name, words in choices.items():
        machine = shown[name].split("(type:")[1]
        for word in words:
            assert word in machine, (name, word, shown[name])


WRONG = [
    ("destroy=on_teardwn", "'on_teardown', 'per_trainer', 'on_destructor', 'on_error', 'at_exit', 'never'"),
    ("destroy=[on_teardown,sometimes]", "'on_teardown', 'per_trainer', 'on_destructor'"),
    ("destroy=[]", "empty"),
    ("destroy=[never,at_exit]", "stands alone"),
    ("on_error=explode", "'abort', 'destroy', 'keep'"),
    ("on_mismatch=ignore", "'recreate', 'reuse', 'error'"),
    ("metrics=forget", "'compute', 'keep'"),
    ("start_method=teleport", "'popen', 'spawn', 'fork', 'forkserver'"),
    ("process_group_backend=pigeon", "'gloo'"),
    ("destroy_timeout=30s", "'0:00:30'"),
    ("timeout=-3", "more than 0 seconds"),
    ("rendezvous_timeout=true", "such as '0:00:30'"),
    ("groups={pair: [[0, a]]}", "Expected a <class 'int'>. Got value: a"),
    ("groups={pair: [[0, 0]]}", "rank 0 twice"),
    ("process_group=pair", "which is not there"),
    ("init_method=http://x", "'env://', 'tcp://'"),
    ("parallel_devices=[abacus]", "cpu, cuda"),
    ("pg_options={class_path: torch.distributed.ProcessGroupGloo._Options}", "could not build"),
    ("dstroy=never", "Option 'dstroy' is not accepted"),
]


@pytest.mark.parametrize(("option", "message"), WRONG, ids=[option for option, _ in WRONG])
def test_a_wrong_value_fails_before_training_and_names_the_right_ones(option, message):
    try:
        cli, _, text = build(STRATEGY, f"--trainer.strategy.{option}")
    except (TypeError, ValueError) as error:
        cli, text = 1, str(error)
    assert cli in (1, 2), "the command line took it"
    assert message in text
