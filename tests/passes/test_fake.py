"""The fake value of a call that was made before is the one that the call would give, on memory of its own or its operand's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from passes._torch import fake_mode, shares_memory
from passes.ir.fake_calls import fake_call, is_viewable
from passes.ir.graph import set_value

aten = torch.ops.aten


def _operand(mode: Any, shape: tuple[int, ...], stride: tuple[int, ...]) -> Node:
    node = Graph().placeholder("x")
    with mode:
        set_value(node, torch.empty_strided(shape, stride))
    return node


def _form(value: torch.Tensor) -> tuple[object, ...]:
    return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device


CALLS = [
    (aten.relu.default, ()),
    (aten.clone.default, ()),
    (aten.sum.dim_IntList, ([1], True)),
    (aten.view.default, ([4, 3, 2],)),
    (aten.permute.default, ([1, 0],)),
    (aten.slice.Tensor, (0, 1, 3)),
    (aten.expand.default, ([5, 4, 6],)),
]


@pytest.mark.parametrize(("op", "more"), CALLS, ids=[str(op) for op, _ in CALLS])
def test_an_equal_call_gives_an_equal_value(op: Any, more: tuple[Any, ...]) -> None:
    mode = fake_mode()
    operands = [_operand(mode, (4, 6), (6, 1)) for _ in range(2)]
    first, again = (fake_call(mode, op, (operand, *more), {}) for operand in operands)
    with mode:
        run = op(operands[1].meta["val"], *more)
    assert _form(first) == _form(again) == _form(run)
    assert not shares_memory(first, again)
    assert shares_memory(again, operands[1].meta["val"]) is op.is_view


def test_strides_of_operands_tell_calls_apart() -> None:
    mode = fake_mode()
    row, column = (_operand(mode, (4, 6), stride) for stride in ((6, 1), (1, 4)))
    assert fake_call(mode, aten.relu.default, (row,), {}).stride() == (6, 1)
    assert fake_call(mode, aten.relu.default, (column,), {}).stride() == (1, 4)


def test_a_column_major_matrix_has_no_flat_view() -> None:
    mode = fake_mode()
    row, column = (_operand(mode, (4, 6), stride).meta["val"] for stride in ((6, 1), (1, 4)))
    assert is_viewable(row, [24])
    assert not is_viewable(column, [24])
