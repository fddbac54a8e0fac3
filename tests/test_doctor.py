"""`lightning-pgroup doctor` passes a healthy host, and says of a broken one what is wrong and what to do, in bounded time."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tomllib
import uuid
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from lightning_pgroup import doctor_checks, doctor_network, doctor_ranks
from lightning_pgroup.command_line import main
from lightning_pgroup.doctor_checks import run_checks
from lightning_pgroup.doctor_environment import Host, cleaned, diagnose
from lightning_pgroup.doctor_listeners import is_loopback, listening, owner_of_port
from lightning_pgroup.doctor_network import check_host_name, check_loopback, check_main_address, listens
from lightning_pgroup.doctor_ranks import Outcome, Ranks
from lightning_pgroup.doctor_report import Finding, Result, exit_code, report, to_json
from lightning_pgroup.doctor_versions import COMPROMISED, MINIMUM, PYTHON, check_versions
from tests.scripts import ROOT, finish, processes_of, start_command

SECOND = timedelta(seconds=1)
DOCTOR = [sys.executable, "-m", "lightning_pgroup", "doctor"]
FIRST = ["versions", "environment", "host name", "loopback", "main address"]
IP = shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
HOST = Host(interfaces=["lo", "eth0"], has_mpi4py=False, answers=lambda host, port: False)


def results(out):
    """How each check came out, by the lines of the progress."""
    return dict(re.findall(r"^(\w[\w -]*?) \.+ (ok|warning|FAILED|not checked)(?= \(|$)", out, re.MULTILINE))


# --- whole runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.scripts
def test_a_healthy_host(tmp_path):
    done = finish(start_command([*DOCTOR, "--nproc", "2", "--backend", "gloo"], tmp_path, cold=True))
    assert done.code == 0, done.out + done.err
    assert done.err == ""
    assert results(done.out) == dict.fromkeys([*FIRST, *doctor_checks.ALL], "ok")
    table = done.out.partition("\ncheck ")[2]
    assert re.search(r"start +ok +2 processes, torch 2", table)
    assert re.search(r"the\s+peers\s+of\s+a\s+failed\s+rank\s+woke\s+up\s+after\s+[\d.]+\s+ms", table)
    assert re.search(r"\d ports, all on loopback only", table), "the store, and gloo on each rank"
    assert re.search(r"re-create 20 times +ok +median [\d.]+ ms", table)
    assert done.out.endswith("\nAll is well.\n")
    assert max(map(len, done.out.splitlines())) <= 80
    assert os.listdir(tmp_path) == []


@pytest.mark.scripts
def test_no_loopback_no_host_name_and_leftovers(tmp_path):
    """In namespaces of its own, where all of that is really so. A rank is started all the same, and does not hang for ever."""
    inside = ["unshare", "--net", "--uts", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces can be made here")
    left = ["env", "WORLD_SIZE=4", "RANK=1", "GLOO_SOCKET_IFNAME=eth7", "MASTER_ADDR=no-such-main.invalid", "MASTER_PORT=29500"]
    command = [*inside, *left, *DOCTOR, "--nproc", "1", "--timeout", "3", "--json"]
    done = finish(start_command(command, tmp_path, cold=True))
    document = json.loads(done.out)
    assert (done.code, document["exit_code"], done.err) == (1, 1, "")
    found = {one["check"]: one for one in document["checks"]}
    assert list(found) == [*FIRST, *doctor_checks.ALL]
    assert found["versions"]["result"] == "ok"
    assert "RANK=1, WORLD_SIZE=4" in found["environment"]["found"]
    assert "no interface eth7" in found["environment"]["found"]
    assert any("unset RANK WORLD_SIZE" in advice for advice in found["environment"]["advice"])
    assert "'no-such-host.invalid' does not resolve" in found["host name"]["found"]
    assert "/etc/hosts: 127.0.1.1 no-such-host.invalid" in found["host name"]["advice"][0]
    assert "127.0.0.1 can not be" in found["loopback"]["found"]
    assert "ip link set lo up" in found["loopback"]["advice"][0]
    assert "MASTER_ADDR=no-such-main.invalid does not resolve" in found["main address"]["found"]
    assert found["start"]["result"] == "ok", "the leftovers are not handed on to the rank"
    assert found["rendezvous"]["result"] == "failed"
    assert "rank 0 raised StoreLostError: This process can not host the store" in found["rendezvous"]["found"]
    assert "Is the loopback interface down" in found["rendezvous"]["found"]
    assert {found[name]["result"] for name in doctor_checks.ALL[2:]} == {"skipped"}


HANG = """
import sys

