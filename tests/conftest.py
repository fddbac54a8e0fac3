"""The leak police: no test may leave a thread, a descriptor, a group, a variable or a hook behind in this process."""

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

with contextlib.suppress(ImportError):
    import tensorboardX.event_file_writer  # noqa: F401  (sets a variable of the environment when it is first imported)

from lightning_pgroup import PGroupDDPStrategy, process_group  # noqa: F401  (imported here, so that forked ranks are warm)
from lightning_pgroup.store import LOOPBACK, Endpoint, connect_store, host_store, listen
from tests import warm
from tests.ranks import open_descriptors

# Torch asks the name server for each address that it connects to, and glibc waits 5 s for an answer that gets lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# A shell starts what it does not wait for with Ctrl-C ignored, and so would all ranks and scripts be that start from here.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
_arena = multiprocessing.get_context("fork").Value("i")  # opens the descriptors of what ranks share, once and for all
host_store(listen(LOOPBACK), timedelta(seconds=5))  # libuv keeps two descriptors from its first loop on, for ever
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

_zygotes = pytest.StashKey[warm.Zygotes]()


def pytest_configure(config):
    if not hasattr(config, "workerinput") and not os.environ.get(warm.COLD):
        config.stash[_zygotes] = warm.Zygotes()


def pytest_collection_finish(session):
    if any(item.get_closest_marker("scripts") for item in session.items):
        warm.wake()


def pytest_unconfigure(config):
    if _zygotes in config.stash:
        config.stash[_zygotes].close()


@pytest.fixture(autouse=True)
def _no_leaks():
    environ, hook = dict(os.environ), sys.excepthook
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    assert not dist.is_initialized(), "the test has left a process group"
    assert sys.excepthook is hook, "the test has changed sys.excepthook"
    ignored = {"PYTEST_CURRENT_TEST", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "OMP_NUM_THREADS"}
    after = {k: v for k, v in os.environ.items() if k not in ignored}
    assert after == {k: v for k, v in environ.items() if k not in ignored}, "the test has changed os.environ"
    left = [t for t in threading.enumerate() if t not in threads and t.is_alive() and not t.name.startswith("pytest")]
    for thread in left:
        thread.join(5)
    assert not [t for t in left if t.is_alive()], "the test has left threads"
    assert {n: signal.getsignal(n) for n in handlers} == handlers, "the test has changed signal handlers"
    assert _settles(lambda: open_descriptors() <= descriptors), "the test has left descriptors open"


def _settles(condition):
    """Whether ``condition`` holds within 3 s: a store's server closes its sockets on a thread of its own."""
    if condition():
        return True
    gc.collect()
    pause, until = threading.Event(), time.monotonic() + 3
    while not condition() and time.monotonic() < until:
        pause.wait(0.02)
    return condition()


@pytest.fixture(params=["hash", "tcp", "file"])
def stores(request, tmp_path):
    """A function that gives each rank its own client of one store."""
    bound = timedelta(seconds=20)
    if request.param == "hash":
        shared = dist.HashStore()
        yield lambda: shared
    elif request.param == "file":
        yield lambda: dist.FileStore(str(tmp_path / "store"), -1)
    else:
        hosts = [host_store(listen(LOOPBACK), bound)]
        yield lambda: dist.PrefixStore("run", connect_store(Endpoint(LOOPBACK, hosts[0].port), bound))
        hosts.clear()  # pytest holds the function, and would hold the store, until after the check for leaks
