"""On one node nothing listens beyond loopback; over several nodes gloo uses the way to the main address."""

import os
import shutil
import socket
import subprocess
import sys

import psutil
import pytest

from lightning_pgroup import gloo_interface
from lightning_pgroup.gloo_interface import VARIABLE, GlooInterface, choose, hidden, interface_of
from tests.scripts import run


def outer_address():
    """An address of this machine that is not loopback, and the interface that has it."""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return one.address, name
    pytest.skip("this machine has no address but loopback")


def test_one_node_needs_loopback_only():
    assert choose(1, None) == "lo"
    assert choose(1, "10.1.2.3") == "lo"


def test_several_nodes_take_the_way_to_the_main_address():
    address, name = outer_address()
    assert interface_of(address) == name
    assert choose(2, address) == name
    assert choose(2, None) is None, "a file tells no address"
    assert choose(2, "127.0.0.1") is None, "loopback leads to no other node"
    assert choose(2, "no-such-host.invalid") is None
    assert interface_of("192.0.2.1") is None


def test_the_environment_is_restored(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    chosen = GlooInterface(1, None)
    chosen.use()
    assert os.environ[VARIABLE] == "lo"
    with hidden():
        assert VARIABLE not in os.environ
    assert os.environ[VARIABLE] == "lo"
    chosen.restore()
    chosen.restore()
    assert VARIABLE not in os.environ
    assert gloo_interface._set_by_us == []


def test_the_users_own_choice_stands(monkeypatch):
    monkeypatch.setenv(VARIABLE, "eth7")
    chosen = GlooInterface(1, None)
    chosen.use()
    with hidden():
        assert os.environ[VARIABLE] == "eth7"
    chosen.restore()
    assert os.environ[VARIABLE] == "eth7"
    monkeypatch.delenv(VARIABLE)
    chosen = GlooInterface(1, None)
    chosen.use()
    monkeypatch.setenv(VARIABLE, "eth8")  # changed while a group of ours lives
    chosen.restore()
    assert os.environ[VARIABLE] == "eth8"


@pytest.mark.scripts
def test_nothing_listens_beyond_loopback_on_one_node(tmp_path):
    """In a UTS namespace of its own, where the name of the host stands for an address that is open to the network."""
    address, _ = outer_address()
    command = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', address]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no UTS namespace can be made here")
    done = run(
        """
        import psutil

        def listening():
            found = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
            return sorted(set(found)), len(found) > 0

        class Look(Callback):
            def on_train_batch_start(self, *args):
                self.sub = dist.new_group([0, 1])
                say("ours", *listening())

        make_trainer(PGroupDDPStrategy(destroy="on_teardown"), callbacks=[Look()]).fit(TinyModel(), datamodule=TinyData())
        before = set(psutil.Process().net_connections("tcp"))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        new = set(psutil.Process().net_connections("tcp")) - before
        say("plain", sorted({c.laddr.ip for c in new if c.status == "LISTEN"}))
        dist.destroy_process_group()
        """,
        tmp_path,
        launcher=[*command, sys.executable],
        cold=True,  # a zygote is in another namespace
    )
    assert done.code == 0, done.err
    for rank in range(2):
        assert done.said(rank) == ["ours ['127.0.0.1'] True", f"plain ['{address}']"]
