"""Pointwise ops: all of them run on split inputs, and what is linear is written down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._ops import OpOverload

from tests.rules.harness import Case, check, check_case, floats, ops_of

aten = torch.ops.aten
prims = torch.ops.prims

SHAPE = (4, 6)
A, B, C = floats(*SHAPE), floats(*SHAPE), floats(*SHAPE)
ROW, COLUMN, SCALAR = floats(6), floats(4, 1), floats()
MASK = A > 0
INTS = (A * 4).long()
SINGLE = A.float()
EIGHT = A.to(torch.float8_e4m3fn)
SHORT = INTS.abs().to(torch.uint16)
COMPLEX = torch.complex(A, B)

CASES = (
    Case(
        aten.add.Tensor,
        (A, B),
        {"alpha": 2},
        rows="S(0), S(0) -> S(0); S(1), S(1) -> S(1); P(avg), P(avg) -> P(avg); P(sum), P(sum) -> P(sum)",
    ),
    Case(
        aten.add.Tensor,
        (A, ROW),
        note="row",
        rows="S(0), R -> S(0); S(1), S(0) -> S(1); P(avg), P(avg) -> P(avg); P(sum), P(sum) -> P(sum)",
    ),
    Case(
        aten.add.Tensor,
        (A, COLUMN),
        note="column",
        rows="S(0), S(0) -> S(0); S(1), R -> S(1); P(avg), P(avg) -> P(avg); P(sum), P(sum) -> P(sum)",
    ),
    Case(
        aten.add.Tensor,
        (A, SCALAR),
        note="0d",
        rows="S(0), R -> S(0); S(1), R -> S(1); P(avg), P(avg) -> P(avg); P(sum), P(sum) -> P(sum)",
    ),
    Case(aten.add.Tensor, (A, 2.0), note="affine", rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(aten.add.Tensor, (A, 0.0), note="zero", rows="S(0) -> S(0); S(1) -> S(1); P(avg) -> P(avg); P(sum) -> P(sum)"),
    Case(aten.add.Scalar, (A, 2.0), note="affine", rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(
        aten.add.Tensor,
        (INTS, A),
        note="counts",
        rows="S(0), S(0) -> S(0); S(1), S(1) -> S(1); P(avg), P(avg) -> P(avg); P(sum), P(sum) -> P(sum)",
    ),
    Case(aten.add.Tensor, (MASK, A), note="mask", rows="S(0), S(0) -> S(0); S(1), S(1) -> S(1)"),
    Case(
        aten.sub.Tensor,
        (ROW, A),
        rows="R, S(0) -> S(0); S(0), S(1) -> S(1); P(avg), P(avg) -> P(avg); P(sum), P(sum) -> P(sum)",
    ),
    Case(aten.rsub.Scalar, (A, 1.0), note="affine", rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(
        aten.mul.Tensor,
        (A, COLUMN),
        rows="S(0), S(0) -> S(0); S(1), R -> S(1); P(avg), R -> P(avg); "
        "P(sum), R -> P(sum); R, P(avg) -> P(avg); R, P(sum) -> P(sum)",
    ),
    Case(
        aten.mul.Tensor, (A, 2.0), note="number", rows="S(0) -> S(0); S(1) -> S(1); P(avg) -> P(avg); P(sum) -> P(sum)"
    ),
    Case(
        aten.mul.Tensor,
        (MASK, A),
        note="mask",
        rows="S(0), S(0) -> S(0); S(1), S(1) -> S(1); R, P(avg) -> P(avg); R, P(sum) -> P(sum)",
    ),
    Case(
        aten.mul.Tensor,
        (floats(1, 1), floats(1)),
        note="ones",
        rows="P(avg), R -> P(avg); P(sum), R -> P(sum); R, P(avg) -> P(avg); R, P(sum) -> P(sum)",
    ),
    Case(
        aten.div.Tensor, (A, B), rows="S(0), S(0) -> S(0); S(1), S(1) -> S(1); P(avg), R -> P(avg); P(sum), R -> P(sum)"
    ),
    Case(
        aten.div.Tensor, (A, 3.0), note="number", rows="S(0) -> S(0); S(1) -> S(1); P(avg) -> P(avg); P(sum) -> P(sum)"
    ),
    Case(aten.div.Tensor_mode, (A, B), {"rounding_mode": "floor"}, rows="S(0), S(0) -> S(0); S(1), S(1) -> S(1)"),
    Case(aten.neg.default, (A,), rows="S(0) -> S(0); S(1) -> S(1); P(avg) -> P(avg); P(sum) -> P(sum)"),
    Case(aten.exp.default, (A,), rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(aten.clamp.default, (A, -1.0, 1.0), rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(aten.clip.default, (A, -1.0), rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(aten._conj.default, (COMPLEX,), rows="S(0) -> S(0); S(1) -> S(1); P(avg) -> P(avg); P(sum) -> P(sum)"),
    Case(
        aten.fake_quantize_per_tensor_affine_cachemask.default,
        (A, 0.1, 3, -128, 127),
        rows="S(0) -> S(0), S(0); S(1) -> S(1), S(1)",
    ),
    Case(
        aten.fake_quantize_per_channel_affine_cachemask.default,
        (floats(4, 6).float(), torch.rand(6) + 0.1, torch.arange(6, dtype=torch.int32), 1, -128, 127),
        rows="S(0), R, R -> S(0), S(0); S(1), S(0), S(0) -> S(1), S(1)",
    ),
    Case(prims.conj_physical.default, (COMPLEX,), rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(
        aten.addcmul.default,
        (A, ROW, B),
        rows="S(0), R, S(0) -> S(0); S(1), S(0), S(1) -> S(1); P(avg), P(avg), R -> P(avg); "
        "P(avg), R, P(avg) -> P(avg); P(sum), P(sum), R -> P(sum); P(sum), R, P(sum) -> P(sum)",
    ),
    Case(
        aten.lerp.Tensor,
        (A, B, C),
        rows="S(0), S(0), S(0) -> S(0); S(1), S(1), S(1) -> S(1); "
        "P(avg), P(avg), R -> P(avg); P(sum), P(sum), R -> P(sum)",
    ),
    Case(aten.maximum.default, (A, ROW), rows="S(0), R -> S(0); S(1), S(0) -> S(1); P(max), P(max) -> P(max)"),
    Case(
        aten.where.self, (MASK, A, SCALAR), rows="S(0), S(0), R -> S(0); S(1), S(1), R -> S(1); R, P(*), P(*) -> P(*)"
    ),
    Case(
        aten.where.ScalarOther,
        (MASK, A, 0.0),
        note="zero",
        rows="S(0), S(0) -> S(0); S(1), S(1) -> S(1); R, P(*) -> P(*)",
    ),
    Case(aten.where.ScalarOther, (MASK, A, 1.0), note="affine", rows="S(0), S(0) -> S(0); S(1), S(1) -> S(1)"),
    Case(
        aten.masked_fill.Scalar,
        (A, MASK, 0),
        note="zero",
        rows="S(0), S(0) -> S(0); S(1), S(1) -> S(1); P(*), R -> P(*)",
    ),
    Case(aten.masked_fill.Scalar, (A, MASK, -1e9), note="affine", rows="S(0), S(0) -> S(0); S(1), S(1) -> S(1)"),
    Case(
        aten.masked_fill.Tensor,
        (A, MASK, SCALAR),
        rows="S(0), S(0), R -> S(0); S(1), S(1), R -> S(1); P(*), R, P(*) -> P(*)",
    ),
    Case(aten.fill.Tensor, (A, SCALAR), rows="S(0), R -> S(0); S(1), R -> S(1); R, P(*) -> P(*)"),
    Case(aten.copy.default, (A, ROW), rows="S(0), R -> S(0); S(1), S(0) -> S(1); R, P(*) -> P(*)"),
    Case(aten.clone.default, (A,), rows="S(0) -> S(0); S(1) -> S(1); P(*) -> P(*)"),
    Case(
        aten.gelu_backward.default,
        (A, B),
        rows="S(0), S(0) -> S(0); S(1), S(1) -> S(1); P(avg), R -> P(avg); P(sum), R -> P(sum)",
    ),
    Case(
        aten.native_dropout_backward.default,
        (A, MASK, 2.0),
        rows="S(0), S(0) -> S(0); S(1), S(1) -> S(1); P(avg), R -> P(avg); P(sum), R -> P(sum)",
    ),
    Case(aten.log_sigmoid_forward.default, (A,), rows="S(0) -> S(0), S(0); S(1) -> S(1), S(1)"),
    Case(
        prims.convert_element_type.default,
        (SINGLE, torch.float64),
        note="wider",
        rows="S(0) -> S(0); S(1) -> S(1); P(*) -> P(*)",
    ),
    Case(prims.convert_element_type.default, (A, torch.float32), note="narrower", rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(prims.convert_element_type.default, (A, torch.int64), note="cut", rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(prims.convert_element_type.default, (EIGHT, torch.float32), note="float8", rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(prims.convert_element_type.default, (SHORT, torch.int64), note="unsigned", rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(
        prims.convert_element_type.default,
        (INTS, torch.float64),
        note="counts",
        rows="S(0) -> S(0); S(1) -> S(1); P(*) -> P(*)",
    ),
    Case(
        prims.convert_element_type.default,
        (INTS, torch.bfloat16),
        note="large_counts",
        rows="S(0) -> S(0); S(1) -> S(1)",
    ),
    Case(prims.convert_element_type.default, (MASK, torch.float64), note="mask", rows="S(0) -> S(0); S(1) -> S(1)"),
    Case(aten._to_copy.default, (SINGLE,), {"dtype": torch.float64}, rows="S(0) -> S(0); S(1) -> S(1); P(*) -> P(*)"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_gives_the_value_of_the_op(case: Case) -> None:
    check_case(case)


def tagged() -> tuple[OpOverload, ...]:
    """Return the functional ops of aten and prims that torch tags as pointwise and that give tensors."""
    found: list[OpOverload] = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        if namespace in ("aten", "prims"):
            packet, _, overload = rest.partition(".")
            found.append(getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default"))
    return tuple(op for op in found if torch.Tag.pointwise in op.tags and _gives_tensors(op))


def _gives_tensors(op: OpOverload) -> bool:
    return not op._schema.is_mutable and all("Tensor" in str(result.type) for result in op._schema.returns)


def arguments(op: OpOverload, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return some arguments for `op`: tensors of SHAPE and `dtype`, booleans for masks, small numbers."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in op._schema.arguments:
        kind = str(parameter.type)
        if parameter.has_default_value() and "Tensor" not in kind:
            continue
        value = _argument(parameter.name, kind, dtype)
        if parameter.kwarg_only:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _argument(name: str, kind: str, dtype: torch.dtype) -> Any:
    if name in ("mask", "condition"):
        return MASK
    if "Tensor" in kind:
        if name == "value":
            return torch.tensor(1, dtype=dtype)
        numbers = floats(*SHAPE).abs() / 4 + 0.125
        return numbers if dtype.is_floating_point else (numbers * 8).to(dtype)
    return _SCALARS[kind]


_SCALARS = {"number": 2, "int": 2, "float": 0.5, "bool": False, "str": "floor", "Optional[str]": None}


def run_somehow(op: OpOverload) -> Case:
    """Return a case for `op`, of floats or, where it takes none, of integers."""
    for dtype in (torch.float64, torch.int64):
        args, kwargs = arguments(op, dtype)
        try:
            op(*args, **kwargs)
        except (RuntimeError, NotImplementedError):  # the op refuses this dtype; the test fails below if it refuses both
            continue
        return Case(op, args, kwargs)
    raise AssertionError(f"{op._schema} ran on neither floats nor integers; give it a case")


GENERIC = sorted({*tagged(), *ops_of("passes.rules.pointwise")} - {case.op for case in CASES}, key=str)


@pytest.mark.parametrize("op", GENERIC, ids=str)
def test_every_pointwise_op_is_sharded_on_each_dim(op: OpOverload) -> None:
    rows = check(run_somehow(op))
    assert any("-> S(0)" in row for row in rows) and any("-> S(1)" in row for row in rows)


@st.composite
def broadcast_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Return three shapes that broadcast."""
    whole = draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), max_size=3))
    shapes = []
    for _ in range(3):
        kept = whole[draw(st.integers(0, len(whole))) :]
        shapes.append(tuple(1 if draw(st.booleans()) else size for size in kept))
    return tuple(shapes)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(broadcast_shapes())
def test_broadcast_operands_are_sharded_where_they_span_the_dim(shapes: tuple[tuple[int, ...], ...]) -> None:
    case = Case(aten.addcmul.default, tuple(floats(*shape) for shape in shapes))
    rows = check(case)
    for dim, size in enumerate(torch.broadcast_shapes(*shapes)):
        if size > 1:
            assert sum(row.endswith(f"-> S({dim})") for row in rows) == 1, rows
