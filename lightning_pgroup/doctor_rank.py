"""A rank of the doctor: a process that does what it is told, a line each on its standard input, and answers in JSON lines.

The ranks meet and make groups as those of a Trainer do: rank 0 invites the others, and each group is a block of its own.
"""

import contextlib
import faulthandler
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lightning_pgroup.exceptions import text_of

REPEATS = 20
"""How often a group is created anew."""

EXIT = "exit"
READY = "ready"

_PEERS_ARE_INSIDE = 0.05
_PR_SET_PDEATHSIG = 1

Answer = dict[str, Any]


def main(rank: int, size: int, backend: str, timeout: float) -> None:
    """Run the commands of the doctor, until it says ``exit`` or is gone itself.

    Args:
        rank: This rank.
        size: Number of ranks.
        backend: The backend to check.
        timeout: Bound of each wait for other ranks, in seconds.
    """
    _die_with_doctor()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    faulthandler.enable(all_threads=True)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    commands: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(commands,), name="doctor-commands", daemon=True).start()

    def answer(step: str, function: Callable[[], Answer]) -> None:
        start = time.monotonic()
        try:
            said = function()
        except Exception as error:
            notes = [str(note) for note in getattr(error, "__notes__", ())]
            said = {"error": "\n".join([f"{type(error).__name__}: {text_of(error)}", *notes])}
        answers.write(json.dumps({"seconds": time.monotonic() - start, **said, "step": step}) + "\n")

    steps: list[_Steps] = []

    def prepare() -> Answer:
        steps.append(_Steps(rank, size, backend, timeout))
        return steps[0].describe()

    answer(READY, prepare)
    while (command := commands.get())["step"] != EXIT:
        name, given = command["step"], command.get("given")
        answer(name, lambda name=name, given=given: getattr(steps[0], name)(*([] if given is None else [given])))  # type: ignore[misc]


def _listen(commands: "queue.SimpleQueue[Answer]") -> None:
    """Hand on what the doctor says. By the descriptor itself: a buffer would be locked when the interpreter exits."""
    text = b""
    while True:
        *lines, text = text.split(b"\n")
        for line in lines:
            command = json.loads(line)
            commands.put(command)
            if command["step"] == EXIT:
                return
        chunk = os.read(0, 65536)
        if not chunk:
            os._exit(1)  # the doctor is gone, and nobody wants to know any more
        text += chunk


