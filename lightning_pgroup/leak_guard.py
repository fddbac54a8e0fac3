"""Finds process groups that tests leave alive. Registered with pytest by the plugin when it is asked for, and never else."""

import os
import sys
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PYTESTS_OWN = "PYTEST_CURRENT_TEST"
_REPORTED = "pgroup_left"
"""The attribute of a test's report that brings what was found from the workers of pytest-xdist to the process that shows it."""


@dataclass
class Surroundings:
    """What a test has to leave as it has found it: the groups that live, ``os.environ`` and ``sys.excepthook``."""

    groups: "weakref.WeakSet[ProcessGroup]"
    environ: dict[str, str]
    excepthook: Any

    @classmethod
    def now(cls) -> "Surroundings":
        """As they are. Imports neither torch nor anything that does, unless that is there."""
        return cls(weakref.WeakSet(living_groups()), dict(os.environ), sys.excepthook)

    def new_groups(self) -> "list[ProcessGroup]":
        """The groups that live now and did not then."""
        return [group for group in living_groups() if group not in self.groups]

    def absorb(self, before: "Surroundings", after: "Surroundings") -> None:
        """What came between ``before`` and ``after`` is to stay."""
        self.groups.update(group for group in after.groups if group not in before.groups)
        for name in before.environ.keys() | after.environ.keys():
            if before.environ.get(name) != after.environ.get(name):
                _put(self.environ, name, after.environ.get(name))
        if after.excepthook is not before.excepthook:
            self.excepthook = after.excepthook

    def undo(self, later: "Surroundings") -> None:
        """Put back what came between this and ``later``, unless it was changed again. Groups are left alone."""
        for name in self.environ.keys() | later.environ.keys():
            before, after = self.environ.get(name), later.environ.get(name)
            if before != after and name != _PYTESTS_OWN and os.environ.get(name) == after:
                _put(os.environ, name, before)
        if sys.excepthook is later.excepthook:
            sys.excepthook = self.excepthook


class LeakGuard:
    """Ends what tests leave alive, and fails the test or lists it at the end of the run.

    A group belongs to the test that has made it, or to a fixture that is shared by several tests, and lives as long as these
    need it. One that was there before the first test belongs to nobody and is left alone.

    Args:
        fail: Whether a test that leaves a group fails; else it is listed.
    """

    def __init__(self, *, fail: bool) -> None:
        self._fail = fail
        self._test = ""
        self._before: Surroundings | None = None
        self._left: list[str] = []
        self._all_left: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note which test is running."""
        self._test, self._left = item.nodeid, []
        return (yield)

    @pytest.fixture(autouse=True)
    def _pgroup_guard(self) -> Iterator[None]:
        # Set up after all that tests share and before all that only this one has, and so torn down in between too.
        self._before = before = Surroundings.now()
        yield
        self._before = None
        before.undo(Surroundings.now())
        self._judge(before.new_groups(), f"{self._test} has left")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: "pytest.FixtureDef[Any]") -> Generator[None, object, object]:
        """Let what a fixture makes that several tests share be its own, until it is torn down."""
        if fixturedef.scope == "function":
            return (yield)
        before = Surroundings.now()
        after: Surroundings | None = None
        whose = f"{self._test} has created by the fixture {fixturedef.argname!r} ({fixturedef.scope}), which has left"

        def end() -> None:
            if after is not None:
                before.undo(after)
                self._judge([group for group in before.new_groups() if group in after.groups], whose)

        fixturedef.addfinalizer(end)  # the first one runs last
        try:
            return (yield)
        finally:
            after = Surroundings.now()
            if self._before is not None:  # the test has asked for it while it ran
                self._before.absorb(before, after)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Hand what was found to the process that shows it, with the report."""
        report = yield
        if call.when == "teardown" and self._left:
            setattr(report, _REPORTED, self._left)
            self._left = []
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what was found, from all workers."""
        self._all_left += getattr(report, _REPORTED, [])

    def pytest_terminal_summary(self, terminalreporter: "pytest.TerminalReporter") -> None:
        """List what was found."""
        if self._all_left:
            terminalreporter.section("process groups that tests have left")
            for line in self._all_left:
                terminalreporter.line(line)

    def _judge(self, groups: "list[ProcessGroup]", whose: str) -> None:
        if not groups:
            return
        what, fail = _describe(groups), self._fail
        try:
            _end(groups)  # which empties the list: nothing here must be the last to hold a group
            end = "was destroyed"
        except Exception as error:
            end, fail = f"could not be destroyed: {error}", True
        text = f"{whose} a process group alive: {what}. It {end}."
        if fail:
            pytest.fail(
                f"{text} Let the test end what it creates: `with lightning_pgroup.process_group():`, the fixture"
                " `process_group`, `destroy='on_teardown'`, or `lightning_pgroup.destroy_process_group()`.",
                pytrace=False,
            )
        self._left.append(text)


def living_groups() -> "list[ProcessGroup]":
    """All groups of this process, sub-groups too, the default group last. Imports no torch: without it there are none."""
    module = sys.modules.get("torch.distributed")
    if module is None or not getattr(module, "is_initialized", bool)():
        return []
    from lightning_pgroup import c10d

    return c10d.all_groups()


def _describe(groups: "list[ProcessGroup]") -> str:
    from lightning_pgroup import c10d

    default = c10d.default_group()
    return " and ".join(
        f"{'the default group' if group is default else 'a sub-group'} ({', '.join(sorted(c10d.backends_of(group)))},"
        f" {group.size()} {'rank' if group.size() == 1 else 'ranks'})"
        for group in groups
    )


def _end(groups: "list[ProcessGroup]") -> None:
    from lightning_pgroup import c10d
    from lightning_pgroup.public import destroy_process_group

    if groups[-1] is c10d.default_group():
        groups.clear()
        destroy_process_group(foreign=True)
    while groups:
        destroy_process_group(groups.pop())


def _put(mapping: Any, name: str, value: str | None) -> None:
    if value is None:
        mapping.pop(name, None)
    else:
        mapping[name] = value
