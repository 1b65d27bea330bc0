"""Chunks of a collective and of the products beside it compute what the whole did, and are made only where they pay."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from autoshard.compile import split_program
from autoshard.options import Options
from passes.base import PassContext
from passes.cost.from_graph import program_of_graph
from passes.cost.schedule import schedule
from passes.decompose_matmuls import WORTH, DecomposeMatmuls
from passes.ir.chunks import sites_in, split
from passes.ir.graph import note_of, origin_of, transfer_of
from passes.ir.mesh import Mesh
from passes.ir.text import format_graph, parse_graph
from passes.ranks import run_ranks
from tests.models import build
from tests.spmd.oracle import plan_ranks

GROUP = '"autoshard:tp=2:tp"'
MESH = Mesh("tp=2", hardware="h100")


def _read(text: str) -> GraphModule:
    return parse_graph(f"mesh tp=2\nstage LOCAL\n{text.strip()}")[0]


def _gather(before: int, behind: int, width: int, *, kept: bool) -> str:
    """x @ w and x @ v, where rows of x are gathered [before, 2, behind]."""
    rows = before * behind
    returned = ', output("2") %whole' if kept else ""
    return f"""
%x: f64[{rows}, {width}] = input("x")
%w: f64[{width}, 3] = parameter("w")
%v: f64[{width}, 5] = parameter("v")
%gather: f64[{2 * rows}, {width}] = _c10d_functional.all_gather_into_tensor(%x, 2, {GROUP})
%wait: f64[{2 * rows}, {width}] = _c10d_functional.wait_tensor(%gather)
%split: f64[2, {before}, {behind}, {width}] = view(%wait, [2, {before}, {behind}, {width}])
%placed: f64[{before}, 2, {behind}, {width}]<{behind * width}, {rows * width}, {width}, 1> = permute(%split, [1, 0, 2, 3])
%copied: f64[{before}, 2, {behind}, {width}] = clone(%placed, memory_format=torch.contiguous_format)
%whole: f64[{2 * rows}, {width}] = view(%copied, [{2 * rows}, {width}])
%mm: f64[{2 * rows}, 3] = mm(%whole, %w)
%mm_1: f64[{2 * rows}, 5] = mm(%whole, %v)
return output("0") %mm, output("1") %mm_1{returned}
"""


def _scatter(before: int, behind: int, width: int, *, kept: bool) -> str:
    """The sum of x @ w and, if `kept`, y @ w in a wider dtype, whose rows [before, 2, behind] are parted."""
    rows = 2 * before * behind
    source, dtype = ("wide", "f64") if kept else ("mm", "f32")
    wide = f"""
%mm_1: f32[{rows}, {width}] = mm(%y, %w)
%total: f32[{rows}, {width}] = add.Tensor(%mm, %mm_1)
%shaped: f32[{before}, {2 * behind}, {width}] = view(%total, [{before}, {2 * behind}, {width}])
%wide: f64[{before}, {2 * behind}, {width}] = prims.convert_element_type(%shaped, f64)"""
    strides = f"<{behind * width}, {2 * behind * width}, {width}, 1>"
    return f"""
