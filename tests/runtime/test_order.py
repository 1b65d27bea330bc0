"""Inductor's code runs collectives, waits and kernels in the order of the graph, and so does a profile of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch.fx import GraphModule
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.compile.compiled import Split, compile_split, split_program
from autoshard.compile.overlap import OverlapPhase
from autoshard.config.options import Options, Overlap
from autoshard.runtime.process_groups import axes_used
from passes._torch import inductor_compile, register_group, unregister_group
from passes.ir.matmul_chunks import sites
from passes.ir.matmul_chunks.sites import sites_in
from passes.ir.mesh import Mesh
from passes.ir.text import parse_graph
from tests.cost.measured import one_of
from tests.models import build
from tests.spmd.oracle import plan_ranks

# Two layers: x @ v and relu(..) @ w, both stored in halves, gathered again in the backward.
TRAINING = """
mesh dp=2
stage LOCAL
%v: f32[4, 8] = parameter("v")
%w: f32[4, 8] = parameter("w")
%x: f32[16, 8] = input("x")
%tangent: f32[16, 8] = tangent("output")
%gather: f32[8, 8] recompute = _c10d_functional.all_gather_into_tensor(%v, 2, "autoshard:dp=2:dp")
%whole: f32[8, 8] recompute = _c10d_functional.wait_tensor(%gather)
%mm: f32[16, 8] = mm(%x, %whole)
%relu: f32[16, 8] = relu(%mm)
%gather_1: f32[8, 8] recompute = _c10d_functional.all_gather_into_tensor(%w, 2, "autoshard:dp=2:dp")
%whole_1: f32[8, 8] recompute = _c10d_functional.wait_tensor(%gather_1)
%mm_1: f32[16, 8] = mm(%relu, %whole_1)
%sin: f32[16, 8] = sin(%mm_1)
%cos: f32[16, 8] = cos(%mm_1)
%mul: f32[16, 8] = mul.Tensor(%tangent, %cos)
%permute: f32[8, 16]<1, 8> = permute(%relu, [1, 0])
%mm_2: f32[8, 8] = mm(%permute, %mul)
%scatter: f32[4, 8] = _c10d_functional.reduce_scatter_tensor(%mm_2, "sum", 2, "autoshard:dp=2:dp")
%scattered: f32[4, 8] = _c10d_functional.wait_tensor(%scatter)
%permute_1: f32[8, 8]<1, 8> = permute(%whole_1, [1, 0])
%mm_3: f32[16, 8] = mm(%mul, %permute_1)
%le: b8[16, 8] = le.Scalar(%relu, 0)
%zero: f32[] = full([], 0.0)
%where: f32[16, 8] = where.self(%le, %zero, %mm_3)
%permute_2: f32[8, 16]<1, 8> = permute(%x, [1, 0])
%mm_4: f32[8, 8] = mm(%permute_2, %where)
%scatter_1: f32[4, 8] = _c10d_functional.reduce_scatter_tensor(%mm_4, "sum", 2, "autoshard:dp=2:dp")
%scattered_1: f32[4, 8] = _c10d_functional.wait_tensor(%scatter_1)
%permute_3: f32[8, 8]<1, 8> = permute(%whole, [1, 0])
%mm_5: f32[16, 8] = mm(%where, %permute_3)
return output("output") %sin, gradient("v") %scattered_1, gradient("w") %scattered, gradient("input:x") %mm_5
"""

# Two sums that read the same, which Inductor would make in one kernel; the first is sent long before the second is made.
SUMS = """
mesh dp=2
stage LOCAL
%x: f32[16, 8] = input("x")
%y: f32[16, 8] = input("y")
%w: f32[8, 8] = input("w")
%mul: f32[16, 8] = mul.Tensor(%x, %y)
%sum_1: f32[8] = sum.dim_IntList(%mul, [0])
%scatter: f32[4] = _c10d_functional.reduce_scatter_tensor(%sum_1, "sum", 2, "autoshard:dp=2:dp")
%mm: f32[16, 8] = mm(%x, %w)
%mul_1: f32[16, 8] = mul.Tensor(%x, %mm)
%sum_2: f32[8] = sum.dim_IntList(%mul_1, [0])
%scatter_1: f32[4] = _c10d_functional.reduce_scatter_tensor(%sum_2, "sum", 2, "autoshard:dp=2:dp")
%wait: f32[4] = _c10d_functional.wait_tensor(%scatter)
%wait_1: f32[4] = _c10d_functional.wait_tensor(%scatter_1)
return output("0") %wait, output("1") %wait_1
"""

_CALL = re.compile(
    r"_c10d_functional\.(\w+?)_?\.default\(|extern_kernels\.(\w+)\(|= torch\.ops\.aten\.(_scaled\w+?)\.default\("
)
_GRAPH = re.compile(r"_c10d_functional\.(\w+?)_?\.default|aten\.((?:add)?b?mm)\.default|aten\.(_scaled\w+)\.default")


@pytest.fixture
def ranks() -> Iterator[None]:
    """Open eight ranks of which this process is one and the others are nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


