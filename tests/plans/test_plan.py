"""A plan is made without processes, devices or memory, and can be read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from autoshard import Mesh, Options, ShardingPlan, plan
from autoshard.config.axis_recipes import rule_of_thumb
from autoshard.inspection.report.table import format_plan
from passes.errors import ConstraintError
from passes.ir.graph import Stage, stage_of
from passes.ir.layout import Partial
from passes.ir.text import format_graph, parse_graph
from tests.models import build, llama


class Residual(nn.Module):
    """Two blocks that add to a stream, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8, bias=False)) for _ in range(2)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, y)


def planned(mesh: str | Mesh = "dp=2,tp=2", recipe: Any = "fsdp+megatron", **options: Any) -> ShardingPlan:
    with torch.device("meta"):
        model, x = Residual(), torch.empty(6, 4, 8)
    return plan(model, mesh, (x, x), options=Options(recipe=recipe, **options))


def test_a_plan_reads_as_a_table() -> None:
    assert_expected_inline(
        format_plan(planned(), width=100, colour=False),
        """\
plan on 4 ranks of cpu: dp=2 fsdp, tp=2 megatron
step    8.59 ms: compute 97.9 us, exposed communication 8.49 ms; 19.4 us of communication hidden
links   in use for 99 % of the step; at 80 % of their rate it takes 24.8 % longer
rests   on the figures of cpu: 10 measured, 11 published
memory  4.8 KiB at the peak: temporary 1.6 KiB, activations 1.0 KiB, optimizer 816 B, inputs 776 B,
        parameters 408 B, gathered 192 B, outputs 4 B
in  x[B_dp, S, F], y[B_dp, S, F]   out output[]
module       values and weights, as stored -> as made                               compute  exposed
blocks.0.0   x[B_dp, S, F] . W[F, D_tp.dp], bias[D_tp.dp] -> [B_dp, S, D_tp]        14.0 us   398 us
blocks.0-1
  1          In[B_dp, S, D_tp] -> [B_dp, S, D_tp]                                   11.0 us        -
  2          In[B_dp, S, D_tp] . W[D_tp, F_dp] -> [B_dp, S_tp, F]                   39.2 us  4.04 ms
(model)      x[B_dp, S, F], ... -> [B_dp, S_tp, F], ...                             19.3 us  1.99 ms
blocks.1.0   In[B_dp, S_tp, F] . W[F, D_tp.dp], bias[D_tp.dp] -> [B_dp, S, D_tp]    14.0 us  2.06 ms
(optimizer)                                                                         0.29 us        -
B=6 S=4 D=12 F=8; F_tp: F sharded over tp; {U_tp}: partial sum over tp
collective      over  fwd  bwd  received  exposed  for
reduce_scatter  tp      2    -     384 B  2.00 ms  test_plan.py:37 megatron: row-parallel output
all_gather      tp      1    2     576 B  1.50 ms  test_plan.py:37 mm
reduce_scatter  dp      -    6     408 B  1.00 ms  test_plan.py:37 gradient, in a bucket
all_reduce      dp      1    -       4 B  1.00 ms  test_plan.py:38 output
all_gather      dp      6    3     696 B  1.00 ms  test_plan.py:37 fsdp: gathered fo..., in a bucket
reduce_scatter  tp      -    1     192 B   996 us  test_plan.py:37 add.Tensor
all_reduce      tp      1    -       4 B   992 us  test_plan.py:38 output""",
    )


def test_text_in_a_pipe_has_no_colours() -> None:
    made = planned()
    assert "\x1b" not in str(made) and "\x1b" in format_plan(made, colour=True)
    assert str(made).splitlines()[0] == "plan on 4 ranks of cpu: dp=2 fsdp, tp=2 megatron"


@pytest.mark.slow
def test_meta_real_and_named_meshes_make_the_same_plan() -> None:
    real = plan(
        Residual(), "dp=2,tp=2", (torch.randn(6, 4, 8), torch.randn(6, 4, 8)), options=Options(recipe="fsdp+megatron")
    )
    assert planned() == real == planned(Mesh("dp=2,tp=2")) == planned(Mesh.of(dp=2, tp=2))
    assert not dist.is_initialized() or dist.get_world_size() == 1


def test_a_plan_is_the_same_every_time() -> None:
    assert planned().graphs == planned().graphs


def test_the_rule_of_thumb_goes_by_the_names_of_axes() -> None:
    assert rule_of_thumb(Mesh("dp=2,tp=2")) == ("fsdp", "megatron")
    assert rule_of_thumb(Mesh("tp=2,replica=2")) == ("megatron", "fsdp")
    assert rule_of_thumb(Mesh("cp=2,x=2")) == ("fsdp_context", None)


def test_parameters_inputs_and_outputs_are_described() -> None:
    made = planned()
    weight = made.parameters["blocks.0.0.weight"]
    assert (weight.shape, weight.dtype, weight.layout.format(made.mesh)) == ((12, 8), "float32", "{dp:S(0/2), tp:S(0)}")
    assert weight.local_shape(made.mesh) == (3, 8)
    assert {name: value.layout.format(made.mesh) for name, value in made.inputs.items()} == {
        "x": "{dp:S(0), tp:R}",
        "y": "{dp:S(0), tp:R}",
    }
    assert made.outputs["output"].layout.format(made.mesh) == "{dp:R, tp:R}"
    assert list(made.parameters) == [name for name, _ in Residual().named_parameters()]


