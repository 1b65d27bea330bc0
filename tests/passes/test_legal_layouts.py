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
from passes.ir.layout import (
    Layout,
    Partial,
    R,
    Shard,
    assemble,
    is_even,
    is_storable,
    local_part,
    local_shape,
    parse_layout,
)
from passes.ir.mesh import Mesh
from passes.ir.routes import plan_steps
from passes.ir.text import parse_graph
from passes.localize import Localize
from passes.lower_reshards import LowerReshards
from passes.manager import PassManager

Shape = tuple[int, ...]

OUTERS = (1, 2, 3, 4, 6, 8, 12)
MIRRORED = ((1, 1), (2, 1), (1, 2), (3, 1))  # parts, each of two halves, and digits between a half and its axis
TERMS = tuple(map(Partial, ("sum", "max")))
CASES: tuple[tuple[str, Shape], ...] = (
    ("a=2,b=2", (18, 6)),
    ("a=4,b=2", (16, 8)),
    ("a=3,b=4", (12, 5)),
    ("a=2,b=2,c=2", (18, 6)),
    ("a=2,b=2,c=2", (6, 2)),
    ("a=2,b=3,c=4", (24,)),
    ("a=2,b=4", (64, 3)),
)
PLANNED, RUN = 4000, 50  # pairs of layouts per case: of those that a way is looked for, and that are run besides
every_case = pytest.mark.parametrize(("axes", "shape"), CASES)


def layouts(mesh: Mesh, shape: Shape) -> list[Layout]:
    """Return all layouts that `shape` allows, padded ones included."""
    shards = [Shard(dim, outer) for dim, outer in itertools.product(range(len(shape)), OUTERS)]
    shards += [Shard(dim, 2 * parts * mirror, mirror) for dim in range(len(shape)) for parts, mirror in MIRRORED]
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


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        ("{a:S(0~), b:R}", "{a:R, b:R}", "all_gather"),
        ("{a:R, b:R}", "{a:S(0~), b:S(0~4)}", "take_part"),
        ("{a:S(0~), b:S(0~4)}", "{a:R, b:R}", "all_gather"),
        ("{a:S(0~), b:S(0~4)}", "{a:R, b:S(0~4)}", "all_gather"),
        ("{a:S(0/2~), b:S(0)}", "{a:S(1), b:S(0)}", "all_to_all"),
        ("{a:S(1), b:R}", "{a:S(0~), b:R}", "all_to_all"),
        ("{a:P(sum), b:P(sum)}", "{a:S(0~), b:S(0~4)}", "reduce_scatter"),
        ("{a:S(0~), b:R}", "{a:S(0), b:R}", "all_gather take_part"),
    ],
)
def test_mirrored_digits_move_as_others_do(source: str, target: str, steps: str) -> None:
    mesh, shape = Mesh("a=4,b=2"), (32, 8)
    before, after = parse_layout(source, mesh), parse_layout(target, mesh)
    assert " ".join(step.kind.name for step in plan_steps(before, after, shape, mesh)) == steps
    assert torch.equal(assemble(resharded(before, after, shape, mesh), shape, after, mesh), whole(shape))


def test_a_mirrored_digit_pairs_the_first_chunk_with_the_last() -> None:
    def held(layout: str, mesh: Mesh, size: int) -> list[list[int]]:
        parts = (local_part(torch.arange(size), parse_layout(layout, mesh), mesh, at) for at in mesh.coordinates())
        return [part.tolist() for part in parts]

    assert held("{a:S(0~)}", Mesh("a=3"), 6) == [[0, 5], [1, 4], [2, 3]]
    assert held("{a:S(0/2~)}", Mesh("a=2"), 8) == [[0, 3, 4, 7], [1, 2, 5, 6]]
    assert held("{a:S(0~), b:S(0~2)}", Mesh("a=2,b=2"), 8) == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_a_mirrored_digit_needs_its_halves_whole() -> None:
    mesh = Mesh("a=2,b=2")
    assert is_storable(parse_layout("{a:S(0), b:S(0/2~)}", mesh), (8,), mesh)
    assert not is_storable(parse_layout("{a:S(0), b:S(0~)}", mesh), (8,), mesh)  # a takes the halves
    assert not is_storable(parse_layout("{a:S(0~), b:R}", mesh), (6,), mesh)  # padding would stand inside