class Break:
    '''Lets the second rank hang in one collective: all of torch is there when this module is asked for.'''
    def find_spec(self, name, *args):
        if name == "lightning_pgroup.context" and sys.argv[0] == "-c":
            import json, threading, torch.distributed as dist
            if json.loads(sys.argv[1])[1] == 1:
                def broken_all_gather(*args):
                    threading.Event().wait()
                dist.all_gather = broken_all_gather

sys.meta_path.insert(0, Break())
"""


@pytest.mark.scripts
def test_a_rank_that_hangs(tmp_path):
    """It is killed when its time is over, and the report says where it was.

    What came before it is checked all the same, also where leftovers in the environment would have broken it.
    """
    (tmp_path / "sitecustomize.py").write_text(HANG)
    environ = ["env", f"PYTHONPATH={tmp_path}{os.pathsep}{ROOT}", "COLUMNS=80", "WORLD_SIZE=4", "GLOO_SOCKET_IFNAME=eth7"]
    done = finish(start_command([*environ, *DOCTOR, "--timeout", "4"], tmp_path, cold=True))
    assert (done.code, done.err) == (1, ""), done.out
    found = results(done.out)
    good = ["versions", "host name", "loopback", "main address", "start", "rendezvous", "create", "addresses"]
    assert [name for name, result in found.items() if result == "ok"] == good
    assert {name for name, result in found.items() if result == "not checked"} == set(doctor_checks.ALL[5:])
    assert (found["environment"], found["collective"]) == ("FAILED", "FAILED")
    assert re.search(r"rank 1\s+hung, and\s+got\s+killed", done.out)
    assert re.search(r"Where rank 1 hung in 'collective'.*\n.*\n.*threading.*\n(?:.*\n){0,2}.*in broken_all_gather", done.out)
    assert "What rank 0 raised in 'collective':" in done.out
    assert done.out.endswith("\nFailed: 2. Not checked: 3. Warnings: 0.\n")


@pytest.mark.scripts
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_interrupted_doctor_leaves_nothing(number, code, tmp_path):
    process = start_command(DOCTOR, tmp_path, cold=True)
    for line in process.stdout:
        if line.startswith("main address"):
            break
    until, pause = time.monotonic() + 60, threading.Event()
    while len(busy := [one for one in processes_of(process) if one.pid != process.pid and is_busy(one)]) < 2:
        assert time.monotonic() < until, busy
        pause.wait(0.05)
    os.kill(process.pid, number)
    done = finish(process, timeout=30)  # fails if a process is left
    assert (done.code, done.err) == (code, "")
    assert done.out == ("interrupted; the ranks have been ended\n" if code == 130 else "")
    assert os.listdir(tmp_path) == []


def is_busy(process):
    """Whether a rank is in the middle of the import of torch."""
    try:
        return process.cpu_times().user > 0.7
    except psutil.Error:
        return False


# --- the network, really broken ---------------------------------------------------------------------------------------------


@pytest.fixture
def network():
    """A network namespace; runs one of the checks inside it and returns what it finds."""
    name = f"pgroup-doctor-{uuid.uuid4().hex[:8]}"
    if IP is None or subprocess.run([IP, "netns", "add", name], capture_output=True).returncode:
        pytest.skip("network namespaces can not be made here")

    def check(expression, *setup):
        for command in setup:
            done = subprocess.run([IP, "netns", "exec", name, "sh", "-c", command], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{command!r} is not possible here: {done.stderr}")
        code = (
            "from datetime import timedelta; from lightning_pgroup.doctor_network import *;"
            f" from lightning_pgroup.doctor_report import to_json; print(to_json([{expression}]))"
        )
        command = [IP, "netns", "exec", name, sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)["checks"][0]

    try:
        yield check
    finally:
        subprocess.run([IP, "netns", "delete", name], check=True)


DROP = "PATH=$PATH:/usr/sbin:/sbin; tc qdisc add dev lo root tbf rate 8bit burst 1 latency 1ms"
"""Loopback then loses each packet, as behind a firewall that drops them: there is no bucket that one would fit into."""


def test_a_firewall_that_drops(network):
    found = network("check_loopback(timedelta(seconds=0.5))", f"{IP} link set lo up", DROP)
    assert found["result"] == "failed"
    assert "127.0.0.1 does not answer to itself: waited 5" in found["found"]
    assert "firewall drops" in found["advice"][0]
    assert "iptables -I INPUT -i lo -j ACCEPT" in found["advice"][0]


def test_a_firewall_before_the_main_address(network):
    """The way to another host is there, and nothing comes back."""
    found = network(
        "check_main_address({'MASTER_ADDR': '10.77.1.2', 'MASTER_PORT': '29500'}, timedelta(seconds=0.5))",
        f"{IP} link set lo up",
        f"{IP} link add one type veth peer name two && {IP} address add 10.77.1.1/24 dev one && {IP} link set one up"
        f" && {IP} link set two up && {IP} neigh add 10.77.1.2 lladdr 02:00:00:00:00:01 dev one",
    )
    assert found["result"] == "failed"
    assert found["found"] == "10.77.1.2:29500 can not be reached (no answer within 500 ms)"
    assert "a firewall is in between" in found["advice"][0]


def test_no_way_to_the_main_address(network):
    found = network(
        "check_main_address({'MASTER_ADDR': '192.0.2.1', 'MASTER_PORT': '29500'}, timedelta(seconds=0.5))",
        f"{IP} link set lo up",
    )
    assert (found["result"], found["found"]) == ("failed", "192.0.2.1:29500 can not be reached (Network is unreachable)")


# --- the network of this host -----------------------------------------------------------------------------------------------


def test_the_port_is_taken():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        environ = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        found = check_main_address({"MASTER_PORT": str(port)}, SECOND)
        assert found.result is Result.FAILED
        name = Path("/proc/self/comm").read_text().strip()
        assert found.found == f"MASTER_PORT={port} is taken by {name} (pid {os.getpid()})"
        assert "set MASTER_PORT to another port" in found.advice[0]
        assert check_main_address(environ, SECOND, is_torchruns=True).result is Result.OK
        assert ("127.0.0.1", port) in listening()
        assert owner_of_port(port) == f"{name} (pid {os.getpid()})"
        assert listens("127.0.0.1", str(port), SECOND)
    assert check_main_address(environ, SECOND).found.endswith("is an address of this host, and the port is free")
    assert not listens("127.0.0.1", str(port), SECOND)
    assert owner_of_port(port) == ""
    assert not any(listens("127.0.0.1", text, SECOND) for text in ("", "x", "99999"))


def test_listening_knows_what_other_hosts_can_reach():
    with socket.socket(socket.AF_INET6) as both, socket.socket() as one:
        both.bind(("::", 0))
        both.listen()
        one.bind(("0.0.0.0", 0))
        found = listening()
        assert ("::", both.getsockname()[1]) in found
        assert one.getsockname()[1] not in dict(map(reversed, found)), "bound is not listening"
    assert [is_loopback(address) for address in ("127.0.1.1", "::1", "::ffff:127.0.0.1", "::", "0.0.0.0", "10.1.2.3")] == [
        *[True] * 3,
        *[False] * 3,
    ]
    assert listening(2**22 + 1) == [], "no such process"


@pytest.mark.parametrize(("text", "word"), [("0", "no port"), ("70000", "no port"), ("abc", "no port"), ("-1", "no port")])
def test_a_port_that_is_none(text, word):
    found = check_main_address({"MASTER_PORT": text}, SECOND)
    assert found.result is Result.FAILED
    assert word in found.found
    assert "from 1 to 65535" in found.advice[0]


def test_no_main_address_is_fine():
    assert check_main_address({}, SECOND).result is Result.OK
    assert check_main_address({"MASTER_ADDR": "127.0.0.1"}, SECOND).found == "127.0.0.1 is an address of this host"


def test_a_name_server_that_does_not_answer(monkeypatch):
    """A stand-in for the resolver of the system, which waits for 5 s and more."""
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: over.wait(30))
    start = time.monotonic()
    found = check_host_name(timedelta(seconds=0.1))
    other = check_main_address({"MASTER_ADDR": "somewhere"}, timedelta(seconds=0.1))
    assert time.monotonic() - start < 5
    over.set()
    assert found.result is other.result is Result.FAILED
    assert "did not resolve within 100 ms" in found.found
    assert "/etc/resolv.conf" in found.advice[0]
    assert "MASTER_ADDR=somewhere does not resolve (no answer within 100 ms)" in other.found


def test_a_slow_name_server_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor_network, "_SLOW", -1.0)
    found = check_host_name(SECOND)
    assert found.result is Result.WARNING
    assert 'RES_OPTIONS="timeout:1 attempts:1"' in found.advice[0]


def test_a_connection_that_is_refused(monkeypatch):
    def refuse(*args):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    assert check_loopback(SECOND).result is Result.OK
    monkeypatch.setattr(socket, "create_connection", refuse)
    found = check_loopback(SECOND)
    assert (found.result, found.found) == (Result.FAILED, "127.0.0.1 can not be connected to (Connection refused)")
    assert "firewall" in found.advice[0]


# --- the environment --------------------------------------------------------------------------------------------------------

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train"}
LSF = {"LSB_JOBID": "7", "LSB_DJOB_RANKFILE": "/x", "JSM_NAMESPACE_LOCAL_RANK": "0", "JSM_NAMESPACE_SIZE": "4"}
FAILED, WARNING, OK = Result.FAILED, Result.WARNING, Result.OK


@pytest.mark.parametrize(
    ("environ", "result", "found", "advice"),
    [
        ({}, OK, "no launcher: Lightning starts the ranks itself", ""),
        ({"PATH": "/bin", "MASTER_PORT": "29500"}, OK, "with MASTER_PORT=29500", ""),
        ({"WORLD_SIZE": "4"}, FAILED, "WORLD_SIZE=4, and no launcher", "unset WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, FAILED, "RANK=1, WORLD_SIZE=4", "unset RANK WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "4", "KUBERNETES_PORT": "x"}, WARNING, "in Kubernetes", "KubeflowEnvironment"),
        ({"LOCAL_RANK": "0", "MASTER_PORT": "1"}, FAILED, "started by hand", "unset LOCAL_RANK MASTER_PORT"),
        ({"NODE_RANK": "1"}, FAILED, "NODE_RANK=1, and no MASTER_ADDR", "unset NODE_RANK"),
        ({"NODE_RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, OK, "NODE_RANK=1", ""),
        (TORCHRUN, FAILED, "no torchrun that answers at 127.0.0.1:29500", f"unset {' '.join(sorted(TORCHRUN))}"),
        (SLURM, FAILED, "a SLURM job of 4 tasks", "srun"),
        ({**SLURM, "SLURM_JOB_NAME": "bash"}, OK, "no launcher", ""),
        ({**SLURM, "SLURM_NTASKS": "1"}, OK, "a SLURM job of one task", ""),
        ({**SLURM, "SLURM_STEP_ID": "0"}, WARNING, "srun has started this process, as one of 4", "by itself"),
        (LSF, WARNING, "jsrun (LSF) has started this process, as one of 4", "by itself"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, WARNING, "no mpi4py", "pip install mpi4py"),
        ({"PMI_SIZE": "1"}, OK, "no launcher", ""),
        ({"GLOO_SOCKET_IFNAME": "eth"}, FAILED, "no interface eth", "set GLOO_SOCKET_IFNAME to one of these, or unset it"),
        ({"GLOO_SOCKET_IFNAME": "eth0,lo"}, OK, "no launcher", ""),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, FAILED, "no interface eth", "It has lo, eth0"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, OK, "no launcher", ""),
        ({"NCCL_SOCKET_IFNAME": "^docker0"}, OK, "no launcher", ""),
        ({"TORCH_DIST_INIT_BARRIER": "1"}, WARNING, "TORCH_DIST_INIT_BARRIER=1", "unset TORCH_DIST_INIT_BARRIER"),
        ({"WORLD_SIZE": "4", "TORCH_DIST_INIT_BARRIER": "1"}, FAILED, "WORLD_SIZE=4", "unset WORLD_SIZE"),
    ],
)
def test_what_the_environment_means(environ, result, found, advice):
    finding = diagnose(environ, HOST)
    assert (finding.result, bool(finding.advice)) == (result, result is not OK)
    assert found in finding.found
    assert advice in " ".join(finding.advice)


def test_a_launcher_that_lives_is_a_warning():
    asked = []
    host = Host(interfaces=["lo"], has_mpi4py=True, answers=lambda *where: asked.append(where) or True)
    finding = diagnose(TORCHRUN, host)
    assert (finding.result, asked) == (WARNING, [("127.0.0.1", "29500")])
    assert "by itself, not under a launcher" in finding.advice[0]
    assert "mpirun has started this process, as one of 3" in diagnose({"PMI_SIZE": "3"}, host).found


def test_its_own_ranks_do_not_get_what_is_left_over():
    kept = {"PATH": "/bin", "OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": "x", "GROUP_NAME": "mine"}
    left = {**TORCHRUN, **SLURM, **LSF, "NODE_RANK": "1", "PMI_SIZE": "3", "LIGHTNING_PGROUP_INVITATION": "{}"}
    assert cleaned({**kept, **left}, ["lo", "eth0"]) == kept
    assert "GLOO_SOCKET_IFNAME" not in cleaned(kept, ["lo"])


# --- versions ---------------------------------------------------------------------------------------------------------------


def test_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [re.split(r"[>=,!]+", text) for text in project["dependencies"]]
    assert {name: minimum for name, minimum, *_ in needed} == MINIMUM
    assert {name: tuple(rest) for name, _, *rest in needed if rest} == COMPROMISED
    assert project["requires-python"] == f">={'.'.join(map(str, PYTHON))}"
    assert check_versions().result is OK


def test_wrong_versions():
    have = {"torch": "2.5.1+cu124", "lightning": "2.6.3"}

    def version_of(name):
        if name not in have:
            raise metadata.PackageNotFoundError(name)
        return have[name]

    finding = check_versions(version_of, (3, 10))
    assert finding.result is FAILED
    assert "torch 2.5.1+cu124, lightning 2.6.3 (compromised), no torchmetrics" in finding.found
    python, torch, lightning, missing = finding.advice
    assert "3.11 or newer" in python
    assert "pip install --upgrade 'torch>=2.6'" in torch
    assert "malicious code" in lightning
    assert "replace all passwords" in lightning
    assert "pip install 'torchmetrics>=1.9'" in missing
    have |= {"torch": "2.10.0", "lightning": "2.6.4", "torchmetrics": "1.9.0"}
    assert check_versions(version_of, (3, 13)).result is OK


# --- ranks that misbehave, each a process without torch ---------------------------------------------------------------------

STAND_IN = """
import json, os, signal, sys, threading
import faulthandler; faulthandler.register(signal.SIGUSR1, all_threads=True)
rank = json.loads(sys.argv[1])[1]
def answer(step, **said): print(json.dumps({"step": step, "seconds": 0.001, **said}), flush=True)
answer("ready", torch="2", backend_problem="", devices=0)
for line in sys.stdin:
    step = json.loads(line)["step"]
    if step == "exit": break
    SPECIAL
    ports = [["127.0.0.1", 1], ["0.0.0.0", 2]]
    answer(step, invitation={}, at="here", listening=ports, spent=[0.01, 0.03], raised=1.0, woke=1.5)
