"""Cumulative sums along a sharded sequence: each rank adds the totals of the parts before its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Options, autoshard
from tests.models import Case
from tests.spawn import run_on_ranks
from tests.spmd.oracle import Reference, compare, relative_error

TOLERANCE = 1e-12  # relative, float64
SHARDED = Options(recipe=None, inputs={"x": {"cp": "S(1)"}})


class Scan(nn.Module):
    """A recurrence without gates, as linear attention has it: what was seen so far, read by each position."""

    def __init__(self, scan: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.out, self.scan = nn.Linear(6, 8), nn.Linear(8, 6), scan

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        return self.out(torch.sigmoid(h) * self.scan(h)).square().mean()


class Positions(nn.Module):
    """Positions are counted where a token is not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(17, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table((x != 0).long().cumsum(1))).square().mean()


def scan(op: Callable[[Tensor], Tensor]) -> Case:
    torch.manual_seed(0)
    return Case(Scan(op).double(), (torch.randn(2, 16, 6, dtype=torch.float64),), {})


def positions() -> Case:
    torch.manual_seed(0)
    return Case(Positions().double(), (torch.randint(3, (2, 16)),), {})


CASES: dict[str, Callable[[], Case]] = {
    "sum": lambda: scan(lambda h: h.cumsum(1)),
    "from_end": lambda: scan(lambda h: h.flip(1).cumsum(1).flip(1)),
    "mean": lambda: scan(lambda h: h.cumsum(1) / torch.arange(1, 17)[:, None]),
    "product": lambda: scan(lambda h: h.exp().cumprod(1)),
    "logsumexp": lambda: scan(lambda h: h.logcumsumexp(1)),
    "positions": positions,
}


@cache
def reference(name: str) -> Reference:
    return Reference.of(CASES[name]())


@pytest.mark.parametrize("mesh", ["cp=2", "cp=4"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_gives_the_numbers_of_one_device(name: str, mesh: str) -> None:
    compare(reference(name).plan(mesh, SHARDED).run().step, reference(name).step, TOLERANCE)


@pytest.mark.parametrize("name", ["sum", "from_end", "mean"])
def test_totals_alone_are_gathered(name: str) -> None:
    plan = reference(name).plan("cp=4", SHARDED).planned.plan
    moved = [one for one in plan.collectives if one.kind != "all_reduce"]
    total = 2 * 8 * 8  # bytes: f64[2, 1, 8]
    assert [(one.what, one.bytes, one.backward) for one in moved] == [
        ("sums of parts", 3 * total, False),
        ("sums of parts", 3 * total, True),
    ]


def test_blocks_of_a_sequence_are_resharded_first() -> None:
    options = Options(recipe=None, inputs={"x": {"cp": "S(1/4)"}})
    compare(reference("sum").plan("cp=2", options).run().step, reference("sum").step, TOLERANCE)


@pytest.mark.slow
@pytest.mark.gloo
def test_real_ranks_give_the_gradients_of_one_device() -> None:
    assert max(run_on_ranks(_train, 2, timeout=200)) < TOLERANCE


def _train(rank: int) -> float:
    """Return the relative error of the worst gradient after one step."""
    case = CASES["sum"]()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    options = Options(recipe=None, inputs={"x": {"cp": "S(1)"}}, compile="inductor")
    model = autoshard(case.model, mesh, case.args, options=options)
    model(*model.shard(*case.args)).backward()
    case.model(*case.args).backward()
    grads = {name: one.grad for name, one in case.model.named_parameters()}
    return max(relative_error(one.grad.full_tensor(), grads[name]) for name, one in model.named_parameters())
