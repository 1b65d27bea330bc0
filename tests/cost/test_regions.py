"""What becomes one kernel, and what crosses its border."""

from __future__ import annotations

import random
import re
import time
from dataclasses import replace
from textwrap import dedent

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph, Node

from passes.cost.build_program import program_of_graph
from passes.cost.fused_regions import MAX_NODES, is_alias, is_fusible, region_bytes, regions, source_of
from passes.hardware.hardware import hardware_named
from passes.ir.graph import set_value
from passes.ir.text import parse_graph

aten = torch.ops.aten


def read(text: str) -> Graph:
    return parse_graph("mesh tp=1\nstage LOCAL\n" + dedent(text))[0].graph


def kernels(graph: Graph) -> list[str]:
    return [" ".join(node.name for node in region) for region in regions(graph)]


def test_a_chain_is_one_kernel_and_a_product_is_its_own() -> None:
    graph = read("""\
        %x: f32[4, 8] = input("x")
        %w: f32[8, 6] = input("w")
        %relu: f32[4, 8] = relu(%x)
        %neg: f32[4, 8] = neg(%relu)
        %mm: f32[4, 6] = mm(%neg, %w)
        %exp: f32[4, 6] = exp(%mm)
        %mul: f32[4, 6] = mul.Tensor(%exp, %mm)
        return output("y") %mul
    """)
    assert kernels(graph) == ["relu neg", "mm", "exp mul"]
    assert [region_bytes(region) for region in regions(graph)] == [2 * 4 * 32, 4 * (32 + 48 + 24), 2 * 4 * 24]


def test_a_gated_product_is_one_kernel_whichever_half_comes_first() -> None:
    graph = read("""\
        %x: f32[4, 8] = input("x")
        %v: f32[8, 6] = input("v")
        %w: f32[8, 6] = input("w")
        %mm: f32[4, 6] = mm(%x, %v)
        %silu: f32[4, 6] = silu(%mm)
        %mm_1: f32[4, 6] = mm(%x, %w)
        %neg: f32[4, 6] = neg(%mm_1)
        %mul: f32[4, 6] = mul.Tensor(%silu, %neg)
        return output("y") %mul
    """)
    assert kernels(graph) == ["mm", "mm_1", "silu neg mul"]


def test_a_node_does_not_join_where_another_operand_depends_on_the_region() -> None:
    graph = read("""\
        %x: f32[8, 8] = input("x")
        %relu: f32[8, 8] = relu(%x)
        %mm: f32[8, 8] = mm(%relu, %x)
        %add: f32[8, 8] = add.Tensor(%relu, %mm)
        return output("y") %add
    """)
    assert kernels(graph) == ["relu", "mm", "add"]


def test_a_norm_is_one_kernel() -> None:
    graph = read("""\
        %x: f32[4, 8] = input("x")
        %weight: f32[8] = input("weight")
        %pow_1: f32[4, 8] = pow.Tensor_Scalar(%x, 2)
        %mean: f32[4, 1] = mean.dim(%pow_1, [1], True)
        %rsqrt: f32[4, 1] = rsqrt(%mean)
        %mul: f32[4, 8] = mul.Tensor(%x, %rsqrt)
        %mul_1: f32[4, 8] = mul.Tensor(%mul, %weight)
        return output("y") %mul_1
    """)
    assert kernels(graph) == ["pow_1 mean rsqrt mul mul_1"]
    assert region_bytes(regions(graph)[0]) == 4 * (32 + 8 + 32)


def test_a_number_that_two_kernels_read_does_not_join_them() -> None:
    """Each kernel computes it again: a rank's place in a ring decides in all layers what a mask hides."""
    graph = read("""\
        %place: i64[1] = input("place")
        %x: f32[4, 8] = input("x")
        %y: f32[4, 8] = input("y")
        %lt: b8[1] = lt.Scalar(%place, 2)
        %view: b8[1, 1] = view(%lt, [1, 1])
        %masked_fill: f32[4, 8] = masked_fill.Scalar(%x, %view, 0.0)
        %neg: f32[4, 8] = neg(%masked_fill)
        %mm: f32[4, 4] = mm(%neg, %y)
        %masked_fill_1: f32[4, 8] = masked_fill.Scalar(%y, %view, 0.0)
        return output("y") %mm, output("z") %masked_fill_1
    """)
    assert kernels(graph) == ["lt", "masked_fill neg", "mm", "masked_fill_1"]


