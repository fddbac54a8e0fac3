"""How a stage gets its group: the ranks agree, then each carries the decision out."""

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from lightning_pgroup import agreement, payload, records
from lightning_pgroup.agreement import Decision, Report
from lightning_pgroup.backends import wait_in_store
from lightning_pgroup.claim import GroupRequest, Stage
from lightning_pgroup.custody import Custody
from lightning_pgroup.errors import GarbledStoreError, GroupMismatchError, RanksDisagreeError, StoreLostError, WorldSizeError
from lightning_pgroup.exceptions import describe
from lightning_pgroup.gloo_interface import GlooInterface
from lightning_pgroup.group import OwnedGroup, create_group, discard_unfinished
from lightning_pgroup.membership import Membership
from lightning_pgroup.notices import Notices
from lightning_pgroup.policy import Action, Event, OnMismatch, Ownership, reason
from lightning_pgroup.team import Team

_HOOK = "setup_environment"
"""The hook of Lightning in which a stage gets its group."""


class Acquisition:
    """Gets groups for stages.

    Args:
        custody: Where the group is kept.
        membership: How to reach the other ranks.
        notices: How to tell them of a failure.
    """

    def __init__(self, custody: Custody, membership: Membership, notices: Notices) -> None:
        self._custody = custody
        self._membership = membership
        self._notices = notices

    def agree(self, stage: Stage, request: GroupRequest) -> None:
        """Reuse the living group or create the next, as all ranks decide together. Collective.

        Raises:
            PGroupError: The ranks did not come, do not agree, or there are not as many as the stage asks for.
        """
        clock, place = time.perf_counter(), request.place
        self._custody.drop_inherited()
        if self._custody.ownership() is Ownership.FOREIGN and not self._membership.is_known(request.place):
            stage.met = True
            self._adopt(stage, request, "the group was there before and belongs to other code")
            return
        report = self._report(stage, request)
        try:
            self._notices.team = team = self._join(stage, request)
            self._agree_in(team, report, stage, request, clock)
        except dist.DistError as error:
            raise StoreLostError(
                f"Rank {place.rank} of {place.size} can not start {stage.name!r}: it does not reach the store"
                f" in which the ranks meet ({self._membership.describe(place)}). The process that hosts it, rank 0 or"
                f" the launcher, has ended or never started: look for its own error. If it lives, another program may have"
                f" written to the store: see docs/security.md. Torch says: {error}"
            ) from error
        except GarbledStoreError as error:
            raise GarbledStoreError(f"Rank {place.rank} of {place.size} can not start {stage.name!r}: {error}") from error

    def _join(self, stage: Stage, request: GroupRequest) -> Team:
        try:
            return self._membership.team(request.place)
        except BaseException as error:
            stage.met = True
            self._membership.note_missed(request.place, f"it has not reached the store: {describe(error)}")
            raise

    def _agree_in(self, team: Team, report: Report, stage: Stage, request: GroupRequest, clock: float) -> None:
        round_before = team.rounds.number
        try:
            text = self._meet(team, report, request.place.timeout)
            self._carry_out(_checked(text, report), team, stage, request, time.perf_counter() - clock)
        except BaseException as error:
            if team.rounds.number > round_before and not stage.failure:
                # An interrupt can come when the others have heard the answer already, and act by it.
                answer = team.rounds.settle(describe(error))
                decision = None if answer is None else payload.if_readable(lambda: Decision.from_json(answer))
                if decision is not None and decision.action in (agreement.CREATE, agreement.REUSE):
                    self._custody.highest = max(self._custody.highest, decision.generation)
                    self._notices.tell(stage, error, _HOOK, team, decision.generation)
            raise
        finally:
            stage.met = team.size == 1 or team.rounds.number > round_before

    def share_running(self, stage: Stage, request: GroupRequest) -> None:
        """Let a stage use the group in which another one, around it, is running; that one can not lose it.

        Raises:
            WorldSizeError: The stage asks for another number of ranks, or to be another rank.
            GroupMismatchError: The group differs and ``on_mismatch="error"``.
        """
        if self._custody.ownership() is Ownership.FOREIGN:
            self._adopt(stage, request, "another stage is running in it, and it belongs to other code")
            return
        assert self._custody.current is not None
        living = self._custody.current.signature
        if living.world_size != request.signature.world_size:
            raise WorldSizeError(
                f"{stage.name!r} asks for {request.signature.world_size} ranks inside a stage that runs with"
                f" {living.world_size}. Give both the same number, or start it after that stage."
            )
        if living.rank != request.signature.rank:
            raise WorldSizeError(
                f"{stage.name!r} asks to be rank {request.signature.rank} inside a stage in which this process is rank"
                f" {living.rank}."
            )
        differences = living.differences(request.signature)
        if differences and stage.claim.config.on_mismatch is OnMismatch.ERROR:
            raise GroupMismatchError(
                f"{stage.name!r} asks for another group than the one it is started in ({', '.join(differences)}), and"
                " `on_mismatch='error'`."
            )
        self._warn_of_differences(stage, request, "a stage around it is running in that, so it is used all the same")
        self._custody.record_use(records.REUSED, "a stage around it is running in it", stage, time.time(), 0.0)

    def _meet(self, team: Team, report: Report, timeout: timedelta) -> str:
        """Let all ranks decide; returns the decision as JSON."""

        def answer(said: list[dict[str, Any]]) -> str:
            decision = agreement.decide(agreement.reports_of(said))
            if decision.action == agreement.CREATE:
                team.announce(decision.generation)
            return decision.to_json()

        if team.size == 1:
            return answer([report.to_payload()])
        return team.rounds.run(report.to_payload(), answer, timeout, check_peers=team.check_peers)

    def _report(self, stage: Stage, request: GroupRequest) -> Report:
        custody = self._custody
        living = custody.current if custody.ownership() is Ownership.OWNED else None
        fresh = ""
        differences: tuple[str, ...] = ()
        resized = False
        if living is not None:
            old, new = living.signature, request.signature
            differences = old.differences(new)
            resized = (old.world_size, old.rank) != (new.world_size, new.rank)
            if stage.is_block and stage.claim.config.on_mismatch is OnMismatch.RECREATE:
                fresh = "a block begins, which makes a group of its own"
            elif custody.is_next_trainer(stage.trainer) and custody.action(Event.NEXT_TRAINER) is Action.DESTROY:
                fresh = reason(Event.NEXT_TRAINER)
        return Report(
            generation=0 if living is None else living.generation,
            highest=custody.highest,
            fresh=fresh,
            differences=differences,
            on_mismatch=stage.claim.config.on_mismatch.value,
            resized=resized,
            foreign=custody.ownership() is Ownership.FOREIGN,
            stage=stage.name,
            held=stage.held,
            groups=stage.groups,
            wanted=request.signature.shared(),
        )

    def _carry_out(self, decision: Decision, team: Team, stage: Stage, request: GroupRequest, waited: float) -> None:
        custody = self._custody
        if decision.action == agreement.REFUSE:
            kind = GroupMismatchError if decision.mismatch else RanksDisagreeError
            raise kind(f"Rank {request.place.rank} can not start {stage.name!r}: {decision.why}.")
        stage.renewed = decision.held
        if decision.action == agreement.ADOPT:
            self._adopt(stage, request, decision.why)
            return
        start = time.time()
        if custody.current is not None and stage.claim.config.on_mismatch is OnMismatch.REUSE:
            self._warn_of_differences(stage, request, f"generation {decision.generation} is {decision.action}d all the same")
        if decision.action == agreement.REUSE:
            custody.record_use(records.REUSED, decision.why, stage, start - waited, waited)
            return
        generation, place = decision.generation, request.place
        if wait_in_store([request.signature.backend]) and team.size > 1:
            store: Store = team.watched_store(generation, place.timeout)
        else:
            store = team.generation_store(generation)
        group: OwnedGroup | None = None
        custody.highest = generation  # whatever becomes of it: its keys must not be met again
        try:
            custody.end(decision.why, stage=stage.name, by=stage.claim)
            custody.graveyard.cut_connections()
            start, clock = time.time(), time.perf_counter()
            team.delete_before(generation)
            group = create_group(
                generation,
                request.signature,
                store,
                request.device_id,
                request.pg_options,
                interface=GlooInterface(place.nodes, team.main_host),
                run=team.run,
                attempt=team.attempt,
            )
            group.watch(team.store, [request.signature.backend])
        except BaseException as error:
            # Others may wait for this rank in torch's own rendezvous, where they do not see it leave.
            self._notices.tell(stage, error, _HOOK, team, generation)
            if group is None:
                discard_unfinished(request.signature.backend, store)
            else:
                group.abort(custody.graveyard)
            raise
        custody.take(group)
        custody.record_use(records.CREATED, decision.why, stage, start, time.perf_counter() - clock)

    def _warn_of_differences(self, stage: Stage, request: GroupRequest, outcome: str) -> None:
        assert self._custody.current is not None
        living = self._custody.current
        differences = living.signature.differences(request.signature)
        if differences:
            records.logger.warning(
                "%s %s asks for another group than the living one, but %s: %s",
                living.log_prefix,
                stage.name,
                outcome,
                ", ".join(differences),
            )

    def _adopt(self, stage: Stage, request: GroupRequest, why: str) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        wanted = request.signature
        if (rank, size) != (wanted.rank, wanted.world_size):
            raise WorldSizeError(
                f"A process group of other code is there, in which this process is rank {rank} of {size}, but"
                f" {stage.name!r} asks to be rank {wanted.rank} of {wanted.world_size}. Destroy that group first, or let the"
                " Trainer have as many devices as it has ranks."
            )
        backend = dist.get_backend()
        if backend != wanted.backend:
            records.logger.warning(
                "[rank %d/%d] %s asks for the backend %r, but a process group of other code is there, with %r: that is used",
                rank,
                size,
                stage.name,
                wanted.backend,
                backend,
            )
        self._custody.record_foreign(why, stage, rank, size, backend)


def _checked(text: str, report: Report) -> Decision:
    """Read the decision of the ranks; refuses to use or to make a group that this one has not reported."""
    decision = Decision.from_json(text)
    reuse, adopt = decision.action == agreement.REUSE, decision.action == agreement.ADOPT
    strange = not report.groups.keys() >= set(decision.held)
    if strange or (reuse and not 0 < decision.generation == report.generation) or (adopt and not report.foreign):
        raise payload.garbled("round/<r>/outcome", "a decision of the ranks", text)
    return decision
