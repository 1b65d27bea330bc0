"""Run a command of `python -m autoshard <command>`.

Exit codes: 0 done; 1 `check` or `bisect` found numbers that differ; 2 the request cannot be fulfilled, with one message on
stderr that says what to change; 130 stopped by the user. Any traceback is a bug of autoshard.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from autoshard.cli.flags import with_flags
from passes.errors import UserError

DONE, DIFFERENT, USERS_FAULT, STOPPED = 0, 1, 2, 130

_COMMANDS = {  # the module of each, which is imported when it is called, and what it does
    "plan": ("plan_command", "find a plan, print it, save it"),
    "recipes": ("plan_command", "compare the recipes and the solved plan"),
    "show": ("showing", "print a saved plan"),
    "diff": ("questioning", "what is different between two saved plans"),
    "explain": ("questioning", "why something is as it is"),
    "replay": ("questioning", "run the passes after a dump again"),
    "check": ("questioning", "whether the numbers are those of one device"),
    "bisect": ("questioning", "the first pass that changes the numbers"),
    "calibrate": ("calibrating", "measure this machine"),
    "crossover": ("asking", "from which size on a sharded product is faster"),
    "hsdp": ("asking", "what HSDP saves on the network, and costs"),
}


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports its errors in the same form as all others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, given as words (by default the process's arguments), and return its exit code."""
    try:
        words = sys.argv[1:] if arguments is None else arguments
        command = next(iter(words), "")
        given, unknown = _parser(command).parse_known_args(words)
        if unknown:  # argparse would point to the help of all commands
            shown = f"{command} --help" if command in _COMMANDS else "--help"
            raise UserError(f"unrecognized arguments: {' '.join(unknown)}; see `python -m autoshard {shown}`")
        return DONE if given.run(given) is not False else DIFFERENT
    except UserError as error:
        print(f"autoshard: {with_flags(str(error))}", file=sys.stderr)
        return USERS_FAULT
    except KeyboardInterrupt:
        print("autoshard: stopped", file=sys.stderr)
        return STOPPED


def _parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command; of any other word, one that lists the commands."""
    parser = _Parser(
        prog="python -m autoshard",
        description="Plan the training of a PyTorch model on a mesh of devices: here, without any of them.",
        epilog="exit codes: 0 done, 1 a check found numbers that differ, 2 what was asked cannot be done, 130 stopped",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="command", parser_class=_Parser)
    if command in _COMMANDS:
        importlib.import_module(f"autoshard.cli.{_COMMANDS[command][0]}").add_commands(commands)
    else:
        for name, (_, text) in _COMMANDS.items():
            commands.add_parser(name, help=text)
    return parser