def test_a_mask_of_padding_that_two_kernels_read_does_not_join_them() -> None:
    """It is computed from indices alone, so that each kernel computes it again, however long it is."""
    graph = read("""\
        %x: f32[4, 300] = input("x")
        %y: f32[4, 300] = input("y")
        %iota: i64[300] = prims.iota(300, start=0, step=1, dtype=i64, device=device(cpu), requires_grad=False)
        %lt: b8[300] = lt.Scalar(%iota, 290)
        %masked_fill: f32[4, 300] = masked_fill.Scalar(%x, %lt, 0.0)
        %masked_fill_1: f32[4, 300] = masked_fill.Scalar(%y, %lt, 0.0)
        return output("y") %masked_fill, output("z") %masked_fill_1
    """)
    assert kernels(graph)[-2:] == ["masked_fill", "masked_fill_1"]


def test_a_number_that_one_kernel_reads_is_a_part_of_it() -> None:
    graph = read("""\
        %place: i64[1] = input("place")
        %x: f32[4, 8] = input("x")
        %lt: b8[1] = lt.Scalar(%place, 2)
        %masked_fill: f32[4, 8] = masked_fill.Scalar(%x, %lt, 0.0)
        return output("y") %masked_fill
    """)
    assert kernels(graph) == ["lt masked_fill"]


def test_a_sum_of_columns_ends_its_kernel() -> None:
    graph = read("""\
        %x: f32[4, 8] = input("x")
        %relu: f32[4, 8] = relu(%x)
        %sum_1: f32[1, 8] = sum.dim_IntList(%relu, [0], True)
        %mul: f32[4, 8] = mul.Tensor(%relu, %sum_1)
        return output("y") %mul
    """)
    assert kernels(graph) == ["relu sum_1", "mul"]


def test_rows_and_columns_are_summed_in_two_kernels() -> None:
    graph = read("""\
        %x: f32[4, 8] = input("x")
        %relu: f32[4, 8] = relu(%x)
        %sum_1: f32[4] = sum.dim_IntList(%relu, [1])
        %sum_2: f32[8] = sum.dim_IntList(%relu, [0])
        return output("y") %sum_1, output("z") %sum_2
    """)
    assert kernels(graph) == ["relu sum_1", "sum_2"]


def test_views_are_free_and_belong_to_no_kernel() -> None:
    graph = read("""\
        %x: f32[4, 8] = input("x")
        %relu: f32[4, 8] = relu(%x)
        %view: f32[32] = view(%relu, [32])
        %neg: f32[32] = neg(%view)
        %slice_1: f32[8] = slice.Tensor(%neg, 0, 0, 8)
        return output("y") %slice_1
    """)
    assert kernels(graph) == ["relu neg"]
    assert [node.name for node in graph.nodes if is_alias(node)] == ["view", "slice_1"]
    nodes = {node.name: node for node in graph.nodes}
    assert source_of(nodes["slice_1"]) is nodes["neg"] and source_of(nodes["relu"]) is nodes["relu"]


def joined_products(left: str, right: str, *, dim: int) -> str:
    """Return the text of a graph that concatenates two products, or views of them."""
    return f"""\
        %x: f32[64, 64] = input("x")
        %y: f32[64, 64] = input("y")
        %mm: f32[64, 64] = mm(%x, %y)
        %mm_1: f32[64, 64] = mm(%y, %x)
        %view: f32[8, 8, 64] = view(%mm, [8, 8, 64])
        %view_1: f32[8, 8, 64] = view(%mm_1, [8, 8, 64])
        %cat: f32[{"8, 16, 64" if dim else "128, 64"}] = cat([%{left}, %{right}], {dim})
        return output("0") %cat
    """


