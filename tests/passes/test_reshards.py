"""Any reshard, lowered and run on simulated ranks, gives the value it was given."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.debug.rank_interpreter import run_ranks
from passes.base import PassContext
from passes.errors import CompilerError
from passes.ir.collectives import all_gather, all_to_all, reduce_scatter
from passes.ir.graph import InputRole, input_of, placeholders
from passes.ir.layout import Layout, Partial, R, Shard, assemble, is_even, is_storable, local_part, parse_layout
from passes.ir.mesh import Mesh
from passes.ir.routes import plan_steps
from passes.ir.text import parse_graph
from passes.localize import Localize
from passes.lower_reshards import LowerReshards
from passes.manager import PassManager

MESHES = (Mesh("a=2"), Mesh("a=2,b=2"), Mesh("a=2,b=3"), Mesh("a=2,b=2,c=2"))
SHAPE = (24, 12, 5)


def layouts(mesh: Mesh, *, stored: bool = False) -> list[Layout]:
    """Return all layouts of `SHAPE` with digits that nest, partial sums included."""
    digits = [Shard(dim, outer) for dim in (0, 1) for outer in (1, 2, 3, 4, 6)]
    choices = (R, Partial(), *digits, *([Shard(2)] if stored else []))
    found = (Layout(placements) for placements in itertools.product(choices, repeat=mesh.ndim))
    fits = is_storable if stored else is_even
    return [layout for layout in found if fits(layout, SHAPE, mesh)]


def run_reshard(source: Layout, target: Layout, mesh: Mesh) -> torch.Tensor:
    text = (
        f"mesh {mesh}\nstage EXPLICIT\n"
        f'%x: f64[24, 12, 5] {source.format(mesh)} = parameter("x")\n'
        f"%reshard: f64[24, 12, 5] {target.format(mesh)} = reshard(%x)\n"
        'return output("output") %reshard\n'
    )
    gm, _ = parse_graph(text)
    PassManager((LowerReshards(), Localize())).run(gm, PassContext(mesh))
    inputs = [[_input(node, source, mesh, at) for node in placeholders(gm.graph)] for at in mesh.coordinates()]
    return assemble([part[0] for part in run_ranks(gm, mesh, inputs)], SHAPE, target, mesh)


def _input(node: torch.fx.Node, source: Layout, mesh: Mesh, at: tuple[int, ...]) -> torch.Tensor:
    if input_of(node).role is InputRole.COORDINATE:
        return torch.tensor([at[mesh.index(input_of(node).name)]])
    return local_part(value(), source, mesh, at).contiguous()


def value() -> torch.Tensor:
    return torch.arange(math.prod(SHAPE), dtype=torch.float64).view(SHAPE) + 1


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_reshard_keeps_the_value(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    source = data.draw(st.sampled_from(layouts(mesh)))
    target = data.draw(st.sampled_from(layouts(mesh)))
    assert torch.equal(run_reshard(source, target, mesh), value()), f"{source} -> {target}"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_padded_parameter_is_gathered_and_scattered(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    stored = data.draw(st.sampled_from([layout for layout in layouts(mesh, stored=True) if not layout.has_partial]))
    partial = Layout((Partial(),) * mesh.ndim)
    whole = Layout((R,) * mesh.ndim)
    assert torch.equal(run_reshard(stored, whole, mesh), value())
    assert torch.equal(run_reshard(partial, stored, mesh), value())


def steps(source: str, target: str, shape: tuple[int, ...], mesh: Mesh) -> list[tuple[object, tuple[int, ...]]]:
    found = plan_steps(parse_layout(source, mesh), parse_layout(target, mesh), shape, mesh)
    return [(step.kind.step, step.axes) for step in found]


def test_two_axes_of_one_dim_are_gathered_in_one_collective() -> None:
    mesh = Mesh("dp=2,tp=2")
    assert steps("{dp:S(0/2), tp:S(0)}", "{}", (8, 6), mesh) == [(all_gather, (0, 1))]


def test_the_outer_axis_can_be_gathered_first() -> None:
    mesh = Mesh("dp=2,tp=2")
    assert steps("{dp:S(0/2), tp:S(0)}", "{dp:S(0/2)}", (8, 6), mesh) == [(all_gather, (1,))]


def test_reducing_to_a_shard_is_one_reduce_scatter() -> None:
    mesh = Mesh("dp=2,tp=2")
    assert steps("{dp:P(sum)}", "{dp:S(1)}", (8, 6), mesh) == [(reduce_scatter, (0,))]


def test_moving_a_shard_to_another_dim_is_one_all_to_all() -> None:
    assert steps("{tp:S(0)}", "{tp:S(1)}", (8, 6), Mesh("tp=2")) == [(all_to_all, (0,))]


def test_a_layout_that_does_not_split_the_shape_is_refused() -> None:
    mesh = Mesh("a=2,b=2,c=2")
    with pytest.raises(CompilerError, match="does not split a tensor of shape"):
        steps("{a:S(0/3), b:P(sum)}", "{a:S(0/3), b:S(0/6), c:S(0/12)}", (18, 6), mesh)


def test_a_moved_parameter_is_gathered_before_its_use() -> None:
    gm, mesh = parse_graph("""mesh tp=2
stage EXPLICIT
%w: f32[8, 6] {tp:S(0)} = parameter("w")
%x: f32[4, 6] {tp:R} = input("x")
%reshard: f32[8, 6] {tp:R} = reshard(%w)
%permute: f32[6, 8]<1, 6> {tp:R} = permute(%reshard, [1, 0])
%relu: f32[4, 6] {tp:R} = relu(%x)
%mm: f32[4, 8] {tp:R} = mm(%relu, %permute)
return output("output") %mm
""")
    LowerReshards().run(gm, PassContext(mesh))
    names = [node.name for node in gm.graph.nodes if node.op == "call_function"]
    assert names == ["relu", "all_gather", "permute", "mm"]
