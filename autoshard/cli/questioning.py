"""`diff` and `explain`: what a plan is asked once it is made."""

from __future__ import annotations

import argparse
from typing import Any

from autoshard.cli.planning import add_problem, find_plan
from autoshard.plan import ShardingPlan
from passes.errors import UserError


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    diff = commands.add_parser("diff", help="what is different between two saved plans", description=_diff.__doc__)
    diff.add_argument("before", help="a file that `plan -o` wrote")
    diff.add_argument("after", help="another one")
    diff.set_defaults(run=_diff)
    explain = commands.add_parser("explain", help="why something is as it is", description=_explain.__doc__)
    add_problem(explain, target="a saved plan, or file.py:function to plan first, as for `plan`", mesh_is_required=False)
    explain.add_argument("--recipe", default="auto", help="as for `plan`")
    explain.add_argument("--what", required=True, help="layers.0.wq.weight, layers.0.attention, %%mm_1, model.py:42, ...")
    explain.set_defaults(run=_explain)


def _diff(given: argparse.Namespace) -> None:
    """What the second plan has otherwise than the first: time, memory, layouts, collectives; equal layers as one line."""
    print(ShardingPlan.load(given.before).diff(ShardingPlan.load(given.after)))


def _explain(given: argparse.Namespace) -> None:
    """What was chosen for a parameter, module, value, collective or source line; what else there was, and its price in the
    whole step; who insisted; where it came from; which passes touched it. A saved plan knows all but prices and passes."""
    if given.mesh is None and ":" in given.target:
        raise UserError(f"give --mesh to plan {given.target} on, or a saved plan")
    plan = ShardingPlan.load(given.target) if given.mesh is None else find_plan(given)
    print(plan.explain(given.what))
