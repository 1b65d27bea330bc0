"""A per-device graph as code: what is partitioned where, and code that gives what the graph says."""

from __future__ import annotations

import re

import pytest
import torch
from torch.fx import GraphModule

from autoshard.compile import compiled as compiling
from autoshard.compile.compiled import Mode, compile_split, split_program
from passes._torch import InductorCode
from passes.ir.text import parse_graph

MODES: tuple[Mode, ...] = ("eager", "inductor")

# relu(x @ w), where w is stored in halves.
TRAINING = """
mesh dp=2
stage LOCAL
%w: f32[4, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%tangent: f32[4, 6] = tangent("output")
%gather: f32[8, 6] RECOMPUTE = _c10d_functional.all_gather_into_tensor(%w, 2, "autoshard:dp=2:dp")
%gathered: f32[8, 6] RECOMPUTE = _c10d_functional.wait_tensor(%gather)
%mm: f32[4, 6] = mm(%x, %gathered)
%relu: f32[4, 6] = relu(%mm)
%total: f32[4, 6] = _c10d_functional.all_reduce(%relu, "sum", "autoshard:dp=2:dp")
%summed: f32[4, 6] = _c10d_functional.wait_tensor(%total)
%le: b8[4, 6] = le.Scalar(%relu, 0)
%zero: f32[] = full([], 0.0)
%where: f32[4, 6] = where.self(%le, %zero, %tangent)
%permute: f32[8, 4]<1, 8> = permute(%x, [1, 0])
%mm_1: f32[8, 6] = mm(%permute, %where)
%scatter: f32[4, 6] = _c10d_functional.reduce_scatter_tensor(%mm_1, "sum", 2, "autoshard:dp=2:dp")
%scattered: f32[4, 6] = _c10d_functional.wait_tensor(%scatter)
%transposed: f32[6, 8]<1, 6> = permute(%gathered, [1, 0])
%mm_2: f32[4, 8] = mm(%where, %transposed)
return output("output") %summed, gradient("w") %scattered, gradient("input:x") %mm_2
"""


def training(*, again: bool) -> GraphModule:
    return parse_graph(TRAINING.replace("RECOMPUTE", "recompute" if again else "").strip())[0]


def ops(gm: GraphModule | None) -> list[str]:
    assert gm is not None
    return [str(node.target).split(".")[1] for node in gm.graph.nodes if node.op == "call_function"]


def test_a_gathered_parameter_is_gathered_again_in_the_backward() -> None:
    split = split_program(training(again=True), mode="eager")
    assert ops(split.forward).count("all_gather_into_tensor") == 1
    assert ops(split.backward).count("all_gather_into_tensor") == 1
    assert WHOLE not in elements_kept(split.backward)


WHOLE = 8 * 6


def elements_kept(gm: GraphModule | None) -> list[int]:
    assert gm is not None
    return [node.meta["val"].numel() for node in gm.graph.find_nodes(op="placeholder")]


def test_it_is_gathered_right_before_its_use() -> None:
    backward = ops(split_program(training(again=True), mode="eager").backward)
    assert backward.index("all_gather_into_tensor") > backward.index("reduce_scatter_tensor")


def test_what_other_collectives_give_is_saved() -> None:
    split = split_program(training(again=False), mode="eager")
    assert "all_gather_into_tensor" not in ops(split.backward)
    assert WHOLE in elements_kept(split.backward)


def test_the_collective_of_an_output_is_in_the_forward() -> None:
    split = split_program(training(again=True), mode="eager")
    assert "all_reduce" in ops(split.forward)
    assert "all_reduce" not in ops(split.backward)


def test_the_graph_is_left_as_it_was() -> None:
    gm = training(again=True)
    before = str(gm.graph)
    split_program(gm, mode="inductor")
    assert str(gm.graph) == before


def test_what_inductor_rewrites_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def rewriting(gm: GraphModule, *_: object, **__: object) -> InductorCode:
        gm.graph.output_node().args = ((),)
        return InductorCode(lambda _: [], ())

    monkeypatch.setattr(compiling, "inductor_compile", rewriting)
    split = split_program(training(again=True), mode="inductor")
    graphs = [str(gm.graph) for gm in (split.forward, split.backward) if gm is not None]
    compiling.compile_split(split, mode="inductor")
    assert [str(gm.graph) for gm in (split.forward, split.backward) if gm is not None] == graphs and len(graphs) == 2


