"""Collectives in compiled code on real ranks: they give what the same graph gives op by op, for every dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Options, autoshard
from autoshard.compile.compiled import compile_split, split_program
from autoshard.runtime.process_groups import open_groups
from passes.ir.mesh import Mesh
from passes.ir.text import parse_graph
from tests.spawn import run_on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.gloo]

# Everything that moves is read twice: as it is, and turned to its opposite, where booleans differ from numbers.
MOVED = """
mesh dp=2
stage LOCAL
%x: f64[4, 8] = input("x")
%gt: b8[4, 8] = gt.Scalar(%x, 0)
%gather: b8[8, 8] = _c10d_functional.all_gather_into_tensor(%gt, 2, "autoshard:dp=2:dp")
%gathered: b8[8, 8] = _c10d_functional.wait_tensor(%gather)
%exchange: b8[4, 8] = _c10d_functional.all_to_all_single(%gt, [2, 2], [2, 2], "autoshard:dp=2:dp")
%exchanged: b8[4, 8] = _c10d_functional.wait_tensor(%exchange)
%reduced: b8[4, 8] = _c10d_functional.all_reduce(%gt, "max", "autoshard:dp=2:dp")
%some: b8[4, 8] = _c10d_functional.wait_tensor(%reduced)
%scatter: b8[2, 8] = _c10d_functional.reduce_scatter_tensor(%gt, "max", 2, "autoshard:dp=2:dp")
%scattered: b8[2, 8] = _c10d_functional.wait_tensor(%scatter)
%send: b8[4, 8] = autoshard.send(%gt, 1, "autoshard:dp=2:dp")
%sent: b8[4, 8] = _c10d_functional.wait_tensor(%send)
%cat: b8[22, 8] = cat([%gathered, %exchanged, %some, %scattered, %sent])
%left_out: b8[22, 8] = bitwise_not(%cat)
%zero: f32[] = full([], 0.0)
%one: f32[] = full([], 1.0)
%where: f32[22, 8] = where.self(%left_out, %one, %zero)
%row: f64[8]<1> = select.int(%x, 0, 0)
%product: f64[22, 8] = mul.Tensor(%row, %left_out)
%chosen: f64[8, 8] = where.self(%gathered, %row, %zero)
return output("chosen") %chosen, output("product") %product, output("where") %where, output("sent") %sent
"""

# Few rows are reduced in one loop, whose masks stand beside each other; those of the rank are compared with what returns.
COMPARED = """
mesh dp=2
stage LOCAL
%x: f64[2, 8] = input("x")
%gt: b8[2, 8] = gt.Scalar(%x, 0)
%gather: b8[4, 8] = _c10d_functional.all_gather_into_tensor(%gt, 2, "autoshard:dp=2:dp")
%gathered: b8[4, 8] = _c10d_functional.wait_tensor(%gather)
%send: b8[2, 8] = autoshard.send(%gt, 1, "autoshard:dp=2:dp")
%sent: b8[2, 8] = _c10d_functional.wait_tensor(%send)
%most: (b8[8], i64[8]) = max.dim(%gathered, 0)
%first: i64[8] = getitem(%most, 1)
%least: (b8[8], i64[8]) = min.dim(%gathered, 0)
%last: i64[8] = getitem(%least, 1)
%eq: b8[2, 8] = eq.Tensor(%sent, %gt)
%le: b8[2, 8] = le.Tensor(%gt, %sent)
%larger: b8[2, 8] = gt.Tensor(%sent, %gt)
%cat: b8[6, 8] = cat([%eq, %le, %larger])
return output("first") %first, output("last") %last, output("compared") %cat
"""


def test_booleans_stay_booleans() -> None:
    for found, expected in run_on_ranks(_moved, 2):
        assert found == expected
        assert {1.0, 0.0} == {value for row in found[2] for value in row}


def _moved(rank: int) -> tuple[Any, Any]:
    """Return what compiled code gives, and what the graph gives op by op."""
    open_groups(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), Mesh("dp=2"), [("dp",)])
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    gm, _ = parse_graph(MOVED.strip())
    compiled, eager = (compile_split(split_program(gm, mode=mode), mode=mode) for mode in ("inductor", "eager"))
    found, expected = compiled.forward([x])[0], eager.forward([x])[0]
    assert [value.dtype for value in found] == [torch.float64, torch.float64, torch.float32, torch.bool]
    return [value.tolist() for value in found], [value.tolist() for value in expected]


def test_booleans_that_return_are_compared_with_others() -> None:
    for found, expected in run_on_ranks(_compared, 2):
        assert found == expected


def _compared(rank: int) -> tuple[Any, Any]:
    """Return what compiled code gives, and what the graph gives op by op."""
    open_groups(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), Mesh("dp=2"), [("dp",)])
    x = torch.tensor([[1.0, -1, 1, -1, -1, 1, 1, -1], [-1, 1, 1, -1, 1, -1, 1, -1]], dtype=torch.float64)
    gm, _ = parse_graph(COMPARED.strip())
    compiled, eager = (compile_split(split_program(gm, mode=mode), mode=mode) for mode in ("inductor", "eager"))
    found, expected = compiled.forward([x if rank == 0 else -x])[0], eager.forward([x if rank == 0 else -x])[0]
    return [value.tolist() for value in found], [value.tolist() for value in expected]


class Masked(nn.Module):
    """Adds up what a mask, looked up by position in the batch, leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        keep = (x[:, 0] > 0)[order]
        return (x * self.weight * ~keep[:, None]).sum()


def test_a_gathered_mask_is_one_device_s() -> None:
    for found, expected in run_on_ranks(_masked, 2):
        assert found == pytest.approx(expected, rel=1e-12)


def _masked(rank: int) -> tuple[list[float], list[float]]:
    """Return loss and gradient, and those of one device."""
    torch.manual_seed(0)
    x, order = torch.randn(8, 6, dtype=torch.float64), torch.randperm(8)
    one, mesh = Masked(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    sharded = autoshard(Masked(), mesh, args=(x, order), options=Options(recipe="fsdp"))
    expected, found = one(x, order), sharded(*sharded.shard(x, order))
    expected.backward()
    found.backward()
    assert one.weight.grad is not None
    gradient = sharded.weight.grad.full_tensor()
    return [found.item(), *gradient.tolist()], [expected.item(), *one.weight.grad.tolist()]