%x: f32[{rows}, 3] = input("x")
%y: f32[{rows}, 3] = input("y")
%w: f32[3, {width}] = parameter("w")
%mm: f32[{rows}, {width}] = mm(%x, %w){wide if kept else ""}
%split: {dtype}[{before}, 2, {behind}, {width}] = view(%{source}, [{before}, 2, {behind}, {width}])
%placed: {dtype}[2, {before}, {behind}, {width}]{strides} = permute(%split, [1, 0, 2, 3])
%copied: {dtype}[2, {before}, {behind}, {width}] = clone(%placed, memory_format=torch.contiguous_format)
%flat: {dtype}[2, {rows // 2 * width}] = view(%copied, [2, {rows // 2 * width}])
%reduce: {dtype}[1, {rows // 2 * width}] = _c10d_functional.reduce_scatter_tensor(%flat, "sum", 2, {GROUP})
%wait: {dtype}[1, {rows // 2 * width}] = _c10d_functional.wait_tensor(%reduce)
%part: {dtype}[{before}, {behind}, {width}] = view(%wait, [{before}, {behind}, {width}])
return output("0") %part
"""


def _all_reduce(before: int, behind: int, width: int, *, kept: bool) -> str:
    """The sum of x @ w, in a wider dtype if `kept`, on all ranks."""
    rows = before * behind
    source, wide = ("%wide", f"\n%wide: f64[{rows}, {width}] = prims.convert_element_type(%mm, f64)") if kept else ("%mm", "")
    dtype = "f64" if kept else "f32"
    return f"""
%x: f32[{rows}, 3] = input("x")
%w: f32[3, {width}] = parameter("w")
%mm: f32[{rows}, {width}] = mm(%x, %w){wide}
%reduce: {dtype}[{rows}, {width}] = _c10d_functional.all_reduce({source}, "sum", {GROUP})
%wait: {dtype}[{rows}, {width}] = _c10d_functional.wait_tensor(%reduce)
return output("0") %wait
"""


def _inputs(gm: GraphModule) -> list[list[torch.Tensor]]:
    """Small integers, of which sums are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return [
        [torch.randint(-4, 5, tuple(value.shape), generator=generator).to(value.dtype) for value in values]
        for _ in range(MESH.size)
    ]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", [_gather, _scatter, _all_reduce])
@pytest.mark.parametrize(
    ("before", "behind", "count"), [(1, 8, 2), (1, 8, 4), (4, 3, 2), (4, 3, 4), (3, 4, 2), (3, 4, 4), (2, 1, 2), (2, 6, 4)]
)
def test_chunks_give_the_rows_in_their_order(
    kind: Callable[..., str], kept: bool, before: int, behind: int, count: int
) -> None:
    gm = _read(kind(before, behind, 6, kept=kept))
    given = _inputs(gm)
    whole = run_ranks(gm, MESH, given)
    (site,) = sites_in(gm)
    cut = site.cut(count)
    assert cut is not None and cut.count == count
    split(site, cut, "test")
    gm.graph.lint()
    parse_graph(format_graph(gm, MESH))
    assert sum(transfer_of(node) is not None for node in gm.graph.nodes) == count
    for mine, theirs in zip(run_ranks(gm, MESH, given), whole, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)


def _split_all(gm: GraphModule, count: int) -> int:
    sites = [(site, cut) for site in sites_in(gm) if (cut := site.cut(count)) is not None]
    for site, cut in sites:
        split(site, cut, "decompose_matmuls")
    gm.graph.lint()
    return len(sites)


@pytest.mark.parametrize(
    ("name", "axes", "recipe", "counts"),
    [("llama", "dp=2,tp=2", "fsdp+megatron", (9, 24)), ("gpt", "tp=2", "megatron", (9, 9))],
)
def test_a_model_in_chunks_computes_the_same(name: str, axes: str, recipe: str, counts: tuple[int, int]) -> None:
    ranks = plan_ranks(build(name), Mesh(axes), Options(recipe=recipe))
    given = split_program(ranks.planned.graph, mode="eager")
    chunked = split_program(ranks.planned.graph, mode="eager")
    assert chunked.backward is not None
    assert (_split_all(chunked.forward, 2), _split_all(chunked.backward, 2)) == counts
    for node in (*chunked.forward.graph.nodes, *chunked.backward.graph.nodes):
        if note_of(node).startswith("decompose_matmuls"):
            assert origin_of(node).file and origin_of(node).line and transfer_of(node), node
            assert re.fullmatch(r"decompose_matmuls: part [12] of 2, \w+: .+", note_of(node))
    for mine, theirs in zip(ranks.run_split(chunked), ranks.run_split(given), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def _linear(rows: int, inner: int, *, beside: bool = False, kept: bool = False) -> str:
    """Rows are gathered for a product of `inner` columns; `beside`, another one can be computed meanwhile."""
    other = "%square: bf16[8192, 8192] = mm(%v, %v)" if beside else ""
    returned = [f'output("{n}") %{n}' for n, there in (("mm", True), ("square", beside), ("whole", kept)) if there]
    return f"""
%x: bf16[{rows}, 4096] = input("x")
%v: bf16[8192, 8192] = input("v")
%w: bf16[4096, {inner}] = parameter("w")
%gather: bf16[{2 * rows}, 4096] = _c10d_functional.all_gather_into_tensor(%x, 2, {GROUP})      # | solve: gathered
{other}
%whole: bf16[{2 * rows}, 4096] = _c10d_functional.wait_tensor(%gather)
%mm: bf16[{2 * rows}, {inner}] = mm(%whole, %w)
return {", ".join(returned)}
"""


def _decided(text: str, mesh: Mesh = MESH, memory_limit: int = 1 << 40) -> tuple[GraphModule, str]:
    gm, ctx = _read(text), PassContext(mesh)
    changed = DecomposeMatmuls(memory_limit).run(gm, ctx)
    assert changed == (len([node for node in gm.graph.nodes if transfer_of(node)]) > 1)
    return gm, "\n".join(map(str, ctx.remarks))


def test_what_is_split_and_what_is_left_whole_says_why() -> None:
    small = Mesh("tp=2")
    told = [
        _decided(_linear(2048, 1024))[1],
        _decided(_linear(2048, 64))[1],
        _decided(_linear(2048, 1024, beside=True))[1],
        _decided(_linear(16384, 2048, kept=True), memory_limit=1)[1],
        _decided(_linear(2047, 4096))[1],
        _decided(_linear(2048, 4096), small)[1],
    ]
    assert_expected_inline("\n".join(told), """\
decompose_matmuls: split: 2 chunks save 6.79 us of 131 us around it [%gather]
decompose_matmuls: left whole: 88.1 us by itself, 96.9 us in 2 chunks [%gather]
decompose_matmuls: left whole: all but 0 s of 1.55 ms around it is hidden [%gather]
decompose_matmuls: left whole: all that are worth it in chunks take 816.0 MiB at the peak, over 656.0 MiB [%gather]
decompose_matmuls: left whole: its 1 x 2047 rows are not divided by 2 [%gather]
decompose_matmuls: left whole: the figures of this device are not known [%gather]""")


def test_chunks_are_never_predicted_to_be_slower_and_say_who_made_them() -> None:
    for rows, inner in ((512, 8192), (2048, 4096), (4096, 2048), (8192, 512)):
        given = schedule(program_of_graph(_read(_linear(rows, inner)), MESH)).timeline
        gm, _ = _decided(_linear(rows, inner))
        found = schedule(program_of_graph(gm, MESH)).timeline
        collectives = [node for node in gm.graph.nodes if transfer_of(node)]
        assert found.step_time <= (1 - WORTH * (len(collectives) > 1)) * given.step_time
        if len(collectives) > 1:
            assert [note_of(node) for node in collectives] == [
                f"decompose_matmuls: part {n} of {len(collectives)}, solve: gathered" for n in range(1, len(collectives) + 1)
            ]
