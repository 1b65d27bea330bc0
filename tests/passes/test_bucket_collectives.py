"""Buckets that would have to wait for each other."""

from __future__ import annotations

from collections import Counter

import torch

from autoshard.debug.rank_interpreter import run_ranks
from passes.base import PassContext
from passes.bucket_collectives import BucketCollectives
from passes.ir.graph import placeholders, tensor_of, transfer_of
from passes.ir.text import parse_graph
from passes.manager import PassManager
from passes.observers import Verifier

# One value is reduced over `a` and then scattered over `b`, the other the other way round.
CROSSING = """
mesh a=2,b=2
stage LOCAL
%x: f64[2, 3] {a:R, b:R} = input("x")
%y: f64[2, 3] {a:R, b:R} = input("y")
%all_reduce: f64[2, 3] = _c10d_functional.all_reduce(%x, "sum", "autoshard:a=2,b=2:a")
%wait_tensor: f64[2, 3] {a:R, b:R} = _c10d_functional.wait_tensor(%all_reduce)
%reduce_scatter: f64[1, 3] = _c10d_functional.reduce_scatter_tensor(%y, "sum", 2, "autoshard:a=2,b=2:b")
%wait_tensor_1: f64[1, 3] {a:R, b:R} = _c10d_functional.wait_tensor(%reduce_scatter)
%reduce_scatter_1: f64[1, 3] = _c10d_functional.reduce_scatter_tensor(%wait_tensor, "sum", 2, "autoshard:a=2,b=2:b")
%wait_tensor_2: f64[1, 3] {a:R, b:R} = _c10d_functional.wait_tensor(%reduce_scatter_1)
%all_reduce_1: f64[1, 3] = _c10d_functional.all_reduce(%wait_tensor_1, "sum", "autoshard:a=2,b=2:a")
%wait_tensor_3: f64[1, 3] {a:R, b:R} = _c10d_functional.wait_tensor(%all_reduce_1)
return output("0") %wait_tensor_2, output("1") %wait_tensor_3
"""


def test_reductions_in_opposite_order_are_not_joined() -> None:
    gm, mesh = parse_graph(CROSSING)
    generator = torch.Generator().manual_seed(0)
    given = [
        [torch.randn(tensor_of(n).shape, dtype=torch.float64, generator=generator) for n in placeholders(gm.graph)]
        for _ in range(mesh.size)
    ]
    want = run_ranks(gm, mesh, given)
    PassManager((BucketCollectives(),), (Verifier(),)).run(gm, PassContext(mesh))
    kinds = Counter(transfer.kind for node in gm.graph.nodes if (transfer := transfer_of(node)) is not None)
    assert kinds == {"all_reduce": 2, "reduce_scatter": 2}
    for one, other in zip(run_ranks(gm, mesh, given), want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