class _Written(Exception):
    """There is code; it need not be compiled."""


def _codes(split: Split, mesh: Mesh) -> tuple[str, ...]:
    """Return the code of forward and backward, if there is one, as Inductor writes it."""
    halves = tuple(filter(None, (split.forward, split.backward)))
    names = [(mesh.group_name(axes), axes) for axes in axes_used(halves, mesh)]
    for name, axes in names:
        register_group(name, dist.new_group(list(range(math.prod(map(mesh.axis_size, axes))))))
    codes: list[str] = []

    def write(code: str) -> None:
        codes.append(code)
        raise _Written

    for gm in halves:
        values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        facts = {"is_backward": gm is split.backward, "is_inference": False, "keep_order": True}
        with (
            config.patch(force_disable_caches=True),
            mock.patch.object(GraphLowering, "save_output_code", staticmethod(write)),
            pytest.raises(InductorError, match="_Written"),
        ):
            inductor_compile(gm, values, static_inputs=(), visible_outputs=(), **facts)
    for name, _ in names:
        unregister_group(name)
    return tuple(codes)


def _in_graph(gm: GraphModule) -> list[str]:
    found = (_GRAPH.fullmatch(str(node.target)) for node in gm.graph.nodes if node.op == "call_function")
    return [next(filter(None, match.groups())) for match in found if match]


def _in_code(code: str) -> list[str]:
    body = code[code.index("def call(") :]
    return [next(filter(None, match.groups())) for match in _CALL.finditer(body)]


@pytest.mark.slow
def test_the_order_of_the_graph_is_that_of_the_code(ranks: None) -> None:
    mesh = Mesh("dp=2", hardware="h100")
    split = split_program(parse_graph(TRAINING.strip())[0], mode="inductor")
    OverlapPhase(mesh, 1 << 40, "adamw").apply(split, mode="inductor")
    forward, backward = _codes(split, mesh)
    gather, wait, scatter = "all_gather_into_tensor", "wait_tensor", "reduce_scatter_tensor"
    assert _in_code(forward) == _in_graph(split.forward) == [gather, gather, wait, "mm", wait, "mm"]
    assert _in_code(backward) == _in_graph(split.backward) == [
        gather, "mm", gather, wait, "mm", scatter, "mm", scatter, wait, wait, "mm", wait,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_kernel_after_a_collective_is_not_joined_with_one_that_leads_to_it(ranks: None) -> None:
    split = split_program(parse_graph(SUMS.strip())[0], mode="inductor")
    (code,) = _codes(split, Mesh("dp=2", hardware="h100"))
    scatter, wait = "reduce_scatter_tensor", "wait_tensor"
    assert _in_code(code) == _in_graph(split.forward) == [scatter, "mm", scatter, wait, wait]


# On CPU a gather calls that into a tensor which is given (`_out`).
_EVENT = re.compile(r"_c10d_functional::((?!\w+_out$)\w+)|aten::((?:add)?b?mm)|aten::(_scaled_dot\w+)")


def _in_profile(run: Callable[[], object]) -> list[str]:
    """Return collectives, waits and products in the order in which they start, as the profiler saw them."""
    run()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    found = (_EVENT.fullmatch(event.name()) for event in events)
    return [next(filter(None, match.groups())) for match in found if match]


@pytest.mark.slow
def test_the_order_of_the_graph_is_that_of_a_profile() -> None:
    mesh = Mesh("dp=2", hardware="h100")
    split = split_program(parse_graph(TRAINING.strip())[0], mode="inductor")
    OverlapPhase(mesh, 1 << 40, "adamw").apply(split, mode="inductor")
    with one_of(mesh, split):
        program = compile_split(split, mode="inductor")
        values = [torch.ones(value.shape) for value in split.input_values]
        saved = program.forward(list(values))[2]
        tangents = [torch.ones(value.shape) for value in split.tangent_values]
        forward = _in_profile(lambda: program.forward(list(values)))
        backward = _in_profile(lambda: program.backward(list(saved), list(tangents)))
    assert split.backward is not None
    assert forward == _in_graph(split.forward) and backward == _in_graph(split.backward)


@pytest.mark.slow
def test_the_order_of_a_model_in_chunks_is_that_of_its_code(ranks: None) -> None:
    mesh = Mesh("dp=2,tp=2", hardware="h100")
    planned = plan_ranks(build("mlp"), mesh, Options(recipe="fsdp+megatron", overlap=Overlap(bucket_bytes=10_000))).planned
    split = split_program(planned.graph, mode="inductor")
    for gm in (split.forward, split.backward):
        assert gm is not None
        for site in sites_in(gm):
            cut = site.cut(2)
            assert cut is not None
            sites.split(site, cut, "decompose_matmuls")
    OverlapPhase(mesh, 1 << 40, "adamw").apply(split, mode="inductor")
    for gm, code in zip((split.forward, split.backward), _codes(split, mesh), strict=True):
        assert _in_code(code) == _in_graph(gm)
