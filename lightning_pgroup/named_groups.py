"""The named groups of this process: made on first use in the default group that is there, gone with it."""

import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch.distributed import ProcessGroup

from lightning_pgroup import c10d, lineage, records, transport
from lightning_pgroup.errors import NoGroupError, NotInGroupError
from lightning_pgroup.group_definitions import GroupDefinition
from lightning_pgroup.lifecycle import Lifecycle
from lightning_pgroup.policy import Ownership


class Place(NamedTuple):
    """A rank and the number of ranks."""

    rank: int
    size: int


class NamedGroups:
    """Makes and finds named groups. Strategies that define the same group share it, as they share the default group.

    Args:
        lifecycle: The owner of the default group.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._lock = threading.RLock()
        self._default: weakref.ref[ProcessGroup] | None = None
        self._made: dict[GroupDefinition, weakref.ref[ProcessGroup]] = {}

    def get(self, definitions: Mapping[str, GroupDefinition], name: str) -> ProcessGroup:
        """This rank's group of a name, made on the first use in a generation; collective among its members then.

        With it are made, the smaller first, the groups that were not there yet and whose members are all members of it too:
        they all come here, in whatever order they ask for names. Groups with other members are not: those may never come.

        Args:
            definitions: All that the strategy knows, in the order of their definition.
            name: One of them.

        Raises:
            NoGroupError: There is no living default group.
            NotInGroupError: This rank is not a member.
            WorldSizeError: The default group does not have all these ranks.
            PGroupError: A member did not come within the timeout of the group, or has failed.
        """
        with self._lock:
            default, wanted = self._follow(name), definitions[name]
            rank = default.rank()
            wanted.check_fits(default.size(), "the process group")
            ranks = wanted.ranks_with(rank)
            if not ranks:
                raise NotInGroupError(
                    f"Rank {rank} of {default.size()} asks for the group {name!r}, but is in none of its lists"
                    f" {wanted.describe()}. Let only their members ask for it."
                )
            for one in _inside(definitions.values(), ranks, rank):
                if one not in self._made or (one is wanted and self.living(wanted) is None):
                    self._make(one, rank)
            group = self.living(wanted)
            assert group is not None
            return group

    def living(self, definition: GroupDefinition) -> ProcessGroup | None:
        """This rank's group of a definition, if it was made and has not ended. Local."""
        reference = self._made.get(definition)
        group = None if reference is None else reference()
        return group if group is not None and c10d.is_alive(group) else None

    def place(self) -> Place | None:
        """This rank's place in the living default group, if there is one. Local."""
        default = self._living_default()
        return None if default is None else Place(default.rank(), default.size())

    def _living_default(self) -> ProcessGroup | None:
        # One that a fork has copied is there, but does not work.
        return None if self._lifecycle.ownership() is Ownership.NONE else c10d.default_group()

    def _follow(self, name: str) -> ProcessGroup:
        """The living default group; forgets what was made in another one."""
        default = self._living_default()
        if default is None:
            raise no_group(name)
        if self._default is None or self._default() is not default:
            self._made.clear()
            self._default = weakref.ref(default)
        return default

    def _make(self, definition: GroupDefinition, rank: int) -> None:
        ranks = definition.ranks_with(rank)
        group = c10d.new_local_group(definition.name, ranks, backend=definition.backend, timeout=definition.timeout)
        lineage.remember(group, definition.name)
        self._lifecycle.watch(group)
        transport.settle(group, c10d.backends_of(group))
        self._made[definition] = weakref.ref(group)
        where = "a group of other code" if self._lifecycle.generation is None else f"generation {self._lifecycle.generation}"
        records.logger.debug("[rank %d] made the group %r of the ranks %s in %s", rank, definition.name, list(ranks), where)


def no_group(name: str) -> NoGroupError:
    """Why a group can not be made without a default group."""
    return NoGroupError(
        f"The group {name!r} can not be made: there is no process group. Ask for it inside a stage; or between stages,"
        " after `strategy.barrier()` on all ranks, with a policy that keeps the group alive then (not 'on_teardown')."
    )


def _inside(definitions: Iterable[GroupDefinition], ranks: tuple[int, ...], rank: int) -> list[GroupDefinition]:
    """The definitions whose group with ``rank`` has no other members than ``ranks``; the smaller before the larger."""
    lists = [(one.ranks_with(rank), one) for one in definitions]
    inside = [(len(own), one) for own, one in lists if own and set(own) <= set(ranks)]
    return [one for _, one in sorted(inside, key=lambda pair: pair[0])]
