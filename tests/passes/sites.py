"""Graphs of a collective and the products beside it, and small integers as their inputs."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from passes.ir.mesh import Mesh
from passes.ir.text import parse_graph

GROUP = '"autoshard:tp=2:tp"'
MESH = Mesh("tp=2", hardware="h100")


def read(text: str) -> GraphModule:
    return parse_graph(f"mesh tp=2\nstage LOCAL\n{text.strip()}")[0]


def gather(before: int, after: int, width: int, *, kept: bool) -> str:
    """Return x @ w and x @ v, where rows of x are gathered [before, 2, after]."""
    rows = before * after
    returned = ', output("2") %whole' if kept else ""
    return f"""
%x: f64[{rows}, {width}] = input("x")
%w: f64[{width}, 3] = parameter("w")
%v: f64[{width}, 5] = parameter("v")
%gather: f64[{2 * rows}, {width}] = _c10d_functional.all_gather_into_tensor(%x, 2, {GROUP})
%wait: f64[{2 * rows}, {width}] = _c10d_functional.wait_tensor(%gather)
%split: f64[2, {before}, {after}, {width}] = view(%wait, [2, {before}, {after}, {width}])
%placed: f64[{before}, 2, {after}, {width}]<{after * width}, {rows * width}, {width}, 1> = permute(%split, [1, 0, 2, 3])
%copied: f64[{before}, 2, {after}, {width}] = clone(%placed, memory_format=torch.contiguous_format)
%whole: f64[{2 * rows}, {width}] = view(%copied, [{2 * rows}, {width}])
%mm: f64[{2 * rows}, 3] = mm(%whole, %w)
%mm_1: f64[{2 * rows}, 5] = mm(%whole, %v)
return output("0") %mm, output("1") %mm_1{returned}
"""


def saved(before: int, after: int, width: int, *, kept: bool) -> str:
    """Return what `gather` does, where others read the rows before products do: the backward, and a call earlier than the view
    that products read."""
    text = gather(before, after, width, kept=kept)
    earlier = f"%twice: f64[{before}, 2, {after}, {width}] = mul.Tensor(%copied, 2)"
    return text.replace("%whole: ", f"{earlier}\n%whole: ", 1).rstrip() + ', output("3") %copied, output("4") %twice\n'


def scatter(before: int, after: int, width: int, *, kept: bool) -> str:
    """Return the sum of x @ w and, if `kept`, y @ w in a wider dtype, whose rows [before, 2, after] are parted."""
    rows = 2 * before * after
    source, dtype = ("wide", "f64") if kept else ("mm", "f32")
    wide = f"""
%mm_1: f32[{rows}, {width}] = mm(%y, %w)
%total: f32[{rows}, {width}] = add.Tensor(%mm, %mm_1)
%shaped: f32[{before}, {2 * after}, {width}] = view(%total, [{before}, {2 * after}, {width}])
%wide: f64[{before}, {2 * after}, {width}] = prims.convert_element_type(%shaped, f64)"""
    strides = f"<{after * width}, {2 * after * width}, {width}, 1>"
    return f"""
%x: f32[{rows}, 3] = input("x")
%y: f32[{rows}, 3] = input("y")
%w: f32[3, {width}] = parameter("w")
%mm: f32[{rows}, {width}] = mm(%x, %w){wide if kept else ""}
%split: {dtype}[{before}, 2, {after}, {width}] = view(%{source}, [{before}, 2, {after}, {width}])
%placed: {dtype}[2, {before}, {after}, {width}]{strides} = permute(%split, [1, 0, 2, 3])
%copied: {dtype}[2, {before}, {after}, {width}] = clone(%placed, memory_format=torch.contiguous_format)
%flat: {dtype}[2, {rows // 2 * width}] = view(%copied, [2, {rows // 2 * width}])
%reduce: {dtype}[1, {rows // 2 * width}] = _c10d_functional.reduce_scatter_tensor(%flat, "sum", 2, {GROUP})
%wait: {dtype}[1, {rows // 2 * width}] = _c10d_functional.wait_tensor(%reduce)
%part: {dtype}[{before}, {after}, {width}] = view(%wait, [{before}, {after}, {width}])
return output("0") %part
"""


def all_reduce(before: int, after: int, width: int, *, kept: bool) -> str:
    """Return the sum of x @ w, in a wider dtype if `kept`, on all ranks."""
    rows = before * after
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


def inputs(gm: GraphModule) -> list[list[torch.Tensor]]:
    """Return small integers, of which sums are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return [
        [torch.randint(-4, 5, tuple(value.shape), generator=generator).to(value.dtype) for value in values]
        for _ in range(MESH.size)
    ]
