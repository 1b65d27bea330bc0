"""Fingerprints of tensors: equal for equal values, whatever the size."""

from __future__ import annotations

import pytest
import torch

from autoshard.runtime.agreement import HASHED_BYTES_MAX, digest


@pytest.mark.parametrize("size", [3, HASHED_BYTES_MAX])  # in bytes: hashed here, folded by torch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_digest_tells_values_apart(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = [torch.randint(-100, 100, (size,)).to(dtype) for _ in range(8)]  # half of all folds exceed int64
    assert len({digest(value) for value in values}) == 8
    assert digest(values[0]) == digest(values[0].clone())


def test_a_digest_knows_the_order_of_values() -> None:
    values = torch.arange(HASHED_BYTES_MAX)
    assert digest(values) != digest(values.flip(0))
