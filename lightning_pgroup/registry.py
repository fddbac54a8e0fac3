"""The names under which ``Trainer(strategy=…)`` finds the strategy.

Lightning gets them as soon as both it and this package are imported, in whatever order: neither has to wait for the other.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    from lightning_pgroup.strategy import PGroupDDPStrategy

_REGISTRY = "lightning.pytorch.strategies"
_START_METHODS = {
    "pgroup_ddp": "popen",
    "pgroup_ddp_spawn": "spawn",
    "pgroup_ddp_fork": "fork",
    "pgroup_ddp_notebook": "fork",
}
_SUFFIXES: dict[str, dict[str, bool]] = {
    "": {},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
}


def register_with_lightning() -> None:
    """Make the string names known to Lightning: now if it is imported, else right after it is. Called when we are imported."""
    if _REGISTRY in sys.modules:
        register_strategies()
    else:
        sys.meta_path.insert(0, _Registrar())


def register_strategies() -> None:
    """Make the string names known to Lightning, which this imports. May be called again."""
    from lightning.pytorch.strategies import StrategyRegistry

    for name, start_method in _START_METHODS.items():
        for suffix, arguments in _SUFFIXES.items():
            if name + suffix not in StrategyRegistry:
                StrategyRegistry.register(
                    name + suffix,
                    _build,
                    description=f"DDP that owns its process group, with start_method={start_method!r} {arguments or ''}",
                    start_method=start_method,
                    **arguments,
                )


def _build(**arguments: Any) -> "PGroupDDPStrategy":
    from lightning_pgroup.strategy import PGroupDDPStrategy

    return PGroupDDPStrategy(**arguments)


class _Registrar(MetaPathFinder):
    """Finds what the finders after it find, and notices thereby when Lightning's registry is imported."""

    @override
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        for finder in self._later_finders():
            find_spec = getattr(finder, "find_spec", None)  # Python 3.11 still takes finders without it
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec is not None else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _RegisteringLoader(spec.loader, self)
                return spec
        return None

    def _later_finders(self) -> list[Any]:
        """Those that come after this one: an earlier one may be another of this kind, which would ask this one again."""
        finders: list[Any] = list(sys.meta_path)
        return finders[finders.index(self) + 1 :] if self in finders else finders


class _RegisteringLoader(Loader):
    """Loads a module as another loader does, and then registers the strategies in it."""

    def __init__(self, loader: Loader, registrar: _Registrar) -> None:
        self._loader = loader
        self._registrar = registrar

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # which has more to offer, such as the source for tracebacks
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._registrar in sys.meta_path:
            sys.meta_path.remove(self._registrar)
        register_strategies()
