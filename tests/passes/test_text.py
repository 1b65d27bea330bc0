"""Graphs are written and read back exactly; what cannot be read is named with its line."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.errors import CompilerError, GraphTextError
from passes.ir.graph import (
    Input,
    InputRole,
    Origin,
    Stage,
    Transfer,
    has_needs,
    input_of,
    is_recompute,
    layout_of,
    needs_of,
    note_of,
    origin_of,
    outputs_of,
    pins_of,
    returned,
    set_note,
    set_origin,
    stage_of,
    tensor_of,
    transfer_of,
    value_of,
)
from passes.ir.layout import Partial, R, Shard, parse_layout
from passes.ir.mesh import Mesh
from passes.ir.text import ALL_DTYPES, DTYPE_NAMES, format_graph, format_node, format_target, parse_graph

CAPTURED = """\
mesh dp=2,tp=2
stage CAPTURED
%w2: f32[16, 8] pinned(dp:S(0) "fsdp: stored", tp:S(1/2) "say \\"no\\", # {x}") = parameter("layers.0.w2")
%tokens: i64[4, 16] pinned(dp:S(1~) "context: sequence", tp:S(1/4~) "alike") = input("tokens")
%tangent: f32[] = tangent("loss")
%step: i64[] = seed("step")
%place: i64[1] = coordinate("tp")
%running: f64[8]@cuda:1 = buffer("bn.running_mean")
%embedding: f32[4, 16, 8] = embedding(%w2, %tokens)      # mlp.py:14 layers.0
%var_mean: (f32[4, 16, 1], f32[4, 16, 1]) = var_mean.correction(%embedding, [2], correction=0, keepdim=True)
%getitem: f32[4, 16, 1] = getitem(%var_mean, 0)      # layers.0 | normalize: a reason, with # and |
%permute: f32[16, 4, 1]<1, 16, 1> = permute(%getitem, [1, 0, 2])      # | normalize: alone
%convert: bf16[16, 4, 1]<1, 16, 1> = prims.convert_element_type(%permute, bf16)      # mlp.py:15
%full: f32[2] = full([2], -inf, dtype=f32, layout=torch.strided, device=device(cpu), pin_memory=False)
%full_1: f32[2] = full([2], 1e-05)
%full_2: c64[2] = full([2], complex(-0.0, 1.5))
%clone: f32[2] = clone(%full, memory_format=torch.contiguous_format)
%gelu: f32[2] = gelu(%clone, approximate="tanh")
%index: f32[4, 8] = index.Tensor(%embedding, [None, %place])
%reshard: f32[4, 8] pinned(dp:R "gathered for use") recompute = reshard(%index)
return output("loss") %full_1, buffer("bn.running_mean") %running, gradient("layers.0.w2") %w2, gradient("unused") None
"""

PLACED = """\
mesh dp=2,tp=2
stage PLACED
%w: f32[8, 6] {dp:R, tp:S(0)} = parameter("w")
%x: f32[4, 8] {dp:S(0), tp:R} = input("x")
%mm: f32[4, 6] {dp:S(0), tp:P(sum)} = mm(%x{dp:S(0), tp:S(1)}, %w)
%add: f32[4, 6] {dp:S(0), tp:R} = add.Tensor(%mm{dp:S(0), tp:R}, %mm{dp:S(0), tp:R})
%var_mean: (f32[4] {dp:S(0), tp:R}, f32[4] {dp:S(0), tp:R}) = var_mean.correction(%add, [1])
%getitem: f32[4] {dp:S(0), tp:R} = getitem(%var_mean, 1)
return output("output") %getitem{dp:R, tp:R}, gradient("w") None
"""


@pytest.mark.parametrize("text", [CAPTURED, PLACED], ids=["CAPTURED", "PLACED"])
def test_text_reads_back_as_the_same_text(text: str) -> None:
    assert format_graph(*parse_graph(text)) == text


def test_mesh_with_ranks_of_its_own_reads_back() -> None:
    text = "mesh tp=2 ranks 5,7\nstage CAPTURED\nreturn\n"
    gm, mesh = parse_graph(text)
    assert mesh == Mesh("tp=2", ranks=(5, 7))
    assert format_graph(gm, mesh) == text


def test_values_read_back_with_shape_dtype_stride_and_device() -> None:
    gm, _ = parse_graph(CAPTURED)
    nodes = {node.name: node for node in gm.graph.nodes}
    convert = tensor_of(nodes["convert"])
    assert (convert.shape, convert.dtype, convert.stride()) == ((16, 4, 1), torch.bfloat16, (1, 16, 1))
    assert tensor_of(nodes["running"]).device == torch.device("cuda:1")
    assert [v.shape for v in value_of(nodes["var_mean"])] == [(4, 16, 1), (4, 16, 1)]


def test_a_graph_read_back_has_fake_tensors_that_run_together() -> None:
    gm, _ = parse_graph(PLACED)
    w, x = (tensor_of(node) for node in gm.graph.find_nodes(op="placeholder"))
    assert torch.mm(x, w).shape == (4, 6)


def test_facts_of_nodes_read_back() -> None:
    gm, _ = parse_graph(CAPTURED)
    nodes = {node.name: node for node in gm.graph.nodes}
    assert stage_of(gm) is Stage.CAPTURED
    assert input_of(nodes["w2"]) == Input(InputRole.PARAMETER, "layers.0.w2")
    assert [(pin.axis, pin.placement, pin.reason) for pin in pins_of(nodes["w2"])] == [
        (0, Shard(0), "fsdp: stored"),
        (1, Shard(1, 2), 'say "no", # {x}'),
    ]
    assert origin_of(nodes["embedding"]) == Origin("layers.0", "mlp.py", 14)
    assert origin_of(nodes["getitem"]) == Origin("layers.0")
    assert note_of(nodes["getitem"]) == "normalize: a reason, with # and |"
    assert (origin_of(nodes["permute"]), note_of(nodes["permute"])) == (Origin(), "normalize: alone")
    assert [node.name for node in gm.graph.nodes if is_recompute(node)] == ["reshard"]
    assert [str(value) for value in returned(gm.graph)] == ["full_1", "running", "w2", "None"]
    assert [(o.role.value, o.name) for o in outputs_of(gm.graph)][2:] == [
        ("gradient", "layers.0.w2"),
        ("gradient", "unused"),
    ]


def test_arguments_read_back_as_what_they_were() -> None:
    gm, _ = parse_graph(CAPTURED)
    nodes = {node.name: node for node in gm.graph.nodes}
    assert nodes["full"].args == ([2], float("-inf"))
    assert dict(nodes["full"].kwargs) == {
        "dtype": torch.float32,
        "layout": torch.strided,
        "device": torch.device("cpu"),
        "pin_memory": False,
    }
    assert nodes["full_1"].args[1] == 1e-05
    assert repr(nodes["full_2"].args[1]) == "(-0+1.5j)"
    assert nodes["index"].args == (nodes["embedding"], [None, nodes["place"]])


def test_needs_are_the_operands_layouts_where_not_written() -> None:
    gm, mesh = parse_graph(PLACED)
    mm = next(node for node in gm.graph.nodes if node.name == "mm")
    assert layout_of(mm).placements == (Shard(0), Partial("sum"))
    assert [need.placements for need in needs_of(mm)] == [(Shard(0), Shard(1)), (R, Shard(0))]
    (needed,) = needs_of(gm.graph.output_node())
    assert needed == parse_layout("{dp:R, tp:R}", mesh)


def test_captured_graphs_have_no_needs() -> None:
    gm, _ = parse_graph(CAPTURED)
    assert not any(has_needs(node) for node in gm.graph.nodes)


def test_collectives_of_local_graphs_read_back_with_what_they_move() -> None:
    gm, _ = parse_graph("""\
