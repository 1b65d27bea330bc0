"""A graph traced from few layers, with the layers of one in other sizes, is the graph that tracing all layers gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

from autoshard.capture.capture import Captured, capture, capture_call
from autoshard.capture.shallow import few_layers, is_alike, whole_graph
from passes.fold import Fold
from passes.ir.folded_layers import Run
from passes.ir.graph import outputs_of, repeats_of, value_of
from passes.ir.mesh import Mesh
from passes.ir.text import format_graph
from tests.capture.test_shallow import KINDS, Stack
from tests.extended import extended
from tests.models import gpt, llama

MESH = Mesh("dp=2")


class Once(Stack):
    """A stack that cuts what all of its layers read once, and not in each; of ten layers."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.blocks = self.blocks[:10]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        scale, kept = self.scale[:8], []
        for block in self.blocks:
            x = block(x, scale, self.shared)
            kept.append(x)
        if self.kind == "skip":
            x = x + kept[4]
        loss = F.cross_entropy(self.head(x), y)
        return (loss, kept) if self.kind == "states" else loss


TAKEN = ("plain", "embedded", "alternating", "dropout", "buffers", "in place", "cached", "literal")


def _captured(model: nn.Module, *args: torch.Tensor, training: bool = True) -> Captured:
    return capture_call(model, args, training=training)


def _text(gm: GraphModule) -> str:
    strides = [
        str(value_of(node).stride()) for node in gm.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)
    ]
    return "\n".join([format_graph(gm, MESH), *strides, *map(str, outputs_of(gm.graph))])


def _check(second: Captured, first: GraphModule) -> GraphModule | None:
    """Check that the graph of the second call, if it follows from the first one's, is what tracing it gives."""
    few = few_layers(second, Fold(), MESH, [first])
    found = None if few is None or not is_alike(second, first) else whole_graph(few, [first])
    if found is not None:
        assert _text(found) == _text(second.graph_module)
    return found


def _rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(count, 8), torch.randint(5, (count,))


@pytest.mark.parametrize("kind", ["plain", "alternating", "buffers", "shared", "cached", "literal"])
def test_few_layers_and_the_earlier_graph_give_the_whole(kind: str) -> None:
    model = Once(kind)
    found = _check(_captured(model, *_rows(10)), capture(model, _rows(12), training=True).graph_module)
    assert (found is not None) == (kind in TAKEN)


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_layers(kind: str) -> None:
    model = Once(kind)
    found = _check(_captured(model, *_rows(10)), capture(model, _rows(12), training=True).graph_module)
    assert (found is not None) == (kind in TAKEN)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: gpt(layers=7), extended(lambda: llama(layers=7))])
def test_decoders(make: Callable[[], Any]) -> None:
    model, args, _ = make()
    model.double()
    second = _captured(model, *(one[:4] for one in args))
    assert _check(second, capture(model, args, training=True).graph_module) is not None


@pytest.mark.slow
def test_evaluation() -> None:
    model = Once("plain").eval()
    second = _captured(model, *_rows(10), training=False)
    assert _check(second, capture(model, _rows(12), training=False).graph_module) is not None


