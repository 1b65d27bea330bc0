"""One operator of a collective and its products computes what they did, where there is one and where it pays."""

from __future__ import annotations

import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from autoshard.compile.compiled import split_program
from autoshard.config.options import Options
from autoshard.debug.rank_interpreter import run_ranks
from passes._torch import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, fake_mode
from passes._torch.operators import symmetric
from passes.base import PassContext
from passes.cost.build_program import program_of_graph
from passes.cost.scheduling.best_schedule import schedule
from passes.cost.simulate import simulate
from passes.decompose_matmuls import DecomposeMatmuls
from passes.ir.graph import note_of, origin_of, transfer_of
from passes.ir.matmul_chunks.one_operator import OPERATORS, make_one, why_not_one
from passes.ir.matmul_chunks.sites import sites_in
from passes.ir.mesh import Mesh
from passes.ir.text import format_graph, parse_graph
from passes.schedule_overlap import ScheduleOverlap
from passes.verify import verify
from tests.models import build
from tests.passes.sites import GROUP, MESH, all_reduce, gather, inputs, read, saved, scatter
from tests.spmd.oracle import plan_ranks


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", [gather, saved, scatter])
@pytest.mark.parametrize(("before", "after"), [(1, 8), (4, 3), (2, 1)])
def test_one_operator_gives_the_rows_in_their_order(
    kind: Callable[..., str], kept: bool, before: int, after: int
) -> None:
    gm = read(kind(before, after, 6, kept=kept and kind is not scatter))
    given = inputs(gm)
    whole = run_ranks(gm, MESH, given)
    (site,) = sites_in(gm)
    make_one(site, "test")
    verify(gm, MESH)
    again, _ = parse_graph(format_graph(gm, MESH))
    for graph in (gm, again):
        (one,) = [node for node in graph.graph.nodes if transfer_of(node) is not None]
        assert one.target is (MATMUL_REDUCE_SCATTER if kind is scatter else ALL_GATHER_MATMUL)
        assert transfer_of(one) == transfer_of(site.collective)
        assert note_of(one) == f"test: one with {'its product' if kind is scatter else '2 products'}"
        for mine, theirs in zip(run_ranks(graph, MESH, given), whole, strict=True):
            for value, other in zip(mine, theirs, strict=True):
                assert torch.equal(value, other)


