"""Claims: one strategy's stake in the group, the stages that it runs, and the group that they ask for."""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_pgroup.config import LifecycleConfig
from lightning_pgroup.membership import Place
from lightning_pgroup.records import LifecycleEvent, Tally
from lightning_pgroup.signature import GroupSignature

MAX_EVENTS = 10_000
"""How many records a strategy keeps; the oldest go first."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Claim:
    """What the owner of the group knows of one strategy. Holds no reference to it, so that it can be collected.

    Attributes:
        config: What its user asked for.
        events: What was done with the group while this strategy used it.
        tally: The same, counted; it goes on where the list has lost its oldest records.
        is_rank: Whether it ever ran a stage in this process. In the parent of spawned or forked workers it never does.
        running: How many stages of it run, one inside the other.
        pending: Whether its last stage has left the launcher but not yet been torn down by the Trainer.
        failed: Whether its last stage raised and the Trainer has not yet torn it down: its collectives are local then, so that
            hooks for errors can not hang.
        terminated: Whether SIGTERM arrived in its last stage.
        closed: Whether it was closed.
    """

    config: LifecycleConfig
    events: deque[LifecycleEvent] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    tally: Tally = field(default_factory=Tally)
    is_rank: bool = False
    running: int = 0
    pending: bool = False
    failed: bool = False
    terminated: bool = False
    closed: bool = False

    def note(self, event: LifecycleEvent) -> None:
        """Keep a record."""
        self.events.append(event)
        self.tally.add(event)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """The group that a stage asks for.

    Attributes:
        signature: What it shall be.
        place: Where this rank stands, and how to reach the others.
        device_id: The device to bind the group to; ``None`` on CPU.
        pg_options: Options of the backend.
    """

    signature: GroupSignature
    place: Place
    device_id: torch.device | None
    pg_options: Any


@dataclass(eq=False, slots=True)
class Stage:
    """One running stage, one collective that was called between stages, or one ``process_group`` block of a script.

    Attributes:
        claim: Whose it is.
        name: ``"fit"``, ``"validate"``, …, or the name of the collective or of the block.
        trainer: The Trainer that runs it; ``None`` for a collective between stages and for a block.
        request: Says which group it asks for; asked for only when that is needed.
        number: Number of that Trainer, for records.
        is_block: Whether it is a block, which has a group of its own unless a stage is running around it.
        inner: Its number among the stages of its generation that began inside another one; 0 for the outermost.
        met: Whether it has come to the rendezvous of the ranks, or has stayed away from it for good.
        acquired: Whether it has got its group.
        groups: The named groups that its strategy knows: what they are, as a short text, by name.
        held: The names of those that this rank's objects hold.
        renewed: The names of those that any rank's objects hold, which their members are to make anew.
        failure: The first failure of its generation, in words, once that is known.
        guests: The metrics of the stages that ran inside it, by their identity, to be computed when it ends.
        visits: How many such stages there were.
        farewell: For a block: what is to be done before it ends, with what its body raised; ``None`` if nothing.
    """

    claim: Claim
    name: str
    trainer: "weakref.ref[object] | None"
    request: Callable[[], GroupRequest]
    number: int | None = None
    is_block: bool = False
    inner: int = 0
    met: bool = False
    failure: str = ""
    acquired: bool = False
    groups: dict[str, str] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    renewed: tuple[str, ...] = ()
    guests: dict[int, Any] = field(default_factory=dict)
    visits: int = 0
    farewell: Callable[[BaseException | None], None] | None = None
