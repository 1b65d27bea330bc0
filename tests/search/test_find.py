"""The search finds what a look at every plan finds, and says how sure it is."""

from __future__ import annotations

import math
import random

import pytest

import passes.rules  # registers the rules
from passes.errors import MemoryLimitError
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


def deep_graph(layers: int, mesh: str, rows: int = 4096) -> str:
    """Layers of two products with a kernel between them, and what is added to."""
    lines = [f"mesh {mesh}", "stage CAPTURED", f'%x: f32[{rows}, 4096] = input("x")']
    lines += [f'%{name}{i}: f32[4096, 4096] = parameter("{name}{i}")' for i in range(layers) for name in ("up", "down")]
    last = "x"
    for i in range(layers):
        lines += [
            f"%a{i}: f32[{rows}, 4096] = mm(%{last}, %up{i})",
            f"%b{i}: f32[{rows}, 4096] = relu(%a{i})",
            f"%c{i}: f32[{rows}, 4096] = exp(%b{i})",
            f"%d{i}: f32[{rows}, 4096] = mm(%c{i}, %down{i})",
            f"%e{i}: f32[{rows}, 4096] = add.Tensor(%d{i}, %{last})",
        ]
        last = f"e{i}"
    return "\n".join([*lines, f'return output("output") %{last}']) + "\n"


def test_a_large_graph_has_fewer_variables_than_calls() -> None:
    problem, _ = problem_of(deep_graph(8, "tp=2"))
    calls = [node.name for variable in problem.variables for node in variable.nodes if node.op == "call_function"]
    assert len(calls) == 40
    assert sum(variable.nodes[0].op == "call_function" for variable in problem.variables) == 32  # relu and exp are one


def test_a_plan_that_cannot_fit_is_refused_by_its_bound() -> None:
    problem, prices = problem_of(deep_graph(2, "dp=2,tp=2"))
    with pytest.raises(MemoryLimitError, match="the smallest plan found needs"):
        solve(problem, prices, Goal(memory_limit=1e6))


def test_a_price_on_bytes_finds_a_plan_that_fits() -> None:
    problem, prices = problem_of(deep_graph(4, "dp=4", rows=1 << 17))
    rich, _ = solve(problem, prices, Goal())
    limit = rich.memory * 0.85
    poor, bound = solve(problem, prices, Goal(memory_limit=limit))
    assert poor.memory <= limit * (1 + 1e-6)
    assert rich.objective <= poor.objective and bound <= poor.objective


def test_a_time_limit_that_is_over_gives_a_plan_at_once() -> None:
    problem, prices = problem_of(deep_graph(8, "dp=2,cp=2,tp=2"))
    plan, bound = solve(problem, prices, Goal(time_limit=0.0))
    assert 0.0 < bound <= plan.objective
    assert len(plan.picked) == len(problem.variables)
