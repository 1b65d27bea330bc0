"""Views of parameters and gradients: refused where torch would mix up their elements, written to and read as on one device."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autoshard.runtime.parameters import Place, distributed_copy, distributed_parameter, place_of
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
    """Check which views of DTensors are refused once a module is sharded."""
    distributed_copy(nn.Linear(8, 8), place_of(mesh), None)
    for shape, dim in (((4, 8), 1), ((2, 4, 8), 1), ((2, 4, 8), 2)):
        with pytest.raises(RuntimeError, match=rf"mix up .* dim {dim} of .* into others"):
            _on_two_axes(mesh, shape, dim).flatten()
    for shape, dim in (((4, 8), 0), ((1, 8), 1)):
        _on_two_axes(mesh, shape, dim).flatten()
    _on_two_axes(mesh, (2, 4, 8), 2).flatten(0, 1)
    _on_two_axes(mesh, (4, 8), 1).unflatten(0, (2, 2))
    text = (
        "the .data of a DTensor of shape (4, 8) takes a tensor of that shape, but this one is (2, 8); give the whole tensor or a "
        "DTensor, or replace the parameter by a new nn.Parameter"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        _on_two_axes(mesh, (4, 8), 1).data = torch.zeros(2, 8)


def _on_two_axes(mesh: DeviceMesh, shape: tuple[int, ...], dim: int) -> DTensor:
    """Return a DTensor of which two axes shard a dim, the second first, as tensor parallelism with FSDP does."""
    placements = _StridedShard(dim, split_factor=2), Shard(dim)
    local, whole = torch.zeros(shape).chunk(4, dim)[0], torch.zeros(shape)
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride(), run_check=False)


def test_views_that_torch_gets_wrong_are_refused() -> None:
    subprocess.run([sys.executable, "-c", FOUR_RANKS], check=True)


def _assign(weight: torch.Tensor) -> None:
    weight.data = weight.data * 2


def _assign_plain(weight: torch.Tensor) -> None:
    weight.data = torch.arange(weight.numel(), dtype=weight.dtype).view(weight.shape) * 3


def _assign_otherwise_laid_out(weight: torch.Tensor) -> None:
    weight.data = (weight.data.t() @ weight.data)[:1] + torch.zeros_like(weight)


def _assign_for_a_while(weight: torch.Tensor) -> None:
    """Change a weight and put it back, as an average of weights does for an evaluation."""
    kept = weight.data
    weight.data = weight.data * 2
    weight.mul_(2)
    weight.data = kept


def _swap_rows(weight: torch.Tensor) -> None:
    weight[1:3] = weight[3:5]


def _set_row(weight: torch.Tensor) -> None:
    weight[0] = 0


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
    "chunk": lambda weight: weight.chunk(2)[0].zero_(),
    "parts": lambda weight: [part.mul_(i + 2) for i, part in enumerate(weight.split(3, 1))],
    "view of a view": lambda weight: weight[2:6][1].zero_(),
    "transposed": lambda weight: weight.t()[0].zero_(),
    "diagonal": lambda weight: weight.diagonal().zero_(),
    "whole": lambda weight: weight.mul_(3),
    "data assigned": _assign,
    "data assigned, plain": _assign_plain,
    "data assigned, otherwise laid out": _assign_otherwise_laid_out,
    "data put back": _assign_for_a_while,
    "out": lambda weight: torch.neg(weight[1], out=weight[6]),
}


def _norm(weight: torch.Tensor) -> float:
    return weight.norm().item()


DRAWS: dict[str, Callable[[torch.Tensor], object]] = {
    "normal": lambda weight: weight.normal_(1, 2),
    "normal, of a generator": lambda weight: weight.normal_(generator=torch.Generator().manual_seed(3)),
    "uniform": lambda weight: nn.init.xavier_uniform_(weight),
    "truncated": lambda weight: nn.init.trunc_normal_(weight),
    "bernoulli": lambda weight: weight.bernoulli_(0.5),
    "like": lambda weight: weight.copy_(torch.randn_like(weight) + torch.rand_like(weight)),
    "integers like": lambda weight: weight.copy_(torch.randint_like(weight, 3, 9)),
    "chosen": lambda weight: weight.copy_(torch.bernoulli(torch.sigmoid(weight))),
    "dropout": lambda weight: weight.copy_(nn.functional.dropout(weight, 0.4)),
    "a part": lambda weight: weight[1:5].normal_(),
}

READS: dict[str, Callable[[torch.Tensor], float]] = {
    "sum": lambda weight: weight.sum().item(),
    "mean": lambda weight: float(weight.mean()),
    "norm": lambda weight: weight.norm().item(),
    "largest": lambda weight: float(weight.max()),
    "number of": lambda weight: int((weight > 9).sum()),
    "any": lambda weight: 1.0 if (weight == 40).any() else 0.0,
    "all": lambda weight: 1.0 if (weight < 40).all() else 0.0,
    "element": lambda weight: weight[6, 3].item(),
    "format": lambda weight: float(f"{weight.norm():.3f}") + float(f"{weight[3, 2]:g}"),
    "in a compiled function": lambda weight: torch.compile(_norm, backend="eager")(weight),
    "several": lambda weight: sum(part.norm().item() for part in weight.chunk(2)),
}

def _infinite_norm(weight: torch.Tensor) -> float:
    weight.grad = (weight * 2).detach()
    norm = nn.utils.clip_grad_norm_([weight], 5.0, norm_type=float("inf"))
    return norm.item() + weight.grad.sum().item()


EXTREMA: dict[str, Callable[[torch.Tensor], float]] = {
    "largest": lambda weight: weight.max().item(),
    "smallest": lambda weight: weight.abs().min().item(),
    "largest of rows": lambda weight: weight.amax(0).sum().item(),
    "smallest of columns": lambda weight: weight.amin(1, keepdim=True).sum().item(),
    "where the largest is": lambda weight: weight.argmax().item(),
    "where the smallest of columns is": lambda weight: weight.argmin(1).sum().item(),
    "largest row": lambda weight: weight.max(0).values.sum().item(),
    "clipped by the infinite norm": _infinite_norm,
    "norm of the least": lambda weight: torch.linalg.vector_norm(weight + 1, float("-inf")).item(),
    "largest of several": lambda weight: torch._foreach_max([weight, weight * 2])[1].item(),
    "in a compiled function": lambda weight: torch.compile(_largest, backend="eager")(weight),
    "sum": lambda weight: weight.sum().item(),
}


def _largest(weight: torch.Tensor) -> float:
    return weight.max().item()


LAYOUTS = (Layout((Split(0), R)), 7), (Layout((Split(0), Split(1))), 7), (Layout((Split(0, outer=2), Split(0))), 8)
FEW_ROWS = (
    *((Layout((Split(0), R)), rows) for rows in (1, 2)),
    (Layout((R, Split(0))), 1),
    *((Layout((Split(0), Split(1))), rows) for rows in (1, 2)),
)  # of most, some rank has none


def _wrong(rank: int) -> dict[str, list[str]]:
    """Return the changes, draws and reads whose result is not that of a plain tensor."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # each of two axes gathers
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    place = place_of(device_mesh)
    distributed_copy(nn.Linear(8, 8), place, None)  # once a module is sharded, DTensors are corrected
    open_groups(device_mesh, place.mesh)
    return {
        "changes": _wrong_changes(place, CHANGES),
        "draws": _wrong_changes(place, DRAWS),
        "reads": _wrong_reads(place, READS, LAYOUTS),
        "extrema": _wrong_reads(place, EXTREMA, FEW_ROWS),
    }