@pytest.mark.parametrize(("left", "right", "dim"), [("mm", "mm_1", 0), ("view", "view_1", 1)])
def test_products_write_their_part_of_a_concatenation_unless_it_sees_them_through_views(
    left: str, right: str, dim: int
) -> None:
    """Compare with the code that Inductor generates."""
    text = joined_products(left, right, dim=dim)
    gm, mesh = parse_graph("mesh tp=1\nstage LOCAL\n" + dedent(text))
    tasks = {task.name: task for task in program_of_graph(gm, replace(mesh, hardware=hardware_named("h100"))).tasks}
    _, (code,) = run_and_get_code(torch.compile(gm), torch.randn(64, 64), torch.randn(64, 64))
    generates = "cpp_fused_cat" in code
    assert generates == bool(dim)
    assert (tasks["cat"].seconds > 0) == generates


def test_what_reads_concatenated_products_is_another_kernel() -> None:
    text = joined_products("view", "view_1", dim=1).replace("return", "%exp: f32[8, 16, 64] = exp(%cat)\n        return")
    assert kernels(read(text)) == ["mm", "mm_1", "cat", "exp"]


def test_each_value_crosses_the_border_once_and_no_further_than_it_is_read() -> None:
    graph = read("""\
        %x: f32[4, 8] = input("x")
        %row: f32[1, 8] = input("row")
        %expand: f32[4, 8] = expand(%row, [4, 8])
        %slice_1: f32[4, 4] = slice.Tensor(%x, 1, 0, 4)
        %neg: f32[4, 4] = neg(%slice_1)
        %mul: f32[4, 8] = mul.Tensor(%expand, %expand)
        %sum_1: f32[4, 4] = add.Tensor(%neg, %slice_1)
        return output("y") %mul, output("z") %sum_1
    """)
    assert [region_bytes(region) for region in regions(graph)] == [4 * (16 + 16), 4 * (8 + 32)]


def test_a_look_up_reads_few_elements_of_what_it_computes_again() -> None:
    """Labels come from a product of the other kernel's result, so that the look-up is a kernel by itself."""
    text = """\
        mesh tp=1
        stage LOCAL
        %x: f32[64, 1000] = input("x")
        %w: f32[1000, 64] = input("w")
        %neg: f32[64, 1000] = neg(%x)
        %sum_1: f32[1, 1000] = sum.dim_IntList(%neg, [0], True)
        %mm: f32[1, 64] = mm(%sum_1, %w)
        %permute: f32[64, 1] = permute(%mm, [1, 0])
        %label: i64[64, 1] = _to_copy(%permute, dtype=i64)
        %gather: f32[64, 1] = gather(%neg, 1, %label)
        return output("y") %gather
    """
    gm, mesh = parse_graph(dedent(text))
    summed, _, looked_up = program_of_graph(gm, replace(mesh, hardware=hardware_named("h100"))).tasks
    assert summed.nbytes == 4 * (64 * 1000 + 1000)
    assert looked_up.nbytes == 4 * (64 + 64 + 64), "labels, as many elements of x, results"


def test_what_puts_few_rows_into_zeros_writes_these_alone() -> None:
    """Compare the gradient of an embedding with the code that Inductor generates: one loop writes zeros, one adds rows."""
    text = """\
        mesh tp=1
        stage LOCAL
        %row: i64[8] = input("row")
        %value: f32[8, 64] = input("value")
        %full: f32[1000, 64] = full([1000, 64], 0.0)
        %index_put: f32[1000, 64] = index_put(%full, [%row], %value, True)
        return output("y") %index_put
    """
    gm, mesh = parse_graph(dedent(text))
    filled, put = program_of_graph(gm, replace(mesh, hardware=hardware_named("h100"))).tasks
    assert filled.nbytes == 4 * 64000 and put.in_place
    assert put.nbytes == 8 * 8 + 3 * 4 * 8 * 64, "rows' numbers, and values that are read, and added to what is read and written"
    _, (code,) = run_and_get_code(torch.compile(gm), torch.arange(8), torch.randn(8, 64))
    assert re.findall(r"for\(.*x\d<static_cast<int64_t>\((\d+)L\)", code) == ["64000", "8", "64"]


