"""No collective is anonymous: each names its module, its line, what it moves, and the pass that made it with the reason.

That a pass says why is checked whenever a plan is made: `collectives_of` raises where none does.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import Options, ShardingPlan
from autoshard.compile.compiled import split_program
from autoshard.phases import Phases, default_passes
from autoshard.planner.make_plan import Planned, make_plan, plan_ahead
from autoshard.planner.request import PlanRequest
from autoshard.plans.collectives import collectives_of
from passes.errors import VerifyError
from passes.ir.graph import transfer_of
from passes.ir.mesh import Mesh
from passes.ir.text import parse_graph
from passes.solve import Solve
from tests.models import Case, build

PASSES = {*(one.name for one in default_passes()), "solve"}
MOVED = ("parameter ", "gradient ", "input ", "output ", "tangent ", "buffer ", "%")


def check_names(plan: ShardingPlan, model: nn.Module) -> None:
    """Check that modules are the model's; what is in none has a line of its own forward, but what is only returned."""
    assert plan.collectives
    assert all(one.what.startswith(MOVED) for one in plan.collectives)
    assert {one.reason.partition(": ")[0] for one in plan.collectives} <= PASSES
    modules = {name for name, _ in model.named_modules() if name}
    lines, first = inspect.getsourcelines(type(model).forward)
    for one in plan.collectives:
        if ": output needs " in one.reason and one.what.startswith(("parameter ", "buffer ")):
            continue
        in_root = first <= one.origin.line < first + len(lines)
        assert one.origin.file and one.origin.line and one.origin.source, one
        assert one.origin.fqn in modules or (one.origin.fqn == "" and in_root), one


def check_sent(planned: Planned) -> None:
    """Check that the halves of the program send what the plan says: in the forward, in the backward, or the same in both."""
    split = split_program(planned.graph, mode="eager")
    assert split.backward is not None
    for half, said in (
        (split.forward, [one.id for one in planned.plan.collectives if not one.backward]),
        (split.backward, [one.id for one in planned.plan.collectives if one.backward or one.recomputed]),
    ):
        transfers = [transfer for node in half.graph.nodes if (transfer := transfer_of(node)) is not None]
        assert sorted(step for transfer in transfers for step in transfer.steps) == sorted(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        pytest.param("llama", "fsdp+megatron", marks=pytest.mark.slow),
        pytest.param("llama", {"dp": "ddp", "tp": "megatron"}, marks=pytest.mark.slow),
        ("conv_net", "fsdp+ddp"),
        ("moe", "zero2+megatron"),
        pytest.param("encoder", "fsdp+megatron", marks=pytest.mark.slow),
        ("irregular", "fsdp+megatron"),
        ("structured", "fsdp+megatron"),
    ],
)
def test_collectives_of_a_model_are_named(name: str, recipe: Any) -> None:
    case = build(name, dtype=torch.float32)
    mesh = Mesh("dp=2,tp=2", hardware="h100")
    plan, _ = plan_ahead(PlanRequest(case.model, case.args, case.kwargs, mesh, Options(recipe=recipe)))
    check_names(plan, case.model)


class Searched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4096, 16384, bias=False), nn.Linear(16384, 4096, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.relu(self.up(x))), y)


def test_a_searched_plan() -> None:
    with torch.device("meta"):
        case = Case(Searched(), (torch.empty(8192, 4096), torch.empty(8192, 4096)), {})
    mesh, options = Mesh("dp=2,tp=4", hardware="h100"), Options(passes=Phases(choose=Solve()).passes)
    planned = make_plan(PlanRequest(case.model, case.args, case.kwargs, mesh, options))
    check_names(planned.plan, case.model)
    check_sent(planned)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fsdp+megatron", "zero2+megatron"])
def test_what_is_sent_again_is_what_the_backward_sends(recipe: str) -> None:
    case = build("llama", dtype=torch.float32)
    options = Options(recipe=recipe, recompute="block" if recipe.startswith("zero2") else "none")
    check_sent(make_plan(PlanRequest(case.model, case.args, case.kwargs, Mesh("dp=2,tp=2"), options)))


def test_a_backward_that_gathers_in_another_layout_sends_a_message_of_its_own() -> None:
    gm, mesh = parse_graph("""
mesh tp=2
stage COLLECTIVE
%w: f32[8, 6] {tp:S(0)} = parameter("w")
%v: f32[6, 6] {tp:S(0)} = parameter("v")
%x: f32[4, 8] {tp:R} = input("x")
%t: f32[4, 6] {tp:R} = tangent("output")
%all_gather: f32[8, 6] {tp:R} recompute = all_gather(%w, ["tp"])      # | insert_reshards: mm needs it
%mm: f32[4, 6] {tp:R} = mm(%x, %all_gather)
%all_gather_1: f32[6, 6] {tp:R} recompute = all_gather(%v, ["tp"])      # | insert_reshards: mm needs it
%mm_1: f32[4, 6] {tp:R} = mm(%mm, %all_gather_1)
%permute: f32[6, 6]<1, 6> {tp:R} = permute(%all_gather_1, [1, 0])
%mm_2: f32[4, 6] {tp:R} = mm(%t, %permute)
%all_to_all: f32[8, 6] {tp:S(1)} recompute = all_to_all(%w, ["tp"])      # | insert_reshards: mm needs it
%permute_1: f32[6, 8]<1, 6> {tp:S(0)} = permute(%all_to_all, [1, 0])
%take_part: f32[4, 6] {tp:S(1)} = take_part(%mm_2, ["tp"])
%mm_3: f32[4, 8] {tp:P(sum)} = mm(%take_part, %permute_1)
%all_reduce: f32[4, 8] {tp:R} = all_reduce(%mm_3, ["tp"])      # | insert_reshards: mm needs it
return output("output") %mm_1, gradient("input:x") %all_reduce
""")
    found = [(one.id, one.backward, one.recomputed) for one in collectives_of(gm, mesh)]
    assert found == [
        ("all_gather", False, False),
        ("all_gather_1", False, True),
        ("all_to_all", True, False),
        ("all_reduce", True, False),
    ]


def test_a_collective_that_no_pass_gives_a_reason_for_is_refused() -> None:
    gm, mesh = parse_graph("""
mesh tp=2
stage COLLECTIVE
%w: f32[8, 6] {tp:S(0)} = parameter("w")
%all_gather: f32[8, 6] {tp:R} = all_gather(%w, ["tp"])
return output("output") %all_gather
""")
    with pytest.raises(VerifyError, match="%all_gather sends between ranks, but no pass says why: its note is ''"):
        collectives_of(gm, mesh)
