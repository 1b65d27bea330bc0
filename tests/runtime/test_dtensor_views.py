"""Parameters and gradients are changed and read as on one device; views are refused where torch would mix up their elements."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autoshard.runtime.parameters import distributed_copy, distributed_parameter, place_of
from autoshard.runtime.process_groups import open_groups
from passes.ir.layout import Layout, R
from passes.ir.layout import Shard as Split
from tests.spawn import run_on_ranks

FOUR_RANKS = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.runtime.test_dtensor_views import check

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
check(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
"""


def check(mesh: DeviceMesh) -> None:
    """Check which views and data of DTensors are refused once a module is sharded."""
    distributed_copy(nn.Linear(8, 8), place_of(mesh), None)
    for shape, dim in (((4, 8), 1), ((2, 4, 8), 1), ((2, 4, 8), 2)):
        with pytest.raises(RuntimeError, match=rf"mix up .* dim {dim} of .* into others"):
            _on_two_axes(mesh, shape, dim).flatten()
    for shape, dim in (((4, 8), 0), ((1, 8), 1)):
        _on_two_axes(mesh, shape, dim).flatten()
    weight = _on_two_axes(mesh, (2, 4, 8), 2)
    with pytest.raises(RuntimeError) as error:
        weight.data = weight[0]
    assert str(error.value) == (
        "a tensor of (4, 8) is assigned to the data of a DTensor of (2, 4, 8); assign a DTensor or the whole tensor; to change "
        "the shape of a parameter, assign a new nn.Parameter and build the optimizer again"
    )
    _on_two_axes(mesh, (2, 4, 8), 2).flatten(0, 1)
    _on_two_axes(mesh, (4, 8), 1).unflatten(0, (2, 2))


def _on_two_axes(mesh: DeviceMesh, shape: tuple[int, ...], dim: int) -> DTensor:
    """Return a DTensor of which two axes shard a dim, the second first, as tensor parallelism with FSDP does."""
    placements = _StridedShard(dim, split_factor=2), Shard(dim)
    local, whole = torch.zeros(shape).chunk(4, dim)[0], torch.zeros(shape)
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride(), run_check=False)


def test_views_and_data_that_torch_gets_wrong_are_refused() -> None:
    subprocess.run([sys.executable, "-c", FOUR_RANKS], check=True)


def _swap_rows(weight: torch.Tensor) -> None:
    weight[1:3] = weight[3:5]


def _set_row(weight: torch.Tensor) -> None:
    weight[0] = 0


def _set_data(weight: torch.Tensor) -> None:
    weight.data = weight.data.clamp(3, 20) * 2


def _set_data_of_another(weight: torch.Tensor) -> None:
    """Set data that is laid out in another way, and change it after that."""
    weight.data = weight.data @ torch.ones_like(weight[:6]).detach()
    weight.data.mul_(2)


def _set_whole_data(weight: torch.Tensor) -> None:
    weight.data = torch.arange(weight.numel(), dtype=weight.dtype).view(weight.shape) * 3


def _set_data_for_a_while(weight: torch.Tensor) -> None:
    """Change a weight and put it back, as an average of weights does for an evaluation."""
    kept = weight.data
    weight.data = weight.data * 2
    weight.mul_(2)
    weight.data = kept


def _add_to_row(weight: torch.Tensor) -> None:
    weight[5] += 1


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "row": lambda weight: weight[0].zero_(),
    "row set": _set_row,
    "row added to": _add_to_row,
    "rows swapped": _swap_rows,
    "rows": lambda weight: weight[:5].mul_(0.5),
    "columns": lambda weight: weight[:, 2:4].add_(1),
    "data": lambda weight: weight.data[3].fill_(7),
    "data set": _set_data,
    "data of another layout": _set_data_of_another,
    "data from a whole tensor": _set_whole_data,
    "data put back": _set_data_for_a_while,
    "chunk": lambda weight: weight.chunk(2)[0].zero_(),
    "parts": lambda weight: [part.mul_(i + 2) for i, part in enumerate(weight.split(3, 1))],
    "view of a view": lambda weight: weight[2:6][1].zero_(),
    "transposed": lambda weight: weight.t()[0].zero_(),
    "diagonal": lambda weight: weight.diagonal().zero_(),
    "whole": lambda weight: weight.mul_(3),
    "out": lambda weight: torch.neg(weight[1], out=weight[6]),
}


NUMBERS: dict[str, Callable[[torch.Tensor], object]] = {
    "norm": lambda weight: round(weight.norm().item(), 3),
    "largest": lambda weight: float(weight.max()),
    "mean": lambda weight: weight.mean().item(),
    "any": lambda weight: bool((weight > 40).any()),
    "count": lambda weight: int((weight > 3).sum()),
    "all are finite": lambda weight: "yes" if torch.isfinite(weight).all() else "no",
    "format": lambda weight: f"{weight.norm():.3f} and {weight[3, 2]}",
    "scalar": lambda weight: weight.data[6:7, 5:6].item(),
}


def _wrong(rank: int) -> list[str]:
    """Return the changes in place after which a DTensor is not what a plain tensor is, and numbers that are read wrongly."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # each of two axes gathers
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    place, wrong = place_of(device_mesh), []
    layouts = (Layout((Split(0), R)), 7), (Layout((Split(0), Split(1))), 7), (Layout((Split(0, outer=2), Split(0))), 8)
    distributed_copy(nn.Linear(8, 8), place, None)  # once a module is sharded, DTensors are corrected
    open_groups(device_mesh, place.mesh)
    for layout, rows in layouts:
        for name, change in CHANGES.items():
            for is_leaf in (True, False):
                whole = nn.Parameter(torch.arange(rows * 6.0).view(rows, 6), requires_grad=is_leaf)
                parts = distributed_parameter(whole, place, layout)
                numbers = {} if name != "row" else NUMBERS
                wrong += [f"{one} of {layout}" for one, read in numbers.items() if read(parts) != read(whole)]
                with torch.no_grad():
                    change(whole)
                    change(parts)
                if not torch.equal(parts.full_tensor(), whole):  # type: ignore[attr-defined]
                    wrong.append(f"{name} of {layout}")
    return wrong


@pytest.mark.slow
@pytest.mark.gloo
def test_dtensors_are_changed_and_read_as_on_one_device() -> None:
    """DTensor gathers rows of several ranks into a copy, and changed that alone: a zeroed row of an embedding stayed.

    A number, such as the norm of a gradient, was that of this rank's part.
    """
    assert run_on_ranks(_wrong, 4) == [[]] * 4
