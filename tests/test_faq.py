"""The messages on docs/faq.md are those that torch, Lightning and this package have, and it has all of ours."""

import mmap
import os
import re
from datetime import timedelta
from pathlib import Path

import lightning
import pytest
import torch
import torch.distributed as dist

from tests.messages import pieces, raised_and_logged, templates
from tests.ranks import free_port, run_ranks
from tests.scripts import ROOT

PAGE = (ROOT / "docs" / "faq.md").read_text()
FOREIGN, OURS = PAGE.split("## Of this package")
NCCL = "quoted from builds with NCCL"
OF_TORCH, OF_LIGHTNING = FOREIGN.split("## Of Lightning")
NOT_BROUGHT_ABOUT = ("successfully reached", "connectFullMesh", "prior iteration", "LightningModule")
OF_NCCL = re.findall(rf"<!-- {NCCL} -->\n```text\n(.*?)```", FOREIGN, re.DOTALL)


def quoted(text):
    return [line for block in re.findall(r"(?<!-->\n)```text\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def missing(lines, sources):
    texts = {" ".join(one.split()) for one in sources}
    return {piece for line in lines for piece in pieces(line) if not any(piece in text for text in texts)}


def test_what_is_quoted_of_ours_stands_in_the_package():
    lines = quoted(OURS)
    assert len(lines) > 50
    assert missing(lines, templates(ROOT / "lightning_pgroup")) == set()


def test_all_that_the_package_says_at_run_time_is_on_the_page():
    page = " ".join(OURS.split())
    said = [max(found, key=len) for text in raised_and_logged() if (found := pieces(text))]
    assert len(said) > 50
    assert [text for text in said if not any(part in page for part in _beginnings(text))] == []


def _beginnings(text):
    """A message of several sentences is known by its first or its last one."""
    sentences = re.split(r"(?<=[.;]) ", text)
    return [sentences[0].strip(" .;,"), sentences[-1].strip(" .;,")]


def test_what_is_quoted_of_lightning_stands_in_its_source():
    root = Path(lightning.__file__).parent
    folders = [root / "pytorch" / "trainer" / "connectors", root / "fabric" / "strategies" / "launchers"]
    launchers = [root / "pytorch" / "strategies" / "launchers", root / "fabric" / "plugins" / "environments"]
    lines = quoted(OF_LIGHTNING) + [line for line in quoted(OF_TORCH) if "LightningModule" in line]
    assert len(lines) > 6
    assert missing(lines, templates(*folders, *launchers, root / "pytorch" / "strategies" / "ddp.py")) == set()


def test_what_is_quoted_of_torch_and_can_not_be_brought_about_stands_in_its_library():
    lines = [line for line in quoted(OF_TORCH) if any(word in line for word in NOT_BROUGHT_ABOUT[:3])]
    assert len(lines) == 3
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        for piece in [piece for line in lines for piece in pieces(line)]:
            assert text.find(piece.encode()) > 0, piece


def test_messages_of_nccl_are_marked():
    assert len(OF_NCCL) == 3  # no build for CPUs has them


def said_by(function, *args, **kwargs):
    with pytest.raises((RuntimeError, ValueError, AssertionError)) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def alone(rank):
    said = [said_by(dist.all_reduce, torch.zeros(1)), said_by(dist.init_process_group, "gloo")]
    said.append(said_by(dist.destroy_process_group))
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    said.append(said_by(store.wait, ["key"], timedelta(seconds=0.1)))
    said.append(said_by(dist.TCPStore, "127.0.0.1", store.port, 1, True))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    said.append(said_by(dist.init_process_group, "gloo", store=store, rank=0, world_size=1))
    sub_group = dist.new_group([0])
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("next", store), rank=0, world_size=1)
    said.append(said_by(dist.get_global_rank, sub_group, 0))
    said.append(said_by(dist.destroy_process_group, sub_group))
    dist.destroy_process_group()
    with free_port() as port:
        said.append(said_by(dist.TCPStore, "127.0.0.1", port, 2, True, timeout=timedelta(seconds=1)))
        said.append(said_by(dist.TCPStore, "127.0.0.1", port, 2, False, timeout=timedelta(seconds=1)))
    return said


def among_two(rank):
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    told = dist.PrefixStore("told", dist.distributed_c10d._get_default_store())
    if rank == 1:
        told.wait(["late"])
        told.set("heard", "1")
        last = [said_by(dist.monitored_barrier, timeout=timedelta(seconds=1))]
    else:
        last = [said_by(dist.monitored_barrier, timeout=timedelta(seconds=0.1))]
        last += [said_by(dist.all_reduce, torch.zeros(1))]
        told.set("late", "1")
        told.wait(["heard"])  # this rank hosts the store, which ends with it
    dist.destroy_process_group()
    return last


def test_torch_and_gloo_say_what_is_quoted():
    """Each message that a CPU can bring about, brought about."""
    (solo,) = run_ranks(alone, size=1, bare=True, check_leaks=False)
    first, second = run_ranks(among_two, check_leaks=False)
    lines = [line for line in quoted(OF_TORCH) if not any(word in line for word in NOT_BROUGHT_ABOUT)]
    assert len(lines) > 12
    said = [" ".join(text.split()) for text in [*solo, *first, *second]]
    for line in lines:
        assert any(all(piece in text for piece in pieces(line)) for text in said), line
