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


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(8.0)[4:5:4].as_strided((1,), (4,)),
        torch.arange(8.0)[::2],
        torch.arange(8.0).view(2, 4).t(),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.tensor(3.0),
        torch.zeros(0),
    ],
    ids=["one element", "step", "transposed", "conjugate", "negated", "scalar", "empty"],
)
def test_a_digest_of_a_view_is_that_of_its_copy(view: torch.Tensor) -> None:
    copy = view.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    assert digest(view) == digest(copy)
