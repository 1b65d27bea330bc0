"""Attention: the CPU's forms are run row by row, the accelerators' are held to the shapes that their rows claim."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes.ir.layout import Layout, Placement, local_shape
from passes.ir.mesh import Mesh
from passes.rules.rule import Row, rule_of
from tests.rules.harness import Case, all_rows, call_on, check_case, floats, ops_of

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
MATH = aten._scaled_dot_product_attention_math.default


def small(*shape: int) -> torch.Tensor:
    """Return numbers in [-1, 1]."""
    return floats(*shape) * (8 / torch.Size(shape).numel())


def qkv(heads: int, key_heads: int, queries: int = 8, keys: int = 12) -> tuple[torch.Tensor, ...]:
    return tuple(small(4, h, s, 6) for h, s in ((heads, queries), (key_heads, keys), (key_heads, keys)))


def backward(*inputs: torch.Tensor, causal: bool = False, mask: torch.Tensor | None = None) -> tuple[Any, ...]:
    """Return positional arguments of the backward: a gradient, and what the forward gives."""
    out, logsumexp = FORWARD(*inputs, 0.0, causal, attn_mask=mask)
    return (small(*out.shape), *inputs, out, logsumexp, 0.0, causal)


PLAIN = qkv(4, 4)
GROUPED = qkv(24, 4)
SQUARE = qkv(4, 4, keys=8)
POSITIONS, BATCH = small(8, 12), small(4, 1, 1, 12)
RUN = (
    Case(
        FORWARD, PLAIN, rows="S(0), S(0), S(0) -> S(0), S(0); S(1), S(1), S(1) -> S(1), S(1); S(2), R, R -> S(2), S(2)"
    ),
    Case(
        FORWARD,
        (*SQUARE, 0.0, True),
        note="causal",
        rows="S(0), S(0), S(0) -> S(0), S(0); S(1), S(1), S(1) -> S(1), S(1); S(2), R, R -> S(2), S(2)",
    ),
    Case(
        FORWARD,
        (*qkv(4, 2, 12, 12), 0.0, True),
        {"scale": 0.3},
        note="causal_grouped",
        rows=(
            "S(0), S(0), S(0) -> S(0), S(0); S(1), S(1), S(1) -> S(1), S(1); "
            "S(1/2), R, R -> S(1/2), S(1/2); S(2), R, R -> S(2), S(2)"
        ),
    ),
    Case(
        FORWARD,
        GROUPED,
        {"scale": 0.3},
        note="grouped",
        rows=(
            "S(0), S(0), S(0) -> S(0), S(0); S(1), S(1), S(1) -> S(1), S(1); "
            "S(1/4), R, R -> S(1/4), S(1/4); S(2), R, R -> S(2), S(2)"
        ),
    ),
    Case(
        FORWARD,
        qkv(4, 1),
        note="one_key_head",
        rows="S(0), S(0), S(0) -> S(0), S(0); S(1), R, R -> S(1), S(1); S(2), R, R -> S(2), S(2)",
    ),
    Case(
        FORWARD,
        PLAIN,
        {"attn_mask": POSITIONS},
        note="mask",
        rows=("S(0), S(0), S(0), R -> S(0), S(0); S(1), S(1), S(1), R -> S(1), S(1); S(2), R, R, S(0) -> S(2), S(2)"),
    ),
    Case(
        FORWARD,
        PLAIN,
        {"attn_mask": BATCH},
        note="padding_mask",
        rows=("S(0), S(0), S(0), S(0) -> S(0), S(0); S(1), S(1), S(1), R -> S(1), S(1); S(2), R, R, R -> S(2), S(2)"),
    ),
    Case(
        FORWARD,
        GROUPED,
        {"attn_mask": small(1, 24, 8, 12)},
        note="grouped_mask",
        rows=(
            "S(0), S(0), S(0), R -> S(0), S(0); S(1), S(1), S(1), S(1) -> S(1), S(1); "
            "S(1/4), R, R, S(1/4) -> S(1/4), S(1/4); S(2), R, R, S(2) -> S(2), S(2)"
        ),
    ),
    Case(
        BACKWARD,
        backward(*PLAIN),
        rows=(
            "S(0), S(0), S(0), S(0), S(0), S(0) -> S(0), S(0), S(0); "
            "S(1), S(1), S(1), S(1), S(1), S(1) -> S(1), S(1), S(1); "
            "S(2), S(2), R, R, S(2), S(2) -> S(2), P(sum), P(sum); "
            "P(sum), R, R, R, R, R -> P(sum), P(sum), P(sum)"
        ),
    ),
    Case(
        BACKWARD,
        backward(*SQUARE, causal=True),
        note="causal",
        rows=(
            "S(0), S(0), S(0), S(0), S(0), S(0) -> S(0), S(0), S(0); "
            "S(1), S(1), S(1), S(1), S(1), S(1) -> S(1), S(1), S(1); "
            "S(2), S(2), R, R, S(2), S(2) -> S(2), P(sum), P(sum); "
            "P(sum), R, R, R, R, R -> P(sum), P(sum), P(sum)"
        ),
    ),
    Case(
        BACKWARD,
        backward(*qkv(4, 2, 12, 12), causal=True),
        note="causal_grouped",
        rows=(
            "S(0), S(0), S(0), S(0), S(0), S(0) -> S(0), S(0), S(0); "
            "S(1), S(1), S(1), S(1), S(1), S(1) -> S(1), S(1), S(1); "
            "S(1/2), S(1/2), R, R, S(1/2), S(1/2) -> S(1/2), P(sum), P(sum); "
            "S(2), S(2), R, R, S(2), S(2) -> S(2), P(sum), P(sum); "
            "P(sum), R, R, R, R, R -> P(sum), P(sum), P(sum)"
        ),
    ),
    Case(
        BACKWARD,
        backward(*GROUPED),
        note="grouped",
        rows=(
            "S(0), S(0), S(0), S(0), S(0), S(0) -> S(0), S(0), S(0); "
            "S(1), S(1), S(1), S(1), S(1), S(1) -> S(1), S(1), S(1); "
            "S(1/4), S(1/4), R, R, S(1/4), S(1/4) -> S(1/4), P(sum), P(sum); "
            "S(2), S(2), R, R, S(2), S(2) -> S(2), P(sum), P(sum); "
            "P(sum), R, R, R, R, R -> P(sum), P(sum), P(sum)"
        ),
    ),
    Case(
        BACKWARD,
        backward(*PLAIN, mask=BATCH),
        {"attn_mask": BATCH},
        note="padding_mask",
        rows=(
            "S(0), S(0), S(0), S(0), S(0), S(0), S(0) -> S(0), S(0), S(0); "
            "S(1), S(1), S(1), S(1), S(1), S(1), R -> S(1), S(1), S(1); "
            "S(2), S(2), R, R, S(2), S(2), R -> S(2), P(sum), P(sum); "
            "P(sum), R, R, R, R, R, R -> P(sum), P(sum), P(sum)"
        ),
    ),
    Case(
        MATH,
        (*PLAIN, POSITIONS),
        note="mask",
        rows=("S(0), S(0), S(0), R -> S(0), S(0); S(1), S(1), S(1), R -> S(1), S(1); S(2), R, R, S(0) -> S(2), S(2)"),
    ),
    Case(
        MATH,
        (*SQUARE, None, 0.0, True),
        note="causal",
        rows="S(0), S(0), S(0) -> S(0), S(0); S(1), S(1), S(1) -> S(1), S(1); S(2), R, R -> S(2), S(2)",
    ),
    Case(
        FORWARD,
        (*PLAIN, 0.0, True),
        note="causal_lengths",
        rows="S(0), S(0), S(0) -> S(0), S(0); S(1), S(1), S(1) -> S(1), S(1); S(2), R, R -> S(2), S(2)",
    ),
    Case(
        FORWARD,
        (*PLAIN, 0.0, True),
        {"attn_mask": POSITIONS},
        note="causal_mask",
        rows=("S(0), S(0), S(0), R -> S(0), S(0); S(1), S(1), S(1), R -> S(1), S(1); S(2), R, R, S(0) -> S(2), S(2)"),
    ),
    Case(
        BACKWARD,
        backward(*PLAIN, causal=True, mask=BATCH),
        {"attn_mask": BATCH},
        note="causal_padding_mask",
        rows=(
            "S(0), S(0), S(0), S(0), S(0), S(0), S(0) -> S(0), S(0), S(0); "
            "S(1), S(1), S(1), S(1), S(1), S(1), R -> S(1), S(1), S(1); "
            "S(2), S(2), R, R, S(2), S(2), R -> S(2), P(sum), P(sum); "
            "P(sum), R, R, R, R, R, R -> P(sum), P(sum), P(sum)"
        ),
    ),
)


@pytest.mark.parametrize("case", RUN, ids=str)
def test_rows_are_those_expected_and_give_the_ops_value(case: Case) -> None:
    check_case(case)


# Kernels of accelerators cannot be run here: on meta tensors they give shapes.

Q, K, V = (torch.empty(4, h, s, 16, device="meta") for h, s in ((24, 64), (4, 128), (4, 128)))
WIDE = torch.empty(4, 24, 128, 16, device="meta")  # the efficient kernel has no groups
SAME, BIAS_OF_SAME = torch.empty(4, 24, 128, 16, device="meta"), torch.empty(1, 24, 128, 128, device="meta")
BIAS = torch.empty(1, 24, 64, 128, device="meta")
SEED = torch.empty((), dtype=torch.int64, device="meta")
GRAD, LOGSUMEXP = torch.empty_like(Q), torch.empty(4, 24, 64, device="meta")
COLUMN = torch.empty(4, 24, 64, 1, device="meta")
ALL = [True, True, True, True]
FLASH, FLASH_BACKWARD = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
)
EFFICIENT, EFFICIENT_BACKWARD = (
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
CUDNN, CUDNN_BACKWARD = (
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
FUSED, FUSED_BACKWARD = (
    aten._scaled_dot_product_fused_attention_overrideable.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
)
SHAPED = (
    (Case(FLASH, (Q, K, V)), "b k g s"),
    (Case(FLASH, (Q, K, V, 0.0, True), note="causal_lengths"), "b k g"),
    (Case(FLASH, (Q, K, V, 0.1), note="dropout"), ""),
    (Case(FLASH_BACKWARD, (GRAD, Q, K, V, GRAD, LOGSUMEXP, None, None, 64, 128, 0.0, False, SEED, SEED)), "b k g s"),
    (Case(EFFICIENT, (Q, WIDE, WIDE, BIAS, True)), "b k s"),
    (Case(EFFICIENT, (Q, WIDE, WIDE, None, True, 0.0, True), note="causal_lengths"), "b k"),
    (Case(EFFICIENT, (Q[:, :, :48], WIDE, WIDE, None, True), note="padded_rows"), "b k"),
    (Case(EFFICIENT, (Q, WIDE, WIDE, None, False), note="inference"), "b k"),
    (Case(EFFICIENT_BACKWARD, (GRAD, Q, WIDE, WIDE, BIAS, GRAD, LOGSUMEXP, SEED, SEED, 0.0, ALL)), "b k s"),
    (Case(CUDNN, (Q, K, V, None, True)), "b k g s"),
    (
        Case(CUDNN_BACKWARD, (GRAD, Q, K, V, GRAD, COLUMN, SEED, SEED, None, None, None, 64, 128, 0.0, False)),
        "b k g s",
    ),
    (Case(FUSED, (Q, K, V, BIAS)), "b k g s"),
    (Case(FUSED, (SAME, K, V, None, 0.0, True), note="causal"), "b k g s"),
    (Case(FUSED, (SAME, K, V, BIAS_OF_SAME, 0.0, True), note="causal_mask"), "b k g"),
    (
        Case(
            FUSED_BACKWARD,
            (GRAD, Q, K, V, BIAS, ALL, GRAD, LOGSUMEXP, None, None, 64, 128, 0.0, False, SEED, SEED),
        ),
        "b k g s",
    ),
)


@pytest.mark.parametrize(("case", "factors"), SHAPED, ids=lambda value: str(value))
def test_kernels_of_accelerators_give_the_shapes_that_rows_claim(case: Case, factors: str) -> None:
    whole = tensors(case.op(*case.args, **case.kwargs))
    call = call_on(case, whole)
    rule = rule_of(case.op)
    assert rule is not None
    space = rule.space(call)
    assert space is not None
    sharded = {row.label for row in all_rows(space, 2)} - {"R", "P(sum)"}
    assert sharded == set(factors.split())
    for row in all_rows(space, 2):
        found = tensors(case.op(*split(list(case.args), row), **case.kwargs))
        claimed = [part(tensor, placement) for tensor, placement in zip(whole, row.results, strict=True)]
        assert [tensor.shape for tensor in found] == [tensor.shape for tensor in claimed], row


def tensors(results: Any) -> list[torch.Tensor]:
    return [result for result in results if isinstance(result, torch.Tensor)]


def split(args: list[Any], row: Row) -> list[Any]:
    placements = iter(row.operands)
    return [part(arg, next(placements)) if isinstance(arg, torch.Tensor) else arg for arg in args]


def part(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    shape = local_shape(Layout((placement,)), tensor.shape, Mesh.of(x=2))
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def test_a_debug_mask_or_other_head_counts_have_no_rows() -> None:
    debug = Case(FLASH, (Q, K, V, 0.0, False, True))
    results = tensors(debug.op(*debug.args))
    rule = rule_of(FLASH)
    assert rule is not None
    assert rule.space(call_on(debug, results)) is None
    odd = Case(FLASH, (Q[:, :6], K, V))
    assert rule.space(call_on(odd, tensors(odd.op(*odd.args)))) is None
    grouped = Case(EFFICIENT, (Q, K, V, None, True))
    rule = rule_of(EFFICIENT)
    assert rule is not None
    assert rule.space(call_on(grouped, tensors(grouped.op(*grouped.args)))) is None


def test_every_rule_is_run_or_shaped() -> None:
    ops = {case.op for case in RUN} | {case.op for case, _ in SHAPED}
    assert ops_of("passes.rules.attention") == ops
