"""A process that was forked from one that has computed on several threads can compute on several too."""

import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch

from lightning_pgroup import openmp
from lightning_pgroup.openmp import let_threads_go
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP is what torch uses on Linux")


def compute():
    torch.set_num_threads(2)
    return float((torch.ones(1000, 1000) @ torch.ones(1000, 1000)).exp().mean())


def threads():
    return len(os.listdir("/proc/self/task"))


def test_a_forked_process_computes_on_two_threads_and_its_parent_goes_on():
    def job(_):
        compute()
        before = threads()
        let_threads_go()
        after = threads()
        child = multiprocessing.get_context("fork").Process(target=compute)
        child.start()
        child.join(20)
        ended = child.exitcode
        if ended is None:
            child.kill()
            child.join()
        compute()
        return before > after, ended, threads() == before

    assert run_ranks(job, size=1, bare=True, deadline=40) == [(True, 0, True)]


def test_nothing_happens_without_the_system_that_tells_which_libraries_there_are(monkeypatch):
    monkeypatch.setattr(openmp, "_MAPS", Path("/nowhere"))
    monkeypatch.setattr(openmp, "_pause", pytest.fail)
    let_threads_go()


def test_a_library_that_can_not_be_asked_stops_nobody(monkeypatch, caplog):
    def refuse(path):
        raise OSError("no such library")

    caplog.set_level("DEBUG", "lightning_pgroup")
    monkeypatch.setattr(openmp, "_loaded", lambda: {"libgomp.so"})
    monkeypatch.setattr(openmp, "_pause", refuse)
    let_threads_go()
    assert "no such library" in caplog.text
