"""Commands `diff`, `explain`, `replay`, `check` and `bisect`: ask questions about a plan, a dump, or a model's numbers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autoshard.cli.plan_command import add_problem, find_plan, options_of_command, sizes_of
from autoshard.cli.target import load_target
from autoshard.debug.bisection import bisect
from autoshard.debug.checking import check
from autoshard.debug.replay import replay
from autoshard.inspection.sharding_plan import ShardingPlan
from passes.errors import UserError
from passes.ir.mesh import Mesh


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    diff = commands.add_parser("diff", description=_diff.__doc__)
    diff.add_argument("before", help="a file that `plan -o` wrote")
    diff.add_argument("after", help="another one")
    diff.set_defaults(run=_diff)
    explain = commands.add_parser("explain", description=_explain.__doc__)
    add_problem(explain, target="a saved plan, or file.py:function to plan first, as for `plan`", mesh_is_required=False)
    explain.add_argument("--recipe", default="auto", help="as for `plan`")
    explain.add_argument("--what", required=True, help="layers.0.wq.weight, layers.0.attention, %%mm_1, model.py:42, ...")
    explain.set_defaults(run=_explain)
    again = commands.add_parser("replay", description=_replay.__doc__)
    again.add_argument("dump", type=Path, help="a file of a dump: dump/06_insert_reshards.txt")
    again.add_argument("--after", metavar="PASS", help="the pass that gave it; by default the one in its name")
    again.add_argument("--recipe", help="that places a graph dumped before the seeds: fsdp+megatron")
    again.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="where to write what each pass makes of it")
    again.set_defaults(run=_replay)
    for name, run in (("check", _check), ("bisect", _bisect)):
        numbers = commands.add_parser(name, description=run.__doc__)
        add_problem(numbers, target="file.py:function; it gives (model, args) and is called on cpu: with values")
        numbers.add_argument("--recipe", default="auto", help="as for `plan`")
        numbers.set_defaults(run=run)


def _diff(given: argparse.Namespace) -> None:
    """Show what is different in the second plan: time, memory, layouts, collectives; equal layers as one line."""
    print(ShardingPlan.load(given.before).diff(ShardingPlan.load(given.after)))


def _explain(given: argparse.Namespace) -> None:
    """Show what was chosen for a parameter, module, value, collective or source line; what else there was, and its price in the
    whole step; whose constraint it is; its origin; which passes touched it. A saved plan has all but prices and passes."""
    if given.mesh is None and ":" in given.target:
        raise UserError(f"give --mesh to plan {given.target} on, or a saved plan")
    if ":" not in given.target and (extra := _planning_options(given)):
        raise UserError(
            f"{given.target} is a saved plan, which has its mesh and options: leave {', '.join(extra)} out, or give "
            "file.py:function to plan"
        )
    plan = ShardingPlan.load(given.target) if given.mesh is None else find_plan(given)
    print(plan.explain(given.what))


def _planning_options(given: argparse.Namespace) -> list[str]:
    """Return the options of planning that were given, as they are written."""
    names = ("mesh", "hardware", "batch", "seq", "bf16", "memory_limit", "time_limit", "inference", "recipe")
    return [f"--{name.replace('_', '-')}" for name in names if vars(given)[name] not in (None, False, "auto")]


def _replay(given: argparse.Namespace) -> None:
    """Read a graph that was dumped, run the passes after it again, and print what comes out."""
    found = replay(given.dump, after=given.after, folder=given.output, recipe=given.recipe)
    print(found.text, end="")
    for remark in found.remarks:
        print(f"# {remark}")
    print(f"# ran {', '.join(found.ran)}")


def _check(given: argparse.Namespace) -> bool:
    """Run the program of every rank in this process, and compare outputs, gradients and buffers with one device. The exit code
    is 1 if any differs."""
    return _printed(given, check)


def _bisect(given: argparse.Namespace) -> bool:
    """Run the program after every pass, on simulated ranks once it is one of a device, and compare it with the model: after
    which pass are the numbers wrong first, and which value is it? The exit code is 1 if any is."""
    return _printed(given, bisect)


def _printed(given: argparse.Namespace, compare: Callable[..., object]) -> bool:
    """Build the model with values, print what a comparison found, and return whether the numbers are right."""
    target = load_target(given.target, sizes_of(given), device="cpu")
    with torch.set_grad_enabled(not given.inference):
        mesh = Mesh(given.mesh, hardware=given.hardware)
        found = compare(target.model, mesh, target.args, target.kwargs, options=options_of_command(given))
    print(found)
    return bool(found)
