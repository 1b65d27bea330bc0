"""What the backward computes again changes no bit of a step, and takes the memory that is predicted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autoshard.compile import Mode, Split, split_program
from autoshard.options import Options
from passes.ir.graph import Input, InputRole, OutputRole, placeholders, saving_of
from tests.models import build
from tests.spmd.oracle import Ranks, plan_ranks
from tests.spmd.test_numerics import FAST, Recipe

STEPS = 3


def _training(name: str, axes: str, recipe: Recipe, checkpoint: str, mode: Mode, steps: int) -> tuple[Split, list[Tensor]]:
    """The program, and all that its ranks compute in some steps of descent."""
    ranks = plan_ranks(build(name), axes, Options(recipe=recipe, checkpoint=checkpoint))
    split = split_program(ranks.planned.graph, mode=mode)
    return split, [value for _ in range(steps) for value in _step(ranks, split)]


def _step(ranks: Ranks, split: Split) -> Iterator[Tensor]:
    for held, values in zip(ranks.held, ranks.run_split(split), strict=True):
        for output, value in zip((*split.outputs, *split.gradients), values, strict=True):
            parameter, buffer = Input(InputRole.PARAMETER, output.name), Input(InputRole.BUFFER, output.name)
            if output.role is OutputRole.GRADIENT and parameter in held and value is not None:
                held[parameter] = held[parameter] - 0.1 * value
            if output.role is OutputRole.BUFFER:
                held[buffer] = value
            if value is not None:
                yield value


def _saved(split: Split) -> int:
    assert split.backward is not None
    nodes = placeholders(split.backward.graph, InputRole.SAVED)
    return sum(node.meta["val"].nbytes for node in nodes)


def _check(name: str, axes: str, recipe: Recipe, mode: Mode, *, steps: int = 1) -> None:
    usual, expected = _training(name, axes, recipe, "none", mode, steps)
    split, got = _training(name, axes, recipe, "block", mode, steps)
    assert split.backward is not None
    assert any(saving_of(node) == "remade" for node in split.backward.graph.nodes)
    assert _saved(split) < _saved(usual)
    assert len(got) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "axes", "recipe"),
    [("gpt_dropout", *FAST[2]), ("llama", *FAST[0]), ("encoder", *FAST[1]), ("gpt_dropout", "dp=2", "zero2")],
)
def test_blocks_that_are_computed_again_give_the_same_to_the_bit(name: str, axes: str, recipe: Recipe) -> None:
    _check(name, axes, recipe, "inductor" if name == "llama" else "eager", steps=STEPS)