# sin(x @ w) * b, which then counts its calls; no collectives, so that it can run here.
LOCAL = """
mesh dp=1
stage LOCAL
%w: f32[8, 6] = parameter("w")
%b: f32[6] = buffer("b")
%x: f32[4, 8] = input("x")
%tangent: f32[4, 6] = tangent("output")
%mm: f32[4, 6] = mm(%x, %w)
%sin: f32[4, 6] = sin(%mm)
%out: f32[4, 6] = mul.Tensor(%sin, %b)
%new: f32[6] = add.Tensor(%b, 1)
%grad: f32[4, 6] = mul.Tensor(%tangent, %b)
%cos: f32[4, 6] = cos(%mm)
%grad_1: f32[4, 6] = mul.Tensor(%grad, %cos)
%permute: f32[8, 4]<1, 8> = permute(%x, [1, 0])
%mm_1: f32[8, 6] = mm(%permute, %grad_1)
return output("output") %out, buffer("b") %new, gradient("w") %mm_1
"""


@pytest.mark.parametrize("mode", MODES)
def test_code_gives_outputs_buffers_and_gradients(mode: Mode) -> None:
    program = compile_split(split_program(parse_graph(LOCAL.strip())[0], mode=mode), mode=mode)
    generator = torch.Generator().manual_seed(0)
    w, b, x, tangent = (torch.randn(*shape, generator=generator) for shape in ((8, 6), (6,), (4, 8), (4, 6)))
    w.requires_grad_()
    expected = torch.sin(x @ w) * b
    expected.backward(tangent)
    assert [given.name for given in program.split.inputs] == ["w", "b", "x"]
    outputs, buffers, saved = program.forward([w.detach(), b, x])
    torch.testing.assert_close(outputs, [expected.detach()])
    torch.testing.assert_close(buffers, [b + 1])
    torch.testing.assert_close(program.backward(saved, [tangent]), [w.grad])


@pytest.mark.parametrize("mode", MODES)
def test_code_empties_the_lists_that_it_is_given(mode: Mode) -> None:
    program = compile_split(split_program(parse_graph(LOCAL.strip())[0], mode=mode), mode=mode)
    inputs = [torch.ones(8, 6), torch.ones(6), torch.ones(4, 8)]
    _, _, saved = program.forward(inputs)
    program.backward(saved, [torch.ones(4, 6)])
    assert inputs == []
    assert saved == []


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_without_gradients_is_a_forward_alone(mode: Mode) -> None:
    text = LOCAL.strip().rpartition("return")[0] + 'return output("output") %out'
    text = "\n".join(
        line for line in text.splitlines() if not {"tangent", "grad", "cos"} & set(re.findall(r"[a-z]+", line))
    )
    program = compile_split(split_program(parse_graph(text.strip())[0], mode=mode), mode=mode)
    assert program.split.backward is None
    outputs, buffers, saved = program.forward([torch.ones(8, 6), torch.ones(6), torch.ones(4, 8)])
    torch.testing.assert_close(outputs, [torch.ones(4, 6) * torch.sin(torch.tensor(8.0))])
    assert (buffers, saved) == ([], [])


# The forward reads a weight gathered over both axes, the backward alone reads it gathered over one.
TWO_GATHERS = """
mesh dp=2,tp=2
stage LOCAL
%w: f32[2, 8] = parameter("w")
%x: f32[16, 8] = input("x")
%tangent: f32[16, 8] = tangent("output")
%gather: f32[8, 8] recompute = _c10d_functional.all_gather_into_tensor(%w, 4, "autoshard:dp=2,tp=2:dp.tp")
%whole: f32[8, 8] recompute = _c10d_functional.wait_tensor(%gather)
%gather_1: f32[4, 8] recompute = _c10d_functional.all_gather_into_tensor(%w, 2, "autoshard:dp=2,tp=2:dp")
%part: f32[4, 8] recompute = _c10d_functional.wait_tensor(%gather_1)
%mm: f32[16, 8] = mm(%x, %whole)
%permute: f32[8, 4]<1, 8> = permute(%part, [1, 0])
%mm_1: f32[16, 4] = mm(%tangent, %permute)
return output("output") %mm, gradient("input:x") %mm_1
"""


def test_what_the_backward_alone_gathers_is_not_gathered_in_the_forward() -> None:
    split = split_program(parse_graph(TWO_GATHERS.strip())[0], mode="eager")
    assert split.backward is not None
    gathers = [[n.name for n in gm.graph.nodes if n.name.startswith("gather")] for gm in (split.forward, split.backward)]
    assert gathers == [["gather"], ["gather_1"]]
