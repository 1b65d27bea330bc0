"""A program that is partitioned and ordered as one of other sizes computes what one device does, or is not made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard.compile.compiled import Split, split_program
from autoshard.compile.overlap import OverlapPhase
from autoshard.compile.resized import resized
from autoshard.config.options import Options, Overlap
from passes.ir.graph import transfer_of
from passes.ir.mesh import Mesh
from tests.models import Case, build
from tests.spmd.oracle import Ranks, compare, plan_ranks, run_on_one_device

TOLERANCE = 1e-12


def _ordered(ranks: Ranks, mesh: Mesh) -> Split:
    """Return the program in another order, with messages joined where they can be."""
    split = split_program(ranks.planned.graph, mode="eager")
    OverlapPhase(mesh, 1 << 40, "adamw", Overlap(bucket_bytes=1 << 22)).apply(split, mode="eager")
    return split


def _cut(case: Case, *sizes: int) -> Case:
    """Return the case with the first `sizes` of the dims of its inputs."""
    places = tuple(slice(size) for size in sizes)
    return case._replace(args=tuple(one[places[: one.ndim]].contiguous() for one in case.args))


def _both(case: Case, other: Case, axes: str, recipe: str) -> tuple[Split, Split | None, Ranks]:
    """Return the program of a case, that of another in its sizes, and the ranks of the other."""
    mesh, options = Mesh(axes), Options(recipe=recipe)
    first, second = plan_ranks(case, mesh, options), plan_ranks(other, mesh, options)
    split = _ordered(first, mesh)
    return split, resized(split, first.planned.graph, second.planned.graph), second


@pytest.mark.parametrize(
    ("name", "sizes", "axes", "recipe"),
    [
        ("gpt", (2, 6), "dp=2", "fsdp"),
        ("gpt", (4, 16), "dp=2", "ddp"),
        ("llama", (2, 16), "tp=2", "megatron"),
        ("llama", (4, 16), "dp=2,tp=2", "fsdp+megatron"),
        ("mlp", (16, 24), "dp=2", "zero2"),
        ("conv_net", (2,), "dp=2", "fsdp"),
    ],
)
def test_other_sizes_take_partition_and_order(name: str, sizes: tuple[int, ...], axes: str, recipe: str) -> None:
    other = _cut(build(name), *sizes)
    split, found, ranks = _both(build(name), other, axes, recipe)
    assert found is not None and found.backward is not None and split.backward is not None
    for mine, theirs in ((found.forward, split.forward), (found.backward, split.backward)):
        assert [node.name for node in mine.graph.nodes] == [node.name for node in theirs.graph.nodes]
    compare(ranks.run_partitioned(found).step, run_on_one_device(other), TOLERANCE)


def test_buckets_of_parameters_stay() -> None:
    split, found, _ = _both(build("gpt"), _cut(build("gpt"), 4), "dp=2", "fsdp")
    assert found is not None
    counts = [sum(transfer_of(node) is not None for node in one.forward.graph.nodes) for one in (split, found)]
    assert counts[0] == counts[1] < len(list(build("gpt").model.parameters()))


class Sizes(nn.Module):
    """Computes with its sizes, of which two may be equal: forward(x) with x [batch, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], dtype=x.dtype).sin()
        columns = torch.arange(x.shape[1], dtype=x.dtype).sin()
        y = (x * self.weight[: x.shape[1]] * columns).sum(1) * rows / x.shape[1]
        return y.square().sum() + self.weight[x.shape[0] // 4 :].sum()


def _sizes(batch: int, width: int) -> Case:
    torch.manual_seed(0)
    return Case(Sizes(), (torch.randn(batch, width, dtype=torch.float64),), {})


def test_numbers_computed_from_sizes_are_those_of_the_call() -> None:
    other = _sizes(12, 5)
    _, found, ranks = _both(_sizes(8, 6), other, "dp=2", "ddp")
    assert found is not None
    compare(ranks.run_partitioned(found).step, run_on_one_device(other), TOLERANCE)


def test_calls_that_were_equal_by_chance_are_not_taken() -> None:
    one, other = _sizes(6, 6), _sizes(8, 6)
    split, found, _ = _both(one, other, "dp=1", "ddp")
    assert sum(node.target is torch.ops.aten.sin.default for node in split.forward.graph.nodes) == 1
    assert found is None


def test_a_model_that_takes_another_path_is_not_taken() -> None:
    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.sin() if x.shape[0] > 6 else y.cos()

    torch.manual_seed(0)
    model = Branches(4, 4).double()
    cases = [Case(model, (torch.randn(batch, 4, dtype=torch.float64),), {}) for batch in (4, 8)]
    assert _both(cases[0], cases[1], "dp=2", "ddp")[1] is None