mesh dp=2,tp=2
stage LOCAL
%x: f32[4, 8] = input("x")
%gathered: f32[16, 8] = _c10d_functional.all_gather_into_tensor(%x, 4, "autoshard:dp=2,tp=2:dp.tp")
%wait_tensor: f32[16, 8] = _c10d_functional.wait_tensor(%gathered)
return output("output") %wait_tensor
""")
    moved = [transfer_of(node) for node in gm.graph.nodes]
    assert moved == [None, Transfer("all_gather", ("dp", "tp")), None, None]


def test_custom_ops_are_written_with_their_namespace() -> None:
    with torch.library._scoped_library("autoshard_test_text", "DEF") as library:
        library.define("scale(Tensor x, float by) -> Tensor")
        assert format_target(torch.ops.autoshard_test_text.scale.default) == "autoshard_test_text.scale"
        text = """\
mesh tp=2
stage CAPTURED
%x: f32[4] = input("x")
%scale: f32[4] = autoshard_test_text.scale(%x, 2.0)
return output("output") %scale
"""
        assert format_graph(*parse_graph(text)) == text


def test_a_long_return_has_a_value_per_line() -> None:
    names = [f"layers.{i}.attention.projection" for i in range(3)]
    gradients = ", ".join(f'gradient("{name}") %x' for name in names)
    gm, mesh = parse_graph(f'mesh tp=2\nstage CAPTURED\n%x: f32[4] = input("x")\nreturn {gradients}\n')
    text = format_graph(gm, mesh)
    assert_expected_inline(
        text,
        """\
