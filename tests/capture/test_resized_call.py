"""A call in other sizes, captured by running the model's code, has the graph that dynamo traces."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.capture.capture import Captured, capture_call
from autoshard.capture.tracing import trace
from passes._torch import called_functions
from passes.errors import CaptureError
from tests.models import gpt, llama

Args = tuple[Any, ...]


def _text(captured: Captured) -> list[Any]:
    found = []
    for node in captured.call.graph_module.graph.nodes:
        value = node.meta.get("example_value")
        shape = (value.shape, value.dtype, value.stride()) if isinstance(value, Tensor) else type(value)
        found.append((node.op, str(node.target), str(node.args), str(node.kwargs), shape))
    return found


def _later(model: nn.Module, first: Args, second: Args, *, training: bool = True) -> tuple[Captured, bool]:
    """Return the capture of the second call, checked against dynamo's, and whether it was captured by a run."""
    earlier = capture_call(model, first, training=training)
    traced = capture_call(model, second, training=training)
    with mock.patch("autoshard.capture.capture.trace", wraps=trace) as traces:
        found = capture_call(model, second, training=training, earlier=[earlier])
    assert _text(found) == _text(traced)
    assert found.signature == traced.signature
    assert found.call.remarks == traced.call.remarks
    assert list(found.call.tensors) == list(traced.call.tensors)
    assert found.names is not None and traced.names is not None and found.names >= {"weight"} & traced.names
    return found, not traces.called


@pytest.mark.parametrize("make", [gpt, llama])
@pytest.mark.parametrize("training", [True, False])
def test_decoders(make: Callable[[], Any], training: bool) -> None:
    model, args, _ = make()
    model.double()
    _, was_run = _later(model, args, tuple(one[:4, :12] for one in args), training=training)
    assert was_run


class Config:
    """A configuration in which a model's first call sets a flag."""

    def __init__(self) -> None:
        self.kind: str | None = None


