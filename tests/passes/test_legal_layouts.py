"""Between any two layouts that a shape allows there is a way, and it keeps the value; no recipe takes another layout."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.fx import Node

from autoshard import Mesh as Axes
from autoshard import Options, plan
from autoshard.debug.rank_interpreter import run_ranks
from passes.base import PassContext
from passes.ir.graph import InputRole, input_of, placeholders
from passes.ir.layout import Layout, Partial, R, Shard, assemble, is_even, is_storable, local_part, local_shape
from passes.ir.mesh import Mesh
from passes.ir.routes import plan_steps
from passes.ir.text import parse_graph
from passes.localize import Localize
from passes.lower_reshards import LowerReshards
from passes.manager import PassManager

Shape = tuple[int, ...]

OUTERS = (1, 2, 3, 4, 6, 8, 12)
TERMS = tuple(map(Partial, ("sum", "max")))
CASES: tuple[tuple[str, Shape], ...] = (
    ("a=2,b=2", (18, 6)),
    ("a=3,b=4", (12, 5)),
    ("a=2,b=2,c=2", (18, 6)),
    ("a=2,b=2,c=2", (6, 2)),
    ("a=2,b=3,c=4", (24,)),
)
PLANNED, RUN = 4000, 50  # pairs of layouts per case: of those that a way is looked for, and that are run besides
every_case = pytest.mark.parametrize(("axes", "shape"), CASES)


def layouts(mesh: Mesh, shape: Shape) -> list[Layout]:
    """Return all layouts that `shape` allows, padded ones included."""
    shards = [Shard(dim, outer) for dim, outer in itertools.product(range(len(shape)), OUTERS)]
    found = (Layout(placements) for placements in itertools.product((R, *TERMS, *shards), repeat=mesh.ndim))
    return [layout for layout in found if is_storable(layout, shape, mesh)]


def pairs(mesh: Mesh, shape: Shape, count: int) -> list[tuple[Layout, Layout]]:
    """Return so many pairs of layouts, or all of them, spread over all."""
    found = layouts(mesh, shape)
    total = len(found) ** 2
    step = max(1, total // count) | 1  # odd, so that targets vary as sources do
    return [(found[number // len(found)], found[number % len(found)]) for number in range(0, total, step)]


@every_case
def test_there_is_a_way_between_any_two_legal_layouts(axes: str, shape: Shape) -> None:
    mesh = Mesh(axes)
    for source, target in pairs(mesh, shape, PLANNED):
        steps = plan_steps(source, target, shape, mesh)
        assert (steps[-1].layout if steps else source) == target
        assert all(is_storable(step.layout, shape, mesh) for step in steps)


@every_case
def test_every_way_keeps_the_value(axes: str, shape: Shape) -> None:
    mesh = Mesh(axes)
    for source, target in pairs(mesh, shape, RUN):
        parts = resharded(source, target, shape, mesh)
        assert torch.equal(assemble(parts, shape, target, mesh), whole(shape)), (source, target)
        assert {tuple(part.shape) for part in parts} == {local_shape(target, shape, mesh)}


@pytest.mark.parametrize("op", ["sum", "product", "max", "min", "avg"])
def test_terms_of_every_reduction_are_taken(op: str) -> None:
    mesh, replicated, terms = Mesh("a=3"), Layout((R,)), Layout((Partial(op),))
    assert torch.equal(assemble(resharded(replicated, terms, (4,), mesh), (4,), terms, mesh), whole((4,)))


def resharded(source: Layout, target: Layout, shape: Shape, mesh: Mesh) -> list[torch.Tensor]:
    """Return every rank's part of a value that is moved from `source` to `target`."""
    type_ = f"f64[{', '.join(map(str, shape))}]"
    gm, _ = parse_graph(
        f"mesh {mesh}\nstage EXPLICIT\n"
        f'%x: {type_} {source.format(mesh)} = parameter("x")\n'
        f"%reshard: {type_} {target.format(mesh)} = reshard(%x)\n"
        'return output("output") %reshard\n'
    )
    PassManager((LowerReshards(), Localize())).run(gm, PassContext(mesh))
    inputs = [[_given(node, source, shape, mesh, at) for node in placeholders(gm.graph)] for at in mesh.coordinates()]
    return [part for (part,) in run_ranks(gm, mesh, inputs)]


def _given(node: Node, source: Layout, shape: Shape, mesh: Mesh, at: tuple[int, ...]) -> torch.Tensor:
    if input_of(node).role is InputRole.COORDINATE:
        return torch.tensor([at[mesh.index(input_of(node).name)]])
    return local_part(whole(shape), source, mesh, at).contiguous()


def whole(shape: Shape) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape) + 1


def test_every_even_layout_is_legal_and_a_dim_that_is_not_there_is_not() -> None:
    mesh = Mesh("a=2,b=3")
    shards = [Shard(dim, outer) for dim, outer in itertools.product(range(3), OUTERS)]
    for placements in itertools.product((R, *TERMS, *shards), repeat=2):
        layout = Layout(placements)
        assert is_storable(layout, (24, 18), mesh) or not is_even(layout, (24, 18), mesh)
    assert not is_storable(Layout((Shard(2), R)), (24, 18), mesh)


class FusedProjection(nn.Module):
    """q, k and v of three parts that no two axes split evenly."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split(self.dim, dim=-1)
        loss: torch.Tensor = self.out(torch.relu(q) * k + v).square().mean()
        return loss


@pytest.mark.parametrize("dim", [2, 6])
@pytest.mark.parametrize(
    "recipe", [pytest.param("auto", marks=pytest.mark.slow), {"a": "megatron", "b": "megatron", "c": "megatron"}]
)
def test_recipes_take_only_layouts_that_can_be_lowered(dim: int, recipe: str | dict[str, str]) -> None:
    mesh = Axes("a=2,b=2,c=2", hardware="h100")
    made = plan(FusedProjection(dim), mesh, (torch.randn(8, dim),), options=Options(recipe=recipe))
    for name, parameter in made.parameters.items():
        assert is_storable(parameter.layout, parameter.shape, mesh), name
