"""Interrupts put off: work that must not be cut in two runs to its end, and the signals that come meanwhile are heard later.

Python runs the handler of a signal on the main thread, after any call and at any turn of a loop, and what the handler raises
comes out there. While such work runs, a stand-in takes the place of each handler that is written in Python, and keeps the
signal. No thread is needed for that, so that it costs some 10 µs.
"""

import _signal  # type: ignore[import-not-found]  # `signal.getsignal` makes an enum of each answer, which takes twenty times as long
import ctypes
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T")
_Handler = Callable[[int, FrameType | None], Any]

_NUMBERS = tuple(int(number) for number in signal.valid_signals())
_MOST = 100
_KEPT = 3

_Action = ctypes.c_char * 1024  # more than a `struct sigaction` has anywhere
_sigaction = None if sys.platform == "win32" else ctypes.CDLL(None).sigaction


class _StandIn:
    """A handler that keeps its signal for later, as long as the work runs; the handler that it stands in for, afterwards."""

    __slots__ = ("handler",)

    def __init__(self, handler: _Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _now.active and not _now.open:
            _now.keep(self.handler, number, frame)
        else:
            self.handler(number, frame)


class _PutOff:
    """What is put off now, on the main thread of this process.

    Attributes:
        active: Whether signals are put off.
        closed: Whether a wait of the work does not hear them either.
        open: Whether such a wait runs, and hears them.
        pending: What was put off.
        raised: What handlers have raised that ran in a wait of shielded work.
    """

    def __init__(self) -> None:
        self.active = self.closed = self.open = False
        self.pending: deque[tuple[_Handler, int, FrameType | None]] = deque()
        self.raised: tuple[BaseException, ...] = ()
        self._replaced: dict[int, _Handler] = {}

    def begin(self) -> None:
        """Put signals off from now on. One that comes before all are may end this: it is to be called again then."""
        self.open, self.active, self.raised = False, True, ()
        for number in _NUMBERS:
            handler: Any = _signal.getsignal(number)
            if type(handler) is _StandIn:
                self._replaced[number] = handler.handler
            elif callable(handler):
                self._replaced[number] = handler
                _set_handler(number, _StandIn(handler))

    def end(self) -> None:
        """Hear what was put off, and all else from now on. What a handler raises ends this: it is to be called again then."""
        for number, handler in tuple(self._replaced.items()):
            if type(_signal.getsignal(number)) is _StandIn:  # or else the work has set another
                _set_handler(number, handler)
            self._replaced.pop(number, None)
        self.active = self.closed = False
        self.hear()

    def keep(self, handler: _Handler, number: int, frame: FrameType | None) -> None:
        """Put one signal off. Of a timer that rings all the time only the first few, as the system keeps only one."""
        if sum(one[1] == number for one in self.pending) < _KEPT:
            self.pending.append((handler, number, frame))

    def forget(self) -> None:
        """In a child that was forked in the work: it hears its signals at once, and none that its parent has got."""
        self.active = self.closed = self.open = False
        self.pending.clear()
        self.raised = ()

    def hear(self) -> None:
        """Let the handlers run for what was put off."""
        while self.pending:
            handler, number, frame = self.pending.popleft()
            handler(number, frame)

    def hear_without_raising(self) -> None:
        """The same in the middle of work that is to come to its end: what they raise is kept for that."""
        while self.pending:
            try:
                self.hear()
            except BaseException as error:
                self.raised = (*self.raised, error)


_now = _PutOff()


def forget() -> None:
    """Forget what this process has put off. For a child, right after it was forked, in which the work does not go on."""
    _now.forget()


def run_shielded(work: Callable[[], None]) -> None:
    """Run ``work`` to its end, whatever signals arrive; what their handlers raise comes afterwards. ``work`` must be bounded.

    Raises:
        BaseException: What a handler raised, else what ``work`` raised.
    """
    _run(work, closed=True)


def run_attentive(work: Callable[[], None]) -> None:
    """Run ``work``, which hears signals where it waits for others (:func:`attentively`), and nowhere else.

    It does not begin when a handler has raised right before: it would wait for others, with that unheard.

    Raises:
        BaseException: What a handler raised after its end, else what ``work`` raised.
    """
    _run(work, closed=False)


def attentively(wait: Callable[[], _T]) -> _T:
    """Wait, awake to signals where the work around this is not shielded: before, meanwhile, and not after it.

    Raises:
        BaseException: What a handler raised.
    """
    if not _now.active or _now.closed or not _on_main_thread():
        return wait()
    try:
        _now.open = True
        if _now.raised:  # in shielded work inside the present one
            raised, _now.raised = _now.raised, ()
            raise _loudest(raised)
        _now.hear()
        return wait()
    finally:
        _now.open = False  # no call before that, after which Python would look for the next signal


def in_a_hurry() -> bool:
    """Whether the work is to come to its end soon: the handler of a signal that came meanwhile has raised.

    Asked in waits of shielded work. The handlers run here, but what they raise comes after the work. One that raises nothing,
    as that of a timer or Lightning's for SIGTERM, is no reason to break off a save.
    """
    if _now.active and _on_main_thread():
        _now.hear_without_raising()
    return _now.active and bool(_now.raised)


def _run(work: Callable[[], None], *, closed: bool) -> None:
    interrupts: tuple[BaseException, ...] = ()
    problem: BaseException | None = None
    raised: tuple[BaseException, ...] = ()
    loudest: BaseException | None = None
    outermost: bool | None = None
    begun = over = False
    try:
        while not over:
            try:
                if outermost is None:
                    outermost = not _now.active and _on_main_thread()  # on other threads no handler runs
                if not outermost:
                    break
                if not begun:
                    _now.begin()
                    _now.closed = closed
                    begun = True
                    if closed or not interrupts:
                        try:
                            work()
                        except BaseException as error:
                            problem = error
                _now.end()
                over = True
            except BaseException as interrupt:
                interrupts = (*interrupts, interrupt)  # no call, after which Python would look for the next signal
                if interrupts[_MOST:]:  # no interrupts at all: say, the end of the stack or of the memory
                    _now.forget()
                    raise
        if outermost:
            interrupts = (*_now.raised, *interrupts)
        else:
            _run_inside(work, closed)
        raised = interrupts if problem is None else (*interrupts, problem)
        if raised:
            loudest = _loudest(raised)
            if problem is None or problem is loudest:
                raise loudest
            raise loudest from problem
    finally:
        if outermost:
            _now.raised = ()
        interrupts, problem, raised, loudest = (), None, (), None  # or each would hold this frame, and this frame it


def _run_inside(work: Callable[[], None], closed: bool) -> None:
    if not _on_main_thread():
        work()
        return
    before = _now.closed, _now.open
    try:
        _now.closed, _now.open = closed or _now.closed, False
        work()
    finally:
        _now.closed, _now.open = before


def _loudest(raised: tuple[BaseException, ...]) -> BaseException:
    """The one to raise. Whoever catches an error must not take it for all: Ctrl-C, or ``sys.exit``, is to end the process."""
    return next((one for one in raised if not isinstance(one, Exception)), raised[0])


def _set_handler(number: int, handler: _Handler) -> None:
    """Set a handler written in Python, and leave alone what the system does before it runs.

    ``signal.signal`` would undo ``signal.siginterrupt``, and ``faulthandler.register`` with ``chain=True``.
    """
    if _sigaction is None:
        _signal.signal(number, handler)
        return
    action = _Action()
    _sigaction(number, None, action)
    try:
        _signal.signal(number, handler)
    finally:
        _sigaction(number, action, None)


def _on_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