"""


@pytest.fixture
def stand_ins(monkeypatch):
    """Runs all checks with two stand-ins, of which ``special`` is what they do before they answer."""

    def run(special="pass", end="", timeout=20.0):
        body = STAND_IN.replace("    SPECIAL", textwrap.indent(textwrap.dedent(special), "    "))
        monkeypatch.setattr(doctor_ranks, "_START", body + end)
        with Ranks(2, "gloo", os.environ, 1.0) as ranks:
            found = {one.check: one for one in run_checks(ranks, 2, "gloo", timeout, 20.0)}
        assert None not in [one.process.returncode for one in ranks._ranks]
        return found

    return run


def test_what_good_answers_mean(stand_ins):
    found = stand_ins()
    assert list(found) == list(doctor_checks.ALL)
    assert {name for name, one in found.items() if one.result is not OK} == {"addresses"}
    assert found["addresses"].result is WARNING
    assert found["addresses"].found == "open beyond loopback: 0.0.0.0:2"
    assert "unset GLOO_SOCKET_IFNAME" in found["addresses"].advice[0]
    assert "after 500 ms" in found["abort and recover"].found
    assert found["re-create 20 times"].found.startswith("median 20 ms, longest 30 ms")


def test_a_rank_that_is_killed(stand_ins):
    found = stand_ins("if step == 'recreate' and rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert found["collective"].result is OK
    assert found["re-create 20 times"].found == "rank 1 was ended by SIGKILL"
    assert "for lack of memory" in found["re-create 20 times"].advice[0]
    assert {found[name].result for name in ("abort and recover", "clean exit")} == {Result.SKIPPED}


def test_a_rank_that_hangs_or_says_nonsense(stand_ins):
    found = stand_ins("if step == 'create' and rank == 0: print('nonsense', flush=True); threading.Event().wait()", timeout=1.0)
    assert re.fullmatch(r"rank 0 hung, and got killed after [\d.]+ s", found["create"].found)
    assert 'in wait\n  File "<string>"' in found["create"].details.replace("threading.py", "", 1).replace("  File", "  File")


def test_ranks_that_raise_are_asked_on(stand_ins):
    special = """
        if step == "collective":
            answer(step, error=["RuntimeError: Connection closed by peer", "ValueError: boom\\nmore"][rank])
            continue
    """
    found = stand_ins(special)
    assert found["collective"].found == "rank 1 raised ValueError: boom; 1 more failed"
    assert "ValueError: boom\nmore" in found["collective"].details
    assert found["clean exit"].result is OK


def test_an_exit_that_is_not_clean(stand_ins):
    found = stand_ins(end="\nprint('a last word', file=sys.stderr)\nsys.exit(3 if rank else 0)")["clean exit"]
    assert (found.result, found.found) == (FAILED, "rank 1 ended with exit code 3 (a last word)")
    found = stand_ins(end="\nprint('a last word', file=sys.stderr)")["clean exit"]
    assert (found.result, found.found) == (WARNING, "exit code 0, but ranks 0, 1 printed at the end: a last word")
    child = "\nimport subprocess\nif rank: subprocess.Popen(['sleep', '300'], stdout=-3, stderr=-3)"
    found = stand_ins(end=child)["clean exit"]
    pid = int(re.fullmatch(r"rank 1 left processes behind: (\d+)", found.found).group(1))
    assert not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text(), "killed"


def test_a_rank_that_does_not_end(monkeypatch):
    monkeypatch.setattr(doctor_ranks, "_START", STAND_IN.replace("SPECIAL", "pass") + "if rank: threading.Event().wait()")
    with Ranks(2, "gloo", os.environ, 1.0) as ranks:
        assert ranks.collect(20.0).is_good
        outcome, printed = ranks.finish(1.0)
    assert (list(outcome.answers), list(outcome.hung)) == ([0], [1])
    assert '  File "<string>", line 13 in <module>' in outcome.hung[1]
    assert printed.keys() == {1}, "its stacks"


def test_a_rank_that_does_not_start(monkeypatch):
    monkeypatch.setattr(doctor_ranks, "_START", "import no_such_module")
    with Ranks(2, "gloo", os.environ, 1.0) as ranks:
        first, *others = run_checks(ranks, 2, "gloo", 20.0, 20.0)
    assert "ended with exit code 1 (ModuleNotFoundError: No module named 'no_such_module')" in first.found
    assert first.seconds < 4, "nothing is waited for any more"
    assert {one.result for one in others} == {Result.SKIPPED}


def test_a_system_that_starts_no_process(tmp_path):
    """With room for the doctor's own files, and not for a pipe to a rank."""
    limited = ["sh", "-c", 'ulimit -n 9 && exec "$@"', "sh"]
    done = finish(start_command([*limited, *DOCTOR, "--nproc", "1", "--json"], tmp_path, cold=True), timeout=30)
    assert (done.code, done.err) == (1, "")
    found = {one["check"]: one for one in json.loads(done.out)["checks"]}
    assert (found["start"]["result"], found["start"]["found"]) == (
        "failed",
        "a process can not be started (Too many open files)",
    )
    assert "`ulimit -n`" in found["start"]["advice"][0]
    assert {found[name]["result"] for name in doctor_checks.ALL[1:]} == {"skipped"}


