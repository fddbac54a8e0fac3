"""The store: bound before anybody is told of it, on loopback only, without a pickle in it."""

import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
from torch.distributed import DistNetworkError, HashStore, PrefixStore, TCPStore

from lightning_pgroup.errors import PGroupError
from lightning_pgroup.init_method import launcher_store
from lightning_pgroup.store import LOOPBACK, Endpoint, connect_store, delete_below, host_on, host_store, listen
from lightning_pgroup.team import ENVIRONMENT_VARIABLE, Invitation, Team
from tests.ranks import free_port

LONG = timedelta(seconds=20)


def listening_addresses(port):
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


def test_f18_the_store_listens_on_loopback_only_and_keeps_its_port():
    listener = listen(LOOPBACK)
    port = listener.getsockname()[1]
    with pytest.raises(OSError, match="in use"):
        listen(LOOPBACK, port)
    store = host_store(listener, LONG)
    assert store.port == port
    assert listening_addresses(port) == {LOOPBACK}
    with pytest.raises(OSError, match="in use"):
        listen(LOOPBACK, port)


def test_f18_plain_store_listens_on_all_interfaces():
    store = TCPStore(LOOPBACK, 0, None, True, LONG, wait_for_workers=False)
    assert listening_addresses(store.port) - {LOOPBACK}


def test_the_port_accepts_connections_from_the_moment_it_is_chosen():
    listener = listen(LOOPBACK)
    early = socket.create_connection(listener.getsockname()[:2])
    store = host_store(listener, LONG)
    client = connect_store(Endpoint(LOOPBACK, store.port), LONG)
    client.set("x", "1")
    assert store.get("x") == b"1"
    early.close()


def test_a_hundred_stores_at_the_same_moment_never_meet_a_port_in_use():
    with ThreadPoolExecutor(20) as pool:
        stores = list(pool.map(lambda _: host_store(listen(LOOPBACK), LONG), range(100)))
    assert len({store.port for store in stores}) == 100


@pytest.mark.parametrize("address", [LOOPBACK, "::1", "localhost"])
def test_f18_a_store_at_a_given_address_listens_there_only(address):
    if address == "::1" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    with free_port() as port:
        store = host_on(address, port, 1, LONG)
    (listens,) = listening_addresses(port)
    assert listens in ([LOOPBACK, "::1"] if address == "localhost" else [address])
    client = connect_store(Endpoint(address, port), LONG)
    client.set("x", "1")
    assert store.get("x") == b"1"


def test_f18_on_several_nodes_a_loopback_name_of_the_main_node_does_not_lock_the_others_out():
    """Kubeflow calls the main node "localhost" on that node itself; many hosts resolve their own name to 127.0.1.1."""
    with free_port() as port:
        store = host_on("localhost", port, 2, LONG)
    assert listening_addresses(port) - {LOOPBACK, "::1"}
    assert store.port == port


def test_f18_an_address_in_front_of_the_main_node_does_not_lock_the_others_out(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("198.51.100.1", 0))]  # for documentation, so that no host has it
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    with free_port() as port:
        store = host_on("localhost", port, 1, LONG)
    assert listening_addresses(port) - {LOOPBACK, "::1"}
    assert store.port == port


@pytest.mark.parametrize("first", ["ours", "the user's"])
def test_stores_of_one_process_at_one_address_are_one_store(first):
    def plain():
        return TCPStore(LOOPBACK, port, None, True, LONG, wait_for_workers=False, multi_tenant=True)  # as `env://` does it

    with free_port() as port:
        stores = [host_on(LOOPBACK, port, 1, LONG) if first == "ours" else plain()]
    stores += [host_on(LOOPBACK, port, 1, LONG), plain()]
    stores[0].set("x", "1")
    assert [store.get("x") for store in stores] == [b"1"] * 3


def test_a_taken_port_is_an_error_at_once():
    taken = listen(LOOPBACK)
    clock = time.monotonic()
    with pytest.raises(DistNetworkError, match="EADDRINUSE"):
        host_on(LOOPBACK, taken.getsockname()[1], 1, LONG)
    assert time.monotonic() - clock < LONG.total_seconds() / 4
    taken.close()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("init_method", ["tcp://localhost:0", "env://"])
def test_port_0_is_an_error_at_once_on_each_rank(init_method, rank, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(PGroupError, match="port other than 0"):
        launcher_store(init_method, rank, 2, LONG, 1)


def test_delete_below_touches_nothing_else():
    store = HashStore()
    for key in ("a/b/1", "a/b/2", "a/c", "ab"):
        store.set(key, "x")
    assert delete_below(PrefixStore("a", store), "b") == 2
    assert sorted(store.list_keys()) == ["a/c", "ab"]


def test_only_rank_0_deletes_and_only_what_is_over():
    store = HashStore()
    teams = [Team(store, "run", rank, 2, is_host=False) for rank in range(2)]
    for generation in (9, 10):
        teams[1].generation_store(generation).set("address", "x")
    teams[1].delete_before(11)
    assert len(store.list_keys()) == 2
    teams[0].delete_before(10)
    assert store.list_keys() == ["lightning_pgroup/run/gen/10/address"]


def test_delete_below_without_list_keys():
    assert delete_below(object(), "a") == 0


def test_invitation_is_taken_from_the_environment_once(monkeypatch):
    invitation = Invitation.to(Endpoint(LOOPBACK, 1234), 4, 7)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, invitation.to_environment())
    assert Invitation.take_from_environment() == invitation
    assert Invitation.take_from_environment() is None
    json.loads(invitation.to_environment())


@pytest.mark.parametrize("left_over", [{}, {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "another"}], ids=["shell", "torchrun"])
def test_an_invitation_that_a_shell_has_left_over_is_ignored(monkeypatch, left_over):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, Invitation.to(Endpoint(LOOPBACK, 1234), 4, 7).to_environment())
    for name, value in left_over.items():
        monkeypatch.setenv(name, value)
    assert Invitation.take_from_environment() is None
    assert ENVIRONMENT_VARIABLE not in os.environ


def test_a_run_is_cleaned_up_and_tells_its_highest_generation():
    store = HashStore()
    invitation = Invitation.to(Endpoint(LOOPBACK, 1), 1, 3)
    assert Team.clean_up(store, invitation) == (3, "[]")
    team = Team(store, invitation.run, 0, 1, is_host=True)
    for generation in (4, 5):
        team.announce(generation)
        team.delete_before(generation)
        team.generation_store(generation).set("address", "x")
    assert len([key for key in store.list_keys() if "/gen/" in key]) == 1
    team.leave_records("[1]")
    assert Team.clean_up(store, invitation) == (5, "[1]")
    assert store.list_keys() == []
