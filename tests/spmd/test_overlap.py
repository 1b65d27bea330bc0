"""Neither the order of a program nor what shares a message changes a bit of what it computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule

from autoshard.compile import Mode, Split, split_program
from autoshard.options import Options
from autoshard.overlap import Overlap
from passes.ir.graph import Input, InputRole, OutputRole, copy_graph, transfer_of
from passes.ir.mesh import Mesh
from tests.models import MODELS, build
from tests.spmd.oracle import Ranks, plan_ranks
from tests.spmd.test_numerics import FAST, Recipe, format_id, in_turn

STEPS = 3
CAP = Overlap(Mesh("dp=1"), 1 << 40, "adamw", 1 << 22)  # as much memory as it likes: most is moved


def _order(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes]


def _messages(gm: GraphModule) -> int:
    return sum(transfer_of(node) is not None for node in gm.graph.nodes)


def _overlapped(split: Split, mesh: Mesh, mode: Mode) -> Split:
    """A copy in another order; messages are joined in what is trained."""
    backward = None if split.backward is None else copy_graph(split.backward)
    copied = replace(split, forward=copy_graph(split.forward), backward=backward)
    replace(CAP, mesh=mesh).apply(copied, mode=mode)
    assert _order(copied.forward) != _order(split.forward)
    assert split.backward is None or _messages(copied.backward) < _messages(split.backward)
    return copied


def _check(name: str, axes: str, recipe: Recipe, mode: Mode, *, steps: int = 1, training: bool = True) -> None:
    mesh = Mesh(axes)  # of devices whose figures are not known, so that all messages are joined that can be
    ranks = plan_ranks(build(name), mesh, Options(recipe=recipe), training=training)
    split = split_program(ranks.planned.graph, mode=mode)
    overlapped = _overlapped(split, mesh, mode)
    for _ in range(steps):
        given, got = ranks.run_split(split), ranks.run_split(overlapped)
        for mine, theirs in zip(given, got, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert one is other is None or torch.equal(one, other)
        _update(ranks, split, given)


def _update(ranks: Ranks, split: Split, results: list[tuple[torch.Tensor, ...]]) -> None:
    """A step of descent, and new values of buffers, on every rank."""
    for held, values in zip(ranks.held, results, strict=True):
        for output, value in zip((*split.outputs, *split.gradients), values, strict=True):
            parameter, buffer = Input(InputRole.PARAMETER, output.name), Input(InputRole.BUFFER, output.name)
            if output.role is OutputRole.GRADIENT and parameter in held and value is not None:
                held[parameter] = held[parameter] - 0.1 * value
            if output.role is OutputRole.BUFFER:
                held[buffer] = value


@pytest.mark.parametrize(
    ("name", "axes", "recipe"), [("gpt", *FAST[2]), ("llama", *FAST[0]), ("moe", *FAST[3]), ("conv_net", *FAST[0])]
)
def test_training_in_another_order_is_the_same_to_the_bit(name: str, axes: str, recipe: Recipe) -> None:
    _check(name, axes, recipe, "inductor", steps=STEPS)


def test_the_forward_alone_in_another_order_is_the_same_to_the_bit() -> None:
    _check("gpt", "dp=2,tp=2", "fsdp+megatron", "eager", training=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes", "recipe"), in_turn(MODELS, FAST[::3]), ids=format_id)
def test_every_model_in_another_order(name: str, axes: str, recipe: Recipe) -> None:
    _check(name, axes, recipe, "eager")
