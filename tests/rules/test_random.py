"""Random numbers: the same for every layout, other ones for every op and step, and random."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx import GraphModule, Node

from passes.ir.graph import value_of
from passes.ir.layout import Layout, R, assemble
from passes.ir.mesh import Mesh
from passes.rules.rule import factor_row, replicated_row, rule_of
from tests.rules.harness import Case, EagerCall, call_on, ops_of, split

aten = torch.ops.aten
DOUBLE = {"dtype": torch.float64}
ONE = Mesh.of(x=1)
SHAPED = torch.zeros(6, 8)
ODDS = torch.linspace(0, 1, 48).reshape(6, 8)
CASES = (
    Case(aten.rand.default, ([6, 8],)),
    Case(aten.rand.default, ([6, 8],), DOUBLE, note="double"),
    Case(aten.rand.default, ([6, 8],), {"dtype": torch.bfloat16}, note="bfloat16"),
    Case(aten.rand_like.default, (SHAPED,)),
    Case(aten.randn.default, ([6, 8],), DOUBLE, note="double"),
    Case(aten.randn_like.default, (SHAPED,), {"dtype": torch.float16}, note="half"),
    Case(aten.uniform.default, (SHAPED, 2.0, 3.0)),
    Case(aten.normal_functional.default, (SHAPED, 1.0, 2.0)),
    Case(
        torch.ops.prims.normal.default,
        ([6, 8],),
        {"mean": 1.0, "std": 2.0, "dtype": torch.float32, "device": torch.device("cpu"), "requires_grad": False},
    ),
    Case(aten.exponential.default, (SHAPED, 2.0)),
    Case(aten.randint.default, (1 << 40, [6, 8]), note="wide"),
    Case(aten.randint.low, (-3, 9, [6, 8])),
    Case(aten.randint_like.default, (SHAPED, 9)),
    Case(aten.randint_like.low_dtype, (SHAPED, 2, 9)),
    Case(aten.bernoulli.default, (ODDS,)),
    Case(aten.bernoulli.p, (SHAPED, 0.3)),
    Case(aten.bernoulli.Tensor, (SHAPED, ODDS[0])),
)
SPLITS = (  # on each axis, the factor sharded and the digits outside of it
    (Mesh.of(x=2), (("d0", 1),)),
    (Mesh.of(x=2), (("d1", 2),)),
    (Mesh.of(x=2, y=3), (("d1", 4), ("d0", 1))),
    (Mesh.of(x=2, y=3), (("d0", 1), ("d0", 2))),
    (Mesh.of(x=2, y=3), (("d0", 3), ("d0", 1))),
)
COUNT = 1 << 18
SIGMAS = 5.0  # how far from its mean a statistic of COUNT numbers may be


class SeededCall(EagerCall):
    """A call of a given step, and place among the random ops."""

    step = 17
    ordinal = 3

    def seed(self) -> Node:
        return self._constant(torch.tensor(self.step))

    def number(self) -> int:
        return self.ordinal


def draw(
    case: Case, mesh: Mesh = ONE, sharded: tuple[tuple[str, int], ...] = (), *, step: int = 17, op: int = 3
) -> torch.Tensor:
    """Return the global result, put together from every rank's part."""
    whole = case.op(*case.args, **case.kwargs)
    call, rule = call_on(case, [whole]), rule_of(case.op)
    assert rule is not None and rule.local is not None
    space = rule.space(call)
    assert space is not None
    chosen = [factor_row(space, *at, mesh.axis_size(axis)) for axis, at in zip(mesh.names, sharded, strict=False)]
    picked = [row or replicated_row(len(call.operands), 1) for row in chosen or [None]]
    layouts = [Layout(tuple(row.operands[i] for row in picked)) for i in range(len(call.operands))]
    layout = Layout(tuple(row.results[0] for row in picked))
    operands = [arg for arg in case.args if isinstance(arg, torch.Tensor)]
    splits = [split(operand, each, mesh) for operand, each in zip(operands, layouts, strict=True)]
    parts = []
    for place, coordinate in enumerate(mesh.coordinates()):
        here = SeededCall(case, call, [ranks[place] for ranks in splits], layouts, [layout], mesh, coordinate)
        here.step, here.ordinal = step, op
        parts.append(value_of(rule.local(here)))
    assert parts[0].dtype == whole.dtype
    return assemble(parts, whole.shape, layout, mesh)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("mesh", "sharded"), SPLITS, ids=str)
def test_any_layout_draws_what_one_device_draws(case: Case, mesh: Mesh, sharded: tuple[tuple[str, int], ...]) -> None:
    torch.testing.assert_close(draw(case, mesh, sharded), draw(case), rtol=1e-6, atol=1e-6)


