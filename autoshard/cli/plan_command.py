"""Commands `plan` and `recipes`: plan a model in a file, and compare the plan with the recipes of experts."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
from rich.console import Console
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.cli.output import add_reports, check_output, write_reports
from autoshard.cli.target import load_target
from autoshard.config.display import Display
from autoshard.config.options import Options
from autoshard.inspection.report.cost_table import candidates_table, cost_table, format_declined
from autoshard.inspection.sharding_plan import ShardingPlan
from autoshard.planner.effort import EXHAUSTIVE, FULL, Effort
from autoshard.planner.make_plan import plan_ahead
from autoshard.planner.request import PlanRequest
from passes.errors import UserError
from passes.ir.mesh import Mesh

PIPED_WIDTH = 120  # columns of tables that no terminal shows
RECIPE = "instead of a search: fsdp, fsdp+megatron, dp=fsdp,tp=megatron, dp=none (nothing is sharded over it), none (on all axes)"


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    plan = commands.add_parser("plan", description=_plan.__doc__)
    add_problem(plan)
    plan.add_argument("--recipe", default="auto", help=RECIPE)
    plan.add_argument("-o", "--output", metavar="FILE", help="where to save the plan, as JSON")
    add_reports(plan)
    plan.set_defaults(run=_plan)
    recipes = commands.add_parser("recipes", description=_recipes.__doc__)
    add_problem(recipes)
    recipes.set_defaults(run=_recipes, recipe="auto")


def add_problem(
    parser: argparse.ArgumentParser,
    *,
    target: str = "file.py:function; it gives (model, args) and is called on meta",
    mesh_is_required: bool = True,
) -> None:
    parser.add_argument("target", help=target)
    parser.add_argument("--mesh", required=mesh_is_required, help="axes and sizes: dp=32,tp=8")
    parser.add_argument("--hardware", help="h100, a100, ... or a file that calibrate wrote; by default this machine")
    parser.add_argument("--batch", type=int, help="given to the function as batch=...: samples of the global batch")
    parser.add_argument("--seq", type=int, help="given to the function as seq=...: length of a sequence")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, reduce gradients in float32")
    parser.add_argument("--memory-limit", metavar="BYTES", help="of one device: 60GB or 60GiB; by default 0.9 of it")
    parser.add_argument("--time-limit", metavar="SECONDS", type=float, help="that the search may take")
    parser.add_argument("--inference", action="store_true", help="plan the forward alone")


def _plan(given: argparse.Namespace) -> None:
    """Find the fastest plan that fits in memory (or take a recipe's), print it, and save it."""
    for path in (given.output, given.html, given.trace):
        check_output(path)
    found = find_plan(given)
    print(found)
    if given.output is not None:
        found.save(given.output)
        Console(stderr=True).print(f"saved {given.output}, fingerprint {found.fingerprint}", highlight=False)
    write_reports(found, given)


def _recipes(given: argparse.Namespace) -> None:
    """Predict a step of every recipe that goes with the mesh, and of the solved plan: the fastest that fits first."""
    found = find_plan(given, effort=EXHAUSTIVE)
    if found.search is None or found.cost is None:
        raise UserError(f"there is nothing to compare on a mesh of {found.mesh}; give one of more than one device")
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH)
    console.print(cost_table(found.cost, found.search, found.recomputation, found.timeline))
    console.print(candidates_table(found.search))
    for declined in format_declined(found.search):
        console.print(f"  {declined}", highlight=False, markup=False)


def find_plan(given: argparse.Namespace, *, effort: Effort = FULL) -> ShardingPlan:
    """Return the plan that a command line asks for."""
    mesh = Mesh(given.mesh, hardware=given.hardware)
    options = options_of_command(given)
    with Display(Console(stderr=True)) as display:
        display("model")
        target = load_target(given.target, sizes_of(given))
        training = not given.inference
        request = PlanRequest(target.model, target.args, target.kwargs, mesh, options, training=training)
        return ShardingPlan.of(*plan_ahead(request, effort=effort, progress=display))


def options_of_command(given: argparse.Namespace) -> Options:
    """Return the options that a command line asks for."""
    return Options(
        recipe=_recipe(given.recipe),
        memory_limit=_bytes(given.memory_limit),
        time_limit=given.time_limit,
        mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32) if given.bf16 else None,
    )


def sizes_of(given: argparse.Namespace) -> dict[str, int]:
    """Return the sizes that a command line asks for, by the names of the function's arguments.

    Raises UserError for one below 1.
    """
    sizes = {name: value for name, value in (("batch", given.batch), ("seq", given.seq)) if value is not None}
    for name, value in sizes.items():
        if value < 1:
            raise UserError(f"--{name} {value}: give 1 or more")
    return sizes


def _bytes(text: str | None) -> int | str | None:
    """Return a memory limit as given (`"60GB"`), or as a number of bytes (`"6564"`)."""
    return int(text) if text is not None and text.isdecimal() and len(text) < 20 else text


def _recipe(text: str) -> str | dict[str, str | None] | None:
    """Return a recipe as given (`"fsdp"`), or one per axis as a dict (`"dp=fsdp,tp=none"`); None for `"none"`."""
    if "=" not in text:
        return _or_none(text)
    found: dict[str, str | None] = {}
    for axis, _, name in ([word.strip() for word in part.partition("=")] for part in text.split(",")):
        if not axis or not name:
            raise UserError(f"--recipe {text}: give each axis a recipe, or none: dp=fsdp,tp=none")
        if axis in found:
            raise UserError(f"--recipe {text}: axis {axis!r} is given two recipes; leave one out")
        found[axis] = _or_none(name)
    return found


def _or_none(name: str) -> str | None:
    return None if name == "none" else name
