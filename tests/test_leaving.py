"""How whole scripts end, under `python` and under `torchrun`: exit codes, what is printed, and signals (F28, F32)."""

import os
import re
import signal
import time

import psutil
import pytest
import torch

from tests.models import TinyModel
from tests.scripts import LAUNCHERS, finish, listen, run, start

pytestmark = pytest.mark.scripts

BOUND = 20.0
"""Seconds from the last word of a script to its end. What hangs in a group would take 100."""

PATIENCE = 2.0
"""Seconds in which every surviving rank must be back."""

BEGIN = """
import signal, threading, time
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
rank = int(os.environ.get("LOCAL_RANK", "0"))
os.dup2(os.open(f"stderr-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
nothing = lambda: None

class Act(Callback):
    def __init__(self, act):
        self.act = act

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            self.act()

def fit(act=nothing, destroy="at_exit", **kwargs):
    strategy = PGroupDDPStrategy(timeout=100, destroy=destroy)
    trainer = make_trainer(strategy, callbacks=[Act(act)], limit_train_batches=5000, **kwargs)
    trainer.fit(TinyModel(), datamodule=TinyData(64 if act is nothing else 40000))
    return trainer

def fail(error):
    raise error

def fail_once(failing=1, **kwargs):
    try:
        fit(lambda: fail(ValueError("caught")) if rank == failing else None, **kwargs)
    except (ValueError, RuntimeError) as error:
        say("failed once:", type(error).__name__)

def stop():
    say("ready", os.getpid())
    threading.Event().wait(60)
    raise AssertionError("no signal came")

def run_free():
    say("ready", os.getpid())

def stop_0():
    stop() if rank == 0 else run_free()
"""

LOG = r"(?:\[(?:run \S+ attempt \d+ )?rank \d/2 gen \d\] .*\n)*"
NOTE = r"The first failure of generation \d was on rank \d \(pid .*\n"


def traceback_of(error, note=""):
    return rf"Traceback \(most recent call last\):\n(?:  .*\n)+{error}\n{note}"


PEER = traceback_of(r"RuntimeError: .*(?:Connection closed by peer|Connection reset by peer|closed|pair\.cc).*", NOTE)
THE_END = traceback_of("ValueError: the end")
INTERRUPTED = traceback_of("KeyboardInterrupt")

# what the script does; its exit code under `python`; what each rank may print to stderr, as a whole
ENDS = {
    "normal, group alive": ("fit(); say('end')", 0, ["", ""]),
    "normal, after a failure": ("fail_once(); say('end')", 0, [LOG, LOG]),
    "normal, after a failure of rank 0 and a good fit": ("fail_once(0); fit(); say('end')", 0, [LOG, LOG]),
    "sys.exit(3), group alive": ("fit(); say('end'); sys.exit(3)", 3, ["", ""]),
    "sys.exit(3) in a step": ("fit(lambda: (say('end'), sys.exit(3)))", 3, [LOG, LOG]),
    "exception, group alive": ("fit(); say('end'); fail(ValueError('the end'))", 1, [THE_END, THE_END]),
    "exception in a step": (
        "fit(lambda: (say('end'), fail(ValueError('the end'))))",
        1,
        [LOG + traceback_of("ValueError: the end", NOTE)] * 2,
    ),
    "exception in a step of rank 0": (
        "fit(lambda: (say('end'), fail(ValueError('the end')) if rank == 0 else None))",
        1,
        [LOG + traceback_of("ValueError: the end", NOTE), LOG + PEER],
    ),
    "exception in a step of rank 1, after a failure": (
        "fail_once(); fit(lambda: (say('end'), fail(ValueError('the end')) if rank == 1 else None))",
        1,
        [LOG + PEER, LOG + traceback_of("ValueError: the end", NOTE)],
    ),
    "Ctrl-C in a step of rank 0, rank 1 in a collective": ("fit(stop_0)", 1, [LOG, LOG]),
    "Ctrl-C while training, after a failure": ("fail_once(); fit(run_free, max_epochs=-1)", 1, [LOG, LOG]),
    "Ctrl-C after a fit, group alive": ("fit(); stop()", -signal.SIGINT, [INTERRUPTED, INTERRUPTED]),
}

