"""A pass of the user's own: this file, and one line that says where it runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.fx import GraphModule

from autoshard import Options, UserError, plan
from autoshard.phases import Phases, default_passes, inserted, replaced
from passes.base import Pass, PassContext
from passes.ir.graph import Stage
from tests.models import build
from tests.passes.docs import example_of, run_example
from tests.spmd.oracle import check_step


@dataclass(frozen=True)
class SquareByProduct(Pass):
    """Write `pow(x, 2)` as `mul(x, x)`.

    Before:

        mesh dp=2
        stage CAPTURED
        %x: f32[4, 8] = input("x")
        %pow_1: f32[4, 8] = pow.Tensor_Scalar(%x, 2)
        return output("output") %pow_1

    After:

        mesh dp=2
        stage CAPTURED
        %x: f32[4, 8] = input("x")
        %pow_1: f32[4, 8] = mul.Tensor(%x, %x)
        return output("output") %pow_1
    """

    name: ClassVar[str] = "square_by_product"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.CAPTURED

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        powers = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.pow.Tensor_Scalar)
        squares = [node for node in powers if node.args[1] == 2]
        for node in squares:
            node.target, node.args = torch.ops.aten.mul.Tensor, (node.args[0], node.args[0])
        return bool(squares)


PASSES = inserted(default_passes(), SquareByProduct(), before="seed")  # the one line


@pytest.mark.slow
def test_a_pass_of_ones_own_runs_where_it_is_told() -> None:
    case = build("llama")
    options = Options(recipe="fsdp+megatron", passes=PASSES)
    found = plan(case.model, "dp=2,tp=2", case.args, case.kwargs, options=options)
    squares = [re.findall(r"pow.Tensor_Scalar\(%\w+, 2\)", found.graph(stage)) for stage in ("CAPTURED", "LOCAL")]
    assert squares[0] and not squares[1]


@pytest.mark.slow
def test_a_pass_of_ones_own_computes_what_one_device_does() -> None:
    check_step(build("llama"), "dp=2,tp=2", Options(recipe="fsdp+megatron", passes=PASSES))


def test_a_pass_of_ones_own_has_an_example_that_runs() -> None:
    assert run_example(example_of(SquareByProduct)) == example_of(SquareByProduct).after


def test_the_other_passes_are_set_for_the_plan_as_ever() -> None:
    mine, usual = (Phases(kept=()).fill(passes) for passes in (PASSES, default_passes()))
    assert replaced(mine, "square_by_product") == usual == Phases(kept=()).passes


def test_a_pass_goes_before_one_that_there_is() -> None:
    with pytest.raises(UserError, match="there is no pass 'sharding'; passes are normalize, pad, seed, "):
        inserted(default_passes(), SquareByProduct(), before="sharding")
