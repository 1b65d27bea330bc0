"""Compiled code reads a value before or after it writes into it, as the graph says: Inductor alone gives wrong numbers here."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from autoshard import Options, autoshard
from autoshard.compile.compiled import compile_split, split_program
from passes.ir.text import parse_graph
from tests.spawn import run_on_ranks

PERMUTED = """
mesh dp=2
stage LOCAL
%x: f64[8, 4] = input("x")
%index: i64[8] = input("index")
%doubled: f64[8, 4] = mul.Tensor(%x, 2)
%rows: f64[8, 4] = view({rows})
%put: f64[8, 4] = index_put(%doubled, [%index], %rows)
%total: f64[4] = sum.dim_IntList(%put, [0])
return output("put") %put, output("total") %total
"""


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["%doubled, [8, 4]", "%x, [8, 4]"])
def test_rows_are_read_before_they_are_written(rows: str) -> None:
    gm, _ = parse_graph(PERMUTED.format(rows=rows).strip())
    x, index = torch.randn(8, 4, dtype=torch.float64), torch.arange(8).flip(0)
    compiled, eager = (compile_split(split_program(gm, mode=mode), mode=mode) for mode in ("inductor", "eager"))
    found, expected = compiled.forward([x, index])[0], eager.forward([x, index])[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Pooled(nn.Module):
    """Takes the maxima around pixels where `mask` says so: their gradients are added up by a scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 5, 3, padding=1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.where(mask, y, F.max_pool2d(y, 3, 1, 1))


@pytest.mark.slow
def test_a_gradient_is_read_after_a_scatter_wrote_it(one_rank: DeviceMesh) -> None:
    """In torch 2.13, Inductor fused the loop that reads it with the one that fills it with zeros before the scatter."""
    torch.manual_seed(0)
    one, x, mask = Pooled(), torch.randn(1, 4, 6, 7), torch.rand(1, 5, 6, 7) > 0.5
    sharded = autoshard(deepcopy(one), one_rank, (x, mask), options=Options(progress=False))
    for model in (one, sharded):
        model(x, mask).square().mean().backward()
    for name, expected in one.named_parameters():
        gradient = sharded.get_parameter(name).grad
        assert isinstance(gradient, DTensor) and expected.grad is not None
        torch.testing.assert_close(gradient.full_tensor(), expected.grad)


class Products(nn.Module):
    """Multiplies images whose channels come last by vectors: sums along one dim of what is read along another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 3, 1, 2)
        v = x * (torch.erf(x * self.scale) + 1)
        vectors, images = F.pad(v.permute(3, 2, 1, 0), (0, 0, 0, 14), value=0.5), F.pad(v, (0, 0, 0, 0, 0, 14), value=0.5)
        return torch.matmul(images, vectors)


def _error_of_products(rank: int) -> float:
    torch.manual_seed(0)
    one, x = Products(), torch.randn(1, 18, 18, 4)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    sharded = autoshard(deepcopy(one), mesh, (x,), options=Options(progress=False))
    with torch.no_grad():
        return float((sharded(x) - one(x)).abs().max())


@pytest.mark.gloo
@pytest.mark.slow
def test_the_last_tile_of_a_reduction_writes_as_many_results_as_it_has() -> None:
    """Inductor wrote 16, over other results and behind the end of the tensor, so that the process may abort."""
    assert run_on_ranks(_error_of_products, 1)[0] < 1e-4