AGENT = (
    r"(?:[WE]\d{4} .*torch/distributed/.*\n"
    r"|\[W\d{4} .*\[c10d\] The hostname of the client socket cannot be retrieved.*\n"
    r"|Traceback \(most recent call last\):\n(?:  .*\n)+"
    r"torch\.distributed\.elastic\.multiprocessing\.(?:errors\.ChildFailedError|api\.SignalException): .*\n"
    r"|[=-]{60}\n|.*script\.py FAILED\n|Failures:\n|Root Cause .*\n|\[\d\]:\n|  .*\n)*"
)
"""What torchrun's agent prints itself when a rank has failed or it is interrupted, or a name server does not answer it."""

EVIL = ("terminate called", "ProcessGroup", "recvValue", "Broken pipe", "Exception ignored", "SIGABRT", "exitcode  : -6")


def stderr_of(folder, rank):
    """What a rank has printed to stderr, without the name that torch puts before each line while a group lives."""
    return re.sub(rf"^\[rank{rank}\]: ", "", (folder / f"stderr-{rank}").read_text(), flags=re.MULTILINE)


COLD = {("exception, group alive", "python"), ("normal, after a failure", "torchrun")} | {
    (end, "python")
    for end in ENDS
    if end.startswith("Ctrl-C")  # it reaches all ranks in the same moment, where no stand-in hands it on
}
"""Which of them start as users start them."""


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("end", ENDS)
def test_a_script_ends_quietly_and_with_its_exit_code(end, launcher, tmp_path):
    body, code, prints = ENDS[end]
    script = start(BEGIN + body, tmp_path, launcher=LAUNCHERS[launcher], cold=(end, launcher) in COLD, whole_end=True)
    interrupted = end.startswith("Ctrl-C")
    listen(script, "ready" if interrupted else "end")
    begin = time.monotonic()
    if interrupted:
        os.killpg(script.pid, signal.SIGINT)
    done = finish(script, timeout=60)
    took = time.monotonic() - begin
    printed = [stderr_of(tmp_path, rank) for rank in (0, 1)]
    everything = "\n".join([*printed, done.err])
    assert took < BOUND, everything
    if launcher == "python":
        assert done.code == code, everything
        assert done.err == ""
    else:
        assert done.code == (0 if code == 0 else 1), everything  # torchrun's own code
        assert re.fullmatch(AGENT if code else "", done.err), done.err
        if not interrupted and code:
            assert re.search(rf"exitcode  : {code} ", done.err), done.err
    for rank in (0, 1):
        assert re.fullmatch(prints[rank], printed[rank]), f"rank {rank} has printed:\n{printed[rank]}"
    for word in EVIL:
        assert word not in everything, everything


