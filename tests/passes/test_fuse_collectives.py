"""What moves less: each form on the smallest graph that has it, and the same numbers on simulated ranks."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import GraphModule

from autoshard.config.options import Options
from autoshard.debug.rank_interpreter import run_ranks
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from examples.llama import TINY, step_of
from passes.base import Pass, PassContext
from passes.cancel_reshards import CancelReshards
from passes.fuse_collectives import FuseCollectives
from passes.hardware.hardware import hardware_named
from passes.ir.graph import layout_of, operands, placeholders, tensor_of, transfer_of
from passes.ir.layout import local_part
from passes.ir.mesh import Mesh
from passes.ir.text import format_graph, parse_graph
from passes.localize import Localize
from passes.lower_reshards import LowerReshards
from passes.manager import PassManager

MESH = Mesh("dp=2,tp=2")
PRICED = MESH.on(hardware_named("a100-pcie"))

# A product's sum, widened by what reads it (as a norm does); a value gathered before it is narrowed.
CASTS = """
mesh dp=2,tp=2
stage EXPLICIT
%x: bf16[8, 4] {dp:S(0), tp:S(1)} = input("x")
%w: bf16[4, 6] {dp:R, tp:S(0)} = parameter("w")
%y: f32[8, 6] {dp:S(0), tp:S(1)} = input("y")
%mm: bf16[8, 6] {dp:S(0), tp:P(sum)} = mm(%x, %w)
%wide: f32[8, 6] {dp:S(0), tp:P(sum)} = prims.convert_element_type(%mm, f32)NOTE
%total: f32[8, 6] {dp:S(0), tp:S(1)} = reshard(%wide)
%mul: f32[8, 6] {dp:S(0), tp:S(1)} = mul.Tensor(%total, %y)
%whole: f32[8, 6] {dp:S(0), tp:R} = reshard(%mul)
%narrow: bf16[8, 6] {dp:S(0), tp:R} = prims.convert_element_type(%whole, bf16)
%again: bf16[8, 6] {dp:S(0), tp:R} = prims.convert_element_type(%whole, bf16)
%add: bf16[8, 6] {dp:S(0), tp:R} = add.Tensor(%narrow, %again)
return output("0") %add
"""

# What earlier and later passes do: a sum of which every rank takes its part, through what is computed of it; equal
# gathers; and two axes that gather.
MOVES = """
mesh dp=2,tp=2
stage EXPLICIT
%x: f32[8, 4] {dp:S(0), tp:S(1)} = input("x")
%w: f32[4, 6] {dp:R, tp:S(0)} = parameter("w")
%mm: f32[8, 6] {dp:S(0), tp:P(sum)} = mm(%x, %w)
%total: f32[8, 6] {dp:S(0), tp:R} = reshard(%mm)
%relu: f32[8, 6] {dp:S(0), tp:R} = relu(%total)
%part: f32[8, 6] {dp:S(0), tp:S(1)} = reshard(%relu)
%a: f32[8, 4] {dp:R, tp:R} = reshard(%x)
%b: f32[8, 4] {dp:R, tp:R} = reshard(%x)
%exp: f32[8, 4] {dp:R, tp:R} = exp(%a)
%sin: f32[8, 4] {dp:R, tp:R} = sin(%b)
return output("0") %part, output("1") %exp, output("2") %sin
"""


# A sum of gradients that is stored narrower than it is reduced.
SUM = """
mesh dp=2,tp=2
stage EXPLICIT
%x: f32[4096, 4] {dp:S(1), tp:R} = input("x")
%w: f32[4, 4096] {dp:S(0), tp:R} = input("w")
%mm: f32[4096, 4096] {dp:P(sum), tp:R} = mm(%x, %w)
%total: f32[4096, 4096] {dp:R, tp:R} = reshard(%mm)
%narrow: bf16[4096, 4096] {dp:R, tp:R} = prims.convert_element_type(%total, bf16)
return output("0") %narrow
"""


def _read(text: str, note: str = "") -> GraphModule:
    return parse_graph(text.strip().replace("NOTE", note))[0]


def _calls(gm: GraphModule) -> str:
    return "\n".join(line for line in format_graph(gm, MESH).splitlines() if " = " in line and '("' not in line)


def test_casts_stand_where_fewer_bytes_move() -> None:
    gm, ctx = _read(CASTS), PassContext(MESH)
    assert FuseCollectives().run(gm, ctx)
    assert_expected_inline(_calls(gm), """\