mesh tp=2
stage CAPTURED
%x: f32[4] = input("x")
return gradient("layers.0.attention.projection") %x,
       gradient("layers.1.attention.projection") %x,
       gradient("layers.2.attention.projection") %x
""",
    )
    assert format_graph(*parse_graph(text)) == text


def test_a_note_of_several_lines_is_written_on_one() -> None:
    gm, mesh = parse_graph(CAPTURED)
    node = next(node for node in gm.graph.nodes if node.name == "embedding")
    set_origin(node, Origin("layers.0", "/home/me/mlp.py", 14, "y = w[x]"))
    set_note(node, "pass: first\n  second")
    assert_expected_inline(
        format_node(node, mesh),
        """%embedding: f32[4, 16, 8] = embedding(%w2, %tokens)      # mlp.py:14 layers.0 | pass: first second""",
    )


@pytest.mark.parametrize(
    ("comment", "origin"),
    [
        ("mlp.py:14 blocks.a b", Origin("blocks.a b", "mlp.py", 14)),
        ("my model.py:14 blocks.0", Origin("blocks.0", "my model.py", 14)),
        ("mlp.py:14", Origin("", "mlp.py", 14)),
        ("blocks.0", Origin("blocks.0")),
        ("the words of a page", Origin()),
    ],
)
def test_the_origin_in_a_comment(comment: str, origin: Origin) -> None:
    gm, _ = parse_graph(f"""mesh dp=2
stage CAPTURED
%x: f32[4] = input("x")
%exp: f32[4] = exp(%x)  # {comment}
return output("y") %exp
""")
    assert origin_of(next(node for node in gm.graph.nodes if node.name == "exp")) == origin


def test_what_has_no_text_is_refused() -> None:
    gm, mesh = parse_graph(CAPTURED)
    node = next(node for node in gm.graph.nodes if node.name == "full")
    node.args = ([2], slice(1, 2))
    with pytest.raises(CompilerError, match="cannot write slice"):
        format_node(node, mesh)


@settings(max_examples=50, deadline=None)
@given(st.floats() | st.integers(-(2**63), 2**63) | st.booleans() | st.none() | st.text())
def test_any_number_and_string_reads_back(value: object) -> None:
    gm, mesh = parse_graph('mesh tp=2\nstage CAPTURED\n%full: f32[2] = full([2], 0)\nreturn output("o") %full\n')
    node = next(iter(gm.graph.nodes))
    node.args = ([2], value)
    again, _ = parse_graph(format_graph(gm, mesh))
    assert repr(next(iter(again.graph.nodes)).args) == repr(node.args)


HEAD = 'mesh dp=2\nstage PLACED\n%x: f32[4, 8] {dp:S(0)} = input("x")\n'


