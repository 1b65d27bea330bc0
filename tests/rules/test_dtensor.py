"""Our rows against DTensor's own rules: the same inputs give the same outputs, without communication."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as DPartial
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement as DPlacement
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

from passes.ir.layout import Layout, Partial, Placement, Replicate, Shard
from passes.ir.mesh import Mesh
from passes.rules import rule_of
from passes.rules.rule import Row, rows
from tests.rules.harness import Case, call_on, floats, split

aten = torch.ops.aten

SIZE = 2
MASK = floats(4, 6) > 0

CASES = (
    Case(aten.mm.default, (floats(4, 6), floats(6, 8))),
    Case(aten.bmm.default, (floats(2, 4, 6), floats(2, 6, 8))),
    Case(aten.add.Tensor, (floats(4, 6), floats(6))),
    Case(aten.add.Tensor, (floats(4, 6), 2.0), note="number"),
    Case(aten.mul.Tensor, (floats(4, 6), floats(4, 1))),
    Case(aten.div.Tensor, (floats(4, 6), floats(4, 6))),
    Case(aten.neg.default, (floats(4, 6),)),
    Case(aten.where.self, (MASK, floats(4, 6), floats(4, 6))),
    Case(aten.sum.dim_IntList, (floats(4, 6, 8), [1])),
    Case(aten.sum.dim_IntList, (floats(4, 6, 8), [0, 2], True), note="keepdim"),
    Case(aten.amax.default, (floats(4, 6), [1])),
    Case(aten._softmax.default, (floats(4, 6), 1, False)),
    Case(aten._log_softmax.default, (floats(4, 6), 0, False)),
    Case(aten.permute.default, (floats(4, 6, 8), [2, 0, 1])),
    Case(aten.t.default, (floats(4, 6),)),
    Case(aten.unsqueeze.default, (floats(4, 6), 1)),
    Case(aten.view.default, (floats(4, 6, 8), [24, 8])),
    Case(aten.view.default, (floats(24, 8), [4, 6, 8]), note="split"),
    Case(aten.expand.default, (floats(4, 1), [4, 6])),
    Case(aten.slice.Tensor, (floats(4, 6), 1, 0, 3)),
    Case(aten.cat.default, ([floats(4, 6), floats(4, 6)], 0)),
    Case(aten.clone.default, (floats(4, 6),)),
    Case(aten.gelu_backward.default, (floats(4, 6), floats(4, 6))),
)


# Where DTensor replicates first. Each of these rows is run on real values by the harness.
REPLICATED_BY_DTENSOR = {
    "aten.where.self": "no partial rows",
    "aten.clone.default": "no partial rows",
    "aten.gelu_backward.default": "no partial rows, though linear in the gradient",
    "aten.sum.dim_IntList": "P(avg): no row, though a sum is linear",
    "aten.sum.dim_IntList-keepdim": "P(avg): no row, though a sum is linear",
    "aten.t.default": "P(product): no row from torch 2.14 on",
    "aten.slice.Tensor": "P(product): no row from torch 2.14 on",
    "aten.cat.default": "P(product): no row from torch 2.14 on",
    "aten.expand.default": "a dim made by a broadcast is not sharded: R -> R is free as well",
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    yield init_device_mesh("cpu", (SIZE,), mesh_dim_names=("x",))
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dtensor_agrees_on(case: Case, mesh: DeviceMesh) -> None:
    for row in rows_of(case):
        placement, collectives = run(case, row, mesh)
        if str(case) in REPLICATED_BY_DTENSOR and placement == "R":
            continue
        assert (placement, collectives) == (str(theirs(row.results[0])), 0), row


def rows_of(case: Case) -> list[Row]:
    value = case.op(*case.args, **case.kwargs)
    space = rule_of(case.op).space(call_on(case, [value]))
    return [row for row in rows(space, SIZE) if all(map(is_plain, (*row.operands, *row.results)))]


def is_plain(placement: Placement) -> bool:
    return not isinstance(placement, Shard) or placement.outer == 1


def run(case: Case, row: Row, mesh: DeviceMesh) -> tuple[str, int]:
    """Return the placement of DTensor's result, and how many collectives it took."""
    operands = iter(row.operands)

    def distributed(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        placement = next(operands)
        local = split(value, Layout((placement,)), Mesh.of(x=SIZE))[0]
        return DTensor.from_local(local, mesh, [theirs(placement)], run_check=False)

    with CommDebugMode() as comm:
        result = case.op(*tree_map(distributed, case.args), **case.kwargs)
    return str(result.placements[0]), comm.get_total_counts()


def theirs(placement: Placement) -> DPlacement:
    match placement:
        case Replicate():
            return DReplicate()
        case Shard(dim=dim):
            return DShard(dim)
        case Partial(op=op):
            return DPartial(op)
