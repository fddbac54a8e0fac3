"""The named groups of a strategy, and DDP's own group by its name."""

from abc import abstractmethod
from collections.abc import Mapping
from datetime import timedelta

from lightning.pytorch.strategies import DDPStrategy
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_pgroup import c10d
from lightning_pgroup.claim import Claim
from lightning_pgroup.config import Duration
from lightning_pgroup.group_definitions import GroupDefinition, Ranks, find, parse_group, parse_groups
from lightning_pgroup.named_groups import no_group
from lightning_pgroup.process_state import ProcessState, existing_process_state, process_state


class GroupNames(DDPStrategy):
    """``DDPStrategy`` that knows named groups. Their definitions are pickled with it; the groups live in the process."""

    _groups: dict[str, GroupDefinition]

    def group(self, name: str) -> ProcessGroup:
        """This rank's process group of a name, in the present generation; made on first use.

        To be called by the members, in a stage, or between stages as long as the default group lives. The first call in a
        generation is collective among them and blocks at most the timeout of the group; later ones are local. It is not to be
        kept: ask again in the next stage.

        Groups of which all members are members of this one, too, are made with it, so that ranks may ask for these names in any
        order. Else let all members ask for names in the same order, as with any collective.

        Args:
            name: From ``groups`` or ``new_group``.

        Raises:
            ValueError: An unknown name; the message lists those that there are.
            TypeError: No name.
            NotInGroupError: This rank is in none of its lists. The others do not notice.
            NoGroupError: There is no living default group: before the first stage, after a failure, after its end.
            PGroupError: A member did not come in time, or has failed.
        """
        find(self._groups, name, "`strategy.group`")
        state = _state()
        if state is None:
            raise no_group(name)
        state.lifecycle.check_open(self.claim(), f"group({name!r})")
        return state.named_groups.get(self._resolved(), name)

    def new_group(
        self, name: str, ranks: Ranks, *, backend: str | None = None, timeout: Duration | None = None
    ) -> ProcessGroup | None:
        """Define a named group in code, as ``groups`` does, and make it on its members if there is a default group.

        To be called on all ranks. Collective among the members, as the first call of ``group``; on the others it is local. The
        definition stays with this strategy object, so that later generations have the group too. May be repeated.

        Args:
            name: Its name: letters, digits, ``_``, ``-``, ``.``.
            ranks: One list of ranks, or several that have no rank in common.
            backend: Its backend; ``None`` is that of the default group.
            timeout: Bound of its collectives, seconds, a ``timedelta`` or its text; ``None`` is that of the strategy.

        Returns:
            This rank's group; ``None`` if it is no member, or if there is no default group yet.

        Raises:
            ValueError: A wrong name or value, or the name is defined otherwise.
            TypeError: A value of the wrong kind.
            WorldSizeError: The default group does not have all these ranks. It is not defined then.
            PGroupError: As for ``group``.
        """
        definition = parse_group("new_group", name, ranks, backend=backend, timeout=timeout)
        known = self._groups.get(name)
        if known is not None and known != definition:
            raise ValueError(
                f"The group {name!r} is defined already, with {known.describe()} (backend {known.backend}, timeout"
                f" {known.timeout}). Repeat that, or take another name for {definition.describe()} (backend"
                f" {definition.backend}, timeout {definition.timeout})."
            )
        state = _state()
        if state is not None:
            state.lifecycle.check_open(self.claim(), f"new_group({name!r})")
        place = None if state is None else state.named_groups.place()
        if place is not None:
            definition.check_fits(place.size, "the process group")
        self._groups[name] = definition
        if state is None or place is None or not definition.ranks_with(place.rank):
            return None
        return state.named_groups.get(self._resolved(), name)

    def destroy_group(self, name: str) -> None:
        """End a named group, and leave the default group alone. The next ``group`` of its members makes it anew.

        To be called by the members; not collective; blocks at most ``destroy_timeout``, then it is aborted. Nothing happens
        where it does not live.

        Raises:
            ValueError: An unknown name; the message lists those that there are.
            PGroupError: The stage that is running trains with it.
        """
        find(self._groups, name, "`strategy.destroy_group`")
        state = existing_process_state()
        group = None if state is None else state.named_groups.living(self._resolved()[name])
        if state is not None and group is not None:
            state.lifecycle.destroy_sub_group(group, self.claim().config.destroy_timeout)

    @property
    def defined_groups(self) -> Mapping[str, GroupDefinition]:
        """All named groups that it knows, whether they live or not."""
        return self._groups

    @abstractmethod
    def claim(self) -> Claim:
        """This strategy's stake in the group of this process."""

    @property
    @abstractmethod
    def group_size(self) -> int:
        """Number of ranks of a stage."""

    def _define_groups(self, groups: Mapping[str, Ranks] | None, process_group: object) -> None:
        """Take over the arguments of the strategy.

        Raises:
            ValueError: A wrong value, or a name that is not there.
            TypeError: A value of the wrong kind.
        """
        self._groups = parse_groups(groups)
        if not (process_group is None or isinstance(process_group, (str, ProcessGroup))):
            raise TypeError(f"`process_group` must be the name of a group, or a process group, got {process_group!r}.")
        if isinstance(process_group, str):
            find(self._groups, process_group, "`process_group`")

    def _check_groups(self) -> None:
        """Refuse definitions that the stage which starts has no ranks for. Local, and the same on all ranks.

        Raises:
            WorldSizeError: The message names them.
        """
        for definition in self._groups.values():
            definition.check_fits(self.group_size, "this stage")
        name = self._ddp_kwargs.get("process_group")
        if isinstance(name, str):
            self._groups[name].check_covers(self.group_size)

    def _resolved(self) -> dict[str, GroupDefinition]:
        timeout: timedelta | None = self._timeout
        return {name: definition.with_timeout(timeout) for name, definition in self._groups.items()}

    @override
    def _setup_model(self, model: Module) -> DistributedDataParallel:
        given = self._ddp_kwargs
        name = given.get("process_group")
        try:
            if isinstance(name, str):
                self._ddp_kwargs = {**given, "process_group": self.group(name)}
            wrapper = super()._setup_model(model)
        finally:
            self._ddp_kwargs = given
        process_state().lifecycle.hold_for(wrapper)
        return wrapper


def _state() -> ProcessState | None:
    """The state of this process; not made as long as there can be no group."""
    state = existing_process_state()
    return process_state() if state is None and c10d.default_group() is not None else state
