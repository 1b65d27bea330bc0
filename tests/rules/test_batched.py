"""Fourier transforms, linear algebra, bags: the batch is sharded, an op's own dims stay whole; each row is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes._torch import CTC_LOSS
from tests.rules.harness import Case, check_case, floats, ops_of

aten = torch.ops.aten

SUMS = "P(sum) -> P(sum); P(avg) -> P(avg)"
STACK = floats(4, 6, 5, 5) / 64 + 3 * torch.eye(5, dtype=torch.float64)
POSITIVE = STACK @ STACK.mT
LEFT = floats(4, 6, 5, 3)
LOWER = torch.linalg.cholesky(POSITIVE)
LU, PIVOTS, _ = torch.linalg.lu_factor_ex(STACK)
REFLECTORS, TAU = torch.geqrf(STACK)


def rows(operands: int, results: int) -> str:
    """Return the rows that shard one of two batch dims of all tensors."""
    return "; ".join(f"{', '.join([f'S({d})'] * operands)} -> {', '.join([f'S({d})'] * results)}" for d in (0, 1))


WAVES = (
    Case(
        aten._fft_r2c.default, (floats(4, 6, 8), [1], 0, True), note="middle", rows=f"S(0) -> S(0); S(2) -> S(2); {SUMS}"
    ),
    Case(
        aten._fft_c2c.default,
        (torch.complex(floats(4, 6, 8), floats(4, 6, 8)), [1, 2], 1, False),
        note="two_dims",
        rows=f"S(0) -> S(0); {SUMS}",
    ),
    Case(
        aten._fft_c2r.default,
        (torch.fft.rfft(floats(4, 6, 8), dim=0), [0], 2, 4),
        note="real",
        rows=f"S(1) -> S(1); S(2) -> S(2); {SUMS}",
    ),
)
MATRICES = (
    Case(aten._linalg_eigh.default, (POSITIVE,), rows=rows(1, 2)),
    Case(aten._linalg_eigvals.default, (STACK,), rows=rows(1, 1)),
    Case(aten._linalg_solve_ex.default, (STACK, LEFT), rows=rows(2, 4)),
    Case(aten._linalg_solve_ex.default, (STACK, floats(4, 6, 5)), note="vectors", rows=rows(2, 4)),
    Case(aten._linalg_solve_ex.default, (STACK, floats(5)), note="one_vector_for_all"),
    Case(aten._linalg_svd.default, (STACK,), rows=rows(1, 3)),
    Case(aten._linalg_svd.default, (STACK[0, 0],), note="one_matrix"),
    Case(aten.cholesky_inverse.default, (LOWER,), rows=rows(1, 1)),
    Case(aten.cholesky_solve.default, (LEFT, LOWER), rows=f"{rows(2, 1)}; P(sum), R -> P(sum); P(avg), R -> P(avg)"),
    Case(aten.linalg_cholesky_ex.default, (POSITIVE,), rows=rows(1, 2)),
    Case(aten.linalg_eig.default, (STACK,), rows=rows(1, 2)),
    Case(aten.linalg_householder_product.default, (REFLECTORS, TAU), rows=rows(2, 1)),
    Case(aten.linalg_inv_ex.default, (STACK,), rows=rows(1, 2)),
    Case(aten.linalg_lu.default, (STACK,), rows=rows(1, 3)),
    Case(aten.linalg_lu_factor_ex.default, (STACK,), rows=rows(1, 3)),
    Case(aten.linalg_lu_solve.default, (LU, PIVOTS, LEFT), rows=rows(3, 1)),
    Case(aten.linalg_matrix_exp.default, (STACK,), rows=rows(1, 1)),
    Case(aten.linalg_qr.default, (STACK,), rows=rows(1, 2)),
    Case(
        aten.linalg_solve_triangular.default,
        (LOWER, LEFT),
        {"upper": False},
        rows=f"{rows(2, 1)}; R, P(sum) -> P(sum); R, P(avg) -> P(avg)",
    ),
    Case(aten.lu_unpack.default, (LU, PIVOTS), rows=rows(2, 3)),
    Case(aten.diagonal.default, (floats(5, 4, 6),), rows=f"S(2) -> S(0); {SUMS}"),
    Case(aten.diagonal.default, (floats(4, 6, 5), 1, -1, 1), note="last_dims", rows=f"S(0) -> S(0); {SUMS}"),
    Case(
        aten.diagonal_scatter.default,
        (floats(4, 6, 5), floats(4, 5), 0, 1, 2),
        rows="S(0), S(0) -> S(0); P(sum), P(sum) -> P(sum); P(avg), P(avg) -> P(avg)",
    ),
)
ROWS, OTHERS = floats(4, 6, 5), floats(4, 8, 5)
APART = torch.cdist(ROWS, OTHERS)
PRODUCTS = (
    Case(aten._cdist_forward.default, (ROWS, OTHERS, 2.0, 2), rows="S(0), S(0) -> S(0); S(1), R -> S(1); R, S(1) -> S(2)"),
    Case(
        aten._cdist_backward.default,
        (floats(4, 6, 8), ROWS, OTHERS, 2.0, APART),
        rows="S(0), S(0), S(0), S(0) -> S(0); S(1), S(1), R, S(1) -> S(1); S(2), R, S(1), S(2) -> P(sum); "
        "P(sum), R, R, R -> P(sum)",
    ),
    Case(  # bilinear: x[n, i], w[o, i, j], y[n, j] -> [n, o]
        aten._trilinear.default,
        (floats(4, 6), floats(9, 6, 8), floats(4, 8), [1, 3], [0], [1, 2], [2, 3]),
        rows="S(0), R, S(0) -> S(0); R, S(0), R -> S(1); S(1), S(1), R -> P(sum); R, S(2), S(1) -> P(sum); "
        "P(sum), R, R -> P(sum); R, P(sum), R -> P(sum); R, R, P(sum) -> P(sum)",
    ),
)
TABLE, INDICES, OFFSETS = floats(7, 12), torch.tensor([1, 6, 0, 1, 3, 3, 5]), torch.tensor([0, 2, 2, 5])
WEIGHTS = floats(7)
SUM, MEAN, MAX = range(3)


def bags(mode: int, weights: torch.Tensor | None = None) -> tuple[Any, ...]:
    return TABLE, INDICES, OFFSETS, False, mode, False, weights, False, 3


def bags_backward(mode: int, weights: torch.Tensor | None = None) -> tuple[Any, ...]:
    _, *found = aten._embedding_bag(*bags(mode, weights))
    return floats(4, 12), INDICES, OFFSETS, *found, len(TABLE), False, mode, False, weights, 3


BAGS = (
    Case(aten._embedding_bag.default, bags(SUM), note="sum", rows="S(1), R, R -> S(1), R, R, R"),
    Case(aten._embedding_bag.default, bags(SUM, WEIGHTS), note="weighted", rows="S(1), R, R, R -> S(1), R, R, R"),
    Case(aten._embedding_bag.default, bags(MEAN), note="mean", rows="S(1), R, R -> S(1), R, R, R"),
    Case(aten._embedding_bag.default, bags(MAX), note="max", rows="S(1), R, R -> S(1), R, R, S(1)"),
    Case(aten._embedding_bag_forward_only.default, bags(MEAN), rows="S(1), R, R -> S(1), R, R, R"),
    Case(aten._embedding_bag_backward.default, bags_backward(SUM), note="sum", rows="S(1), R, R, R, R, R -> S(1)"),
    Case(
        aten._embedding_bag_backward.default,
        bags_backward(SUM, WEIGHTS),
        note="weighted",
        rows="S(1), R, R, R, R, R, R -> S(1)",
    ),
    Case(aten._embedding_bag_backward.default, bags_backward(MEAN), note="mean", rows="S(1), R, R, R, R, R -> S(1)"),
    Case(aten._embedding_bag_backward.default, bags_backward(MAX), note="max", rows="S(1), R, R, R, R, S(1) -> S(1)"),
    Case(
        aten._embedding_bag_per_sample_weights_backward.default,
        (floats(4, 12), TABLE, INDICES, OFFSETS, aten._embedding_bag(*bags(SUM))[1], SUM, 3),
        rows="S(1), S(1), R, R, R -> P(sum)",
    ),
)
LOG_PROBS, LABELS = floats(9, 4, 6).log_softmax(-1), torch.arange(12).reshape(4, 3) % 5 + 1
TIMES, LENGTHS = torch.tensor([9, 8, 9, 7]), torch.tensor([3, 2, 0, 3])
SPEECH = (
    Case(
        CTC_LOSS,
        (LOG_PROBS, LABELS, TIMES, LENGTHS, 0, False),
        note="padded",
        rows="S(1), S(0), S(0), S(0) -> S(0), S(1)",
    ),
    Case(CTC_LOSS, (LOG_PROBS, LABELS.flatten()[:8], TIMES, LENGTHS, 0, False), note="in_one_row", rows=""),
)
CASES = (*WAVES, *MATRICES, *PRODUCTS, *BAGS, *SPEECH)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_those_expected_and_give_the_ops_value(case: Case) -> None:
    check_case(case)


def test_every_rule_is_run() -> None:
    assert ops_of("passes.rules.batched") == {case.op for case in CASES}