def test_collectives_are_counted_by_kind_axis_and_direction() -> None:
    made = planned()
    assert made.count("reduce_scatter") == 9
    assert made.count("reduce_scatter", axis="dp") == len(made.parameters)
    assert made.count("reduce_scatter", axis="tp", backward=False) == 2
    assert made.count("reduce_scatter", axis="tp", backward=True) == 1


def test_bytes_are_those_that_a_rank_receives() -> None:
    made = planned("dp=2", "fsdp")
    whole = {name: 4 * torch.Size(value.shape).numel() for name, value in made.parameters.items()}
    for kind in ("all_gather", "reduce_scatter"):
        assert sum(c.bytes for c in made.collectives if c.kind == kind) == sum(whole.values()) // 2
    reduced = planned("dp=2", "ddp")
    assert sum(c.bytes for c in reduced.collectives if c.backward) == sum(whole.values())


@pytest.mark.slow
@pytest.mark.parametrize("stage", list(Stage)[:5])
def test_graphs_of_all_stages_are_kept_and_read_back(stage: Stage) -> None:
    text = planned().graph(stage.name.lower())
    gm, mesh = parse_graph(text)
    assert stage_of(gm) is stage
    assert format_graph(gm, mesh) == text


def test_layouts_are_known_by_the_names_in_the_graph() -> None:
    made = planned()
    assert made.layouts["relu"].format(made.mesh) == "{dp:S(0), tp:S(2)}"
    assert "%relu: f32[6, 4, 12] {dp:S(0), tp:S(2)}" in made.graph("placed")


def test_what_is_declined_is_said() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid(), nn.Linear(1, 8)), torch.empty(6, 8)
    made = plan(model, "tp=2", (x,), options=Options(recipe="megatron"))
    said = [str(remark) for remark in made.remarks if not remark.routine]
    assert any("0.weight stays whole" in text for text in said), said
    assert "remark" in str(made) and "stays whole" in str(made)


def test_what_follows_from_a_recipe_is_kept_but_not_shown() -> None:
    made = planned()
    assert made.remarks and all(remark.routine for remark in made.remarks)
    assert "remark" not in str(made)
    assert {remark.origin.source.strip() for remark in made.remarks} == {"x = x + block(x)"}


def test_without_gradients_the_plan_is_of_the_forward() -> None:
    with torch.no_grad():
        made = planned()
    assert not any(c.backward or c.recomputed for c in made.collectives)
    assert "gradient" not in made.graph("local")


def test_inputs_in_a_structure_are_known_by_their_path() -> None:
    case = build("structured")
    made = plan(case.model, "dp=2", case.args, case.kwargs, options=Options(recipe="fsdp"))
    assert list(made.inputs) == ["batch.pair.0", "batch.pair.1", "batch.weight", "labels"]
    assert {name: str(value.layout.on(0)) for name, value in made.outputs.items()} == {
        "loss": "R",
        "logits": "S(0)",
        "parts.0": "S(0)",
    }


@pytest.mark.slow
def test_a_large_model_on_many_ranks_is_planned_on_meta() -> None:
    """Two layers of Llama 3 8B on 800 ranks: nothing of it is ever made."""
    with torch.device("meta"):
        sizes = {"dim": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "hidden": 14336, "vocab": 128256}
        model = llama(**sizes, seq=4096, layers=2).model.to(torch.bfloat16)
        tokens = torch.empty(200, 4096, dtype=torch.long)
    made = plan(model, "dp=100,tp=8", (tokens, tokens), options=Options(recipe="fsdp+megatron"))
    assert made.inputs["tokens"].local_shape(made.mesh) == (2, 4096)
    assert made.parameters["layers.1.feed_forward.w2.weight"].local_shape(made.mesh) == (41, 1792)


def test_a_plan_is_one_line_to_a_debugger() -> None:
    assert repr(planned()) == "ShardingPlan(dp=2,tp=2, fsdp x megatron, 6 parameters, 20 collectives, 8.59 ms)"


@pytest.mark.parametrize("saved", [False, True])
def test_layouts_of_one_plan_are_constraints_of_another(saved: bool, tmp_path: Path) -> None:
    first = planned(hardware=None)
    if saved:
        first.save(tmp_path / "plan.json")
        first = ShardingPlan.load(tmp_path / "plan.json")
    params = {
        name: dict(zip(first.mesh.names, one.layout.placements, strict=True)) for name, one in first.parameters.items()
    }
    second = planned(recipe=None, hardware=None, params=params)
    before, after = ({name: one.layout for name, one in found.parameters.items()} for found in (first, second))
    assert after == before
    with pytest.raises(ConstraintError, match=re.escape("'blocks.0.0.bias' cannot be P(sum); use Shard(dim) or Replicate()")):
        planned(params={"blocks.0.0.bias": {"dp": Partial("sum")}})
