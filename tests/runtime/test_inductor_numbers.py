"""Compare compiled models with one device where torch's Inductor is wrong on CPUs, or raises."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from autoshard import Options, autoshard
from tests.spawn import run_on_ranks


def scaled_image(x: Tensor, weight: Tensor) -> Tensor:
    """Scale pixels by their minimum, which was 0, and those of rows (pytorch#191499)."""
    low, high = x.amin(), x.max(-1, keepdim=True)
    return (x - low) / (high.values - low).float() * weight[0, 0] + high.indices + x.argmin(0)


def scaled_bytes(x: Tensor, weight: Tensor) -> Tensor:
    """Add maxima of negative numbers, which were 0, and where they are (pytorch#191499)."""
    return (x.max() + x.amax(1) + x.argmax()) * weight[0, 0]


def distant_places(x: Tensor, weight: Tensor) -> Tensor:
    """Add numbers whose step is large: its products were of 32 bits (pytorch#175966)."""
    return (torch.arange(40) * 10**9 + x).double() * weight[0, 0]


def masked_weights(x: Tensor, weight: Tensor) -> Tensor:
    """Weight by a mask that indices open: Inductor raised a KeyError (pytorch#196570)."""
    mask, places = torch.full((8, 8), -10000.0), torch.arange(8)
    mask[places[None], places[:, None]] = 0
    return torch.softmax(x * weight[:8] + mask, -1)


def added_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Add rows to one row that stands for all: each was added to all (pytorch#188084)."""
    return torch.zeros(1).expand(5, 7).index_put((x,), weight[:2, :7], accumulate=True) * 2


def centred_columns(x: Tensor, weight: Tensor) -> Tensor:
    """Subtract the means of rows that are kept for the next loop: those of other rows were read (pytorch#185702)."""
    column = x[..., 16]
    positive, erf = F.softplus(column) + 1e-4, torch.erf(column * weight[1])
    logs = torch.special.xlogy(positive, F.softplus(weight) + 1e-4)
    total = torch.special.gammaln(positive + weight[0].abs()) + erf + logs
    return torch.stack([total - total.mean(-1, keepdim=True), erf, logs], -1)


def counted_places(x: Tensor, weight: Tensor) -> Tensor:
    """Count in integers what was given as a float: counts were floats, of other numbers, and no indices (pytorch#189518)."""
    places = torch.ones(8).cumsum(0, dtype=torch.long) - 1
    return weight[0, places] * x + torch.full((8,), 0.3).cumsum(0, dtype=torch.long) + torch.ones(()).cumsum(0)


def products_with_zero(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply what is not finite by 0, which was 0 (pytorch#187580)."""
    return (x * 0).isnan() + weight[0]


def counted_elements(x: Tensor, weight: Tensor) -> Tensor:
    """Count elements up to the largest, where memory has another order: they were counted in that (pytorch#183082)."""
    turned, repeated = x.sub(0.4).square().t().contiguous(), (x[:, :1] * 100).to(torch.int8).expand(33, 65)
    places = turned.argmax(), turned.argmin(keepdim=True).sum(), repeated.argmax(), (x.exp() + 1).t().flatten().argmin()
    return torch.stack(places) * weight[0, 0]


PIXELS, BYTES = torch.arange(3 * 50 * 70) % 191 + 23, torch.arange(50 * 70) % 97 - 113
CASES: dict[Callable[[Tensor, Tensor], Tensor], Tensor] = {
    scaled_image: PIXELS.view(3, 50, 70).to(torch.uint8),
    scaled_bytes: BYTES.view(50, 70).to(torch.int8),
    distant_places: torch.zeros(40, dtype=torch.int64),
    masked_weights: torch.linspace(-1, 1, 64).view(8, 8),
    added_rows: torch.tensor([0, 2]),
    counted_places: torch.linspace(-1, 1, 8),
    products_with_zero: 1 / torch.arange(8).float(),
    counted_elements: (torch.arange(33 * 17) * 97 % 561).view(33, 17) / 561,
    centred_columns: torch.linspace(-2, 2, 32 * 8 * 17).sin().view(32, 8, 17),
}


class Applied(nn.Module):
    """Applies a function to its input and a weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.linspace(0.5, 1.5, 256).view(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


@pytest.mark.slow
@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_compiled_numbers_are_those_of_one_device(
    function: Callable[[Tensor, Tensor], Tensor], one_rank: DeviceMesh
) -> None:
    _compare(Applied(function), CASES[function], one_rank)


def _compare(one: nn.Module, x: Tensor, mesh: DeviceMesh) -> None:
    sharded = autoshard(deepcopy(one), mesh, (x,), options=Options(progress=False))
    results = one(x), sharded(x)
    torch.testing.assert_close(*results)
    for result in results:
        result.square().mean().backward()
    for name, expected in one.named_parameters():
        gradient = sharded.get_parameter(name).grad
        assert isinstance(gradient, DTensor) and expected.grad is not None
        torch.testing.assert_close(gradient.full_tensor(), expected.grad, rtol=1e-4, atol=1e-5)


class Columns(nn.Module):
    """Sums up columns of an embedding, whose gradient is scattered from a transposed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.scale = nn.Embedding(40, 33), nn.Parameter(torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids).transpose(1, 2).cumsum(2) * self.scale


def _compare_with_threads(rank: int) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    _compare(Columns(), torch.randint(0, 40, (3, 24)), mesh)


@pytest.mark.gloo
@pytest.mark.slow
def test_threads_scatter_rows_to_their_places() -> None:
    """Inductor of torch 2.13 added rows to others, and behind the end of the gradient (pytorch#191837)."""
    run_on_ranks(_compare_with_threads, 1)
