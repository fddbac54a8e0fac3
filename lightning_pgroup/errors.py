"""The exceptions that this package raises at run time.

Wrong or contradictory arguments raise plain ``ValueError`` or ``TypeError`` when a strategy is built. All that can only be
known later derives from :class:`PGroupError`, which is a ``RuntimeError``: code that already guards a distributed run with
``except RuntimeError`` goes on working.
"""


class PGroupError(RuntimeError):
    """Base of all errors that this package raises at run time."""


class RendezvousTimeoutError(PGroupError, TimeoutError):
    """Some ranks did not come to a rendezvous within its timeout. The message names them."""


class RendezvousAbandonedError(PGroupError):
    """Another rank has given up a rendezvous, or has failed before it came to it. The message says which and why."""


class StoreLostError(PGroupError):
    """The store in which the ranks meet can not be reached, most likely because the process that hosts it has ended."""


class GarbledStoreError(PGroupError):
    """The store in which the ranks meet has a value that no rank of this package wrote: another program writes there."""


class RanksDisagreeError(PGroupError):
    """The ranks came to one rendezvous with requests that do not fit together. Raised on all ranks alike."""


class GroupMismatchError(PGroupError):
    """A living group differs from the one asked for and ``on_mismatch="error"`` forbids both reuse and re-creation."""


class WorldSizeError(PGroupError):
    """A stage asks for another number of ranks than there are processes to serve it."""


class GroupLostError(PGroupError):
    """The group ended while a stage was still using it, so that a collective can neither work nor be repeated."""


class StrategyClosedError(PGroupError):
    """A closed strategy was used again."""


class NoGroupError(PGroupError):
    """There is no living default group in which a named group could be made."""


class NotInGroupError(PGroupError):
    """A rank has asked for a named group of which it is no member. Raised on that rank at once; the members do not notice."""


class RanksFailedError(PGroupError):
    """Ranks that a test has forked raised, died or hung. The message has the traceback or the stacks of each of them."""
