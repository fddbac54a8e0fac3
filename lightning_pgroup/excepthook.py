"""Undoes what ``init_process_group`` does to ``sys.excepthook`` (F11 of the design).

Torch wraps the hook at each init, to put the rank before each line of a traceback, and never unwraps it.
"""

import sys
from collections.abc import Callable
from types import TracebackType

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class ExceptHookGuard:
    """Remembers ``sys.excepthook`` before a group is created, and puts it back when that group ends."""

    def __init__(self) -> None:
        self._before: Hook = sys.excepthook
        self._installed: Hook | None = None

    def created(self) -> None:
        """Note the hook that torch has installed. Call right after the group was created."""
        self._installed = sys.excepthook

    def restore(self) -> None:
        """Put the hook back, unless somebody has installed another on top: that one stays."""
        if self._installed is not None and sys.excepthook is self._installed:
            sys.excepthook = self._before
        self._installed = None
