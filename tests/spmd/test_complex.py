"""Collectives of complex numbers on real ranks: gloo and NCCL send real numbers only, so that they are sent as pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autoshard import Mesh, Options, autoshard, plan
from tests.spawn import run_on_ranks
from tests.spmd.oracle import relative_error

TOLERANCE = 1e-12  # relative, float64
READS: dict[str, Callable[[Tensor], Tensor]] = {  # what a model reads of a value whose batch is sharded
    "gather": lambda z: torch.fft.fft2(z),
    "scan": lambda z: z.cumsum(0),
    "conjugate": lambda z: z.conj().cumsum(0) + torch.fft.fft2(z.conj()),
    "sum": lambda z: z.sum(0),
    "scalar": lambda z: z.mean(),
    "product": lambda z: z.prod(0),
    "exchange": lambda z: z.flip(0),
}


class Spectrum(nn.Module):
    """Mixes the channels of complex values, by complex weights of which one has no dims."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.randn((), dtype=torch.complex128))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x @ self.weight * self.scale).abs().square().mean()


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_complex_values_train_as_on_one_device(mode: str) -> None:
    for errors in run_on_ranks(_errors, 2, mode):
        assert {name: error for name, error in errors.items() if error > TOLERANCE} == {}


def _errors(rank: int, mode: Any) -> dict[str, float]:
    """Return the relative errors of losses and gradients, of a batch that the ranks divide and of one that they do not."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), dict[str, float]()
    cases = [(name, "fsdp") for name in READS] + [("gather", "ddp")]  # parameters are sent alike, whatever is read
    if mode == "inductor":  # it compiles no complex numbers, but runs them
        cases = [("gather", "fsdp"), ("conjugate", "ddp")]
    for name, recipe in cases:
        torch.manual_seed(0)
        one = Spectrum(READS[name])
        torch.manual_seed(0)
        options = Options(recipe=recipe, compile=mode, progress=False)
        sharded = autoshard(Spectrum(READS[name]), mesh, options=options)
        for batch in (4, 3):
            x = torch.randn(batch, 6, dtype=torch.complex128).conj()  # only marked as a conjugate
            want, got = one(x), sharded(*sharded.shard(x))
            want.backward()
            got.backward()
            found[f"{name}, {recipe}, {batch}"] = relative_error(got.detach(), want.detach())
            for key, expected in one.named_parameters():
                gradient = sharded.get_parameter(key).grad
                assert isinstance(gradient, DTensor) and expected.grad is not None
                error = relative_error(*(torch.view_as_real(t) for t in (gradient.full_tensor(), expected.grad)))
                found[f"{name}, {recipe}, {batch}, {key}"] = error
    return found


def test_as_many_bytes_are_predicted_as_for_pairs() -> None:
    class Pairs(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight))

    x, weight = torch.randn(16, 6, dtype=torch.complex64), torch.randn(6, 8, dtype=torch.complex64)
    models = (Pairs(weight), Pairs(torch.view_as_real(weight).contiguous()))
    made = [plan(model, Mesh("dp=2", hardware="h100"), (x,), options=Options(recipe="fsdp")) for model in models]
    received = [[(one.kind, one.bytes) for one in each.collectives] for each in made]
    assert received[0] == received[1] != []
