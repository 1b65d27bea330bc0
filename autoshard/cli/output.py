"""Write the files that a command was asked to save."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from autoshard.inspection.sharding_plan import ShardingPlan
from passes.errors import UserError


def add_reports(parser: argparse.ArgumentParser) -> None:
    """Add the options that write a plan as a page or a trace."""
    parser.add_argument("--html", metavar="FILE", help="where to write the plan as one page for a browser")
    parser.add_argument("--trace", metavar="FILE", help="where to write the simulated step, for ui.perfetto.dev")


def write_reports(plan: ShardingPlan, given: argparse.Namespace) -> None:
    """Write the files requested with the options of `add_reports`. Raises UserErrors."""
    console = Console(stderr=True)
    for path, write in ((given.html, plan.to_html), (given.trace, plan.to_trace)):
        if path is not None:
            write(path)
            console.print(f"wrote {path}", highlight=False)


def check_output(path: str | None) -> None:
    """Raise UserError early if the folder to save the result in does not exist, or if the path is a folder."""
    if path is not None and Path(path).is_dir():
        raise UserError(f"{path} is a folder; give the path of a file in it")
    if path is not None and not Path(path).parent.is_dir():
        raise UserError(f"there is no folder {str(Path(path).parent)!r} to save {path} in; make it, or give another path")
