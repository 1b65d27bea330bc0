"""`diff`: saved plans, compared."""

from __future__ import annotations

import argparse
from typing import Any

from autoshard.plan import ShardingPlan


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    diff = commands.add_parser("diff", help="what is different between two saved plans", description=_diff.__doc__)
    diff.add_argument("before", help="a file that `plan -o` wrote")
    diff.add_argument("after", help="another one")
    diff.set_defaults(run=_diff)


def _diff(given: argparse.Namespace) -> None:
    """What the second plan has otherwise than the first: time, memory, layouts, collectives; equal layers as one line."""
    print(ShardingPlan.load(given.before).diff(ShardingPlan.load(given.after)))