@pytest.mark.parametrize("lacks", ["descriptors", "threads"])
def test_a_system_that_starts_some_of_the_ranks(lacks, monkeypatch):
    started, popen, limits = [], subprocess.Popen, resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(doctor_ranks, "_START", STAND_IN.replace("SPECIAL", "pass"))
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: started.append(popen(*args, **kwargs)) or started[-1])
    if lacks == "descriptors":
        free = [number for number in range(1000) if not os.path.exists(f"/proc/self/fd/{number}")]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[14], limits[1]))
    else:
        start = threading.Thread.start
        left = iter([start, start, start])
        monkeypatch.setattr(threading.Thread, "start", lambda thread: next(left, _no_thread)(thread))
    try:
        with pytest.raises(OSError, match=r"Too many open files|can't start new thread"):
            Ranks(20, "gloo", os.environ, 1.0).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert 1 < len(started) < 20
    assert None not in [one.returncode for one in started]


def _no_thread(thread):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("backend", "said", "found"),
    [
        ("nccl", {"backend_problem": "", "devices": 1}, "nccl needs a GPU for each rank: torch 2 sees 1, for 2 ranks"),
        ("mpi", {"backend_problem": "no 'mpi'", "devices": 0}, "no 'mpi'"),
    ],
)
def test_a_backend_that_is_not_there(backend, said, found):
    finding = doctor_checks._started(Outcome(answers={0: {"torch": "2", **said}}), 2, backend)
    assert (finding.result, finding.found) == (FAILED, found)
    assert finding.advice


