"""Chunks of a collective and of the products beside it compute what the whole did, and are made only where they pay."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.fx import GraphModule

from autoshard import check
from autoshard.compile.compiled import split_program
from autoshard.config.options import Options
from autoshard.debug.rank_interpreter import run_ranks
from passes.base import PassContext
from passes.cost.build_program import program_of_graph
from passes.cost.scheduling.best_schedule import schedule
from passes.decompose_matmuls import DecomposeMatmuls
from passes.ir.graph import note_of, origin_of, transfer_of
from passes.ir.matmul_chunks.sites import sites_in, split
from passes.ir.mesh import Mesh
from passes.ir.text import format_graph, parse_graph
from passes.matmul_ways.trials import WORTH
from tests.calm import calm
from tests.models import build
from tests.passes.sites import GROUP, MESH, all_reduce, gather, inputs, read, saved, scatter
from tests.spmd.oracle import plan_ranks


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", [gather, saved, scatter, all_reduce])
@pytest.mark.parametrize(
    ("before", "after", "count"), [(1, 8, 2), (1, 8, 4), (4, 3, 2), (4, 3, 4), (3, 4, 2), (3, 4, 4), (2, 1, 2), (2, 6, 4)]
)
def test_chunks_give_the_rows_in_their_order(
    kind: Callable[..., str], kept: bool, before: int, after: int, count: int
) -> None:
    gm = read(kind(before, after, 6, kept=kept))
    given = inputs(gm)
    whole = run_ranks(gm, MESH, given)
    (site,) = sites_in(gm)
    cut = site.cut(count)
    assert cut is not None and cut.count == count
    split(site, cut, "test")
    gm.graph.lint()
    parse_graph(format_graph(gm, MESH))
    assert sum(transfer_of(node) is not None for node in gm.graph.nodes) == count
    for mine, theirs in zip(run_ranks(gm, MESH, given), whole, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)


def _split_all(gm: GraphModule, count: int) -> int:
    sites = [(site, cut) for site in sites_in(gm) if (cut := site.cut(count)) is not None]
    for site, cut in sites:
        split(site, cut, "decompose_matmuls")
    gm.graph.lint()
    return len(sites)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "recipe", "counts"),
    [("llama", "dp=2,tp=2", "fsdp+megatron", (9, 24)), ("gpt", "tp=2", "megatron", (9, 9))],
)
def test_a_model_in_chunks_computes_the_same(name: str, axes: str, recipe: str, counts: tuple[int, int]) -> None:
    ranks = plan_ranks(build(name), Mesh(axes), Options(recipe=recipe))
    given = split_program(ranks.planned.graph, mode="eager")
    chunked = split_program(ranks.planned.graph, mode="eager")
    assert chunked.backward is not None
    assert (_split_all(chunked.forward, 2), _split_all(chunked.backward, 2)) == counts
    for node in (*chunked.forward.graph.nodes, *chunked.backward.graph.nodes):
        if note_of(node).startswith("decompose_matmuls"):
            assert origin_of(node).file and origin_of(node).line and transfer_of(node), node
            assert re.fullmatch(r"decompose_matmuls: part [12] of 2, \w+: .+", note_of(node))
    for mine, theirs in zip(ranks.run_split(chunked), ranks.run_split(given), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def _linear(rows: int, inner: int, *, beside: bool = False, kept: bool = False) -> str:
    """Gather rows for a product of `inner` columns; `beside`, another one can be computed meanwhile."""
    other = "%square: bf16[8192, 8192] = mm(%v, %v)" if beside else ""
    returned = [f'output("{n}") %{n}' for n, there in (("mm", True), ("square", beside), ("whole", kept)) if there]
    return f"""
%x: bf16[{rows}, 4096] = input("x")
%v: bf16[8192, 8192] = input("v")
%w: bf16[4096, {inner}] = parameter("w")
%gather: bf16[{2 * rows}, 4096] = _c10d_functional.all_gather_into_tensor(%x, 2, {GROUP})      # | solve: gathered
{other}
%whole: bf16[{2 * rows}, 4096] = _c10d_functional.wait_tensor(%gather)
%mm: bf16[{2 * rows}, {inner}] = mm(%whole, %w)
return {", ".join(returned)}
"""


def _decided(text: str, mesh: Mesh = MESH, memory_limit: int = 1 << 40) -> tuple[GraphModule, str]:
    gm, ctx = read(text), PassContext(mesh)
    changed = DecomposeMatmuls(memory_limit).run(gm, ctx)
    assert changed == (len([node for node in gm.graph.nodes if transfer_of(node)]) > 1)
    return gm, "\n".join(map(str, ctx.remarks))


def test_what_is_split_and_what_is_left_whole_says_why() -> None:
    small = Mesh("tp=2")
    told = [
        _decided(_linear(8192, 1024))[1],
        _decided(_linear(2048, 64))[1],
        _decided(_linear(2048, 1024, beside=True))[1],
        _decided(_linear(16384, 1024, kept=True), Mesh("tp=2", hardware=calm("h100")), memory_limit=1)[1],
        _decided(_linear(2047, 4096))[1],
        _decided(_linear(2048, 4096), small)[1],
    ]
    assert_expected_inline("\n".join(told), """\
decompose_matmuls: split: 4 chunks save 40.8 us of 448 us around it [%gather]
decompose_matmuls: left whole: 83.6 us by itself, 92.1 us in 2 chunks [%gather]
decompose_matmuls: left whole: 0 s of a step of 1.55 ms is exposed [%gather]
decompose_matmuls: left whole: all that are worth it in parts take 784.0 MiB at the peak, over 584.0 MiB [%gather]
decompose_matmuls: left whole: its 1 x 2047 rows are not divided by 2 [%gather]
decompose_matmuls: left whole: the figures of this device are not known [%gather]""")


def test_chunks_are_never_predicted_to_be_slower_and_say_who_made_them() -> None:
    for rows, inner in ((512, 8192), (2048, 4096), (4096, 2048), (8192, 512)):
        given = schedule(program_of_graph(read(_linear(rows, inner)), MESH)).timeline
        gm, _ = _decided(_linear(rows, inner))
        found = schedule(program_of_graph(gm, MESH)).timeline
        collectives = [node for node in gm.graph.nodes if transfer_of(node)]
        assert found.step_time <= (1 - WORTH * (len(collectives) > 1)) * given.step_time
        if len(collectives) > 1:
            assert [note_of(node) for node in collectives] == [
                f"decompose_matmuls: part {n} of {len(collectives)}, solve: gathered" for n in range(1, len(collectives) + 1)
            ]


class Dots(nn.Module):
    """Sums a product of two matrices, which is one of 1 x 1, and another number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.layer(x)
        return torch.einsum("bi,bi->", z, y) + z.square().mean()


def test_a_number_has_no_rows_to_split() -> None:
    given = torch.ones(4, 6), torch.ones(4, 6)
    assert check(Dots(), "dp=2", given, options=Options(recipe="fsdp", progress=False))
