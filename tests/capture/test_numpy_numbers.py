"""Numbers of numpy's that a model holds are numbers, as on one device: what `np.sqrt` gives, or an element of an array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import Options, autoshard

X = torch.linspace(-1, 1, 24).reshape(4, 6)
EAGER = Options(recipe="fsdp", compile="eager")
Use = Callable[[Tensor, Any], Tensor]


class Holder(nn.Module):
    def __init__(self, use: Use, held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.held = held
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.linear(x), self.held)


CASES: dict[str, tuple[Use, Any]] = {
    "float": (lambda x, n: x * float(n), np.sqrt(6)),
    "a product": (lambda x, n: x * n, np.float32(0.1)),
    "a product from the left": (lambda x, n: n * x, np.float64(2)),
    "numbers alone": (lambda x, n: x * (n * 3), np.float32(0.1)),
    "a slice": (lambda x, n: x[:, :n], np.int64(3)),
    "a view": (lambda x, n: x.view(-1, n, 2), np.prod([3])),
    "an index": (lambda x, n: [x, x * 2][n], np.int64(1)),
    "a range": (lambda x, n: sum((x for _ in range(n)), torch.zeros(())), np.int64(3)),
    "a branch": (lambda x, n: x * 2 if n > 1 else x, np.float64(2)),
    "a flag": (lambda x, n: x if n else x * 2, np.bool_(False)),
    "a dropout's rate": (lambda x, n: F.dropout(x, n, False), np.linspace(0, 0.1, 3)[1]),
    "a class": (lambda x, n: x if isinstance(n, float) else x * 2, np.float32(2)),
    "a class of numpy's": (lambda x, n: x * 2 if isinstance(n, np.floating) else x, np.float32(2)),
    "item": (lambda x, n: x * n.item(), np.float32(3)),
    "astype": (lambda x, n: x * float(n.astype(np.float32)), np.float64(0.1)),
    "ndim": (lambda x, n: x * (n.ndim + 1), np.float64(0.1)),
    "in a dict": (lambda x, n: x * n["a"][1], {"a": [1, np.float32(2)]}),
    "a tensor of it": (lambda x, n: x * torch.tensor(n), np.float64(3)),
    "a tensor of a list of it": (lambda x, n: x * torch.tensor([n] * 6), np.float64(3)),
    "a full tensor": (lambda x, n: x * torch.full((6,), n), np.float64(3)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_number_of_numpys_is_a_number(one_rank: DeviceMesh, name: str) -> None:
    model = Holder(*CASES[name])
    want, got = model(X), autoshard(model, one_rank, options=EAGER)(X)
    assert got.dtype is want.dtype
    assert torch.equal(got, want)


def test_another_number_is_captured_again(one_rank: DeviceMesh) -> None:
    model = Holder(lambda x, n: x * n, np.int64(2))
    sharded: Any = autoshard(model, one_rank, options=EAGER)
    for number in (2, 3, 2):
        model.held = sharded.held = np.int64(number)
        assert torch.equal(sharded(X), model(X))
    assert len(sharded.programs) == 2


NUMBER = np.int64(2)


def test_a_global_number_is_captured_again(one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Holder(lambda x, n: x * int(NUMBER), None)
    sharded: Any = autoshard(model, one_rank, options=EAGER)
    sharded(X)
    monkeypatch.setitem(globals(), "NUMBER", np.int64(3))
    assert torch.equal(sharded(X), model(X))


def test_an_argument_that_is_a_number_of_numpys(one_rank: DeviceMesh) -> None:
    class Times(Holder):
        def forward(self, x: Tensor, times: Any = 1) -> Tensor:
            return self.linear(x) * times

    model = Times(lambda x, n: x, None)
    sharded: Any = autoshard(model, one_rank, options=EAGER)
    for times in (np.int64(2), np.float32("nan"), np.float32("nan"), np.float64(2)):
        torch.testing.assert_close(sharded(X, times), model(X, times), equal_nan=True)
    assert len(sharded.programs) == 3