def test_forward_and_backward_share_no_kernel_even_through_a_node_that_does_not_say() -> None:
    graph = read("""\
        %x: f32[4, 8] = input("x")
        %relu: f32[4, 8] = relu(%x)
        %neg: f32[4, 8] = neg(%relu)
        %exp: f32[4, 8] = exp(%neg)
        return output("y") %exp
    """)
    nodes = {node.name: node for node in graph.nodes}
    nodes["neg"].meta["partitioner_tag"], nodes["exp"].meta["partitioner_tag"] = "is_forward", "is_backward"
    assert kernels(graph) == ["relu neg", "exp"]


@pytest.mark.parametrize(
    ("op", "fusible"),
    [
        (aten.relu.default, True),
        (aten.clone.default, True),
        (aten.sum.dim_IntList, True),
        (aten.embedding.default, True),
        (torch.ops.prims.convert_element_type.default, True),
        (aten.mm.default, False),
        (aten.convolution.default, False),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, False),
        (torch.ops._c10d_functional.wait_tensor.default, False),
        (aten.add_.Tensor, False),
        (torch.add, False),
    ],
)
def test_what_is_fusible(op: object, fusible: bool) -> None:
    assert is_fusible(op) is fusible


# Laws on random graphs ----------------------------------------------------------------------------------------------


def random_graph(seed: int, size: int) -> Graph:
    """Draw pointwise ops, sums of rows and of columns, views and products on [8, 8] matrices, operands among the last."""
    draw = random.Random(seed)
    graph = Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]
    for value in values:
        set_value(value, torch.empty(8, 8, device="meta"))
    for _ in range(size):
        left, right = (values[-1 - min(int(draw.expovariate(0.2)), len(values) - 1)] for _ in range(2))
        kind = draw.choice(["mul", "mul", "mul", "neg", "neg", "rows", "columns", "t", "mm"])
        if kind in ("mul", "mm"):
            node = graph.call_function(aten.mul.Tensor if kind == "mul" else aten.mm.default, (left, right))
            shape = torch.Size((8, 8))
            if kind == "mm" and (left.meta["val"].shape, right.meta["val"].shape) != ((8, 8), (8, 8)):
                graph.erase_node(node)
                continue
            shape = torch.broadcast_shapes(left.meta["val"].shape, right.meta["val"].shape)
        elif kind == "neg":
            node, shape = graph.call_function(aten.neg.default, (left,)), left.meta["val"].shape
        elif kind == "t":
            node, shape = graph.call_function(aten.t.default, (left,)), left.meta["val"].shape[::-1]
        else:
            dim = 1 if kind == "rows" else 0
            node = graph.call_function(aten.sum.dim_IntList, (left, [dim], True))
            shape = torch.Size(1 if i == dim else n for i, n in enumerate(left.meta["val"].shape))
        set_value(node, torch.empty(shape, device="meta"))
        values.append(node)
    graph.output(tuple(values[-3:]))
    return graph


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 1 << 30), st.integers(3, 120))
def test_regions_part_the_kernels_and_can_run_in_their_order(seed: int, size: int) -> None:
    graph = random_graph(seed, size)
    found = regions(graph)
    kernels = [node for node in graph.nodes if node.op == "call_function" and not is_alias(node)]
    assert sorted(node for region in found for node in region) == kernels
    done: set[Node] = {node for node in graph.nodes if node.op == "placeholder"}
    for region in found:
        assert list(region) == sorted(region) and len(region) <= MAX_NODES
        assert len(region) == 1 or all(is_fusible(node.target) for node in region)
        inside: set[Node] = set()
        for node in region:
            for operand in node.all_input_nodes:
                assert source_of(operand) in done | inside, f"{node} runs before {operand}"
            inside.add(node)
        done |= inside


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1 << 30))
def test_fusing_never_adds_bytes(seed: int) -> None:
    graph = random_graph(seed, 60)
    found = regions(graph)
    apart = sum(region_bytes((node,)) for region in found for node in region)
    assert sum(map(region_bytes, found)) <= apart


def test_the_same_graph_gives_the_same_regions() -> None:
    assert kernels(random_graph(7, 300)) == kernels(random_graph(7, 300))


def test_a_graph_of_fifteen_thousand_calls_takes_seconds() -> None:
    graph = random_graph(1, 15_000)
    start = time.process_time()
    found = regions(graph)
    assert time.process_time() - start < 30
    assert len(found) > 1000
