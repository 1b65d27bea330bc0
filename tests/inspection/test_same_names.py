"""Test that a plan tells a parameter from an input that has its name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autoshard import Mesh, Options, plan
from autoshard.inspection.report.html_page import page_data


class SameNames(nn.Module):
    """Takes an input that has the name of a parameter, and another that is called self."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 8))

    def forward(this, scale: Tensor, self: Tensor) -> Tensor:
        return this.scale @ scale * self


def test_a_name_of_a_parameter_and_of_an_input_means_the_parameter() -> None:
    args = (torch.ones(8, 4), torch.ones(8, 4))
    one = plan(SameNames(), Mesh("dp=2", hardware="h100"), args, options=Options(recipe="fsdp"))
    told = {name: one.explain(name) for name in ("scale", "input:scale", "self")}
    assert [(name, each.kind, each.choices[0].type) for name, each in told.items()] == [
        ("scale", "parameter", "f32[8, 8]"),
        ("input:scale", "input", "f32[8, 4]"),
        ("self", "input", "f32[8, 4]"),
    ]
    rows = {(value["role"], value["name"]): value["node"] for value in page_data(one)["values"]}
    assert rows["parameter", "scale"] != rows["input", "scale"]
