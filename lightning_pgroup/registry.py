"""The names under which ``Trainer(strategy=…)`` finds the strategy."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_pgroup.strategy import PGroupDDPStrategy

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


def register_strategies() -> None:
    """Make the string names known to Lightning. May be called again."""
    for name, start_method in _START_METHODS.items():
        for suffix, arguments in _SUFFIXES.items():
            if name + suffix not in StrategyRegistry:
                StrategyRegistry.register(
                    name + suffix,
                    PGroupDDPStrategy,
                    description=f"DDP that owns its process group, with start_method={start_method!r} {arguments or ''}",
                    start_method=start_method,
                    **arguments,
                )