def test_weights_made_after_the_gather_stand_before_the_operator() -> None:
    """A product whose other operand comes of what is gathered stays, and reads what the operator gathers."""
    gm = read(f"""
%x: f64[2, 4] = input("x")
%w: f64[4, 3] = parameter("w")
%v: f64[5, 4] = parameter("v")
%gather: f64[4, 4] = _c10d_functional.all_gather_into_tensor(%x, 2, {GROUP})
%whole: f64[4, 4] = _c10d_functional.wait_tensor(%gather)
%mm: f64[4, 3] = mm(%whole, %w)
%permute: f64[4, 5]<1, 4> = permute(%v, [1, 0])
%mm_1: f64[4, 5] = mm(%whole, %permute)
%turned: f64[4, 4]<1, 4> = permute(%whole, [1, 0])
%mm_2: f64[4, 4] = mm(%whole, %turned)
return output("0") %mm, output("1") %mm_1, output("2") %mm_2
""")
    given = inputs(gm)
    whole = run_ranks(gm, MESH, given)
    make_one(sites_in(gm)[0], "test")
    assert_expected_inline(format_graph(gm, MESH), """\
mesh tp=2
stage LOCAL
%x: f64[2, 4] = input("x")
%w: f64[4, 3] = parameter("w")
%v: f64[5, 4] = parameter("v")
%permute: f64[4, 5]<1, 4> = permute(%v, [1, 0])
%all_gather_matmul: [f64[4, 3], f64[4, 5], f64[4, 4]] = autoshard.all_gather_matmul(%x, [%w, %permute], 0, True, 2, "autoshard:tp=2:tp")      # | test: one with 2 products
%getitem: f64[4, 4] = getitem(%all_gather_matmul, 2)
%getitem_1: f64[4, 3] = getitem(%all_gather_matmul, 0)
%getitem_2: f64[4, 5] = getitem(%all_gather_matmul, 1)
%turned: f64[4, 4]<1, 4> = permute(%getitem, [1, 0])
%mm_2: f64[4, 4] = mm(%getitem, %turned)
return output("0") %getitem_1, output("1") %getitem_2, output("2") %mm_2
""")  # noqa: E501
    for mine, theirs in zip(run_ranks(gm, MESH, given), whole, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_why_there_is_no_operator() -> None:
    alone = f"""
%x: f64[2, 4] = input("x")
%gather: f64[4, 4] = _c10d_functional.all_gather_into_tensor(%x, 2, {GROUP})
%whole: f64[4, 4] = _c10d_functional.wait_tensor(%gather)
%turned: f64[4, 4]<1, 4> = permute(%whole, [1, 0])
%mm: f64[4, 4] = mm(%whole, %turned)
return output("0") %mm
"""
    cast = scatter(1, 8, 6, kept=True).replace("add.Tensor(%mm, %mm_1)", "view(%mm, [16, 6])")
    largest = scatter(1, 8, 6, kept=False).replace('"sum"', '"max"')
    texts = [alone, scatter(1, 8, 6, kept=True), all_reduce(1, 8, 6, kept=False), cast, largest]
    assert_expected_inline("\n".join(why_not_one(sites_in(read(text))[0]) for text in texts), """\
its products' other operands come of what is gathered
it reduces a sum of 2 products
there is none for an all-reduce
the product is cast before it is reduced
it reduces by 'max'""")


def test_what_the_operators_give_has_the_shapes_and_strides_of_torchs() -> None:
    """The first dim in memory is the one that is gathered; a scattered sum is contiguous."""
    with fake_mode():
        part, others = torch.empty(3, 4, 6), [torch.empty(6, 5), torch.empty(7, 6).t()]
        given = ALL_GATHER_MATMUL(part, others, 1, True, 2, "no group")
        assert [(tuple(one.shape), one.stride()) for one in given] == [
            ((3, 8, 5), (5, 15, 1)),
            ((3, 8, 7), (7, 21, 1)),
            ((3, 8, 6), (6, 18, 1)),
        ]
        rows = ALL_GATHER_MATMUL(part[0], others[:1], 0, False, 2, "no group")
        assert [(tuple(one.shape), one.stride()) for one in rows] == [((8, 5), (5, 1))]
        scattered = MATMUL_REDUCE_SCATTER(part, others[0], "sum", 1, 2, "no group")
        assert (tuple(scattered.shape), scattered.stride()) == ((3, 2, 5), (10, 5, 1))


def test_on_cuda_torchs_operators_are_called_with_the_same_arguments() -> None:
    """See the calls of our CUDA kernels without the devices: torch's operators are replaced by ones that note it."""
    part, others = torch.ones(2, 3), [torch.ones(3, 5)]
    with mock.patch.object(torch.ops, "symm_mem") as torchs:
        torchs.fused_all_gather_matmul.return_value = (None, [torch.ones(4, 5)])
        assert len(symmetric._all_gather_matmul(part, others, 0, False, 2, "group")) == 1
        torchs.fused_all_gather_matmul.assert_called_once_with(part, others, 0, "group", return_A=False)
        symmetric._matmul_reduce_scatter(part, others[0], "sum", 0, 2, "group")
        torchs.fused_matmul_reduce_scatter.assert_called_once_with(part, others[0], "sum", 0, "group")


def _linear(rows: int, inner: int) -> str:
    return f"""
%x: bf16[{rows}, 4096] = input("x")
%w: bf16[4096, {inner}] = parameter("w")
%gather: bf16[{2 * rows}, 4096] = _c10d_functional.all_gather_into_tensor(%x, 2, {GROUP})
%whole: bf16[{2 * rows}, 4096] = _c10d_functional.wait_tensor(%gather)
%mm: bf16[{2 * rows}, {inner}] = mm(%whole, %w)
return output("mm") %mm
"""


def _decided(text: str, hardware: str = "h100", **options: bool) -> tuple[GraphModule, str]:
    gm, ctx = read(text), PassContext(Mesh("tp=2", hardware=hardware))
    DecomposeMatmuls(1 << 40, **options).run(gm, ctx)
    return gm, "\n".join(map(str, ctx.remarks))


def test_an_operator_is_made_where_it_is_asked_for_possible_and_predicted_to_pay() -> None:
    reduced = scatter(1, 2048, 4096, kept=True).replace("4096, 3]", "4096, 512]").replace("[3, 4096]", "[512, 4096]")
    told = [
        _decided(_linear(8192, 1024))[1],
        _decided(_linear(8192, 1024), symmetric_memory=True)[1],
        _decided(_linear(2048, 64), symmetric_memory=True)[1],
        _decided(_linear(2047, 1024), symmetric_memory=True)[1],
        _decided(_linear(2048, 1024), "a100-pcie", symmetric_memory=True)[1],
        _decided(reduced, symmetric_memory=True)[1],
    ]
    assert_expected_inline("\n".join(told), """\
decompose_matmuls: split: 4 chunks save 40.8 us of 448 us around it [%gather]
decompose_matmuls: joined: one operator saves 75.4 us of 448 us around it [%gather]
decompose_matmuls: left whole: 83.6 us by itself, 92.1 us in 2 chunks, 96.3 us in one operator [%gather]
decompose_matmuls: joined: one operator saves 7.66 us of 126 us around it [%gather]
decompose_matmuls: split: 4 chunks save 76.0 us of 928 us around it; no operator: ranks joined by PCIe gen4 x16 share no memory [%gather]
decompose_matmuls: left whole: 1.29 ms by itself, 1.33 ms in 2 chunks; no operator: it reduces a sum of 2 products [%reduce]""")  # noqa: E501


def test_an_operator_is_priced_as_the_pipeline_that_it_is() -> None:
    """Its products and its copies hide each other, it holds its link, and what nothing hides is exposed."""
    gm, _ = _decided(_linear(2048, 1024), symmetric_memory=True)
    (task,) = program_of_graph(gm, Mesh("tp=2", hardware="h100")).tasks
    given = simulate(program_of_graph(read(_linear(2048, 1024)), Mesh("tp=2", hardware="h100")))
    gather, product = given.program.tasks
    assert max(gather.seconds, product.seconds) < task.seconds < gather.seconds + product.seconds
    assert (task.stream, task.link, task.axes, task.flops) == ("compute", "inside", ("tp",), product.flops)
    assert task.workspace == 3 * 2048 * 4096 * 2  # its part where others read it, and what is gathered
    timeline = simulate(program_of_graph(gm, Mesh("tp=2", hardware="h100")))
    assert timeline.exposed == pytest.approx(task.waiting) and timeline.exposed_by_task[0][0] == task
    assert timeline.compute == pytest.approx(task.seconds - task.waiting)
    beside = f"""%mm: bf16[4096, 1024] = mm(%whole, %w)
%other: bf16[4096, 4096] = _c10d_functional.all_gather_into_tensor(%y, 2, {GROUP})
%wait: bf16[4096, 4096] = _c10d_functional.wait_tensor(%other)
return output("mm") %mm, output("v") %wait
"""
    text = _linear(2048, 1024).partition("%mm:")[0] + beside
    gm = read(text.replace("%w:", '%y: bf16[2048, 4096] = input("y")\n%w:', 1))
    make_one(sites_in(gm)[0], "test")
    both = simulate(program_of_graph(gm, Mesh("tp=2", hardware="h100")))
    assert sorted(both.starts) == pytest.approx([0.0, min(both.ends)])  # one after the other, as they share a link
    assert schedule(both.program).timeline.step_time == pytest.approx(both.step_time)
    ScheduleOverlap(1 << 40).run(gm, PassContext(Mesh("tp=2", hardware="h100")))
    verify(gm, MESH)


@pytest.mark.slow
def test_a_model_with_operators_computes_the_same() -> None:
    """Forward and backward of a Llama whose gathers and reduce-scatters of one product are made with their products."""
    ranks = plan_ranks(build("llama"), Mesh("dp=2,tp=2"), Options(recipe="fsdp+megatron"))
    given = split_program(ranks.planned.graph, mode="eager")
    made = split_program(ranks.planned.graph, mode="eager")
    assert made.backward is not None
    found = []
    for gm in (made.forward, made.backward):
        for site in sites_in(gm):
            if not why_not_one(site):
                make_one(site, "decompose_matmuls")
        verify(gm, Mesh("dp=2,tp=2"))
        ones = [node for node in gm.graph.nodes if node.target in OPERATORS]
        assert all(origin_of(node).file and origin_of(node).line and origin_of(node).fqn for node in ones)
        assert all(re.fullmatch(r"decompose_matmuls: one with .+, \w+: .+", note_of(node)) for node in ones)
        found.append([sum(node.target is op for node in ones) for op in OPERATORS])
    assert found == [[5, 4], [4, 16]]
    for mine, theirs in zip(ranks.run_split(made), ranks.run_split(given), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
