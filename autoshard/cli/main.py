"""Run a command of `python -m autoshard <command>`.

Exit codes: 0 done; 2 the request cannot be fulfilled, with one message on stderr that says what to change; 130 stopped
by the user. Anything else is a bug of autoshard, with its traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from autoshard.cli import asking, calibrating, plan_command, questioning, showing
from passes.errors import UserError

DONE, USERS_FAULT, STOPPED = 0, 2, 130


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports its errors in the same form as all others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, given as words (by default the process's arguments), and return its exit code."""
    try:
        given = _parser().parse_args(arguments)
        given.run(given)
    except UserError as error:
        print(f"autoshard: {error}", file=sys.stderr)
        return USERS_FAULT
    except KeyboardInterrupt:
        print("autoshard: stopped", file=sys.stderr)
        return STOPPED
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m autoshard",
        description="Plan the training of a PyTorch model on a mesh of devices: here, without any of them.",
        epilog="exit codes: 0 done, 2 what was asked cannot be done, 130 stopped",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="command", parser_class=_Parser)
    for module in (plan_command, showing, questioning, calibrating, asking):
        module.add_commands(commands)
    return parser
