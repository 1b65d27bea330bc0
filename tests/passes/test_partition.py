"""Equal calls are merged before a partition as torch merges them, without importing Inductor's compiler."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from random import Random

import networkx
import pytest
import torch
from torch import Tensor
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.compile.compiled import split_program
from passes._torch.partition import _minimum_cut, with_equal_calls_merged
from passes.ir.text import parse_graph


def sums(x: Tensor) -> tuple[Tensor, ...]:
    """Compute equal values, equal results, and calls that differ only in the type of a number."""
    one, two = (x + 1).sin(), (x + 1).sin()
    return one * two + (x + 1.0) + (x + True), x.cos(), x.cos(), x.cos() + 1, x.view(6).sin(), x.view(6).sin() + 1


def random(x: Tensor) -> Tensor:
    return torch.rand_like(x) - torch.rand_like(x) + torch.empty(4).sum() - torch.empty(4).sum()


def pieces(x: Tensor) -> Tensor:
    return torch.split(x, [1, 1])[0] + torch.split(x, [1, 1])[0] + torch.split(x, 1)[1]


def mutated(x: Tensor) -> Tensor:
    before = x + 1
    after = x.mul_(2) + 1
    return before + after + (x + 1)


@pytest.mark.parametrize("function", [sums, random, pieces, mutated])
def test_equal_calls_are_merged_as_torch_does(function: Callable[[Tensor], object]) -> None:
    graph = make_fx(function, tracing_mode="fake")(torch.ones(2, 3)).graph
    assert str(with_equal_calls_merged(graph)) == str(fx_graph_cse(graph))


def test_a_minimum_cut_is_that_of_the_default_algorithm() -> None:
    drawn = Random(0)
    for _ in range(200):
        graph, size = networkx.DiGraph(), drawn.randrange(4, 40)
        for _ in range(size * 3):
            one, two = sorted(drawn.sample(range(size), 2))
            graph.add_edge(one, two, capacity=drawn.choice([0, 1, 1, 5, 2**40, 2**40 + 1, math.inf]) if two - one < 4 else 3)
        graph.add_edge("source", 0, capacity=math.inf)
        graph.add_edge(size - 1, "sink", capacity=drawn.choice([7, 2**41]))
        assert _minimum_cut(graph, "source", "sink") == networkx.minimum_cut(graph, "source", "sink")


EAGER = """
import sys, torch
from autoshard import Mesh, Options
from autoshard.compile.compiled import split_program
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest

module, args = torch.nn.Linear(4, 4), (torch.ones(2, 4),)
made = make_plan(PlanRequest(module, args, {}, Mesh("dp=2"), Options(recipe="fsdp", compile="eager")))
split_program(made.graph, mode="eager")
sys.exit("torch._inductor.lowering" in sys.modules)
"""


@pytest.mark.slow
def test_a_program_that_runs_op_by_op_is_made_without_the_compiler() -> None:
    subprocess.run([sys.executable, "-c", EAGER], check=True)


SAVED_AGAIN = """
mesh tp=2
stage LOCAL
%w: f32[8, 8] = parameter("w")
%x: f32[4, 8] = input("x")
%tangent: f32[4, 8] = tangent("output")
%mm: f32[4, 8] recompute = mm(%x, %w)
%var_mean: (f32[4, 1], f32[4, 1]) recompute saved = var_mean.correction(%mm, [1], correction=0, keepdim=True)
%getitem: f32[4, 1] recompute = getitem(%var_mean, 0)
%getitem_1: f32[4, 1] recompute = getitem(%var_mean, 1)
%sub: f32[4, 8] = sub.Tensor(%mm, %getitem_1)
%mul: f32[4, 8] = mul.Tensor(%sub, %getitem)
%mul_1: f32[4, 8] = mul.Tensor(%tangent, %getitem)
%permute: f32[8, 4]<1, 8> = permute(%x, [1, 0])
%mm_1: f32[8, 8] = mm(%permute, %mul_1)
return output("output") %mul, gradient("w") %mm_1
"""


def test_items_of_a_call_that_is_saved_are_not_made_again() -> None:
    gm, _ = parse_graph(SAVED_AGAIN.lstrip())
    split = split_program(gm, mode="eager")
    assert split.backward is not None
    made = {str(node.target) for node in split.backward.graph.nodes}
    assert "aten.var_mean.correction" not in made and "aten.mul.Tensor" in made
