"""Patterns that cannot be in a graph are left out; what is found in it is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.pattern_matcher import PatternExpr
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from passes._torch import run_joint_graph_passes, select_decompositions
from passes._torch.inductor.inductor_patterns import _is_padding, _Possible


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention, written out, on [batch, heads, rows, columns]."""
    return torch.softmax(q @ k.transpose(-2, -1) / 4.0, dim=-1) @ v


def casts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.to(torch.float64).to(torch.float32) + k.view(2, -1).view(2, 3, 8, 16)) * torch.ones(16) + v


def products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)) @ v


def attention_of_columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / 4.0, dim=-2) @ v


def attention_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention on keys that are given as [batch, rows, heads, columns]."""
    return torch.softmax(q @ k.permute(0, 2, 3, 1) / 4.0, dim=-1) @ v


def traced(function: object, *args: Tensor) -> GraphModule:
    args = args or tuple(torch.randn(2, 3, 8, 16) for _ in range(3))
    table = select_decompositions(whole=frozenset())
    return make_fx(function, tracing_mode="fake", decomposition_table=table)(*args)


@pytest.mark.parametrize("function", [attention, casts])
def test_the_graph_is_that_of_all_patterns(function: object) -> None:
    given, few, all_ = traced(function), traced(function), traced(function)
    run_joint_graph_passes(few)
    with mock.patch.object(_Possible, "_is_possible", lambda self, pattern: True):
        run_joint_graph_passes(all_)
    assert str(few.graph) == str(all_.graph) != str(given.graph)


@pytest.mark.parametrize(
    ("function", "query", "key"),
    [
        (attention, (2, 3, 8, 16), (2, 3, 8, 16)),
        (attention_of_columns, (2, 3, 8, 16), (2, 3, 8, 16)),
        (attention_of_heads, (1, 4, 4, 16), (1, 4, 4, 16)),
        (attention_of_heads, (1, 3, 8, 16), (1, 8, 3, 16)),
    ],
)
def test_what_only_looks_like_attention_stays(
    function: Callable[..., Tensor], query: tuple[int, ...], key: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, generator=generator) for shape in (query, key, query)]
    gm = traced(function, *args)
    run_joint_graph_passes(gm)
    torch.testing.assert_close(gm(*args), function(*args))
    assert ("_scaled_dot_product" in str(gm.graph)) == (function is attention)
    assert not caplog.records


def test_attention_is_not_looked_for_where_there_is_no_softmax() -> None:
    verdicts: list[bool] = []
    is_possible = _Possible._is_possible

    def noted(self: _Possible, pattern: PatternExpr) -> bool:
        verdicts.append(is_possible(self, pattern))
        return verdicts[-1]

    with mock.patch.object(_Possible, "_is_possible", noted):
        run_joint_graph_passes(traced(products))
    assert len(verdicts) > 20 and sum(verdicts) < len(verdicts) / 2


def test_products_are_not_asked_whether_padding_pays_where_no_gpu_is() -> None:
    asked: list[bool] = []

    def noted(check: Callable[..., Any]) -> bool:
        asked.append(_is_padding(check))
        return asked[-1]

    with mock.patch("passes._torch.inductor.inductor_patterns._is_padding", noted):
        run_joint_graph_passes(traced(products))
    assert any(asked) and not all(asked)
