"""Collectives that are not joined: those that would have to wait for each other, and those that reduce otherwise."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from autoshard import Mesh, Options, check
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


SUMS_AND_MAXIMA = """
mesh dp=2
stage LOCAL
%x: f64[3] {dp:R} = input("x")
%y: f64[2] {dp:R} = input("y")
%z: f64[4] {dp:R} = input("z")
%all_reduce: f64[3] = _c10d_functional.all_reduce(%x, "sum", "autoshard:dp=2:dp")
%wait_tensor: f64[3] {dp:R} = _c10d_functional.wait_tensor(%all_reduce)
%all_reduce_1: f64[2] = _c10d_functional.all_reduce(%y, "max", "autoshard:dp=2:dp")
%wait_tensor_1: f64[2] {dp:R} = _c10d_functional.wait_tensor(%all_reduce_1)
%all_reduce_2: f64[4] = _c10d_functional.all_reduce(%z, "sum", "autoshard:dp=2:dp")
%wait_tensor_2: f64[4] {dp:R} = _c10d_functional.wait_tensor(%all_reduce_2)
return output("0") %wait_tensor, output("1") %wait_tensor_1, output("2") %wait_tensor_2
"""


@pytest.mark.parametrize(("hardware", "sums"), [(None, 1), ("h100", 2)])  # a copy takes longer than such a small message
def test_sums_are_joined_with_sums_alone(hardware: str | None, sums: int) -> None:
    gm, _ = parse_graph(SUMS_AND_MAXIMA)
    mesh = Mesh("dp=2", hardware=hardware)
    given = [[torch.full(tensor_of(n).shape, float(rank + 1)).double() for n in placeholders(gm.graph)] for rank in range(2)]
    PassManager((BucketCollectives(),), (Verifier(),)).run(gm, PassContext(mesh))
    sent = [node.args[1] for node in gm.graph.nodes if transfer_of(node) is not None]
    assert (sent.count("sum"), sent.count("max")) == (sums, 1)
    for results in run_ranks(gm, mesh, given):
        assert [set(one.tolist()) for one in results] == [{3.0}, {2.0}, {3.0}]


def test_messages_without_elements_are_sent_apart() -> None:
    gm, mesh = parse_graph(SUMS_AND_MAXIMA.replace("f64[2]", "f64[0, 2]").replace('"max"', '"sum"'))
    PassManager((BucketCollectives(),), (Verifier(),)).run(gm, PassContext(mesh))
    assert sum(transfer_of(node) is not None for node in gm.graph.nodes) == 2
    for results in run_ranks(gm, mesh, [[torch.ones(3).double(), torch.ones(0, 2).double(), torch.ones(4).double()]] * 2):
        assert [one.tolist() for one in results] == [[2.0] * 3, [], [2.0] * 4]


class Measured(nn.Module):
    """Returns a loss, with the largest value and the product of values, which are reduced otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.layer(x)
        return y.square().mean(), y.abs().max().detach(), x.prod(0), x.mean(0), x.amin(0)


@pytest.mark.parametrize("recipe", ["ddp", "fsdp"])
def test_metrics_are_reduced_as_each_is_defined(recipe: str) -> None:
    assert check(Measured(), "dp=2", (torch.rand(6, 6) + 0.5,), options=Options(recipe=recipe, progress=False))
