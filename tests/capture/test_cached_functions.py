"""A capture leaves no tensors without data in what the model caches with `functools`."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture.capture import capture_call
from passes.errors import CaptureError

DECORATORS = [functools.lru_cache, functools.cache]


def _masks(size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"causal": [torch.ones(size, size).tril()]}
    return found | {"itself": found}


class Masked(nn.Module):
    """Multiplies by masks of each size that it makes once."""

    def __init__(self, decorator: Any) -> None:
        super().__init__()
        self.layer, self.masks = nn.Linear(4, 4), decorator(_masks)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        return (self.masks(size)["causal"][0] @ self.layer(x)).sum((1, 2))


class Unreadable(Masked):
    """Does what dynamo does not understand, so that its code is run."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * zlib.crc32(str(x.shape).encode())


def _is_usable(model: nn.Module, x: Tensor) -> bool:
    return type(model(x)) is Tensor


@pytest.mark.parametrize("decorator", DECORATORS)
def test_of_calls_in_two_sizes(decorator: Any) -> None:
    model, small, large = Masked(decorator), torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    first = capture_call(model, (small,), training=True)
    assert list(first.batch_outputs.values()) == [True]  # as a run of the code says
    assert _is_usable(model, small)
    capture_call(model, (large,), training=True, earlier=[first])
    assert _is_usable(model, large)


@pytest.mark.parametrize("decorator", DECORATORS)
def test_of_a_call_that_is_run_instead_of_traced(decorator: Any) -> None:
    model, x = Unreadable(decorator), torch.randn(2, 3, 4)
    with pytest.raises(CaptureError, match="it keeps a tensor that it computes outside of itself"):
        capture_call(model, (x,), training=True)
    assert _is_usable(model, x)


def test_code_sees_that_it_is_compiled_when_its_outputs_are_counted() -> None:
    """Libraries cache values in calls that are not compiled only."""
    seen = list[bool]()

    class Asks(Masked):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                seen.append(False)
            return super().forward(x)

    capture_call(Asks(functools.cache), (torch.randn(2, 3, 4),), training=True)
    assert not seen
