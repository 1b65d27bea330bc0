"""The search finds what a look at every plan finds, and says how sure it is."""

from __future__ import annotations

import math
import random

import pytest

import passes.rules  # registers the rules
from passes.ir.mesh import Mesh
from passes.ir.text import parse_graph
from passes.search.build import build
from passes.search.find import Goal, solve
from passes.search.kernels import Kernels
from passes.search.prices import Prices
from tests.search.brute_force import brute_force

assert passes.rules
EXACT = Goal(gap=1e-6)
PLANS = 60_000  # a brute force looks at


def small_graph(seed: int, mesh: str) -> str:
    """A chain of a few calls on matrices, some of which use an earlier value again."""
    draw = random.Random(seed)
    big = draw.choice((64, 2048, 8192))
    lines = [f"mesh {mesh}", "stage CAPTURED", f'%w: f32[{big}, {big}] = parameter("w")', f'%x: f32[{big}, {big}] = input("x")']
    values = ["x"]
    for number in range(draw.randint(2, 5)):
        kind = draw.choice(("mm", "relu", "add", "permute", "mm"))
        name, last, other = f"v{number}", values[-1], draw.choice(values)
        call = {
            "mm": f"mm(%{last}, %w)",
            "relu": f"relu(%{last})",
            "add": f"add.Tensor(%{last}, %{other})",
            "permute": f"permute(%{last}, [1, 0])",
        }[kind]
        strides = f"<1, {big}>" if kind == "permute" else ""
        if kind in ("relu", "add", "permute") and "permute" in lines[-1]:
            call, strides = f"mm(%{last}, %w)", ""
        lines.append(f"%{name}: f32[{big}, {big}]{strides} = {call}")
        values.append(name)
    lines.append(f'return output("output") %{values[-1]}')
    return "\n".join(lines) + "\n"


def problem_of(text: str, hardware: str = "h100"):  # type: ignore[no-untyped-def]
    gm, parsed = parse_graph(text)
    mesh = Mesh(parsed.names, parsed.sizes, hardware=hardware)
    assert mesh.hardware is not None
    prices = Prices(mesh, mesh.hardware)
    return build(gm, Kernels(gm.graph, prices)).problem, prices


SMALL = [(seed, "tp=2") for seed in range(12)] + [(seed, "dp=2,tp=2") for seed in (1, 2, 6, 10)]


@pytest.mark.parametrize(("seed", "mesh"), SMALL)
def test_no_plan_is_better(seed: int, mesh: str) -> None:
    problem, prices = problem_of(small_graph(seed, mesh))
    assert math.prod(len(variable.choices) for variable in problem.variables) <= PLANS, "too many plans to look at"
    plan, bound = solve(problem, prices, EXACT)
    best = brute_force(problem, prices)
    assert best is not None
    assert plan.objective == pytest.approx(best.objective, rel=1e-5)
    assert bound <= best.objective * (1 + 1e-9)
