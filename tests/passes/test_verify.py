"""A graph that breaks what its stage promises is refused, by the name of the node; one that keeps it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule, Node

from passes.errors import VerifyError
from passes.ir.graph import (
    Origin,
    Output,
    OutputRole,
    Stage,
    Transfer,
    set_layouts,
    set_origin,
    set_outputs,
    set_stage,
    set_transfer,
    update_facts,
)
from passes.ir.layout import Layout, R
from passes.ir.text import parse_graph
from passes.verify import verify

CAPTURED = """
mesh dp=2,tp=2
stage CAPTURED
%w: f32[8, 6] = parameter("w")
%x: f32[4, 8] = input("x")
%b: f32[8] = buffer("b")
%t: f32[4, 6] = tangent("output")
%mm: f32[4, 6] = mm(%x, %w)
%relu: f32[8] = relu(%b)
%permute: f32[8, 4]<1, 8> = permute(%x, [1, 0])
%mm_1: f32[8, 6] = mm(%permute, %t)
return output("output") %mm, buffer("b") %relu, gradient("w") %mm_1, gradient("unused") None
"""

PLACED = """
mesh dp=2,tp=2
stage PLACED
%w: f32[8, 6] {dp:S(0/2), tp:S(0)} = parameter("w")
%x: f32[4, 8] {dp:S(0), tp:R} = input("x")
%mm: f32[4, 6] {dp:S(0), tp:P(sum)} = mm(%x{dp:S(0), tp:S(1)}, %w{dp:R, tp:S(0)})
return output("output") %mm{dp:S(0), tp:R}
"""

EXPLICIT = """
mesh dp=2,tp=2
stage EXPLICIT
%w: f32[8, 6] {dp:S(0/2), tp:S(0)} = parameter("w")
%x: f32[4, 8] {dp:S(0), tp:R} = input("x")
%reshard: f32[4, 8] {dp:S(0), tp:S(1)} = reshard(%x)
%reshard_1: f32[8, 6] {dp:R, tp:S(0)} = reshard(%w)
%mm: f32[4, 6] {dp:S(0), tp:P(sum)} = mm(%reshard, %reshard_1)
%reshard_2: f32[4, 6] {dp:S(0), tp:R} = reshard(%mm)
%var_mean: (f32[4] {dp:S(0), tp:R}, f32[4] {dp:S(0), tp:R}) = var_mean.correction(%reshard_2, [1], correction=0)
%getitem: f32[4] {dp:S(0), tp:R} = getitem(%var_mean, 1)
return output("0") %reshard_2, output("1") %getitem
"""

COLLECTIVE = """
mesh dp=2,tp=2
stage COLLECTIVE
%w: f32[8, 6] {dp:S(0/2), tp:S(0)} = parameter("w")
%x: f32[4, 8] {dp:S(0), tp:R} = input("x")
%take_part: f32[4, 8] {dp:S(0), tp:S(1)} = take_part(%x, ["tp"])
%all_gather: f32[8, 6] {dp:R, tp:S(0)} = all_gather(%w, ["dp"])
%mm: f32[4, 6] {dp:S(0), tp:P(sum)} = mm(%take_part, %all_gather)
%reduce_scatter: f32[4, 6] {dp:S(0), tp:S(1)} = reduce_scatter(%mm, ["tp"])
return output("output") %reduce_scatter
"""

LOCAL = """
mesh dp=2,tp=2
stage LOCAL
%w: f32[2, 6] {dp:S(0/2), tp:S(0)} = parameter("w")
%x: f32[2, 4] = input("x")
%gathered: f32[4, 6] = _c10d_functional.all_gather_into_tensor(%w, 2, "autoshard:dp=2,tp=2:dp")
%wait_tensor: f32[4, 6] {dp:R, tp:S(0)} = _c10d_functional.wait_tensor(%gathered)
%mm: f32[2, 6] = mm(%x, %wait_tensor)
return output("output") %mm
"""


def refused(text: str, change: Callable[[GraphModule], object] = lambda gm: None) -> str:
    gm, mesh = parse_graph(text)
    change(gm)
    with pytest.raises(VerifyError) as error:
        verify(gm, mesh)
    return str(error.value)


def node_of(gm: GraphModule, name: str) -> Node:
    return next(node for node in gm.graph.nodes if node.name == name)


@pytest.mark.parametrize("text", [CAPTURED, PLACED, EXPLICIT, COLLECTIVE, LOCAL])
def test_a_valid_graph_passes(text: str) -> None:
    verify(*parse_graph(text))


def test_message_names_node_stage_and_source_line() -> None:
    def change(gm: GraphModule) -> None:
        set_origin(node_of(gm, "mm"), Origin("layers.0", "/home/me/mlp.py", 14, "    y = x @ self.w"))

    assert_expected_inline(
        refused(EXPLICIT.replace("%mm: f32[4, 6] {dp:S(0), tp:P(sum)}", "%mm: f32[4, 6] {dp:S(0), tp:R}"), change),
        """\
