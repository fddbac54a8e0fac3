"""A Python that has imported torch and Lightning, and forks for each script that is started: a warm start.

To import them costs four seconds of a processor for each process, and a run of a script has up to five. So scripts run by a
stand-in for ``sys.executable`` (`stand_in.py`), which hands its arguments, environment, folder and descriptors to a zygote.
The zygote forks; its child takes all of that over and runs the script as ``__main__`` from the top level of this file, so that
it ends as the interpreter ends: exit handlers, finalizers, uncaught exceptions, exit codes. The stand-in stays as long as the
script. It forwards signals and dies of what the script dies of; when it is killed, so is the script. The script's own
``sys.executable`` is the stand-in too, so that launchers and agents start their processes warm.

What is not as in a cold start: the parent of a script is the zygote, and its process id is not the stand-in's; torch,
torchmetrics and Lightning are imported already; each script leads a session of its own. And what they have imported is not
collected when the interpreter ends, which would take a second, unless `WHOLE_END` is set. The test of any of these must start
cold. A stop (SIGSTOP) of the stand-in does not stop the script.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.machinery
import marshal
import os
import select
import signal
import socket
import sys
import types

MARK = "LIGHTNING_PGROUP_TEST_SCRIPT"
"""Names the variable that all processes of a run have in their environment; its value has 32 characters."""

WHOLE_END = "LIGHTNING_PGROUP_TEST_WHOLE_END"
"""Names the variable for scripts whose interpreter must end as a whole. Agents of torchrun do not look at it."""


class Zygote:
    """Forks for whoever comes to ``listener``, until its standard input ends. Single-threaded; warm from the first one on."""

    def __init__(self, listener):
        self.listener = listener
        self.children = {}  # the stand-in's line, by the descriptor of the process

    def serve(self):
        """Return a :class:`Job`, in a forked child only."""
        while True:
            poll = select.poll()
            for number in (0, self.listener.fileno(), *self.children, *(line.fileno() for _, line in self.children.values())):
                poll.register(number, select.POLLIN)
            ready = {number for number, _ in poll.poll()}
            for process, (pid, line) in list(self.children.items()):
                if process in ready:
                    self._tell(process, pid, line)
                elif line.fileno() in ready:
                    self._forward(pid, line)
            if 0 in ready:
                self._end()
            if self.listener.fileno() in ready:
                job = self._start(self.listener.accept()[0])
                if job is not None:
                    return job

    def _start(self, line):
        if not gc.get_freeze_count():
            warm_up()
        line.settimeout(10)
        try:
            job, descriptors = receive_job(line)
        except (OSError, EOFError):  # the stand-in was killed, or someone has only woken this
            line.close()
            return None
        pid = os.fork()
        if pid == 0:
            for one in (self.listener, line, *(line for _, line in self.children.values())):
                one.detach()  # their descriptors are the script's from now on
            return Job(job, descriptors)
        for number in descriptors:
            os.close(number)
        self.children[os.pidfd_open(pid)] = (pid, line)
        return None

    def _tell(self, process, pid, line):
        status = os.waitpid(pid, 0)[1]
        with contextlib.suppress(OSError), line:
            line.sendall(status.to_bytes(4, "big"))
        os.close(process)
        del self.children[process]

    def _forward(self, pid, line):
        try:
            numbers = line.recv(100)
        except OSError:
            numbers = b""
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)  # not waited for yet, so that no other process can have its id
        if not numbers:
            process = next(one for one, (its, _) in self.children.items() if its == pid)
            self._tell(process, pid, line)

    def _end(self):
        for pid, _ in self.children.values():
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def warm_up():
    """Import what scripts import. Nothing here may start a thread, or run an operation of torch."""
    import lightning.pytorch  # noqa: F401
    import torch.distributed.elastic.agent.server.local_elastic_agent
    import torch.distributed.run  # noqa: F401
    import torchmetrics  # noqa: F401

    assert "lightning_pgroup" not in sys.modules
    assert len(os.listdir("/proc/self/task")) == 1
    del sys.modules["torch.distributed.run"]  # what it needs stays; runpy warns of a module that is there before it runs
    gc.collect()
    gc.freeze()


def receive_job(line):
    head, descriptors, _, _ = socket.recv_fds(line, 8, 250)
    if not head:
        raise EOFError
    size, text = int.from_bytes(head, "big"), b""
    while len(text) < size:
        part = line.recv(size - len(text))
        if not part:
            raise EOFError
        text += part
    return marshal.loads(text), descriptors


class Job:
    """What a stand-in has been started with, which this process takes over."""

    def __init__(self, job, descriptors):
        self.job = job
        self._take_descriptors(descriptors)
        os.setsid()
        for number in job["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        if os.readlink("/proc/self/ns/net") != job["network"]:
            enter_network(job["pid"])
        os.chdir(job["cwd"])
        self._take_environment()
        self._be_a_fresh_interpreter()

    def _take_descriptors(self, descriptors):
        wanted = self.job["descriptors"]
        kept = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, max(wanted, default=2) + 1) for number in descriptors]
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in kept:
                with contextlib.suppress(OSError):  # the folder that was listed
                    os.close(number)
        for number, there in zip(kept, wanted, strict=True):
            os.dup2(number, there)
            os.close(number)

    def _take_environment(self):
        os.environ.clear()
        os.environ.update({os.fsdecode(key): os.fsdecode(value) for key, value in self.job["environ"].items()})
        show_mark(os.environ.get(MARK, "0" * 32))

    def _be_a_fresh_interpreter(self):
        import multiprocessing.process
        import multiprocessing.spawn

        import numpy as np
        import torch

        sys.executable = self.job["executable"]
        multiprocessing.spawn.set_executable(sys.executable)
        multiprocessing.process.ORIGINAL_DIR = self.job["cwd"]
        multiprocessing.current_process().authkey = os.urandom(32)
        torch.default_generator.seed()
        np.random.seed()  # Python's own generator does that itself
        kind, what = self.job["kind"], self.job["what"]
        self.first = {"-c": "", "-m": self.job["cwd"]}.get(kind, os.path.dirname(os.path.realpath(what)))
        sys.path[:] = [self.first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
        sys.argv = [kind or what, *self.job["argv"]]
        importlib.invalidate_caches()
        if WHOLE_END in os.environ and kind != "-m":
            atexit.register(gc.unfreeze)

    def code(self):
        """The code of the script and its names, in a new ``__main__``. That of a module is to be found yet."""
        kind, what = self.job["kind"], self.job["what"]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__builtins__ = sys.modules["builtins"]
        if kind == "-m":
            return f"__import__('runpy')._run_module_as_main({what!r})", main.__dict__
        if kind == "-c":
            return compile(what, "<string>", "exec"), main.__dict__
        main.__file__, main.__cached__ = os.path.abspath(what), None
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
        return main.__loader__.get_code("__main__"), main.__dict__


def enter_network(pid):
    """Go where the network of another process is, as `ip netns exec` has put it there."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as network:
        if library.setns(network.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "the network of the stand-in can not be entered")


def show_mark(value):
    """Write the mark where others read it: ``/proc/PID/environ`` shows what a process was started with, here the zygote."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])  # the 50th and 51st of all: env_start and env_end
    name = f"{MARK}=".encode()
    at = ctypes.string_at(begin, end - begin).index(name) + len(name)
    assert len(value) == 32
    ctypes.memmove(begin + at, value.encode(), 32)


if __name__ == "__main__":
    zygote = Zygote(socket.socket(fileno=int(sys.argv[1])))
    exec(*zygote.serve().code())
