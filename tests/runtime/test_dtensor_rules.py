"""Results of sharded parameters that DTensor's own rules get wrong, without an error, are those of one device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autoshard.runtime.parameters import Place, distributed_copy, distributed_parameter, place_of
from autoshard.runtime.process_groups import open_groups
from passes.ir.layout import Layout, R, Shard
from tests.spawn import run_on_ranks


def _clipped(weight: Tensor, other: Tensor) -> Tensor:
    weight.grad = torch.where(weight == weight.max(), math.nan, weight).detach()
    return nn.utils.clip_grad_norm_([weight], 1.0, norm_type=math.inf)


def _on_each(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda weight, other: function(weight)


def _changed(change: Callable[[Tensor], object]) -> Callable[[Tensor, Tensor], Tensor]:
    def result(weight: Tensor, other: Tensor) -> Tensor:
        changed = weight.detach().clone()
        change(changed)
        return changed

    return result


def _filled(reduce: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda weight, other: reduce(weight.detach()).fill_(2.0)


def _part_of_a_sum(weight: Tensor) -> Tensor:
    result = weight.detach().sum(0)
    result[0].fill_(2.0)
    return result


RESULTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum of norms of columns": _on_each(lambda weight: weight.norm(dim=0).sum()),
    "sum of norms of rows": _on_each(lambda weight: weight.norm(3, dim=-1, keepdim=True).sum(0)),
    "sum of sums of magnitudes": _on_each(lambda weight: weight.norm(1, dim=0).sum() + weight.sum(0).sum()),
    "rows that are used": _on_each(lambda weight: (weight > 1).any(-1).sum()),
    "columns that are used": _on_each(lambda weight: (weight > 1).any(0).sum()),
    "columns whose sum is not 0": _on_each(lambda weight: (weight.sign().sum(0) * 2).any()),
    "sums of columns that are not 0": _on_each(lambda weight: (weight - weight.mean(0)).sum(0).any(0)),
    "running sum of columns": _on_each(lambda weight: weight.cumsum(-1)),
    "running sum of rows": _on_each(lambda weight: weight.cumsum(-2)),
    "running product": _on_each(lambda weight: weight.detach().cumprod(-1)),
    "running log of a sum": _on_each(lambda weight: weight.detach().logcumsumexp(-1)),
    "squared difference": lambda weight, other: F.mse_loss(weight, other),
    "squared differences": lambda weight, other: F.mse_loss(weight, other, reduction="sum"),
    "each squared difference": lambda weight, other: F.mse_loss(weight, other, reduction="none"),
    "squared difference to gradients": lambda weight, other: F.mse_loss(weight * 2, other.detach()) * 3,
    "huber": lambda weight, other: F.huber_loss(weight, other, delta=0.7),
    "smooth": lambda weight, other: F.smooth_l1_loss(weight, other, beta=0.7),
    "margin": lambda weight, other: F.soft_margin_loss(weight, other.detach().sign()),
    "cross entropy": lambda weight, other: F.binary_cross_entropy(weight.sigmoid(), other.detach().sigmoid()),
    "cross entropy of logits": lambda weight, other: F.binary_cross_entropy_with_logits(weight, other.detach().sigmoid()),
    "absolute difference": lambda weight, other: F.l1_loss(weight, other),
    "largest, of NaN": _on_each(lambda weight: torch.where(weight == weight.max(), math.nan, weight).max()),
    "largest of columns, of NaN": _on_each(lambda weight: torch.where(weight == weight.max(), math.nan, weight).amax(0)),
    "least of rows, of NaN": _on_each(lambda weight: torch.where(weight == weight.max(), math.nan, weight).amin(-1)),
    "largest of infinities": _on_each(lambda weight: (weight / 0).max()),
    "least of infinities": _on_each(lambda weight: (weight.abs() / 0).min()),
    "infinite norm, of NaN": _clipped,
    "identity": _changed(nn.init.eye_),
    "exponential": _changed(lambda weight: weight.exponential_()),
    "log-normal": _changed(lambda weight: weight.log_normal_()),
    "Cauchy": _changed(lambda weight: weight.cauchy_()),
    "geometric": _changed(lambda weight: weight.geometric_(0.4)),
    "Gumbel": lambda weight, other: F.gumbel_softmax(weight.detach()),
    "drawn rows": _on_each(lambda weight: torch.multinomial(weight.detach().softmax(-1), 1)),
    "transposed": _changed(lambda weight: weight.t().normal_()),
    "slopes": _on_each(lambda weight: F.rrelu(weight, training=True)),
    "slopes, in place": _changed(lambda weight: F.rrelu_(weight, training=True)),
    "whether columns are used, as numbers": _on_each(lambda weight: (weight > 0).any(0).int()),
    "values of columns that are used": _on_each(lambda weight: weight * (weight > 0).any(0)),
    "whether it is used, as a number": _on_each(lambda weight: (weight > -9).any().float()),
    "infinite norm": _on_each(lambda weight: weight.norm(math.inf)),
    "largest": _on_each(lambda weight: weight.amax()),
    "sum of no dims, which is of all": _on_each(lambda weight: weight.sum([], keepdim=True)),
    "magnitude of maxima": _on_each(lambda weight: (weight - 3).amax(0).norm(math.inf)),
    "minima below a threshold": _on_each(lambda weight: F.threshold(weight.amin(0), 0.1, 0.9)),
    "bits of a sum": _on_each(lambda weight: weight.detach().round().sum(0).view(torch.int32)),
    "bytes": _on_each(lambda weight: weight.detach().view(torch.uint8)),
    "filled sum": _filled(lambda weight: weight.sum(0)),
    "filled sum of all": _filled(lambda weight: weight.sum()),
    "filled mean": _filled(lambda weight: weight.mean(0)),
    "filled product": _filled(lambda weight: weight.prod(0)),
    "filled norms": _filled(lambda weight: weight.norm(dim=0)),
    "filled maxima": _filled(lambda weight: weight.amax(-1)),
    "filled tensor like a sum": _filled(lambda weight: torch.empty_like(weight.sum(0))),
    "part of a sum that is filled": _on_each(_part_of_a_sum),
    "convolution": lambda weight, other: F.conv1d(weight[..., None], other[..., None]),
    "convolution of a batch": lambda weight, other: F.conv1d(weight[..., None], other.detach()[..., None], other.detach()[:, 0]),
    "convolution of an image": lambda weight, other: F.conv2d(weight[None, None], other[None, None], padding=2),
    "transposed convolution": lambda weight, other: F.conv_transpose1d(weight[..., None], other.mT[..., None]),
}


INDEX = nn.Parameter(torch.tensor([0]), requires_grad=False)


def _whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _results(function: Callable[[Tensor, Tensor], Tensor], weight: Tensor, other: Tensor) -> list[Tensor | None]:
    """Return what a function returns, and the gradients of its sum."""
    torch.manual_seed(3)
    result = function(weight, other)
    if result.requires_grad:
        result.sum().backward()
    return [_whole(one) for one in (result.detach(), weight.grad, other.grad)]


def _changed_in_a_copy(place: Place) -> list[str]:
    """Return changes in place that are lost without an error: those of a sharded dim by indices, of any size."""
    lost = []
    for shape, dim in (((5, 7), 0), ((1, 7), 0), ((4, 1), 1)):
        values, layout = torch.zeros(shape), Layout((Shard(dim),))
        for change in (Tensor.index_add_, Tensor.index_copy_):
            weight = distributed_parameter(nn.Parameter(values), place, layout).detach()
            given = INDEX, nn.Parameter(values.narrow(dim, 0, 1) + 1)
            index, rows = (distributed_parameter(one, place, Layout((R,))).detach() for one in given)
            with pytest.raises(RuntimeError) as caught:
                change(weight, dim, index, rows)
            told = (
                f"aten.{change.__name__}.default needs the elements of several ranks of this DTensor, and torch would change a "
                "gathered copy alone; change the whole, tensor.full_tensor(), and give it back: parameter.data = whole"
            )
            whole = _whole(weight)
            if str(caught.value) != told or whole is None or not torch.equal(whole, values):
                lost.append(f"{change.__name__} of {shape}: {caught.value}, {whole}")
    return lost


def _wrong(rank: int) -> list[str]:
    """Return the results that are not those of plain tensors."""
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    place = place_of(device_mesh)
    distributed_copy(nn.Linear(8, 8), place, None)  # once a module is sharded, DTensors are corrected
    open_groups(device_mesh, place.mesh)
    text = (
        "aten.exponential_.default cannot change a DTensor that is a sum of parts; give tensor.redistribute(...) or the whole"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        distributed_parameter(nn.Parameter(torch.ones(5, 7)), place, Layout((Shard(0),))).detach().sum(0).exponential_()
    pending = distributed_parameter(nn.Parameter(torch.ones(5, 7)), place, Layout((Shard(0),))).detach().norm(dim=0)
    text = (
        "fill_(-1.0) cannot change a DTensor that is pending as _NormP(2); fill tensor.redistribute(placements=...), or the "
        "whole, tensor.full_tensor()"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        pending.fill_(-1.0)
    wrong = _changed_in_a_copy(place)
    for shape in ((5, 7), (8, 6), (1, 3)):
        torch.manual_seed(0)
        values = torch.randn(shape), torch.randn(shape)
        for layout in (Layout((Shard(0),)), Layout((Shard(1),)), Layout((R,))):
            for name, function in RESULTS.items():
                plain = [nn.Parameter(one.clone()) for one in values]
                parts = [distributed_parameter(one, place, layout) for one in plain]
                expected, found = _results(function, *plain), _results(function, *parts)
                for which, one, other in zip(("result", "gradient", "other gradient"), expected, found, strict=True):
                    if (one is None) != (other is None):
                        wrong.append(f"{which} of {name}, {layout} of {shape}: missing")
                    elif one is not None and not torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True):
                        wrong.append(f"{which} of {name}, {layout} of {shape}: {other}, not {one}")
    return wrong


@pytest.mark.gloo
def test_results_that_dtensor_gets_wrong_are_those_of_one_device() -> None:
    """DTensor added up norms and truth values of parts, averaged means of uneven parts, divided gradients by a part's elements,
    filled each part of a sum, and convolved each part of a weight."""
    assert run_on_ranks(_wrong, 2) == [[], []]
