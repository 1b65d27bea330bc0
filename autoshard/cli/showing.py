"""`show`: a saved plan, as it was printed when it was made."""

from __future__ import annotations

import argparse
from typing import Any

from autoshard.plan import ShardingPlan


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    show = commands.add_parser("show", help="print a saved plan", description=_show.__doc__)
    show.add_argument("plan", help="a file that `plan -o` wrote")
    show.set_defaults(run=_show)


def _show(given: argparse.Namespace) -> None:
    """Print a saved plan."""
    print(ShardingPlan.load(given.plan))