def _die_with_doctor() -> None:
    with contextlib.suppress(Exception):  # Linux only; elsewhere `_listen` notices it, unless Python's lock is held
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Steps:
    """What a rank can be told to do. Each returns what it has found; all but ``describe`` and ``host`` are collective."""

    def __init__(self, rank: int, size: int, backend: str, timeout: float) -> None:
        import torch
        import torch.distributed as dist

        from lightning_pgroup.context import process_group
        from lightning_pgroup.process_state import process_state

        torch.set_num_threads(1)
        self._torch, self._dist, self._block = torch, dist, process_group
        self._membership = process_state().membership
        self._rank, self._size, self._backend, self._timeout = rank, size, backend, timeout
        self._device = torch.device("cpu")
        if backend == "nccl" and torch.cuda.is_available():
            self._device = torch.device("cuda", rank % max(1, torch.cuda.device_count()))

    def describe(self) -> Answer:
        """What this build of torch has."""
        from lightning_pgroup.config import check_backend

        problem = ""
        try:
            check_backend(self._backend, "--backend")
        except ValueError as error:
            problem = str(error)
        return {"torch": self._torch.__version__, "backend_problem": problem, "devices": self._torch.cuda.device_count()}

    def host(self) -> Answer:
        """On rank 0: host the store of the ranks and invite the others."""
        invitation = self._membership.invite(self._size, 0)
        self._membership.join(invitation)
        return {"invitation": asdict(invitation)}

    def rendezvous(self, invitation: Answer) -> Answer:
        """Reach the store, and see all other ranks in it."""
        from datetime import timedelta

        from lightning_pgroup.membership import Place
        from lightning_pgroup.team import Invitation

        if self._rank != 0:
            self._membership.join(Invitation(**invitation))
        timeout = timedelta(seconds=self._timeout)
        place = Place(
            rank=self._rank,
            size=self._size,
            nodes=1,
            init_method=None,
            default_init_method=str,
            starter="by the doctor",
            timeout=timeout,
        )
        self._store = self._membership.team(place).store
        self._store.set(f"doctor/{self._rank}", "here")
        self._store.wait([f"doctor/{rank}" for rank in range(self._size)], timeout)
        return {"at": f"{invitation['host']}:{invitation['port']}"}

    def create(self) -> Answer:
        """Make a group, and look at what listens while it lives."""
        from lightning_pgroup.doctor_listeners import listening

        start = time.monotonic()
        with self._group():
            seconds = time.monotonic() - start
            self._sum()
            found = listening()
            self._sum()
        return {"seconds": seconds, "listening": found}

    def collective(self) -> Answer:
        """Several collectives, and their values."""
        dist, torch = self._dist, self._torch
        with self._group():
            start = time.monotonic()
            self._sum()
            sent = torch.full((3,), float(self._rank == 0), device=self._device)
            dist.broadcast(sent, 0)
            gathered = [torch.zeros(1, device=self._device) for _ in range(self._size)]
            dist.all_gather(gathered, torch.tensor([float(self._rank)], device=self._device))
            dist.barrier()
            seconds = time.monotonic() - start
            if sent.tolist() != [1.0] * 3 or [one.item() for one in gathered] != list(map(float, range(self._size))):
                raise ArithmeticError(f"broadcast gave {sent.tolist()}, all_gather {[one.item() for one in gathered]}")
        return {"seconds": seconds}

    def recreate(self) -> Answer:
        """Groups one after the other; how long each took, with its end."""
        spent = []
        for _ in range(REPEATS):
            start = time.monotonic()
            with self._group():
                self._sum()
            spent.append(time.monotonic() - start)
        return {"spent": spent}

    def abort(self) -> Answer:
        """The last rank raises while the others wait in a collective; then all make a good group."""
        last, said = self._size - 1, {}
        try:
            with self._group():
                self._sum()
                if self._rank == last:
                    self._wait_for_peers(range(last))
                    said["raised"] = time.monotonic()
                    raise ValueError("the doctor's own failure")
                self._store.set(f"doctor/inside/{self._rank}", "here")
                try:
                    self._sum()
                finally:
                    said["woke"] = time.monotonic()
        except (ValueError, RuntimeError) as error:
            named = any("the doctor's own failure" in note for note in getattr(error, "__notes__", ()))
            if self._rank != last and not named:
                raise
        else:
            raise AssertionError("a collective came to its end although a rank had failed")
        start = time.monotonic()
        with self._group():
            self._sum()
        return {**said, "seconds": time.monotonic() - start}

    def _group(self) -> contextlib.AbstractContextManager[object]:
        return self._block(
            self._backend,
            rank=self._rank,
            world_size=self._size,
            timeout=self._timeout,
            rendezvous_timeout=self._timeout,
            device_id=self._device if self._device.type == "cuda" else None,
        )

    def _sum(self) -> None:
        value = self._torch.tensor([float(self._rank + 1)], device=self._device)
        self._dist.all_reduce(value)
        want = self._size * (self._size + 1) / 2
        if value.item() != want:
            raise ArithmeticError(f"all_reduce gave {value.item():g}, and {want:g} is right")

    def _wait_for_peers(self, peers: range) -> None:
        from datetime import timedelta

        if peers:
            self._store.wait([f"doctor/inside/{rank}" for rank in peers], timedelta(seconds=self._timeout))
        threading.Event().wait(_PEERS_ARE_INSIDE)  # from the store into the collective