# --- the report -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0"], "--nproc must be at least 1"),
        (["--timeout", "nan"], "--timeout must be"),
        (["--nproc", "x"], "invalid int"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_page_has_each_check_and_the_form_of_the_output():
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert re.findall(r"^\| `([\w -]+)` \|", page.partition("## The checks")[2], re.MULTILINE)[:13] == [
        *FIRST,
        *doctor_checks.ALL,
    ]
    assert list(results(page)) == [*FIRST, *doctor_checks.ALL]
    shown = " ".join(page.partition("What to do:\n- environment: ")[2].partition("\n\n")[0].split())
    assert shown == diagnose({"WORLD_SIZE": "4"}, HOST).advice[0]


def test_the_report():
    good, bad = (
        Finding("a", OK, "fine"),
        Finding("long name", FAILED, "word " * 40, ("do this", "and that"), 1.5, "stacks\nhere"),
    )
    warned = Finding("w", WARNING, "hm", ("look",))
    lines = report([good, warned, bad], 60)
    assert max(map(len, lines)) <= 60
    assert lines[2] == "a          ok       fine"
    assert [line for line in lines if line.startswith("- ")] == ["- w: look", "- long name: do this", "- long name: and that"]
    assert lines[-5:] == ["", "stacks", "here", "", "Failed: 1. Not checked: 0. Warnings: 1."]
    assert [exit_code(one) for one in ([good], [good, warned], [good, bad], [Finding("s", Result.SKIPPED, "")])] == [0, 0, 1, 1]
    assert report([good], 60)[-1] == "All is well."
    assert report([good, warned], 60)[-1] == "All works. Warnings: 1."
    assert json.loads(to_json([bad]))["checks"][0] == {
        "check": "long name",
        "result": "failed",
        "found": bad.found,
        "advice": ["do this", "and that"],
        "seconds": 1.5,
        "details": "stacks\nhere",
    }