def _wrong_reads(
    place: Place, reads: Mapping[str, Callable[[torch.Tensor], float]], layouts: Sequence[tuple[Layout, int]]
) -> list[str]:
    wrong = []
    for layout, rows in layouts:
        whole = nn.Parameter(torch.arange(rows * 6.0).view(rows, 6))
        parts = distributed_parameter(whole, place, layout)
        for name, read in reads.items():
            if abs(read(parts) - read(whole)) > 1e-4:
                wrong.append(f"{name} of {layout}: {read(parts)}, not {read(whole)}")
    return wrong


def _wrong_changes(place: Place, changes: Mapping[str, Callable[[torch.Tensor], object]]) -> list[str]:
    wrong = []
    for layout, rows in LAYOUTS:
        for name, change in changes.items():
            for is_leaf in (True, False):
                whole = nn.Parameter(torch.arange(rows * 6.0).view(rows, 6), requires_grad=is_leaf)
                parts = distributed_parameter(whole, place, layout)
                with torch.no_grad():
                    for weight in (whole, parts):
                        torch.manual_seed(0)
                        change(weight)
                if not torch.equal(parts.full_tensor(), whole):  # type: ignore[attr-defined]
                    wrong.append(f"{name} of {layout}")
    return wrong


@pytest.fixture(scope="module")
def wrong() -> list[dict[str, list[str]]]:
    return run_on_ranks(_wrong, 4)


@pytest.mark.slow
@pytest.mark.gloo
def test_a_part_that_is_changed_in_place_changes_the_parameter(wrong: list[dict[str, list[str]]]) -> None:
    """DTensor gathers rows of several ranks into a copy, and changed that alone: a zeroed row of an embedding stayed."""
    assert [one["changes"] for one in wrong] == [[]] * 4


@pytest.mark.slow
@pytest.mark.gloo
def test_random_numbers_are_those_of_one_device(wrong: list[dict[str, list[str]]]) -> None:
    """DTensor draws each rank's part from the same state: the rows of all ranks had the same noise."""
    assert [one["draws"] for one in wrong] == [[]] * 4


@pytest.mark.slow
@pytest.mark.gloo
def test_a_number_that_is_read_is_that_of_the_whole(wrong: list[dict[str, list[str]]]) -> None:
    """DTensor reads this rank's part: `if grad.isnan().any()` let one rank alone leave out a step."""
    assert [one["reads"] for one in wrong] == [[]] * 4


@pytest.mark.slow
@pytest.mark.gloo
def test_a_largest_number_is_found_where_a_rank_has_none(wrong: list[dict[str, list[str]]]) -> None:
    """DTensor reduces each rank's part first: `bias.max()` of one number failed on one rank, for which the other waited."""
    assert [one["extrema"] for one in wrong] == [[]] * 4