class Computed(nn.Module):
    """A linear layer, and what a function makes of its result."""

    def __init__(self, function: Callable[[Computed, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.norm, self.function = nn.Linear(8, 8), nn.BatchNorm1d(8), function
        self.flag, self.steps, self.kept = False, 0, list[int]()
        self.config = Config()
        self.table = nn.Buffer(torch.ones(64, 8))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.linear(x))


def _checked(function: Callable[[Computed, Tensor], Any], *, training: bool = True) -> bool:
    """Return whether the call of 12 rows was captured by a run, after one of 6."""
    return _later(Computed(function), (torch.ones(6, 8),), (torch.ones(12, 8),), training=training)[1]


def _sliced(model: Computed, x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=0)
    return 2 * first + second.T.reshape(first.shape) / x.shape[0] - model.table[: first.shape[0]]


def _reflected(model: Computed, x: Tensor) -> Tensor:
    noise = torch.rand(x.shape[0], 8)
    return (1 - x) + 2 / (3 + x.abs()) + 0.5 * x**2 - 2**x + noise @ (1.0 - model.linear.weight)


def _in_place(model: Computed, x: Tensor) -> Tensor:
    y = x.clone()
    y += 0.5
    y[: x.shape[0] // 2] = 0
    return y.masked_fill_(y > 1, 0.0).sum() * 2


def _unused(model: Computed, x: Tensor) -> Tensor:
    x[None, :]
    with torch.no_grad():
        scale = x.abs().amax(dim=-1, keepdim=True)
    return F.pad(x / scale, (0, 1), value=-1.0).softmax(-1)


def _settled(model: Computed, x: Tensor) -> Tensor:
    if model.config.kind is None:
        model.config.kind = "rows"
    return x.relu() if model.config.kind == "rows" else x


def _returned(model: Computed, x: Tensor) -> Any:
    return {"loss": model.norm(x).mean(), "rows": x.shape[0], "states": [x, F.dropout(x, 0.1)]}


@pytest.mark.parametrize("function", [_sliced, _reflected, _in_place, _unused, _settled, _returned])
def test_a_run_is_enough(function: Callable[[Computed, Tensor], Any]) -> None:
    assert _checked(function)


@pytest.mark.parametrize("function", [_in_place, _unused])  # the second sets a mode that is set already
def test_without_gradients(function: Callable[[Computed, Tensor], Any]) -> None:
    assert _checked(function, training=False)


def _branched(model: Computed, x: Tensor) -> Tensor:
    return x.relu() if x.shape[0] > 6 else x.sigmoid()


def _longer(model: Computed, x: Tensor) -> Tensor:
    return x.relu() + 1 if x.shape[0] > 6 else x.relu()


def _shorter(model: Computed, x: Tensor) -> Tensor:
    return x.relu() if x.shape[0] > 6 else x.relu() + 1


def _other_operand(model: Computed, x: Tensor) -> Tensor:
    y = x.relu()
    return x + (y if x.shape[0] > 6 else x)


def _other_order(model: Computed, x: Tensor) -> Tensor:
    y = x.relu()
    return torch.add(*((x, y) if x.shape[0] > 6 else (y, x)), alpha=2)


def _other_parameter(model: Computed, x: Tensor) -> Tensor:
    return x * (model.norm.weight if x.shape[0] > 6 else model.norm.bias)


def _other_flag(model: Computed, x: Tensor) -> Tensor:
    return F.dropout(x, 0.1, training=x.shape[0] > 6)


def _without_gradient(model: Computed, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(x.shape[0] <= 6):
        y = x.relu()
    return x + y


def _narrow(model: Computed, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=x.shape[0] > 6):
        return x @ x.T


def _stored(model: Computed, x: Tensor) -> Tensor:
    if x.shape[0] > 6:
        model.flag = True
    return x.relu()


def _counted(model: Computed, x: Tensor) -> Tensor:
    model.steps += 1
    return x.relu()


def _grown(model: Computed, x: Tensor) -> Tensor:
    if x.shape[0] > 6:
        model.kept.append(x.shape[0])
    return x.relu()


def _warned(model: Computed, x: Tensor) -> Tensor:
    warnings.warn("of all sizes", stacklevel=2)
    return x.relu()


def _other_output(model: Computed, x: Tensor) -> Any:
    y = x.relu()
    return (x, y) if x.shape[0] > 6 else (y, x)


def _more_output(model: Computed, x: Tensor) -> Any:
    y = x.relu()
    return (y, x) if x.shape[0] > 6 else (y,)


@pytest.mark.parametrize(
    "function",
    [
        *(_branched, _longer, _shorter, _other_operand, _other_order, _other_parameter, _other_flag, _without_gradient, _narrow),
        *(_stored, _counted, _grown, _warned, _other_output, _more_output),
    ],
)
def test_other_code_is_traced(function: Callable[[Computed, Tensor], Any]) -> None:
    assert not _checked(function)


def _drawn(model: Computed, x: Tensor) -> Tensor:
    return x * random.random() if x.shape[0] > 6 else x * 0.5


def test_calls_are_compared_until_one_is_unlike_all() -> None:
    model = Computed(_branched)
    first = capture_call(model, (torch.ones(6, 8),), training=True)
    second = capture_call(model, (torch.ones(12, 8),), training=True, earlier=[first])
    with mock.patch("autoshard.capture.capture.resized_call", side_effect=AssertionError):
        capture_call(model, (torch.ones(14, 8),), training=True, earlier=[first, second])


def test_numbers_drawn_by_the_code_are_no_constants() -> None:
    model = Computed(_drawn)
    earlier = capture_call(model, (torch.ones(6, 8),), training=True)
    with pytest.raises(Exception, match="random"):
        capture_call(model, (torch.ones(12, 8),), training=True, earlier=[earlier])


_SEEN = list[int]()


def _kept_outside(model: Computed, x: Tensor) -> Tensor:
    if x.shape[0] > 6:
        _SEEN.append(x.shape[0])
    return x.relu()


def test_what_the_code_keeps_outside_of_the_model_is_not_lost() -> None:
    model = Computed(_kept_outside)
    earlier = capture_call(model, (torch.ones(6, 8),), training=True)
    with pytest.raises(CaptureError, match="_SEEN"):
        capture_call(model, (torch.ones(12, 8),), training=True, earlier=[earlier])


@pytest.mark.parametrize(("function", "count"), [(_sliced, 1), (_settled, 2)])
def test_code_runs_again_only_if_it_changes_something(function: Callable[[Computed, Tensor], Any], count: int) -> None:
    model = Computed(function)
    earlier = capture_call(model, (torch.ones(6, 8),), training=True)
    with mock.patch("autoshard.capture.resized_call.called_functions", wraps=called_functions) as runs:
        capture_call(model, (torch.ones(12, 8),), training=True, earlier=[earlier])
    assert runs.call_count == count


def test_a_run_leaves_the_model_as_it_was() -> None:
    model = Computed(_returned)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _later(model, (torch.ones(6, 8),), (torch.ones(12, 8),))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_names_of_code_that_only_the_later_call_runs_are_read() -> None:
    def function(model: Computed, x: Tensor) -> Tensor:
        return x * (_scale_of(model) if x.shape[0] > 6 else 0.5)

    found, was_run = _later(Computed(function), (torch.ones(6, 8),), (torch.ones(12, 8),))
    assert was_run
    assert found.names is not None and "steps" in found.names


def _scale_of(model: Computed) -> float:
    return 0.25 + model.steps