at stage EXPLICIT, %mm is not valid: on tp it runs as S(1), S(0) -> R, but its rule has no such row
    %mm: f32[4, 6] {dp:S(0), tp:R} = mm(%reshard, %reshard_1)      # mlp.py:14 layers.0
    y = x @ self.w""",
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda gm: node_of(gm, "mm").meta.pop("val"), "%mm is not valid: it has no value"),
        (lambda gm: node_of(gm, "x").meta.pop("val"), "%x is not valid: it has no value"),
        (lambda gm: update_facts(node_of(gm, "w"), input=None), "%w is not valid: a placeholder without a role"),
        (lambda gm: node_of(gm, "w").append(node_of(gm, "relu")), "the graph is broken: "),
        (lambda gm: node_of(gm, "x").append(node_of(gm, "permute")), "%b is not valid: placeholders stand before all calls"),
        (lambda gm: setattr(node_of(gm, "relu"), "target", torch.relu), "which is neither an op nor in passes/ir/text/lexer"),
        (lambda gm: set_outputs(gm.graph, ()), "the outputs are not valid: 4 values have 0 descriptions"),
        (lambda gm: gm.graph.output_node().meta.clear(), "the outputs are not valid: they are not described"),
        (
            lambda gm: set_outputs(gm.graph, (Output(OutputRole.GRADIENT, "w"), *[Output(OutputRole.OUTPUT, "0")] * 3)),
            "outputs come first, then buffers, gradients and what is saved",
        ),
    ],
)
def test_broken_structure_is_refused(change: Callable[[GraphModule], object], expected: str) -> None:
    assert expected in refused(CAPTURED, change)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('input("x")', 'parameter("w")', "%x is not valid: %w is parameter 'w' as well"),
        ('gradient("w") %mm_1', 'gradient("w") %mm', "gradient 'w' is unlike its parameter: %mm is f32[4, 6], %w"),
        ('buffer("b") %relu', 'buffer("b") None', "buffer 'b' is None"),
        ("%t: f32[4, 6]", "%t: f64[4, 6]", "output 'output' is unlike its tangent: %mm is f32[4, 6], %t is f64[4, 6]"),
    ],
)
def test_ends_that_do_not_belong_together_are_refused(old: str, new: str, expected: str) -> None:
    assert expected in refused(CAPTURED.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("%mm: f32[4, 6] {dp:S(0), tp:P(sum)}", "%mm: f32[4, 6]", "%mm is not valid: it has 1 results and 0 layouts"),
        ("%x: f32[4, 8] {dp:S(0), tp:R}", "%x: f32[4, 8] {dp:P(sum), tp:R}", "%x is not valid: an input is never partial"),
        ("%mm: f32[4, 6] {dp:S(0)", "%mm: f32[4, 6] {dp:S(0/3)", "{dp:S(0/3), tp:P(sum)} does not split f32[4, 6]"),
        ("%mm: f32[4, 6] {dp:S(0)", "%mm: f32[4, 6] {dp:S(2)", "{dp:S(2), tp:P(sum)} does not split f32[4, 6]"),
        ("%x{dp:S(0), tp:S(1)}", "%x{dp:S(0), tp:S(1/8)}", "{dp:S(0), tp:S(1/8)} does not split f32[4, 8]"),
        ("%w: f32[8, 6] {dp:S(0/2), tp:S(0)}", "%w: f32[8, 6] {dp:S(0), tp:S(0)}", "{dp:S(0), tp:S(0)} does not sp"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(old: str, new: str, expected: str) -> None:
    assert expected in refused(PLACED.replace(old, new))


def test_a_layout_of_another_mesh_is_refused() -> None:
    def change(gm: GraphModule) -> None:
        set_layouts(node_of(gm, "x"), Layout((R,)))

    assert "%x is not valid: a layout has 1 placements, the mesh 2 axes" in refused(PLACED, change)


def test_steps_are_gone_at_local() -> None:
    def later(gm: GraphModule) -> None:
        set_stage(gm, Stage.LOCAL)

    text = 'mesh tp=2\nstage COLLECTIVE\n%x: f32[4] {tp:R} = input("x")\n%all_reduce: f32[4] {tp:R} = all_reduce(%x, ["tp"])\n'
    expected = "%all_reduce is not valid: steps are functional collectives by now"
    assert expected in refused(f'{text}return output("0") %all_reduce\n', later)


_UNSAID = "%gathered is not valid: it sends between ranks, but nothing says over which axes of the mesh"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda node: node.update_arg(2, "0"), "%gathered is not valid: it is no collective over dp of mesh dp=2,tp=2"),
        (lambda node: node.update_arg(2, "autoshard:dp=4:dp"), "it is no collective over dp of mesh dp=2,tp=2"),
        (lambda node: update_facts(node, transfer=None), _UNSAID),
        (lambda node: set_transfer(node, Transfer("all_gather", ("dp", "tp"))), "no collective over dp, tp of mesh"),
    ],
)
def test_a_collective_that_not_all_of_its_group_issue_is_refused(change: Callable[[Node], object], expected: str) -> None:
    assert expected in refused(LOCAL, lambda gm: change(node_of(gm, "gathered")))


def test_a_collective_of_a_part_of_its_group_is_refused() -> None:
    text = LOCAL.replace('"autoshard:dp=2,tp=2:dp"', '"autoshard:dp=2,tp=2:dp.tp"')
    assert "%gathered is not valid: it is a collective of 2 ranks in a group of 4" in refused(text)


def test_a_call_without_needs_is_refused() -> None:
    expected = "%mm is not valid: it has 2 operands and 0 needed layouts"
    assert expected in refused(PLACED, lambda gm: update_facts(node_of(gm, "mm"), needs=None))


def test_only_what_is_stored_may_be_padded() -> None:
    stored = 'mesh tp=2\nstage PLACED\n%w: f32[3, 6] {tp:S(0)} = parameter("w")\nreturn gradient("w") %w\n'
    verify(*parse_graph(stored))
    used = stored.replace("return", '%relu: f32[3, 6] {tp:S(0)} = relu(%w)\nreturn output("0") %relu,')
    assert "%relu is not valid: {tp:S(0)} does not split f32[3, 6]" in refused(used)


def test_a_gradient_needs_the_layout_of_its_parameter() -> None:
    text = 'mesh tp=2\nstage PLACED\n%w: f32[4] {tp:S(0)} = parameter("w")\nreturn gradient("w") %w{tp:R}\n'
    assert_expected_inline(
        refused(text),
        "at stage PLACED, the outputs are not valid: gradient 'w' is needed as {tp:R}, %w has {tp:S(0)}",
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("mm(%reshard, ", "mm(%x{dp:S(0), tp:S(1)}, ", "%x has {dp:S(0), tp:R}, it needs {dp:S(0), tp:S(1)}"),
        ("%getitem: f32[4] {dp:S(0)", "%getitem: f32[4] {dp:R", "it has another layout than the item that it takes"),
        ("%mm: f32[4, 6] {dp:S(0)", "%mm: f32[4, 6] {dp:R", "on dp it runs as S(0), R -> R, but its rule has no such row"),
    ],
)
def test_edges_that_disagree_are_refused(old: str, new: str, expected: str) -> None:
    assert expected in refused(EXPLICIT.replace(old, new))


def test_an_op_without_a_rule_runs_replicated_or_not_at_all() -> None:
    text = """
