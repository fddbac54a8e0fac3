"""A strategy's collectives: inside a stage, between stages, after a failure and after the end."""

import contextlib
from collections.abc import Callable, Iterator

from lightning_pgroup import c10d
from lightning_pgroup.claim import Claim, GroupRequest, Stage
from lightning_pgroup.errors import StrategyClosedError
from lightning_pgroup.interrupts import run_shielded
from lightning_pgroup.lifecycle import Lifecycle
from lightning_pgroup.policy import Ownership


@contextlib.contextmanager
def collective(
    lifecycle: Lifecycle, claim: Claim, name: str, request: Callable[[], GroupRequest], *, may_be_rank: bool
) -> Iterator[bool]:
    """Wrap one collective of a strategy, so that it works or raises and is never silently local (F15 of the design).

    Between stages all ranks must call it: the group is created on demand, and ends afterwards if the policy is
    ``"on_teardown"``.

    Args:
        lifecycle: The owner of the group.
        claim: Whose collective it is.
        name: Its name.
        request: Says which group it needs.
        may_be_rank: Whether the strategy would run its stages in this very process, and so is one of the ranks as soon as
            any stage has run here.

    Yields:
        Whether to run it over the group. ``False`` after a failure: there is no group and nobody must wait.

    Raises:
        StrategyClosedError: The strategy was closed.
    """
    if claim.closed:
        raise StrategyClosedError(
            f"`{name}` was called on a closed strategy. Its process group has ended; call collectives before `close()`."
        )
    if claim.failed:
        yield False
    elif not (claim.is_rank or (may_be_rank and lifecycle.has_run())) or (
        claim.pending and lifecycle.ownership() is not Ownership.NONE
    ):
        yield True
    elif claim.running:
        stage = lifecycle.running_stage(claim)
        if not stage.acquired or c10d.default_group() is None:
            lifecycle.acquire(stage)
        yield True
    else:
        stages: list[Stage] = []
        try:
            run_shielded(lambda: stages.append(lifecycle.enter(claim, name, None, request)))
            lifecycle.acquire(stages[0])
            yield True
            run_shielded(lambda: lifecycle.leave(stages.pop()))
        except BaseException as error:
            caught = error
            if stages:
                run_shielded(lambda: lifecycle.leave(stages.pop(), caught))
                claim.failed = False
            raise
