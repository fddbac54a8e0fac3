"""``lightning-pgroup doctor``: does this host let ranks meet, work, fail and end? It starts some, and says what to do."""

import argparse
import contextlib
import importlib.util
import math
import os
import shutil
import socket
from collections.abc import Callable, Generator
from datetime import timedelta

from lightning_pgroup import doctor_environment, doctor_network, standard_output
from lightning_pgroup.doctor_checks import not_started, run_checks
from lightning_pgroup.doctor_ranks import Ranks
from lightning_pgroup.doctor_report import Finding, exit_code, progress, report, to_json
from lightning_pgroup.doctor_versions import check_versions

HELP = "Start ranks on this host and check that they can meet, make groups, fail and end; say what to do if not."

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""

_TIMEOUT = 60.0
_LONGEST_LOOK = 10.0
_PATIENCE = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="how many ranks to start (default: 2)")
    parser.add_argument("--backend", default="gloo", metavar="NAME", help="the backend to check, gloo or nccl (default: gloo)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=_TIMEOUT,
        metavar="SECONDS",
        help=f"how long each check may take, {_TIMEOUT:g} or more for start and end; ranks that take longer are killed"
        f" (default: {_TIMEOUT:g})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Do all checks. Blocks at most ``--timeout`` for each of them, and longer for start and end; leaves no process.

    Returns:
        0 if all is well or there are only warnings, 1 if a check failed, 130 after Ctrl-C.

    Raises:
        ValueError: No ranks, or no time.
    """
    nproc, backend, timeout = arguments.nproc, arguments.backend.lower(), arguments.timeout
    if nproc < 1:
        raise ValueError(f"--nproc must be at least 1, got {nproc}.")
    if not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"--timeout must be more than 0 seconds and finite, got {timeout:g}.")
    say = _patient(say)
    findings: list[Finding] = []
    if not arguments.json:
        say(f"{nproc} {'rank' if nproc == 1 else 'ranks'}, {backend}, at most {timeout:g} s for each check")
    try:
        with contextlib.closing(_checks(nproc, backend, timeout)) as checks:  # wherever an interrupt comes, the ranks end
            for finding in checks:
                findings.append(finding)
                if not arguments.json:
                    say(progress(finding))
    except KeyboardInterrupt:
        if not arguments.json:
            say("interrupted; the ranks have been ended")
        return INTERRUPTED
    lines = [to_json(findings)] if arguments.json else ["", *report(findings, shutil.get_terminal_size().columns)]
    for line in lines:
        say(line)
    return exit_code(findings)


def _checks(nproc: int, backend: str, timeout: float) -> Generator[Finding, None, None]:
    look = timedelta(seconds=min(timeout, _LONGEST_LOOK))
    interfaces = [name for _, name in socket.if_nameindex()]
    torchrun_answers: list[bool] = []

    def answers(host: str, port: str) -> bool:
        torchrun_answers.append(doctor_network.listens(host, port, look))
        return torchrun_answers[-1]

    yield check_versions()
    yield doctor_environment.diagnose(
        os.environ,
        doctor_environment.Host(
            interfaces=interfaces, has_mpi4py=importlib.util.find_spec("mpi4py") is not None, answers=answers
        ),
    )
    yield doctor_network.check_host_name(look)
    yield doctor_network.check_loopback(look)
    yield doctor_network.check_main_address(os.environ, look, is_torchruns=any(torchrun_answers))
    environ = doctor_environment.cleaned(os.environ, interfaces)
    environ.setdefault("OMP_NUM_THREADS", "1")
    # To import torch, and to let it go, is work, which ranks that share a processor do one after the other.
    long_timeout = max(timeout, _TIMEOUT) * max(1.0, nproc / _processors())
    with contextlib.ExitStack() as stack:
        try:
            ranks = stack.enter_context(Ranks(nproc, backend, environ, _PATIENCE * timeout))
        except OSError as error:
            yield from not_started(error)
            return
        yield from run_checks(ranks, nproc, backend, timeout, long_timeout)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _patient(say: Callable[[str], None]) -> Callable[[str], None]:
    """Go on when nobody reads any more, as after ``| head``: the exit code is still wanted."""

    def patiently(line: str) -> None:
        try:
            say(line)
        except BrokenPipeError:
            standard_output.discard()

    return patiently
