"""Command `show`: print a saved plan, or write it as a page or a trace."""

from __future__ import annotations

import argparse
from typing import Any

from autoshard.cli.output import add_reports, check_output, write_reports
from autoshard.inspection.sharding_plan import ShardingPlan


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    show = commands.add_parser("show", description=_show.__doc__)
    show.add_argument("plan", help="a file that `plan -o` wrote")
    add_reports(show)
    show.set_defaults(run=_show)


def _show(given: argparse.Namespace) -> None:
    """Print a saved plan, and write its page or its trace."""
    for path in (given.html, given.trace):
        check_output(path)
    plan = ShardingPlan.load(given.plan)
    print(plan)
    write_reports(plan, given)
