"""Patterns that cannot be in a graph are left out; what is found in it is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.pattern_matcher import CallFunction, PatternEntry, PatternExpr
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from passes._torch import run_joint_graph_passes, select_decompositions
from passes._torch.inductor.inductor_patterns import _called, _Entries, _is_padding


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
    with mock.patch.object(_Entries, "_is_there", lambda self, keys: True):
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
    sizes: list[tuple[int, int]] = []
    possible = _Entries.possible

    def noted(self: _Entries) -> Iterator[PatternEntry]:
        found = list(possible(self))
        sizes.append((len(found), len(self._entries)))
        return iter(found)

    with mock.patch.object(_Entries, "possible", noted):
        run_joint_graph_passes(traced(products))
    assert max(of for _, of in sizes) > 20 and sum(tried for tried, _ in sizes) < sum(of for _, of in sizes) / 2


def test_an_entry_is_tried_once_an_entry_before_it_has_added_the_call_that_it_lacks() -> None:
    class Entry(NamedTuple):
        pattern: PatternExpr

    late, always, lacking = Entry(CallFunction(torch.cos)), Entry(CallFunction(torch.sin)), Entry(CallFunction(torch.tan))
    assert _called(late.pattern) == ((("call_function", torch.cos),),)
    table: dict[Any, Any] = {("call_function", torch.sin): True}
    entries: Any = (lacking, always, late)
    tried: list[Any] = []
    for entry in _Entries(entries, table).possible():
        tried.append(entry)
        table["call_function", torch.cos] = True
    assert tried == [always, late]


def test_products_are_not_asked_whether_padding_pays_where_no_gpu_is() -> None:
    asked: list[bool] = []

    def noted(check: Callable[..., Any]) -> bool:
        asked.append(_is_padding(check))
        return asked[-1]

    with mock.patch("passes._torch.inductor.inductor_patterns._is_padding", noted):
        run_joint_graph_passes(traced(products))
    assert any(asked) and not all(asked)
