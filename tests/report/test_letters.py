"""Every dim of a graph has a letter, by what the program does with it and not by its size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard import Options, plan
from autoshard.inspection.report.dims import Letters, letters_of
from passes.ir.graph import layout_of
from passes.ir.mesh import Mesh
from passes.ir.text import parse_graph


def notations(body: str, mesh: str = "dp=2,tp=2") -> dict[str, str]:
    """Return the notation of each node of a PLACED graph."""
    gm, parsed = parse_graph(f"mesh {mesh}\nstage PLACED\n{body.strip()}\n")
    letters = letters_of(gm.graph)
    named = [node for node in gm.graph.nodes if node.op != "output"]
    return {node.name: letters.format(node, layout_of(node), parsed) for node in named}


def test_a_product_shares_the_dim_that_it_sums_over() -> None:
    found = notations("""
%w: f32[16, 48] {dp:S(0), tp:S(1)} = parameter("w")
%x: f32[8, 16] {dp:S(0), tp:R} = input("x")
%mm: f32[8, 48] {dp:S(0), tp:S(1)} = mm(%x, %w)
return output("y") %mm
""")
    assert found == {"w": "[D_dp, F_tp]", "x": "[B_dp, D]", "mm": "[B_dp, F_tp]"}


def test_equal_sizes_of_different_dims_have_different_letters() -> None:
    found = notations("""
%w: f32[8, 8] {dp:R, tp:R} = parameter("w")
%x: f32[8, 8] {dp:R, tp:R} = input("x")
%mm: f32[8, 8] {dp:R, tp:R} = mm(%x, %w)
return output("y") %mm
""")
    assert found == {"w": "[D, F]", "x": "[B, D]", "mm": "[B, F]"}


def test_a_dim_that_a_view_splits_is_its_factors_everywhere() -> None:
    found = notations("""
%w: f32[16, 48] {dp:R, tp:S(1)} = parameter("w")
%x: f32[2, 4, 16] {dp:S(0), tp:R} = input("x")
%view: f32[8, 16] {dp:S(0), tp:R} = view(%x, [8, 16])
%mm: f32[8, 48] {dp:S(0), tp:S(1)} = mm(%view, %w)
%heads: f32[2, 4, 6, 8] {dp:S(0), tp:S(2)} = view(%mm, [2, 4, 6, 8])
return output("y") %heads
""")
    assert found["w"] == "[D, F_tp, H]"
    assert found["view"] == "[B_dp, S, D]"
    assert found["mm"] == found["heads"] == "[B_dp, S, F_tp, H]"


def test_a_strided_shard_stands_at_the_factor_that_it_cuts() -> None:
    found = notations("""
%x: f32[2, 4, 16] {dp:R, tp:S(1)} = input("x")
%view: f32[8, 16] {dp:R, tp:S(0/2)} = view(%x, [8, 16])
return output("y") %view
""")
    assert found["view"] == "[B, S_tp, F]"


def test_two_axes_of_one_dim_stand_outermost_first_and_blocks_are_told() -> None:
    found = notations("""
%w: f32[48] {dp:S(0/2), tp:S(0)} = parameter("w")
%v: f32[48] {dp:R, tp:S(0/3)} = parameter("v")
return output("y") %w
""")
    assert (found["w"], found["v"]) == ("[D_tp.dp]", "[F_tp/3]")


def test_a_mirrored_digit_has_a_tilde_in_a_merged_dim_too() -> None:
    found = notations("""
%x: f32[2, 8, 16] {dp:R, tp:S(1~)} = input("x")
%view: f32[16, 16] {dp:R, tp:S(0/2~)} = view(%x, [16, 16])
%y: f32[16] {dp:S(0~), tp:S(0~2)} = input("y")
return output("z") %view,
       output("u") %y
""")
    assert (found["x"], found["view"], found["y"]) == ("[B, S_tp~, H]", "[B, S_tp~, H]", "[F_dp~.tp~]")


def test_terms_of_a_sum_are_told() -> None:
    found = notations("""
%x: f32[8, 16] {dp:S(0), tp:S(1)} = input("x")
%sum_1: f32[8, 1] {dp:S(0), tp:P(sum)} = sum.dim_IntList(%x, [1], True)
%amax: f32[8] {dp:S(0), tp:P(max)} = amax(%x, [1])
return output("y") %sum_1,
       output("z") %amax
""")
    assert (found["sum_1"], found["amax"]) == ("[B_dp, 1] {U_tp}", "[B_dp] {max_tp}")


def test_equal_parameters_of_equal_layers_are_alike() -> None:
    found = notations("""
%layers_0_w: f32[16, 48] {dp:R, tp:S(1)} = parameter("layers.0.w")
%layers_1_w: f32[16, 48] {dp:R, tp:R} = parameter("layers.1.w")
%x: f32[8, 16] {dp:R, tp:R} = input("x")
%mm: f32[8, 48] {dp:R, tp:S(1)} = mm(%x, %layers_0_w)
return output("y") %mm
""")
    assert (found["layers_0_w"], found["layers_1_w"]) == ("[D, F_tp]", "[D, F]")


def test_layers_stay_apart_where_one_dim_would_come_twice() -> None:
    found = notations("""
%layers_0_w: f32[16, 16] {dp:R, tp:R} = parameter("layers.0.w")
%layers_1_w: f32[16, 16] {dp:R, tp:R} = parameter("layers.1.w")
%x: f32[8, 16] {dp:R, tp:R} = input("x")
%mm: f32[8, 16] {dp:R, tp:R} = mm(%x, %layers_0_w)
%mm_1: f32[8, 16] {dp:R, tp:R} = mm(%mm, %layers_1_w)
return output("y") %mm_1
""")
    assert (found["layers_0_w"], found["layers_1_w"]) == ("[F, D]", "[D, H]")


def test_letters_never_run_out() -> None:
    body = "\n".join(f'%x{i}: f32[{i + 2}] {{tp:R}} = input("x{i}")' for i in range(40))
    found = notations(body + '\nreturn output("y") %x0', mesh="tp=2")
    assert len(set(found.values())) == 40


def test_no_dim_has_the_letter_of_a_modules_weights_or_of_partial_sums() -> None:
    body = "\n".join(f'%x{i}: f32[{i + 2}] {{tp:R}} = input("x{i}")' for i in range(40))
    found = notations(body + '\nreturn output("y") %x0', mesh="tp=2")
    assert not {"[W]", "[U]"} & set(found.values())


def test_letters_have_sizes() -> None:
    gm, mesh = parse_graph('mesh dp=2\nstage PLACED\n%x: f32[8, 16] {dp:S(0)} = input("x")\nreturn output("y") %x\n')
    letters = letters_of(gm.graph)
    assert isinstance(letters, Letters) and isinstance(mesh, Mesh)
    assert letters.sizes == {"B": 8, "F": 16}


@pytest.mark.parametrize("recipe", ["fsdp", "zero2"])
def test_a_dim_of_size_1_that_is_sharded_is_printed(recipe: str, tmp_path: Path) -> None:
    model, mesh = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 1)), Mesh("dp=4", hardware="h100")
    found = plan(model, mesh, (torch.zeros(64, 16),), options=Options(recipe=recipe))
    assert str(found).startswith(f"plan on 4 ranks of h100: dp=4 {recipe}")
    found.to_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").stat().st_size > 0
