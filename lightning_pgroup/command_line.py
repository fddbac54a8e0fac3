"""The command line: ``python -m lightning_pgroup``, also installed as ``lightning-pgroup``.

Each subcommand is a module of its own, with a ``HELP``, ``add_arguments(parser)`` and ``run(arguments, say)``, which returns
the exit code and raises ``ValueError`` for wrong arguments. Only what all of them need is imported here, so that none waits for
torch that needs no torch. This is the one place of the package that prints.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Protocol

from lightning_pgroup import doctor, explain, standard_output, timeline
from lightning_pgroup.__about__ import __version__

Say = Callable[[str], None]
"""Writes a line for the user, at once."""


class Command(Protocol):
    """What the module of a subcommand has."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its arguments."""

    def run(self, arguments: argparse.Namespace, say: Say) -> int:
        """Do it, and return the exit code.

        Raises:
            ValueError: A wrong argument; the message says what is right.
        """


COMMANDS: dict[str, Command] = {"doctor": doctor, "explain": explain, "timeline": timeline}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Those after the program's name; by default this process's own.

    Returns:
        The exit code of the subcommand; 1 if nobody reads what it says.

    Raises:
        SystemExit: 2 for wrong arguments, with a message; 0 after ``--help`` and ``--version``.
    """
    parser = argparse.ArgumentParser(prog="lightning-pgroup", description="Who owns the process group, and when does it die?")
    parser.add_argument("--version", action="version", version=f"lightning-pgroup {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {}
    for name, command in COMMANDS.items():
        parsers[name] = subparsers.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(parsers[name])
    chosen = parser.parse_args(arguments)
    try:
        return COMMANDS[chosen.command].run(chosen, _say)
    except ValueError as error:
        parsers[chosen.command].error(str(error))
    except BrokenPipeError:  # whoever reads it, such as `head`, has read enough
        standard_output.discard()
        return 1


def _say(line: str) -> None:
    print(line, flush=True)
