"""Views of DTensors: refuse those for which torch's sharding rule gives wrong values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.distributed.tensor import Placement
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor.placement_types import _StridedShard

from passes._torch.patches import once


def refuse_wrong_views() -> None:
    """Let a view of a DTensor raise where torch would silently mix up its elements.

    This is so where dims are flattened of which any but the first is sharded by a `_StridedShard`, as two mesh axes make it that
    shard one dim: torch keeps the number of blocks, though the dims before it multiply that.
    """
    once("DTensor's views", _check_views)


def _check_views() -> None:
    module: Any = _view_ops
    propagate = module.propagate_shape_and_sharding

    def checked(placements: Sequence[Placement], shape: Sequence[int], rule: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        inner = set(_flattened_into_others(rule, shape))
        wrong = [one for one in placements if isinstance(one, _StridedShard) and one.dim in inner]
        if wrong:
            raise RuntimeError(
                f"torch would mix up the elements of this DTensor: dim {wrong[0].dim} of {tuple(shape)} is flattened into others, "
                "and several mesh axes shard it. Flatten this rank's part, tensor.to_local(), or all of it, tensor.full_tensor()"
            )
        return propagate(placements, shape, rule, *args, **kwargs)

    module.propagate_shape_and_sharding = checked


def _flattened_into_others(rule: Iterable[Any], shape: Sequence[int]) -> Iterator[int]:
    """Yield the dims that are flattened with others before them."""
    for one in rule:
        if isinstance(one, _view_ops.Flatten):
            dims = [part.input_dim for part in one.input_dims if isinstance(part, _view_ops.InputDim)]
            yield from [dim for dim in dims if shape[dim] > 1][1:]
        yield from _flattened_into_others(one.inputs(), shape)
