"""The doctor's checks with real ranks: what each tells them to do, and what their answers mean."""

import statistics
from collections.abc import Callable, Iterator, Sequence

from lightning_pgroup.doctor_listeners import is_loopback
from lightning_pgroup.doctor_rank import REPEATS
from lightning_pgroup.doctor_ranks import Outcome, Ranks
from lightning_pgroup.doctor_report import Finding, Result, duration

START = "start"
RENDEZVOUS = "rendezvous"
CREATE = "create"
COLLECTIVE = "collective"
RECREATE = f"re-create {REPEATS} times"
ADDRESSES = "addresses"
ABORT = "abort and recover"
EXIT = "clean exit"

ALL = (START, RENDEZVOUS, CREATE, ADDRESSES, COLLECTIVE, RECREATE, ABORT, EXIT)
"""In their order."""

_NETWORK = "The ranks talk to each other over loopback: look at what is said about loopback above."
_REPORT = "If loopback is fine, this is a fault worth a report: run `lightning-pgroup doctor --json`, and add what it prints."
_ADVICE = {
    START: "Does `python -c 'import lightning.pytorch'` work here, and how long does it take? See --timeout.",
    RENDEZVOUS: f"{_NETWORK} {_REPORT}",
    CREATE: f"{_NETWORK} Is GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME set? {_REPORT}",
    COLLECTIVE: f"{_NETWORK} {_REPORT}",
    RECREATE: f"{_NETWORK} {_REPORT}",
    ABORT: f"{_NETWORK} {_REPORT}",
    EXIT: "What a library does at the exit of the interpreter stands in the way; what it has printed says which one.",
}
_KILLED = "If nobody has killed it, the system did, for lack of memory: look at `dmesg`, and try fewer ranks."
_LIMITS = "This shell or container allows too little: look at `ulimit -n` (open files), `ulimit -u` (processes) and its memory."
_SHOWN = 400


def run_checks(ranks: Ranks, size: int, backend: str, timeout: float, long_timeout: float) -> Iterator[Finding]:
    """Do all checks, in the order of :data:`ALL`; each finding comes as soon as it is known.

    When a rank is gone, what is left can not be checked, and says so.

    Args:
        ranks: The ranks, just started.
        size: Number of ranks.
        backend: The backend that they check.
        timeout: Bound of each check, in seconds.
        long_timeout: Bound of the start and of the end, which are work for the processor.
    """
    done: list[str] = []
    for finding, goes_on in _run(ranks, size, backend, timeout, long_timeout):
        done.append(finding.check)
        yield finding
        if not goes_on:
            yield from _skipped(ALL[len(done) :], after=finding.check)
            return


def not_started(error: OSError) -> Iterator[Finding]:
    """What is to be said when the system does not even start the ranks: the first check has failed, all others are skipped."""
    first, *others = ALL
    yield Finding(first, Result.FAILED, f"a process can not be started ({error.strerror or error})", (_LIMITS,))
    yield from _skipped(others, after=first)


def _skipped(names: Sequence[str], *, after: str) -> Iterator[Finding]:
    for name in names:
        yield Finding(name, Result.SKIPPED, f"after what happened in {after!r}")


def _run(ranks: Ranks, size: int, backend: str, timeout: float, long_timeout: float) -> Iterator[tuple[Finding, bool]]:
    outcome = ranks.collect(long_timeout)
    yield _judge(START, outcome, lambda: _started(outcome, size, backend)), _is_usable(outcome, size, backend)

    ranks.tell("host", to=[0])
    outcome = hosted = ranks.collect(timeout, of=[0])
    if hosted.is_good:
        ranks.tell("rendezvous", given=hosted.answers[0]["invitation"])
        outcome = ranks.collect(timeout)
    # Without a store there is nothing to go on with.
    yield _judge(RENDEZVOUS, outcome, lambda: _met(outcome)), outcome.is_good

    ranks.tell("create")
    outcome = created = ranks.collect(timeout)
    yield _judge(CREATE, outcome, lambda: _timed(CREATE, outcome, f"a group of {size} with {backend}")), not outcome.is_over
    yield _listening(created), True

    ranks.tell("collective")
    outcome = ranks.collect(timeout)
    found = "all_reduce, broadcast, all_gather and barrier give the right values"
    yield _judge(COLLECTIVE, outcome, lambda: _timed(COLLECTIVE, outcome, found)), not outcome.is_over

    ranks.tell("recreate")
    outcome = ranks.collect(timeout)
    yield _judge(RECREATE, outcome, lambda: _recreated(outcome)), not outcome.is_over

    ranks.tell("abort")
    outcome = ranks.collect(timeout)
    yield _judge(ABORT, outcome, lambda: _aborted(outcome)), not outcome.is_over

    ended, printed = ranks.finish(long_timeout)
    yield _judge(EXIT, ended, lambda: _ended(ended, printed)), True


