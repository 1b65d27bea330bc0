"""No collective is anonymous: each names its module, its line, what it moves, and the pass that made it with the reason.

So do those of every plan that is run on simulated ranks: `tests/spmd/oracle.py` walks them.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import Options, ShardingPlan
from autoshard.pipeline import default_pipeline
from autoshard.planner import make_plan, plan_ahead
from passes.ir.mesh import Mesh
from passes.solve import Solve
from tests.models import Case, build
from tests.spmd.oracle import check_named


def check_names(plan: ShardingPlan, model: nn.Module) -> None:
    """Modules are the model's; what is in none is of a line of its own forward."""
    assert plan.collectives
    check_named(plan)
    modules = {name for name, _ in model.named_modules() if name}
    lines, first = inspect.getsourcelines(type(model).forward)
    for one in plan.collectives:
        in_root = first <= one.origin.line < first + len(lines)
        assert one.origin.fqn in modules or (one.origin.fqn == "" and in_root), one


@pytest.mark.parametrize("recipe", ["fsdp+megatron", {"dp": "ddp", "tp": "megatron"}])
def test_a_llama(recipe: Any) -> None:
    case = build("llama", dtype=torch.float32)
    plan = plan_ahead(case.model, case.args, case.kwargs, Mesh("dp=2,tp=2", hardware="h100"), Options(recipe=recipe))
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
    mesh, options = Mesh("dp=2,tp=4", hardware="h100"), Options(pipeline=default_pipeline(place=Solve()))
    plan = make_plan(case.model, case.args, case.kwargs, mesh, options).plan
    check_names(plan, case.model)