def test_a_permutation_is_whole_on_every_rank() -> None:
    case = Case(aten.randperm.default, (COUNT,))
    drawn = draw(case, Mesh.of(x=2))
    assert torch.equal(drawn, draw(case))
    assert torch.equal(drawn.sort().values, torch.arange(COUNT))
    assert abs(correlation(drawn / COUNT, drawn / COUNT, 1)) < SIGMAS


def test_every_rule_is_run() -> None:
    assert ops_of("passes.rules.random") == {case.op for case in CASES} | {aten.randperm.default}


def uniform(dtype: torch.dtype = torch.float32, *, step: int = 17, op: int = 3) -> torch.Tensor:
    return draw(Case(aten.rand.default, ([COUNT],), {"dtype": dtype}), step=step, op=op)


def correlation(a: torch.Tensor, b: torch.Tensor, lag: int = 0) -> float:
    """Return the correlation of uniform numbers, in standard deviations of its estimate."""
    first, second = (each.double() - 0.5 for each in (a, b))
    return float((first[lag:] * second[: COUNT - lag]).mean()) * 12 * math.sqrt(COUNT)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_uniform_numbers_are_in_range_and_fill_it_evenly(dtype: torch.dtype) -> None:
    drawn = uniform(dtype)
    assert drawn.min() >= 0 and drawn.max() < 1
    cells = 1024
    counts = torch.histc(drawn.double(), cells, 0, 1)
    chi_squared = float(((counts - COUNT / cells) ** 2 / (COUNT / cells)).sum())
    assert abs(chi_squared - cells) < SIGMAS * math.sqrt(2 * cells)


@pytest.mark.parametrize("lag", (1, 2, 3, 8, 64, 1000, 1 << 16))
def test_neighbours_are_independent(lag: int) -> None:
    assert abs(correlation(uniform(), uniform(), lag)) < SIGMAS


@pytest.mark.parametrize("lag", (0, 1, 64))
@pytest.mark.parametrize(("step", "op"), ((17, 4), (17, 5), (18, 3), (16, 3), (17 + (1 << 32), 3), (-17, 3)))
def test_other_ops_and_steps_draw_other_numbers(step: int, op: int, lag: int) -> None:
    assert abs(correlation(uniform(), uniform(step=step, op=op), lag)) < SIGMAS


def test_a_double_has_bits_beyond_a_word() -> None:
    low = uniform(torch.float64) * 2.0**32 % 1
    assert abs(float(low.mean()) - 0.5) * math.sqrt(12 * COUNT) < SIGMAS


def test_normal_numbers_have_the_moments_of_a_normal_distribution() -> None:
    drawn = draw(Case(aten.randn.default, ([COUNT],), DOUBLE))
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((drawn**power).mean()) - moment) < SIGMAS * math.sqrt(variance / COUNT)


def test_integers_are_drawn_evenly_to_both_ends() -> None:
    counts = torch.bincount(draw(Case(aten.randint.low, (-3, 9, [COUNT]))) + 3, minlength=12)
    assert len(counts) == 12
    assert (counts - COUNT / 12).abs().max() < SIGMAS * math.sqrt(COUNT / 12)


def test_bernoulli_hits_as_often_as_it_is_told() -> None:
    hits = draw(Case(aten.bernoulli.p, (torch.zeros(COUNT), 0.3)))
    assert set(hits.tolist()) == {0.0, 1.0}
    assert abs(float(hits.mean()) - 0.3) < SIGMAS * math.sqrt(0.21 / COUNT)


def recorded(case: Case) -> Node:
    """Return the node that holds the numbers, in the graph of its local form."""
    whole = case.op(*case.args, **case.kwargs)
    rule = rule_of(case.op)
    assert rule is not None and rule.local is not None
    node = rule.local(SeededCall(case, call_on(case, [whole]), [], [], [Layout((R,))], ONE, (0,)))
    assert isinstance(node, Node)
    return node


def test_no_product_of_the_hash_overflows() -> None:
    """Overflow of signed numbers is undefined in compiled code, which might then draw other numbers."""
    drawn = recorded(Case(aten.rand.default, ([64],), DOUBLE))
    products = [n for n in drawn.graph.nodes if n.target is aten.mul.Tensor and value_of(n).dtype == torch.int64]
    assert products
    for product in products:
        factor, constant = product.args
        assert isinstance(factor, Node) and isinstance(constant, int)
        assert int(value_of(factor).min()) >= 0 and int(value_of(factor).max()) * constant < 1 << 63


@pytest.mark.slow
def test_compiled_code_draws_what_eager_code_draws() -> None:
    drawn = recorded(Case(aten.rand.default, ([1000],), DOUBLE))
    inputs = [value_of(node) for node in drawn.graph.nodes if node.op == "placeholder"]
    drawn.graph.output(drawn)
    compiled = torch.compile(GraphModule({}, drawn.graph))
    assert torch.equal(compiled(*inputs), value_of(drawn))
