"""Views keep digits: what is sharded before is sharded after."""

from __future__ import annotations

import pytest
import torch

from tests.rules.harness import Case, check_case, floats, ops_of

aten = torch.ops.aten
prims = torch.ops.prims

CASES = (
    Case(
        aten.view.default,
        (floats(4, 6, 10), [24, 10]),
        note="merge",
        rows="S(0) -> S(0); S(1) -> S(0/4); S(2) -> S(1); P(*) -> P(*)",
    ),
    Case(
        aten.view.default,
        (floats(24, 10), [4, 6, 2, 5]),
        note="split",
        rows="S(0) -> S(0); S(0/4) -> S(1); S(1) -> S(2); P(*) -> P(*)",
    ),
    Case(
        aten.view.default,
        (floats(24, 10), [-1, 60]),
        note="infer",
        rows="S(0) -> S(0); S(0/4) -> S(1); S(1) -> S(1/6); P(*) -> P(*)",
    ),
    Case(aten.view.default, (floats(4, 9), [6, 6]), note="across", rows="S(0) -> S(0); S(1/3) -> S(1/2); P(*) -> P(*)"),
    Case(
        aten.view.default,
        (floats(1, 6, 1, 4), [6, 1, 4, 1]),
        note="ones",
        rows="S(1) -> S(0); S(3) -> S(2); P(*) -> P(*)",
    ),
    Case(
        aten.view.default,
        (floats(2, 3, 8), [2, 24]),
        note="heads",
        rows="S(0) -> S(0); S(1) -> S(1); S(2) -> S(1/3); P(*) -> P(*)",
    ),
    Case(aten.view.default, (floats(5, 7), [7, 5]), note="coprime", rows="P(*) -> P(*)"),
    Case(aten.view.default, (floats(12), [12]), note="same", rows="S(0) -> S(0); P(*) -> P(*)"),
    Case(aten.view.default, (floats(4, 0), [0, 6]), note="empty", rows="P(*) -> P(*)"),
    Case(aten.view.default, (floats(1), []), note="scalar", rows="P(*) -> P(*)"),
    Case(
        aten.reshape.default, (floats(6, 4).t(), [24]), note="copy", rows="S(0) -> S(0); S(1) -> S(0/4); P(*) -> P(*)"
    ),
    Case(
        aten._unsafe_view.default,
        (floats(6, 4), [3, 8]),
        rows="S(0) -> S(0); S(0/3) -> S(1); S(1) -> S(1/2); P(*) -> P(*)",
    ),
    Case(
        aten._reshape_alias.default,
        (floats(6, 4), [2, 12], [12, 1]),
        rows="S(0) -> S(0); S(0/2) -> S(1); S(1) -> S(1/3); P(*) -> P(*)",
    ),
    Case(
        aten.permute.default,
        (floats(4, 6, 9), [2, 0, -2]),
        rows="S(0) -> S(1); S(1) -> S(2); S(2) -> S(0); P(*) -> P(*)",
    ),
    Case(aten.transpose.int, (floats(4, 6, 9), 0, -1), rows="S(0) -> S(2); S(1) -> S(1); S(2) -> S(0); P(*) -> P(*)"),
    Case(aten.transpose.int, (floats(), 0, -1), note="scalar", rows="P(*) -> P(*)"),
    Case(aten.t.default, (floats(4, 6),), rows="S(0) -> S(1); S(1) -> S(0); P(*) -> P(*)"),
    Case(aten.t.default, (floats(4),), note="vector", rows="S(0) -> S(0); P(*) -> P(*)"),
    Case(aten.squeeze.default, (floats(4, 1, 3, 1),), rows="S(0) -> S(0); S(2) -> S(1); P(*) -> P(*)"),
    Case(aten.squeeze.dim, (floats(4, 1, 3), 1), rows="S(0) -> S(0); S(2) -> S(1); P(*) -> P(*)"),
    Case(aten.squeeze.dim, (floats(4, 1, 3), 0), note="kept", rows="S(0) -> S(0); S(2) -> S(2); P(*) -> P(*)"),
    Case(aten.squeeze.dims, (floats(4, 1, 3, 1), [0, 1]), rows="S(0) -> S(0); S(2) -> S(1); P(*) -> P(*)"),
    Case(aten.squeeze.dims, (floats(4, 1), []), note="none", rows="S(0) -> S(0); P(*) -> P(*)"),
    Case(aten.unsqueeze.default, (floats(4, 6), -1), rows="S(0) -> S(0); S(1) -> S(1); P(*) -> P(*)"),
    Case(aten.unsqueeze.default, (floats(4, 6), 0), note="front", rows="S(0) -> S(1); S(1) -> S(2); P(*) -> P(*)"),
    Case(aten.expand.default, (floats(6, 1), [4, 6, 9]), rows="R -> S(0); R -> S(2); S(0) -> S(1); P(*) -> P(*)"),
    Case(
        aten.expand.default,
        (floats(6, 1), [4, -1, 9]),
        note="kept",
        rows="R -> S(0); R -> S(2); S(0) -> S(1); P(*) -> P(*)",
    ),
    Case(
        aten.repeat.default,
        (floats(4, 3), [2, 1, 6]),
        rows="R -> S(0); R -> S(2); S(0) -> S(1); S(1) -> S(2/6); P(*) -> P(*)",
    ),
    Case(aten.unfold.default, (floats(4, 6), 1, 3, 1), rows="S(0) -> S(0); P(*) -> P(*)"),
    Case(aten.unfold.default, (floats(), 0, 1, 1), note="scalar", rows="P(*) -> P(*)"),
    Case(aten.flip.default, (floats(4, 6), [-1]), rows="S(0) -> S(0); P(*) -> P(*)"),
    Case(prims.rev.default, (floats(4, 6), [0]), rows="S(1) -> S(1); P(*) -> P(*)"),
    Case(aten.roll.default, (floats(4, 6), [1], [0]), rows="S(1) -> S(1); P(*) -> P(*)"),
    Case(aten.roll.default, (floats(4, 6), [1]), note="flat", rows="P(*) -> P(*)"),
    Case(aten.tril.default, (floats(4, 6, 9), 1), rows="S(0) -> S(0); P(*) -> P(*)"),
    Case(aten.triu.default, (floats(4, 6, 9),), rows="S(0) -> S(0); P(*) -> P(*)"),
    Case(
        aten.view_as_real.default,
        (torch.complex(floats(4, 6), floats(4, 6)),),
        rows="S(0) -> S(0); S(1) -> S(1); P(avg) -> P(avg); P(sum) -> P(sum)",
    ),
    Case(
        aten.view_as_complex.default,
        (floats(4, 6, 2),),
        rows="S(0) -> S(0); S(1) -> S(1); P(avg) -> P(avg); P(sum) -> P(sum)",
    ),
    Case(
        aten.real.default,
        (torch.complex(floats(4, 6), floats(4, 6)),),
        rows="S(0) -> S(0); S(1) -> S(1); P(avg) -> P(avg); P(sum) -> P(sum)",
    ),
    Case(
        aten.imag.default,
        (torch.complex(floats(4, 6), floats(4, 6)),),
        rows="S(0) -> S(0); S(1) -> S(1); P(avg) -> P(avg); P(sum) -> P(sum)",
    ),
    Case(aten.as_strided.default, (floats(4, 6), [6, 4], [1, 6]), rows=""),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_gives_the_value_of_the_op(case: Case) -> None:
    check_case(case)


def test_every_view_has_a_case() -> None:
    assert ops_of("passes.rules.view") == {case.op for case in CASES}
