"""Ranks of ``start_method="popen"`` in a sweep of Hydra: each job of it has ranks of its own.

They run the script as a single run of their job, and end with it. So no job ever trains with a rank that is in another one, and
each may ask for another number of ranks.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning_pgroup import environment, hydra_job
from lightning_pgroup.lightning_private import PatientObserver, dismiss_process_observers
from lightning_pgroup.membership import Membership
from lightning_pgroup.process_state import existing_process_state
from lightning_pgroup.records import logger

END_TIMEOUT = timedelta(seconds=30)
"""How long the ranks of a job may take to end, once the next job needs ranks."""

PATIENCE = 30.0
"""How long a stage may go on after one of its ranks has ended with an error, seconds."""

_WHY = "the next job of the sweep has begun, which has ranks of its own"


def leave_earlier_job() -> None:
    """Part from ranks that this process has started for an earlier job of a sweep, if it has; else nothing happens.

    Called before whatever may need ranks, in the process that runs the jobs. Ends the group of the earlier job, whatever its
    policy, and waits for its ranks, at most ``destroy_timeout``, :data:`END_TIMEOUT` and 10 s more. Local.

    Raises:
        PGroupError: A stage of the earlier job is running.
    """
    state = existing_process_state()
    if state is None or state.membership.job is None:
        return
    job = hydra_job.current_job()
    if job is None or job == state.membership.job:
        return
    state.lifecycle.end_of_run(_WHY)
    before = state.membership.before
    dismiss_process_observers()  # a rank that has failed in the earlier job must not take this one with it
    for rank in state.membership.leave_children(_WHY, END_TIMEOUT):
        logger.warning(
            "%s of an earlier job of the sweep was ended: it was still running %s s after its job was over. All ranks of a job"
            " should run the same stages and collectives.",
            rank,
            END_TIMEOUT.total_seconds(),
        )
    environment.restore(before)


def job_of_ranks(nodes: int) -> str | None:
    """The job of a sweep for which alone ranks are about to be started, if any.

    Over several nodes each node runs the sweep, and its ranks run all of it, as Lightning has it.
    """
    return hydra_job.current_job() if nodes == 1 else None


def run_watched(membership: Membership, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a stage of a job of a sweep, in the process that has started the ranks.

    Lightning kills this process up to 5 s after a rank has failed. Here other jobs follow, so that it gets :data:`PATIENCE` to
    notice that by itself, and after the stage nobody kills it: the ranks end before it has come to its next job.
    """
    dismiss_process_observers()
    try:
        PatientObserver(membership.children.processes, PATIENCE).start()
        return function(*args, **kwargs)
    finally:
        dismiss_process_observers()