def message(text: str) -> str:
    with pytest.raises(GraphTextError) as error:
        parse_graph(text)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "line 1: a graph starts with its mesh, such as 'mesh dp=2,tp=2'"),
        ("mesh dp=2,dp=2\n", "line 1: mesh axes ('dp', 'dp') are not distinct; rename one of them\n    mesh dp=2,dp=2"),
        (
            "mesh dp=2\nstage LATE\n",
            "line 2: the second line is the stage, 'stage' and one of CAPTURED, PLACED, EXPLICIT, COLLECTIVE, LOCAL, "
            "SCHEDULED\n    stage LATE",
        ),
        (HEAD, "line 4: a graph ends in 'return'"),
        (HEAD + "return\n%y: f32[4] = relu(%x)", "line 5: nothing comes after 'return'\n    %y: f32[4] = relu(%x)"),
        (HEAD + "%y: f32[4] = relu(%z)", "line 4: %z is not defined above\n    %y: f32[4] = relu(%z)"),
        (HEAD + '%x: f32[4] = input("y")', 'line 4: %x is defined twice\n    %x: f32[4] = input("y")'),
        (
            HEAD + "%sum: f32[] = sum(%x)",
            "line 4: %sum is not a name that FX takes; call it %sum_1\n    %sum: f32[] = sum(%x)",
        ),
        (
            HEAD + "%y: f32[4] = my.op(%x)",
            "line 4: unknown op 'my.op'; a custom op has to be registered (imported) before its graph is read\n"
            "    %y: f32[4] = my.op(%x)",
        ),
        (
            HEAD + "%y: f31[4] = relu(%x)",
            "line 4: expected a type such as f32[8, 4], got 'f31'\n    %y: f31[4] = relu(%x)",
        ),
        (
            HEAD + "%y: f32[4 = relu(%x)",
            "line 4: expected ']', got '='\n    %y: f32[4 = relu(%x)",
        ),
        (
            HEAD + "%y: f32[4] {tp:R} = relu(%x)",
            "line 4: unknown mesh axis 'tp'; this mesh has dp=2: name one of these\n    %y: f32[4] {tp:R} = relu(%x)",
        ),
        (
            HEAD + "%y: f32[4] {dp:Q} = relu(%x)",
            "line 4: cannot read placement 'Q'; write R, S(dim), S(dim/outer), S(dim~) or P(sum)\n"
            "    %y: f32[4] {dp:Q} = relu(%x)",
        ),
        (HEAD + "%y: f32[4] = relu(%x) $", "line 4: cannot read '$'\n    %y: f32[4] = relu(%x) $"),
        (
            HEAD + "%y: f32[4] = relu(%x) 3",
            "line 4: expected the end of the line, got '3'\n    %y: f32[4] = relu(%x) 3",
        ),
        (
            HEAD + "%y: f32[4] = full([4], foo)",
            "line 4: expected an argument, got 'foo'\n    %y: f32[4] = full([4], foo)",
        ),
        (
            HEAD + "%y: f32[4]@tpu = relu(%x)",
            "line 4: unknown device 'tpu'; one of cpu, cuda, xpu, mps\n    %y: f32[4]@tpu = relu(%x)",
        ),
        (
            HEAD + 'return loss("x") %x',
            "line 4: expected 'output' or 'buffer' or 'gradient' or 'saved', got 'loss'\n    return loss(\"x\") %x",
        ),
        (
            HEAD + '%y: f32[4] = gelu(%x, "\\q")',
            'line 4: cannot read the string "\\q": Invalid \\escape\n    %y: f32[4] = gelu(%x, "\\q")',
        ),
    ],
)
def test_what_does_not_read_is_named_with_its_line(text: str, expected: str) -> None:
    assert message(text) == expected


def test_every_dtype_of_torch_has_a_name_of_its_own() -> None:
    dtypes = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    assert dtypes == set(DTYPE_NAMES) and all(ALL_DTYPES[name] is dtype for dtype, name in DTYPE_NAMES.items())