%mm: bf16[8, 6] {dp:S(0), tp:P(sum)} = mm(%x, %w)
%reshard: bf16[8, 6] {dp:S(0), tp:S(1)} = reshard(%mm)
%wide: f32[8, 6] {dp:S(0), tp:S(1)} = prims.convert_element_type(%reshard, f32)
%mul: f32[8, 6] {dp:S(0), tp:S(1)} = mul.Tensor(%wide, %y)
%narrow: bf16[8, 6] {dp:S(0), tp:S(1)} = prims.convert_element_type(%mul, bf16)
%reshard_1: bf16[8, 6] {dp:S(0), tp:R} = reshard(%narrow)
%add: bf16[8, 6] {dp:S(0), tp:R} = add.Tensor(%reshard_1, %reshard_1)""")
    assert_expected_inline("\n".join(map(str, ctx.remarks)), """\
fuse_collectives: reduced in bf16, in which it is computed, and cast after [%reshard]
fuse_collectives: cast before it to bf16 [%reshard_1]""")


def test_what_is_widened_for_its_reduction_stays_wide() -> None:
    gm = _read(CASTS, "      # | cast_parameters: kept in float32")
    FuseCollectives().run(gm, PassContext(MESH))
    assert "%total: f32[8, 6] {dp:S(0), tp:S(1)} = reshard(%wide)" in _calls(gm)


def test_reduce_scatters_equal_gathers_and_several_axes_come_of_the_passes_around_it() -> None:
    gm = _read(MOVES)
    PassManager((FuseCollectives(), CancelReshards(), LowerReshards())).run(gm, PassContext(MESH))
    assert_expected_inline(_calls(gm), """\
%mm: f32[8, 6] {dp:S(0), tp:P(sum)} = mm(%x, %w)
%reduce_scatter: f32[8, 6] {dp:S(0), tp:S(1)} = reduce_scatter(%mm, ["tp"])
%relu_1: f32[8, 6] {dp:S(0), tp:S(1)} = relu(%reduce_scatter)
%all_gather: f32[8, 4] {dp:R, tp:R} = all_gather(%x, ["dp", "tp"])
%exp: f32[8, 4] {dp:R, tp:R} = exp(%all_gather)
%sin: f32[8, 4] {dp:R, tp:R} = sin(%all_gather)""")


def test_a_sum_is_gathered_narrow_where_that_is_faster() -> None:
    gm, ctx = _read(SUM), PassContext(PRICED)
    assert FuseCollectives().run(gm, ctx)
    assert_expected_inline(_calls(gm), """\
%mm: f32[4096, 4096] {dp:P(sum), tp:R} = mm(%x, %w)
%reshard: f32[4096, 4096] {dp:S(0), tp:R} = reshard(%mm)
%narrow: bf16[4096, 4096] {dp:S(0), tp:R} = prims.convert_element_type(%reshard, bf16)
%reshard_1: bf16[4096, 4096] {dp:R, tp:R} = reshard(%narrow)""")
    for text, mesh in ((SUM, MESH), (SUM.replace("4096", "8"), PRICED)):  # unknown devices; two messages of a few bytes
        assert not FuseCollectives().run(_read(text), PassContext(mesh))


@pytest.mark.parametrize("text", [CASTS, MOVES, SUM])
def test_the_numbers_are_the_same(text: str) -> None:
    generator, results = torch.Generator().manual_seed(0), list[list[tuple[torch.Tensor, ...]]]()
    nodes = placeholders(_read(text).graph)
    values = [torch.randint(-4, 5, tuple(tensor_of(node).shape), generator=generator) for node in nodes]
    for passes in ((), (FuseCollectives(), CancelReshards())):
        gm = _read(text)
        lowered: tuple[Pass, ...] = (*passes, LowerReshards(), Localize())
        layouts = [layout_of(node) for node in placeholders(gm.graph)]
        PassManager(lowered).run(gm, PassContext(PRICED))
        given = [
            [
                local_part(value.to(tensor_of(node).dtype), layout, MESH, at)
                for value, node, layout in zip(values, nodes, layouts, strict=True)
            ]
            + [torch.tensor([at[MESH.index("tp")]])] * (len(placeholders(gm.graph)) - len(values))
            for at in MESH.coordinates()
        ]
        results.append(run_ranks(gm, MESH, given))
    for mine, theirs in zip(*results, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
def test_sums_of_activations_move_in_the_dtype_of_the_model_and_gradients_in_that_of_their_reduction() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, args = step_of(TINY, 2, TINY.seq)
    options = Options(recipe="fsdp+megatron", mixed_precision=policy)
    graph = make_plan(PlanRequest(model, args, {}, Mesh("dp=2,tp=2"), options)).graph.graph
    reduced = {"dp": set[torch.dtype](), "tp": set[torch.dtype]()}
    for node in graph.nodes:
        transfer = transfer_of(node)
        if transfer is not None and transfer.kind == "reduce_scatter":
            reduced[transfer.axes[0]].add(tensor_of(operands(node)[0]).dtype)
    assert reduced == {"dp": {torch.float32}, "tp": {torch.bfloat16}}
