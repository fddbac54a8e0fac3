"""What becomes of standard output when nobody reads it any more, as after ``| head``."""

import os
import sys


def discard() -> None:
    """Send nowhere what this process still writes there, and what the exit of the interpreter writes of its buffer."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