def _judge(check: str, outcome: Outcome, good: Callable[[], Finding]) -> Finding:
    """What an outcome means: ``good`` says it when all ranks did their step."""
    if outcome.is_good:
        return good()
    found, advice, details = [], [], []
    for rank, end in sorted(outcome.died.items()):
        found.append(f"rank {rank} {end}")
        if "SIGKILL" in end:
            advice.append(_KILLED)
    for rank, error in _causes_first(outcome.errors)[:1]:
        found.append(f"rank {rank} raised {_shortened(error)}")
        if len(outcome.errors) > 1:
            found.append(f"{len(outcome.errors) - 1} more failed")
        details += [f"What rank {one} raised in {check!r}:\n{text}" for one, text in sorted(outcome.errors.items())]
    if outcome.hung:
        found.append(f"{_named(sorted(outcome.hung))} hung, and got killed after {duration(outcome.waited)}")
    for rank, stacks in sorted(outcome.hung.items()):
        details.append(f"Where rank {rank} hung in {check!r}, the innermost call first:\n{stacks or 'it gave no stack'}")
    return Finding(
        check, Result.FAILED, "; ".join(found), tuple(advice or [_ADVICE[check]]), outcome.waited, "\n\n".join(details)
    )


def _is_usable(outcome: Outcome, size: int, backend: str) -> bool:
    return outcome.is_good and _started(outcome, size, backend).result is not Result.FAILED


def _started(outcome: Outcome, size: int, backend: str) -> Finding:
    said = outcome.answers[0]
    found = f"{size} {'process' if size == 1 else 'processes'}, torch {said['torch']}"
    if said["backend_problem"]:
        advice = "Give another backend, or install a build of torch that has it: see https://pytorch.org/get-started."
        return Finding(START, Result.FAILED, said["backend_problem"], (advice,), outcome.waited)
    if backend == "nccl" and said["devices"] < size:
        problem = f"nccl needs a GPU for each rank: torch {said['torch']} sees {said['devices']}, for {size} ranks"
        advice = (
            "Use --backend gloo on a machine without GPUs, or fewer ranks with --nproc. If there are GPUs: does `nvidia-smi`"
            " list them, is CUDA_VISIBLE_DEVICES set, and is this a build of torch with CUDA?"
        )
        return Finding(START, Result.FAILED, problem, (advice,), outcome.waited)
    return Finding(START, Result.OK, found, (), outcome.waited)


def _met(outcome: Outcome) -> Finding:
    return _timed(RENDEZVOUS, outcome, f"all ranks meet in the store of rank 0, at {outcome.answers[0]['at']}")


def _timed(check: str, outcome: Outcome, found: str) -> Finding:
    return Finding(check, Result.OK, found, (), max(one["seconds"] for one in outcome.answers.values()))


def _recreated(outcome: Outcome) -> Finding:
    spent = [max(times) for times in zip(*(one["spent"] for one in outcome.answers.values()), strict=True)]
    median = statistics.median(spent)
    found = f"median {duration(median)}, longest {duration(max(spent))}, with a collective and its end"
    return Finding(RECREATE, Result.OK, found, (), sum(spent))


def _listening(outcome: Outcome) -> Finding:
    answers = [one["listening"] for _, one in sorted(outcome.answers.items())]
    if None in answers:
        return Finding(ADDRESSES, Result.OK, "this system does not tell what a process listens on")
    if not answers:
        return Finding(ADDRESSES, Result.SKIPPED, f"after what happened in {CREATE!r}")
    listened: set[tuple[str, int]] = {(address, port) for answer in answers for address, port in answer}
    open_to_all = sorted({f"[{address}]:{port}" if ":" in address else f"{address}:{port}" for address, port in listened
                          if not is_loopback(address)})  # fmt: skip
    if not open_to_all:
        return Finding(ADDRESSES, Result.OK, f"{len(listened)} ports, all on loopback only")
    advice = (
        "Other hosts can reach these, and what listens there trusts whoever comes. For runs on one node unset"
        " GLOO_SOCKET_IFNAME, and set NCCL_SOCKET_IFNAME=lo; else let a firewall guard them. See docs/security.md."
    )
    return Finding(ADDRESSES, Result.WARNING, f"open beyond loopback: {', '.join(open_to_all)}", (advice,))


def _aborted(outcome: Outcome) -> Finding:
    raised = max(one.get("raised", 0.0) for one in outcome.answers.values())
    woke = [one["woke"] - raised for one in outcome.answers.values() if "woke" in one]
    again = f"the next group stands after {duration(max(one['seconds'] for one in outcome.answers.values()))}"
    if not woke:
        return Finding(ABORT, Result.OK, f"one rank has no peers to wake; {again}")
    return Finding(ABORT, Result.OK, f"the peers of a failed rank woke up after {duration(max(woke))}; {again}", (), max(woke))


def _ended(outcome: Outcome, printed: dict[int, str]) -> Finding:
    if not printed:
        return Finding(EXIT, Result.OK, "exit code 0, nothing printed, no process left", (), outcome.waited)
    rank, text = sorted(printed.items())[0]
    found = f"exit code 0, but {_named(sorted(printed))} printed at the end: {_shortened(text)}"
    details = f"What rank {rank} printed at its end:\n{text}"
    return Finding(EXIT, Result.WARNING, found, (_ADVICE[EXIT],), outcome.waited, details)


def _causes_first(errors: dict[int, str]) -> list[tuple[int, str]]:
    """The errors by rank, first those that are not of the kind that a rank raises since another one has gone."""
    return sorted(errors.items(), key=lambda one: ("Connection closed" in one[1] or "The first failure" in one[1], one[0]))


def _shortened(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]} …"


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
