"""Dropout through the whole pipeline: every copy of a random call draws the same numbers, on every mesh."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.config.options import Options
from autoshard.debug.rank_interpreter import run_ranks
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from passes._torch.operators.decompositions import draw_categories
from passes.base import PassContext
from passes.ir.graph import InputRole, draw_of, input_of, layout_of, outputs_of, placeholders, returned
from passes.ir.layout import assemble, local_part
from passes.ir.mesh import Mesh
from passes.ir.text import parse_graph
from passes.normalize import Normalize


class Noisy(nn.Module):
    """Two masks, which the backward needs again, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(6, 12), nn.Linear(12, 6), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.up(self.dropout(x)).relu())
        noisy: torch.Tensor = self.down(hidden) + torch.randn_like(x)
        return noisy.square().mean()


def step(model: nn.Module, x: torch.Tensor, mesh: Mesh, options: Options) -> dict[str, torch.Tensor]:
    """Return loss and gradients, from simulated ranks."""
    gm = make_plan(PlanRequest(model, (x,), {}, mesh, options)).graph
    given = {name: value.detach() for name, value in model.named_parameters()} | {"x": x}
    inputs: list[list[torch.Tensor]] = []
    for coordinate in mesh.coordinates():
        inputs.append([])
        for node in placeholders(gm.graph):
            what = input_of(node)
            if what.role is InputRole.COORDINATE:
                value = torch.tensor([coordinate[mesh.index(what.name)]])
            elif what.role is InputRole.SEED:
                value = torch.tensor(17)
            else:
                whole = given.get(what.name, torch.ones((), dtype=x.dtype))
                value = local_part(whole, layout_of(node), mesh, coordinate)
            inputs[-1].append(value)
    results = run_ranks(gm, mesh, inputs)
    found = {}
    for i, (output, node) in enumerate(zip(outputs_of(gm.graph), returned(gm.graph), strict=True)):
        shape = given[output.name].shape if output.name in given else ()
        found[output.name] = assemble([result[i] for result in results], shape, layout_of(node), mesh)
    return found


@pytest.mark.parametrize("replacement", [False, True])
def test_categories_are_drawn_as_often_as_their_weights_say(replacement: bool) -> None:
    torch.manual_seed(0)
    weights, rows = torch.tensor([4.0, 0.0, 1.0, 3.0, 2.0]), 20_000
    drawn = draw_categories(weights.expand(rows, -1), 2, replacement)
    assert drawn.shape == (rows, 2) and drawn.dtype is torch.int64
    for place in drawn.unbind(1)[: 2 if replacement else 1]:
        torch.testing.assert_close(place.bincount(minlength=5) / rows, weights / 10, atol=0.015, rtol=0)
    assert bool((drawn[:, 0] == drawn[:, 1]).any()) is replacement


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "recipe"), (("dp=4", "ddp"), ("dp=2", "fsdp"), ("dp=2,tp=2", {"dp": "fsdp", "tp": "megatron"}))
)
def test_loss_and_gradients_with_dropout_are_those_of_one_device(mesh: str, recipe: str | dict[str, str]) -> None:
    torch.manual_seed(0)
    model, x = Noisy().double(), torch.randn(4, 8, 6, dtype=torch.float64)
    expected = step(model, x, Mesh("dp=1"), Options())
    actual = step(model, x, Mesh(mesh), Options(recipe=recipe))
    assert set(actual) == set(expected)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_attention_without_dropout_draws_nothing() -> None:
    """PyTorch tags it as random all the same; equal calls are one, and others are not asked to have a rule."""
    calls = {}
    for dropout in (0.0, 0.5):
        attend = f"_scaled_dot_product_flash_attention_for_cpu(%q, %q, %q, {dropout})"
        gm, mesh = parse_graph(f"""
mesh tp=2
stage CAPTURED
%q: f32[2, 4, 8, 16] = input("q")
%one: (f32[2, 4, 8, 16], f32[2, 4, 8]) = {attend}
%a: f32[2, 4, 8, 16] = getitem(%one, 0)
%two: (f32[2, 4, 8, 16], f32[2, 4, 8]) = {attend}
%b: f32[2, 4, 8, 16] = getitem(%two, 0)
%add: f32[2, 4, 8, 16] = add.Tensor(%a, %b)
return output("output") %add
""".lstrip())
        Normalize().run(gm, PassContext(mesh))
        calls[dropout] = [node for node in gm.graph.nodes if "attention" in node.name or node.name in ("one", "two")]
    assert (len(calls[0.0]), len(calls[0.5])) == (1, 2)
    assert [draw_of(node) for node in (*calls[0.0], *calls[0.5])] == [None, 0, 1]
