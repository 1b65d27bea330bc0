"""Pooling and resampling: each row is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import inductor_prims

from tests.rules.harness import Case, check_case, floats, ops_of

aten = torch.ops.aten
POOL = inductor_prims._low_memory_max_pool_with_offsets
POOL_INDICES = inductor_prims._low_memory_max_pool_offsets_to_indices

LINE, IMAGE, VOLUME = floats(4, 12, 5), floats(4, 12, 6, 5), floats(4, 12, 6, 4, 5)
TAKEN = "S(0) -> S(0); S(1) -> S(1)"
GIVEN = f"{TAKEN}; P(sum) -> P(sum)"
TWO_TAKEN = "S(0) -> S(0), S(0); S(1) -> S(1), S(1)"
TWO_GIVEN = "S(0), S(0) -> S(0); S(1), S(1) -> S(1); P(sum), R -> P(sum)"
WITH_INDICES = "S(0), S(0), S(0) -> S(0); S(1), S(1), S(1) -> S(1); P(sum), R, R -> P(sum)"


def max_pool(*, dims: int) -> tuple[Any, ...]:
    """Return window, stride, padding, dilation, whether a last part of a window counts."""
    return [2] * dims, [2] * dims, [0] * dims, [1] * dims, False


def average(*, dims: int) -> tuple[Any, ...]:
    """Return window, stride, padding, whether a last part of a window counts, padding counts, and the divisor."""
    return [3] * dims, [2] * dims, [1] * dims, True, False, None


INDICES_2D = aten.max_pool2d_with_indices(IMAGE, *max_pool(dims=2))[1]
INDICES_3D = aten.max_pool3d_with_indices(VOLUME, *max_pool(dims=3))[1]
ADAPTED = aten.adaptive_max_pool2d(IMAGE, [3, 2])[1]
OFFSETS = POOL(IMAGE, *max_pool(dims=2))[1]
GRID, VOLUME_GRID = floats(4, 3, 2, 2) / 16, floats(4, 3, 2, 2, 3) / 16
SAMPLED = "S(0), S(0) -> S(0); S(1), R -> S(1); P(sum), R -> P(sum)"
SAMPLED_BACK = "S(0), S(0), S(0) -> S(0), S(0); S(1), S(1), R -> S(1), P(sum); P(sum), R, R -> P(sum), P(sum)"
ZEROS, BORDER = 0, 1  # outside of the image
CASES = (
    Case(aten.replication_pad1d_backward.default, (floats(4, 12, 8), LINE, [1, 2]), rows=TWO_GIVEN),
    Case(aten.replication_pad2d_backward.default, (floats(4, 12, 9, 6), IMAGE, [1, 0, 1, 2]), rows=TWO_GIVEN),
    Case(
        aten.replication_pad3d_backward.default,
        (floats(4, 12, 6, 5, 8), VOLUME, [1, 2, 0, 1, 0, 0]),
        rows=TWO_GIVEN,
    ),
    Case(aten.grid_sampler_2d.default, (IMAGE, GRID, 0, ZEROS, False), rows=SAMPLED),
    Case(aten.grid_sampler_3d.default, (VOLUME, VOLUME_GRID, 0, BORDER, True), rows=SAMPLED),
    Case(
        aten.grid_sampler_2d_backward.default,
        (floats(4, 12, 3, 2), IMAGE, GRID, 0, BORDER, False, [True, True]),
        rows=SAMPLED_BACK,
    ),
    Case(
        aten.grid_sampler_2d_backward.default,
        (floats(4, 12, 3, 2), IMAGE, GRID, 0, BORDER, False, [True, False]),
        rows=SAMPLED_BACK,
    ),
    Case(
        aten.grid_sampler_3d_backward.default,
        (floats(4, 12, 3, 2, 2), VOLUME, VOLUME_GRID, 0, ZEROS, False, [True, True]),
        rows=SAMPLED_BACK,
    ),
    Case(aten._upsample_bilinear2d_aa.default, (IMAGE, [3, 7], False), rows=GIVEN),
    Case(aten._upsample_bicubic2d_aa.default, (IMAGE, [3, 7], False), rows=GIVEN),
    Case(aten._upsample_bilinear2d_aa_backward.default, (floats(4, 12, 3, 7), [3, 7], [4, 12, 6, 5], False), rows=GIVEN),
    Case(aten._upsample_bicubic2d_aa_backward.default, (floats(4, 12, 3, 7), [3, 7], [4, 12, 6, 5], False), rows=GIVEN),
    Case(aten.max_pool2d_with_indices.default, (IMAGE, *max_pool(dims=2)), rows=TWO_TAKEN),
    Case(
        aten.max_pool2d_with_indices.default,
        (IMAGE[0], *max_pool(dims=2)),
        note="no_batch",
        rows="S(0) -> S(0), S(0)",
    ),
    Case(
        aten.max_pool2d_with_indices_backward.default,
        (floats(4, 12, 3, 2), IMAGE, *max_pool(dims=2), INDICES_2D),
        rows=WITH_INDICES,
    ),
    Case(aten.max_pool3d_with_indices.default, (VOLUME, *max_pool(dims=3)), rows=TWO_TAKEN),
    Case(
        aten.max_pool3d_with_indices_backward.default,
        (floats(4, 12, 3, 2, 2), VOLUME, *max_pool(dims=3), INDICES_3D),
        rows=WITH_INDICES,
    ),
    Case(aten.adaptive_max_pool2d.default, (IMAGE, [3, 2]), rows=TWO_TAKEN),
    Case(aten.adaptive_max_pool2d_backward.default, (floats(4, 12, 3, 2), IMAGE, ADAPTED), rows=WITH_INDICES),
    Case(POOL, (IMAGE, *max_pool(dims=2)), rows=TWO_TAKEN),
    Case(POOL_INDICES, (OFFSETS, [2, 2], [6, 5], [2, 2], [0, 0], [1, 1]), rows=TAKEN),
    Case(aten.avg_pool2d.default, (IMAGE, *average(dims=2)), rows=GIVEN),
    Case(aten.avg_pool2d_backward.default, (floats(4, 12, 4, 3), IMAGE, *average(dims=2)), rows=TWO_GIVEN),
    Case(aten.avg_pool3d.default, (VOLUME, *average(dims=3)), rows=GIVEN),
    Case(aten.avg_pool3d_backward.default, (floats(4, 12, 4, 3, 3), VOLUME, *average(dims=3)), rows=TWO_GIVEN),
    Case(aten._adaptive_avg_pool2d.default, (IMAGE, [3, 2]), rows=GIVEN),
    Case(aten._adaptive_avg_pool2d_backward.default, (floats(4, 12, 3, 2), IMAGE), rows=TWO_GIVEN),
    Case(aten._adaptive_avg_pool3d.default, (VOLUME, [3, 2, 2]), rows=GIVEN),
    Case(aten._adaptive_avg_pool3d_backward.default, (floats(4, 12, 3, 2, 2), VOLUME), rows=TWO_GIVEN),
    Case(aten.upsample_nearest1d.default, (LINE, [9]), rows=GIVEN),
    Case(aten.upsample_linear1d.default, (LINE, [9], True), rows=GIVEN),
    Case(aten.upsample_nearest2d.default, (IMAGE, [9, 7]), rows=GIVEN),
    Case(aten.upsample_nearest2d.vec, (IMAGE, None, [1.5, 2.0]), rows=GIVEN),
    Case(aten.upsample_bilinear2d.default, (IMAGE, [9, 7], False), rows=GIVEN),
    Case(aten.upsample_bilinear2d.vec, (IMAGE, [9, 7], False, None), rows=GIVEN),
    Case(aten.upsample_bicubic2d.default, (IMAGE, [9, 7], False), rows=GIVEN),
    Case(aten.upsample_bicubic2d.vec, (IMAGE, [9, 7], False, None), rows=GIVEN),
    Case(aten.upsample_nearest3d.default, (VOLUME, [9, 7, 6]), rows=GIVEN),
    Case(aten.upsample_trilinear3d.default, (VOLUME, [9, 7, 6], False), rows=GIVEN),
    Case(aten.upsample_nearest1d_backward.default, (floats(4, 12, 9), [9], [4, 12, 5]), rows=GIVEN),
    Case(aten.upsample_linear1d_backward.default, (floats(4, 12, 9), [9], [4, 12, 5], True), rows=GIVEN),
    Case(aten.upsample_nearest2d_backward.default, (floats(4, 12, 9, 7), [9, 7], [4, 12, 6, 5]), rows=GIVEN),
    Case(aten.upsample_bilinear2d_backward.default, (floats(4, 12, 9, 7), [9, 7], [4, 12, 6, 5], False), rows=GIVEN),
    Case(aten.upsample_bicubic2d_backward.default, (floats(4, 12, 9, 7), [9, 7], [4, 12, 6, 5], False), rows=GIVEN),
    Case(aten.upsample_nearest3d_backward.default, (floats(4, 12, 9, 7, 6), [9, 7, 6], [4, 12, 6, 4, 5]), rows=GIVEN),
    Case(
        aten.upsample_trilinear3d_backward.default,
        (floats(4, 12, 9, 7, 6), [9, 7, 6], [4, 12, 6, 4, 5], True),
        rows=GIVEN,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_those_expected_and_give_the_ops_value(case: Case) -> None:
    check_case(case)


def test_every_rule_is_run() -> None:
    assert ops_of("passes.rules.pool") == {case.op for case in CASES}