SIGNALLED = """
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

arrived = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: arrived.set())  # Lightning's handler calls it too

def act():
    say("ready", os.getpid())
    if rank == {waiting}:
        arrived.wait(60)

try:
    other = ModelCheckpoint("other", save_on_exception=True)
except TypeError:  # Lightning before 2.6
    other = OnExceptionCheckpoint("other")
savers = [OnExceptionCheckpoint("one"), other]
strategy = PGroupDDPStrategy(timeout=100)
trainer = make_trainer(strategy, callbacks=[Act(act), *savers], enable_checkpointing=True, limit_train_batches=5000)
try:
    trainer.fit(TinyModel(), datamodule=TinyData(40000))
except BaseException as error:
    at = time.time()
    own = error if hasattr(error, "__notes__") else error.__context__  # Lightning turns Ctrl-C into SystemExit
    say("back", at, type(error).__name__, trainer.global_step, *own.__notes__)
if {again}:
    say("trained", fit().global_step)
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("hit", [(0,), (1,), (1, 0)], ids=["rank 0", "rank 1", "all"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_the_run_on_every_rank_within_a_step(number, hit, launcher, tmp_path):
    """The last rank that is hit is in a hook then, the other one in a collective.

    Lightning hands SIGTERM on to the ranks that it has started; after Ctrl-C it kills them.
    """
    handed_on = launcher == "python" and 0 in hit
    killed = handed_on and number == signal.SIGINT
    body = BEGIN + SIGNALLED.format(waiting=hit[-1], again=not killed)
    script = start(body, tmp_path, launcher=LAUNCHERS[launcher], cold=handed_on)  # a stand-in would hand it on, but later
    pids = {int(rank): int(pid) for rank, (pid,) in listen(script, "ready").items()}
    sent = time.time()
    for rank in hit:
        os.kill(pids[rank], number)
    done = finish(script, timeout=80)
    printed = "\n".join([done.out, *(stderr_of(tmp_path, rank) for rank in (0, 1)), done.err])
    assert done.code == 0, printed
    for rank in (0,) if killed else (0, 1):
        _, at, kind, steps, *note = done.said(rank)[1].split(" ", 4)
        was_hit = rank in hit or handed_on
        own = "SIGTERMException" if number == signal.SIGTERM else "SystemExit"
        assert kind == (own if was_hit else "RuntimeError"), printed
        assert float(at) - sent < PATIENCE, printed
        assert int(steps) in (2, 3), printed
        assert ("SIGTERM was received" if number == signal.SIGTERM else "KeyboardInterrupt") in note[0]
        assert any(f"was on rank {one} (pid {pids[one]} " in note[0] for one in hit)
        assert done.said(rank)[2:] == ([] if killed else ["trained 8"]), printed
    files = list(tmp_path.glob("one/*.ckpt")) + list(tmp_path.glob("other/*.ckpt"))
    assert len(files) == 2, printed
    for file in files:
        assert torch.load(file, weights_only=False)["global_step"] in (2, 3)
        TinyModel.load_from_checkpoint(file)


@pytest.mark.parametrize(
    ("end", "code"),
    [("raise ValueError('only here')", 1), ("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("sys.exit(0)", 0)],
    ids=["raises", "os._exit", "killed", "fine"],
)
def test_the_run_does_not_end_well_when_a_rank_has_failed(end, code, tmp_path):
    done = run(
        f"""
        import atexit
        atexit.register(say, "an exit handler")
        make_trainer(PGroupDDPStrategy(destroy="on_teardown")).fit(TinyModel(), datamodule=TinyData())
        if os.environ["LOCAL_RANK"] == "1":
            {end}
        """,
        tmp_path,
        timeout=60,
    )
    assert done.code == code, done.err
    assert done.said(0) == ["an exit handler"]


def test_the_host_of_the_store_leaves_last(tmp_path):
    done = run(
        """
        import threading
        from lightning_pgroup.process_state import process_state
        make_trainer(PGroupDDPStrategy(destroy="on_teardown")).fit(TinyModel(), datamodule=TinyData())
        if os.environ["LOCAL_RANK"] == "1":
            threading.Event().wait(2)  # rank 0 has come to its end by now
            (team,) = process_state().membership._teams.values()
            team.store.set("late", "1")
            say("the store answers", team.store.get("late"))
        """,
        tmp_path,
        timeout=60,
    )
    assert done.code == 0, done.err
    assert done.said() == ["1 the store answers b'1'"]


def test_the_host_of_the_store_waits_five_seconds_at_most(tmp_path):
    os.mkfifo(tmp_path / "leave")
    script = start(
        BEGIN
        + """
import atexit
atexit.register(lambda: say("left", time.time()))  # runs after ours, which is registered by the first stage
fit(destroy="on_teardown")
atexit.register(lambda: say("leaves", time.time()))
if rank == 1:
    say("late", os.getpid())
    open("leave").read()
""",
        tmp_path,
    )
    (pid,) = listen(script, "late", count=1)["1"]
    late = psutil.Process(int(pid))
    code, late_is_there = script.wait(40), late.is_running()
    (tmp_path / "leave").open("w").close()
    late.wait(30)
    done = finish(script)
    (leaves,), (left,) = ([line.split()[1] for line in done.said(0) if line.startswith(word)] for word in ("leaves", "left"))
    assert (code, late_is_there) == (0, True)
    assert 4.5 < float(left) - float(leaves) < 5 + PATIENCE


def test_a_rank_that_fails_does_not_kill_the_one_that_waits_for_it_at_exit(tmp_path):
    """Lightning's thread would, which looks every 5 s for such ranks; here it looks a hundred times a second."""
    os.mkfifo(tmp_path / "leave")
    done = run(
        BEGIN
        + """
import atexit, functools
from lightning.fabric.strategies.launchers import subprocess_script as module
from lightning_pgroup.process_state import process_state

module._ChildProcessObserver = functools.partial(module._ChildProcessObserver, sleep_period=0.01)
process_state()
atexit.register(lambda: open("leave", "w").close() if rank == 0 else None)
fit(destroy="on_teardown")
if rank == 1:
    open("leave").read()
    fail(ValueError("only here"))
""",
        tmp_path,
    )
    assert done.code == 1, done.err


def test_the_first_rank_keeps_an_exit_code_of_its_own(tmp_path):
    done = run(
        BEGIN + "fit(destroy='on_teardown'); fail(ValueError('the end')) if rank == 0 else sys.exit(7)\n",
        tmp_path,
        timeout=80,
    )
    assert done.code == 1, stderr_of(tmp_path, 0)
