"""Embedding, indexing, gather and scatter: each row is run, indexed dims sharded included."""

from __future__ import annotations

import pytest
import torch

from passes.ir.graph import tensor_of
from passes.ir.layout import Layout, R, Shard
from passes.ir.mesh import Mesh
from passes.rules.rule import rule_of
from tests.rules.harness import Case, EagerCall, call_on, check_case, floats, ops_of

aten = torch.ops.aten
_GENERATOR = torch.Generator().manual_seed(1)


def ints(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_GENERATOR)


def distinct(size: int, *shape: int) -> torch.Tensor:
    """Return indices below `size`, none of them twice."""
    return torch.randperm(size, generator=_GENERATOR)[: torch.Size(shape).numel()].reshape(shape)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_GENERATOR) > 0.3


ROWS = 12
COLUMN = distinct(ROWS, 4)
EMBEDDING = (
    Case(
        aten.embedding.default,
        (floats(24, 6), ints(0, 24, 4, 3)),
        rows="S(0), R -> P(sum); S(1), R -> S(2); R, S(0) -> S(0); P(*), R -> P(*); R, S(1) -> S(1)",
    ),
    Case(
        aten.embedding.default,
        (floats(24, 6), ints(0, 24, 4).int(), 3),
        note="padding",
        rows="S(0), R -> P(sum); S(1), R -> S(1); R, S(0) -> S(0); P(*), R -> P(*)",
    ),
    Case(
        aten.embedding.default,
        (floats(24, 6), torch.tensor(7)),
        note="scalar",
        rows="S(0), R -> P(sum); S(1), R -> S(0); P(*), R -> P(*)",
    ),
    Case(
        aten.embedding_dense_backward.default,
        (floats(4, 3, 6), ints(0, 24, 4, 3), 24, -1, False),
        rows=("R, R -> S(0); S(2), R -> S(1); S(0), S(0) -> P(sum); P(sum), R -> P(sum); S(1), S(1) -> P(sum)"),
    ),
    Case(
        aten.embedding_dense_backward.default,
        (floats(8, 6), torch.tensor([3, 5, 5, 23, 0, 3, 1, 5]), 24, 5, False),
        note="padding",
        rows="R, R -> S(0); S(1), R -> S(1); S(0), S(0) -> P(sum); P(sum), R -> P(sum)",
    ),
    Case(
        aten.embedding_dense_backward.default,
        (floats(8, 6), torch.tensor([3, 5, 5, 23, 0, 3, 1, 5]), 24, -1, True),
        note="by_frequency",
        rows="S(1), R -> S(1); P(sum), R -> P(sum)",
    ),
)
LOOKUPS = (
    Case(
        aten.index.Tensor,
        (floats(12, 4, 6), [ints(-12, 12, 8)]),
        note="first",
        rows="S(0), R -> P(sum); S(1), R -> S(1); S(2), R -> S(2); R, S(0) -> S(0); P(*), R -> P(*)",
    ),
    Case(
        aten.index.Tensor,
        (floats(12, 4, 6), [None, ints(-4, 4, 3, 8)]),
        note="middle",
        rows=("S(0), R -> S(0); S(1), R -> P(sum); S(2), R -> S(3); R, S(1) -> S(2); P(*), R -> P(*); R, S(0) -> S(1)"),
    ),
    Case(
        aten._unsafe_index.Tensor,
        (floats(12, 4, 6), [None, None, ints(-6, 6, 8)]),
        note="last",
        rows="S(0), R -> S(0); S(1), R -> S(1); S(2), R -> P(sum); R, S(0) -> S(2); P(*), R -> P(*)",
    ),
    Case(
        aten.index.Tensor,
        (floats(12, 4, 6), [ints(-12, 12, 8), None, ints(-6, 6, 8)]),
        note="apart",
        rows=(
            "S(0), R, R -> P(sum); S(1), R, R -> S(1); S(2), R, R -> P(sum); R, S(0), S(0) -> S(0); P(*), R, R -> P(*)"
        ),
    ),
    Case(
        aten.index.Tensor,
        (floats(3, 12, 4), [None, ints(0, 12, 8, 1), ints(0, 4, 2)]),
        note="broadcast",
        rows=(
            "S(1), R, R -> P(sum); S(2), R, R -> P(sum); R, S(0), R -> S(1); R, R, S(0) -> S(2); "
            "P(*), R, R -> P(*); S(0), R, R -> S(0)"
        ),
    ),
    Case(
        aten.index.Tensor,
        (floats(12, 4), [torch.tensor(-5)]),
        note="scalar",
        rows="S(0), R -> P(sum); S(1), R -> S(0); P(*), R -> P(*)",
    ),
    Case(aten.index.Tensor, (mask(12, 4), [ints(0, 12, 8)]), note="booleans", rows="S(1), R -> S(1); R, S(0) -> S(0)"),
    Case(
        aten.index.Tensor,
        (ints(0, 99, 12, 4), [ints(0, 12, 8)]),
        note="integers",
        rows=(
            "S(0), R -> P(sum); S(1), R -> S(1); R, S(0) -> S(0); P(sum), R -> P(sum); "
            "P(max), R -> P(max); P(min), R -> P(min); P(product), R -> P(product)"
        ),
    ),
    Case(aten.index.Tensor, (floats(12, 4), [mask(12)]), note="by_mask", rows=""),
    Case(
        aten._unsafe_masked_index.default,
        (floats(12, 6), mask(8, 1), [ints(0, 12, 8)], 0),
        rows="S(0), R, R -> P(sum); S(1), R, R -> S(1); R, S(0), S(0) -> S(0); P(*), R, R -> P(*)",
    ),
    Case(
        aten._unsafe_masked_index.default,
        (floats(12, 6), mask(8, 6), [ints(0, 12, 8)], 1.5),
        note="filled",
        rows="S(1), S(1), R -> S(1); R, S(0), S(0) -> S(0)",
    ),
    Case(
        aten.index_select.default,
        (floats(4, 12, 6), -2, ints(0, 12, 8)),
        rows="S(0), R -> S(0); S(1), R -> P(sum); S(2), R -> S(2); R, S(0) -> S(1); P(*), R -> P(*)",
    ),
    Case(
        aten.bucketize.Tensor,
        (floats(4, 12), torch.arange(-6.0, 6.0, dtype=torch.float64)),
        rows="S(0), R -> S(0); S(1), R -> S(1)",
    ),
    Case(
        aten.searchsorted.Tensor,
        (torch.arange(-6.0, 6.0, dtype=torch.float64), floats(4, 12)),
        rows="R, S(0) -> S(0); R, S(1) -> S(1)",
    ),
    Case(
        aten.searchsorted.Tensor,
        (floats(4, 5).sort().values, floats(4, 6)),
        {"side": "right"},
        note="a_sequence_per_row",
        rows="S(0), S(0) -> S(0); R, S(1) -> S(1)",
    ),
)
WRITES = (
    Case(
        aten.index_put.default,
        (floats(12, 6), [COLUMN], floats(4, 6)),
        rows="S(0), R, R -> S(0); S(1), R, S(1) -> S(1); P(*), R, P(*) -> P(*)",
    ),
    Case(
        aten.index_put.default,
        (floats(12, 6), [COLUMN - 12], floats(6)),
        note="broadcast",
        rows="S(0), R, R -> S(0); S(1), R, S(0) -> S(1); P(*), R, P(*) -> P(*)",
    ),
    Case(
        aten._unsafe_index_put.default,
        (floats(12, 4, 6), [COLUMN, None, COLUMN % 3], floats(4, 4)),
        note="apart",
        rows=("S(0), R, R, R -> S(0); S(1), R, R, S(1) -> S(1); S(2), R, R, R -> S(2); P(*), R, R, P(*) -> P(*)"),
    ),
    Case(
        aten.index_put.default,
        (floats(12, 6), [ints(0, 12, 4, 3)], floats(4, 3, 6), True),
        note="adding",
        rows=(
            "S(0), R, R -> S(0); S(1), R, S(2) -> S(1); P(sum), S(0), S(0) -> P(sum); "
            "P(sum), R, P(sum) -> P(sum); P(sum), S(1), S(1) -> P(sum)"
        ),
    ),
    Case(
        aten.index_put.default,
        (floats(4, 12, 6), [None, ints(0, 12, 8), ints(0, 6, 8)], floats(8), True),
        note="adding_two",
        rows=(
            "S(0), R, R, R -> S(0); S(1), R, R, R -> S(1); S(2), R, R, R -> S(2); "
            "P(sum), S(0), S(0), S(0) -> P(sum); P(sum), R, R, P(sum) -> P(sum)"
        ),
    ),
    Case(
        aten._unsafe_masked_index_put_accumulate.default,
        (floats(24, 6), mask(4, 3, 1), [ints(0, 24, 4, 3)], floats(4, 3, 6)),
        rows=(
            "S(0), R, R, R -> S(0); S(1), R, R, S(2) -> S(1); P(sum), S(0), S(0), S(0) -> P(sum); "
            "P(sum), R, R, P(sum) -> P(sum); P(sum), S(1), S(1), S(1) -> P(sum)"
        ),
    ),
    Case(
        aten._unsafe_masked_index_put_accumulate.default,
        (floats(4, 12), mask(4, 8), [None, ints(-12, 12, 8)], floats(4, 8)),
        note="last",
        rows=(
            "S(0), S(0), R, S(0) -> S(0); S(1), R, R, R -> S(1); P(sum), S(1), S(0), S(1) -> P(sum); "
            "P(sum), R, R, P(sum) -> P(sum)"
        ),
    ),
)
ALONG = (
    Case(
        aten.gather.default,
        (floats(4, 12), 1, ints(0, 12, 4, 1)),
        note="one",
        rows="S(0), S(0) -> S(0); S(1), R -> P(sum); P(*), R -> P(*)",
    ),
    Case(
        aten.gather.default,
        (floats(12, 6), -2, ints(0, 12, 8, 6)),
        note="many",
        rows="S(0), R -> P(sum); R, S(0) -> S(0); S(1), S(1) -> S(1); P(*), R -> P(*)",
    ),
    Case(
        aten.gather.default,
        (floats(12, 6), 0, ints(0, 12, 8, 4)),
        note="shorter",
        rows="S(0), R -> P(sum); R, S(0) -> S(0); P(*), R -> P(*)",
    ),
    Case(
        aten.gather.default,
        (mask(4, 12), 1, ints(0, 12, 4, 3)),
        note="booleans",
        rows="S(0), S(0) -> S(0); R, S(1) -> S(1)",
    ),
    Case(
        aten.scatter.value,
        (floats(4, 12), 1, ints(0, 12, 4, 1), -1.0),
        note="one",
        rows=("S(0), S(0) -> S(0); S(1), R -> S(1); P(max), R -> P(max); P(min), R -> P(min); P(avg), R -> P(avg)"),
    ),
    Case(
        aten.scatter.value,
        (ints(1, 9, 4, 12), 1, ints(0, 12, 4, 1), 2),
        note="integers",
        rows="S(0), S(0) -> S(0); S(1), R -> S(1); P(max), R -> P(max); P(min), R -> P(min)",
    ),
    Case(
        aten.scatter.value,
        (floats(12, 4), 0, ints(0, 12, 6, 4), 0),
        note="zeros",
        rows="S(0), R -> S(0); S(1), S(1) -> S(1); P(*), R -> P(*)",
    ),
    Case(
        aten.scatter.value,
        (floats(12, 4), 0, ints(0, 12, 1, 2), 3.0),
        note="shorter",
        rows="S(0), R -> S(0); P(max), R -> P(max); P(min), R -> P(min); P(avg), R -> P(avg)",
    ),
    Case(
        aten.scatter.src,
        (floats(4, 12), 1, distinct(12, 4, 3), floats(4, 3)),
        rows="S(0), S(0), S(0) -> S(0); S(1), R, R -> S(1); P(*), R, P(*) -> P(*)",
    ),
    Case(
        aten.scatter.src,
        (floats(4, 12), -1, distinct(12, 4, 3), floats(8, 6)),
        note="longer",
        rows="S(1), R, R -> S(1); P(*), R, P(*) -> P(*)",
    ),
    Case(
        aten.scatter_add.default,
        (floats(4, 12), 1, ints(0, 12, 4, 8), floats(4, 8)),
        rows=(
            "S(0), S(0), S(0) -> S(0); S(1), R, R -> S(1); P(sum), S(1), S(1) -> P(sum); P(sum), R, P(sum) -> P(sum)"
        ),
    ),
    Case(
        aten.scatter_add.default,
        (floats(4, 12), 1, ints(0, 12, 4, 8), floats(4, 9)),
        note="longer",
        rows="S(0), S(0), S(0) -> S(0); S(1), R, R -> S(1); P(sum), R, P(sum) -> P(sum)",
    ),
    *(
        Case(
            aten.scatter_reduce.two,
            (floats(4, 12), 1, ints(0, 12, 4, 8), floats(4, 8), reduce),
            {"include_self": included},
            note=f"{reduce}_{included}",
            rows=f"S(0), S(0), S(0) -> S(0); S(1), R, R -> S(1); {rows}",
        )
        for reduce, included, rows in (
            ("sum", True, "P(sum), S(1), S(1) -> P(sum); P(sum), R, P(sum) -> P(sum)"),
            ("sum", False, "P(sum), R, P(sum) -> P(sum)"),
            ("mean", True, "P(sum), R, P(sum) -> P(sum)"),
            ("amax", True, "P(max), R, P(max) -> P(max)"),
            ("amin", False, "P(min), R, P(min) -> P(min)"),
            ("prod", True, ""),
        )
    ),
)
REDUCED = tuple(
    Case(
        aten.index_reduce.default,
        (floats(4, 6, 5), 1, ints(0, 6, 8), floats(4, 8, 5), reduce),
        {"include_self": included},
        note=reduce,
        rows="S(0), R, S(0) -> S(0)",
    )
    for reduce, included in (("prod", True), ("mean", False), ("amax", True), ("amin", False))
)
CASES = (*EMBEDDING, *LOOKUPS, *WRITES, *ALONG, *REDUCED)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_those_expected_and_give_the_ops_value(case: Case) -> None:
    check_case(case)


def test_every_rule_is_run() -> None:
    ops = ops_of("passes.rules.index") | ops_of("passes.rules.scatter")
    assert ops == {case.op for case in CASES}


def test_a_one_hot_over_a_sharded_vocabulary_is_made_in_parts() -> None:
    case = Case(aten.scatter.value, (torch.zeros(4, 12), 1, ints(0, 12, 4, 1), -1.0))
    call = call_on(case, [torch.zeros(4, 12)])
    parts, layouts = [torch.zeros(4, 3), case.args[2]], [Layout((Shard(1),)), Layout((R,))]
    here = EagerCall(case, call, parts, layouts, layouts[:1], Mesh.of(tp=4), (1,))
    rule = rule_of(case.op)
    assert rule is not None and rule.local is not None
    made = rule.local(here)
    assert all(tensor_of(node).numel() <= 12 for node in made.graph.nodes)
