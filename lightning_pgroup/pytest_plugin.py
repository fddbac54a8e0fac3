"""The pytest plugin: finds tests that leave a process group alive, and has fixtures for tests that need one.

Pytest imports this in each run of a project that has this package installed, so it needs no torch before a test does. It does
nothing there unless it is asked for, by ``--pgroup=destroy``, ``--pgroup=error`` or the same in the ini file.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lightning_pgroup.forked_ranks import ForkedRanks

OFF = "off"
DESTROY = "destroy"
ERROR = "error"

_CHOICES = (OFF, DESTROY, ERROR)
_MEANING = (
    "What happens to a process group that a test leaves alive: 'off' (default) does nothing, 'destroy' ends it and lists it at"
    " the end of the run, 'error' ends it and fails the test. Both put os.environ and sys.excepthook back after each test."
)
_NAME = "lightning_pgroup_guard"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--pgroup`` and the ini option ``pgroup``."""
    parser.getgroup("pgroup", "process groups").addoption("--pgroup", choices=_CHOICES, help=_MEANING)
    parser.addini("pgroup", f"{_MEANING} --pgroup overrides it.", default=OFF)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Register the guard before any conftest, so that its fixture comes before theirs."""
    _register(early_config, early_config.known_args_namespace.pgroup)


def pytest_configure(config: pytest.Config) -> None:
    """Register the guard where pytest has found this plugin only later, by ``pytest_plugins`` in a conftest."""
    _register(config, config.option.pgroup)


def _register(config: pytest.Config, option: str | None) -> None:
    mode = option or config.getini("pgroup")
    if mode not in _CHOICES:
        raise pytest.UsageError(f"The ini option `pgroup` must be one of {', '.join(map(repr, _CHOICES))}, got {mode!r}.")
    if mode != OFF and not config.pluginmanager.has_plugin(_NAME):
        from lightning_pgroup.leak_guard import LeakGuard

        config.pluginmanager.register(LeakGuard(fail=mode == ERROR), _NAME)


@pytest.fixture
def process_group() -> "Iterator[ProcessGroup]":
    """A default process group of one rank, which ends with the test. It needs no port, and looks at no environment."""
    from lightning_pgroup.context import process_group as block

    with block(rank=0, world_size=1) as group:
        yield group


@pytest.fixture
def ranks() -> "Callable[..., ForkedRanks]":
    """``ranks(n, deadline=60)(function)`` runs ``function(rank)`` on ``n`` forked ranks and returns their values."""
    from lightning_pgroup.forked_ranks import ForkedRanks

    return ForkedRanks
