"""How far rounding moves what a model computes: by how much it is another when inputs change in their last digit.

Two correct programs add in different orders. What is zero but for rounding, as the gradient of a bias before a
normalization is, shares no digit between them, and no tolerance relative to it can tell; but it moves as far when
inputs and parameters are nudged.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autoshard.debug.simulated_ranks import Call, Ranks, Step, Whole, distance, run_on_one_device
from passes._torch import flatten_pytree

RUNS = 3  # with other nudges: a single number may come out as before by chance
LIKELY = 8.0  # times as far as in these runs, rounding may move a value


@dataclass(frozen=True)
class Rounding:
    """Of a call, how far rounding moves its results, and with `ranks` that run it, the values of their program.

    `drawn` are values of nodes that draw random numbers: they are the same in each run. All is computed when it is asked for.
    """

    call: Call
    precision: torch.dtype  # that is computed in
    training: bool
    ranks: Ranks | None = None
    drawn: Mapping[Node, Any] = field(default_factory=dict)

    def of_value(self, node: Node, value: Tensor) -> float:
        """Norm of the difference that rounding may make to a value of the program."""
        return LIKELY * max(distance(whole.value(node), value) for whole in self._wholes)

    def of_result(self, kind: str, name: str, value: Tensor) -> float:
        """Return the same for a result of the model; `kind` is a field of `Step`."""
        return LIKELY * max(distance(getattr(step, kind)[name], value) for step in self._steps)

    @cached_property
    def _calls(self) -> tuple[Call, ...]:
        return tuple(_nudged(self.call, self.precision, seed) for seed in range(RUNS))

    @cached_property
    def _wholes(self) -> tuple[Whole, ...]:
        assert self.ranks is not None, "values are of a program that ranks run"
        wholes = tuple(Whole(replace(self.ranks, call=call)) for call in self._calls)
        for whole in wholes:
            whole.values.update(self.drawn)
        return wholes

    @cached_property
    def _steps(self) -> tuple[Step, ...]:
        return tuple(run_on_one_device(call, training=self.training) for call in self._calls)


def _nudged(call: Call, precision: torch.dtype, seed: int) -> Call:
    """A copy in which each number of a parameter, buffer or argument is as it was, or nearer to zero by one digit of its own
    precision or of what is computed in: what has to be within bounds, such as a probability, stays so."""
    model, args, kwargs = copy.deepcopy(call)
    generator = torch.Generator("cpu").manual_seed(seed)
    leaves, _ = flatten_pytree((args, dict(kwargs)))
    for tensor in (*model.parameters(), *model.buffers(), *(leaf for _, leaf in leaves if isinstance(leaf, Tensor))):
        if tensor.is_floating_point() or tensor.is_complex():
            moved = torch.randint(2, tensor.shape, generator=generator, device="cpu").to(tensor.device, torch.bool)
            digit = max(torch.finfo(tensor.dtype).eps, torch.finfo(precision).eps)
            tensor.data = torch.where(moved, tensor.data * (1 - digit), tensor.data)
    return Call(model, args, kwargs)