mesh tp=2
stage EXPLICIT
%x: f32[4, 4] {tp:R} = input("x")
%inverse: f32[4, 4] {tp:R} = linalg_cholesky(%x)
return output("0") %inverse
"""
    verify(*parse_graph(text))
    assert "on tp it runs as S(0) -> S(0), but no rule shards this call" in refused(text.replace("tp:R", "tp:S(0)"))


def test_reshards_are_gone_at_collective() -> None:
    def later(gm: GraphModule) -> None:
        set_stage(gm, Stage.COLLECTIVE)

    assert "%reshard is not valid: reshards are lowered by now" in refused(EXPLICIT, later)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("{dp:R, tp:S(0)} = all_gather", "{dp:S(0), tp:R} = all_gather", "on dp it goes from S(0/2) to S(0)"),
        ('take_part(%x, ["tp"])', 'all_to_all(%x, ["tp"])', "on tp it goes from R to S(1)"),
    ],
)
def test_steps_move_as_their_kind_says(old: str, new: str, expected: str) -> None:
    assert expected in refused(COLLECTIVE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("%mm: f32[2, 6]", "%mm: f32[4, 6]", "%mm is not valid: the call gives f32[2, 6]"),
        (":dp=2,tp=2:dp", ":dp=2,tp=4:dp", "%gathered is not valid: it is no collective over dp of mesh dp=2,tp=2"),
        ("mm(%x, %wait_tensor)", "mm(%x, %gathered)", "what a collective gives is read before it is awaited"),
    ],
)
def test_local_calls_give_what_they_say(old: str, new: str, expected: str) -> None:
    assert expected in refused(LOCAL.replace(old, new))