class Head(nn.Module):
    """A module after the layers: without one, a call that follows belongs to the last of them, and makes it unlike."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


HEADS = pytest.mark.parametrize("has_head", [extended(False), True])


class Sized(nn.Module):
    """Layers that compute with the number of rows, and with what `change` makes of it and of their index."""

    def __init__(self, change: Callable[[torch.Tensor, int], torch.Tensor], *, has_head: bool) -> None:
        super().__init__()
        self.layers, self.change = nn.ModuleList(nn.Linear(8, 8) for _ in range(8)), change
        self.head = Head() if has_head else torch.mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = self.change(F.relu(layer(x)), index) / x.shape[0]
        return self.head(x)


def _sized(change: Callable[[torch.Tensor, int], torch.Tensor], *, has_head: bool) -> GraphModule | None:
    model = Sized(change, has_head=has_head)
    first = capture(model, (torch.ones(6, 8),), training=True).graph_module
    return _check(_captured(model, torch.ones(9, 8)), first)


@HEADS
def test_numbers_computed_from_sizes_are_those_of_the_call(has_head: bool) -> None:
    assert _sized(lambda x, index: x + x.shape[0], has_head=has_head) is not None


@HEADS
@pytest.mark.parametrize(
    "change",
    [
        lambda x, index: x * index,  # unlike layers
        lambda x, index: x.sin() if x.shape[0] > 6 else x,  # another call in each layer
        lambda x, index: x * 2 if index == 4 and x.shape[0] > 6 else x,  # in one layer
        lambda x, index: x * (1 + (index == 4 and x.shape[0] > 6)),  # another number in one layer
        lambda x, index: x * (1 + (index == 0 and x.shape[0] > 6)),  # after the first, whose backward the next one has
        lambda x, index: x * (1 + (index == 7 and x.shape[0] > 6)),  # after the last
        lambda x, index: x * (1 + (index in (0, 7) and x.shape[0] > 6)),  # in neither of those between
        lambda x, index: x * (1 + (index == 4 and x.shape[0] < 7)),  # no longer another number
    ],
)
def test_layers_that_differ_in_some_sizes_are_traced(
    change: Callable[[torch.Tensor, int], torch.Tensor], has_head: bool
) -> None:
    _sized(change, has_head=has_head)


class Reading(nn.Module):
    """Layers that read what the one before them returns, and what `source` says: of which layer, for each."""

    def __init__(self, source: Callable[[int], int], *, has_head: bool) -> None:
        super().__init__()
        self.layers, self.source = nn.ModuleList(nn.Linear(8, 8) for _ in range(8)), source
        self.head = Head() if has_head else torch.mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [x, x.cos()]
        for index, layer in enumerate(self.layers):
            kept.append(layer(kept[-1] * kept[self.source(index)].sin()))
        return self.head(kept[-1])


@HEADS
@pytest.mark.parametrize(
    ("source", "is_taken"),
    [
        (lambda index: index + 1, True),  # the layer before, once more
        (lambda index: 0, False),  # the input
        (lambda index: index % 2, False),  # in turn
        (lambda index: min(index, 2), False),  # the first layer
        (lambda index: max(index, 1), False),  # two layers before
    ],
)
@pytest.mark.parametrize("requires_grad", [False, extended(True)])
def test_all_layers_read_what_they_read(
    source: Callable[[int], int], is_taken: bool, requires_grad: bool, has_head: bool
) -> None:
    model = Reading(source, has_head=has_head)
    first = capture(model, (torch.ones(6, 8, requires_grad=requires_grad),), training=True).graph_module
    second = _captured(model, torch.ones(9, 8, requires_grad=requires_grad))
    assert (_check(second, first) is not None) == is_taken


def test_the_first_layer_stands_for_all() -> None:
    model, args, _ = gpt(layers=5)
    first = capture(model, args, training=True).graph_module
    second = _captured(model, *(one[:4] for one in args))
    few = few_layers(second, Fold(), MESH, [first])
    assert few is not None
    assert repeats_of(few).runs == (Run("blocks", (0,), (1, 2, 3, 4), (), is_wide=True),)
    assert _check(second, first) is not None


@pytest.mark.parametrize("frozen", [0, 4, *(extended(one) for one in (1, 7, 9))])
def test_a_graph_of_other_trained_parameters_is_not_taken(frozen: int) -> None:
    model = Once("plain")
    first = capture(model, _rows(12), training=True).graph_module
    model.blocks[frozen].requires_grad_(False)
    assert _check(_captured(model, *_rows(10)), first) is None


def test_a_layer_that_is_frozen_stays_frozen() -> None:
    model = Once("plain")
    model.blocks[7].requires_grad_(False)
    first = capture(model, _rows(12), training=True).graph_module
    _check(_captured(model, *_rows(10)), first)


def test_a_known_graph_is_not_traced() -> None:
    captured = _captured(Once("plain"), *_rows(12))
    assert replace(captured, known=captured.graph_module).graph_module is captured.graph_module
