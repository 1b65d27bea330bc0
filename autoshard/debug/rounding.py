"""Measure how far rounding moves what a model computes, by changing numbers in their last digit.

Two correct programs add in different orders. What is zero but for rounding, as the gradient of a bias before a
normalization is, shares no digit between them, and no tolerance relative to it can tell; but it moves as far when
inputs, parameters and what ops compute of them are nudged.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autoshard.capture.held_objects import copies_of_computed
from autoshard.debug.random_draws import Draws, ReplayError
from autoshard.debug.simulated_ranks import Call, Ranks, Step, Whole, distance, run_on_one_device
from passes._torch import OpOverload, flatten_pytree, intercepted, select_decompositions, unflatten_pytree

RUNS = 3  # with other nudges: a single number may come out as before by chance
LIKELY = 8.0  # times as far as in these runs, rounding may move a value
_LOGARITHMS_OF_SUMS = frozenset({torch.ops.aten._log_softmax.default, torch.ops.aten.logsumexp.default})


@dataclass(frozen=True)
class Rounding:
    """The distance that rounding moves the results of a call and, with `ranks` that run it, the values of their `program`.

    Random numbers are the same in each run. All is computed when it is asked for.
    """

    call: Call
    precision: torch.dtype  # that is computed in
    training: bool
    program: GraphModule | None = None
    ranks: Ranks | None = None
    drawn: Draws = field(default_factory=Draws)

    def of_value(self, node: Node, value: Tensor) -> float:
        """Return the norm of the difference that rounding may make to a value of the program."""
        found = []
        for seed, whole in enumerate(self._wholes):
            with intercepted(_Nudge(self.precision, seed)):
                found.append(distance(whole.value(node), value))
        return LIKELY * max(found)

    def of_result(self, kind: str, name: str, value: Tensor) -> float:
        """Return the same for a result of the model; `kind` is a field of `Step`. It is 0 if the model draws otherwise than
        the program, so that its numbers cannot be made the same."""
        try:
            return LIKELY * max(distance(getattr(step, kind)[name], value) for step in self._steps)
        except ReplayError:
            return 0.0

    @cached_property
    def _calls(self) -> tuple[Call, ...]:
        return tuple(_nudged(self.call, self.precision, seed) for seed in range(RUNS))

    @cached_property
    def _wholes(self) -> tuple[Whole, ...]:
        assert self.ranks is not None and self.program is not None, "values are of a program that ranks run"
        wholes = tuple(Whole(replace(self.ranks, call=call)) for call in self._calls)
        for whole in wholes:
            whole.values.update(self.drawn.in_graph(self.program))
        return wholes

    @cached_property
    def _steps(self) -> tuple[Step, ...]:
        return tuple(self._step(call, seed) for seed, call in enumerate(self._calls))

    def _step(self, call: Call, seed: int) -> Step:
        with intercepted(_Nudge(self.precision, seed)):
            return run_on_one_device(call, training=self.training, inside=self.drawn.replayed())


class _Nudge:
    """Makes a call, and nudges the numbers that it rounds: no whole ones, and none that it was given.

    A gradient formula (`..._backward`) takes several steps, each of which rounds: what it is given is nudged, whole
    numbers as well. The logarithm of a sum is computed in steps, as the program does: the sum is rounded to a digit of
    one or more, and its logarithm may be far smaller.
    """

    def __init__(self, precision: torch.dtype, seed: int) -> None:
        self.precision, self.generator = precision, torch.Generator("cpu").manual_seed(RUNS + seed)

    def __call__(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if op in _LOGARITHMS_OF_SUMS:
            with intercepted(self):
                return select_decompositions(whole=frozenset())[op](*args, **kwargs)
        given = _numbers((args, kwargs))
        if op._opname.endswith("_backward"):
            leaves, spec = flatten_pytree((args, dict(kwargs)))
            args, kwargs = unflatten_pytree([self._nudged(leaf) for _, leaf in leaves], spec)
        result = op(*args, **kwargs)
        if not given or any(one.alias_info is not None for one in op._schema.returns):  # a view, or written in place
            return result
        leaves, spec = flatten_pytree(result)
        known = torch.cat(given)
        return unflatten_pytree([self._moved(leaf, known) if _has_digits(leaf) else leaf for _, leaf in leaves], spec)

    def _nudged(self, leaf: Any) -> Any:
        return nudged(leaf, self.precision, self.generator) if _has_digits(leaf) and not leaf.is_complex() else leaf

    def _moved(self, value: Tensor, known: Tensor) -> Tensor:
        numbers = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        is_rounded = numbers != numbers.round()
        is_rounded = is_rounded.masked_scatter(is_rounded, ~is_among(numbers[is_rounded].double(), known))
        moved = torch.where(is_rounded, nudged(numbers, self.precision, self.generator), numbers)
        # The strides of the result are those that its op gave it:
        return value.copy_(torch.view_as_complex(moved) if value.is_complex() else moved)


def _numbers(values: Any) -> list[Tensor]:
    """Return the numbers with digits among the arguments of a call."""
    leaves = [leaf for _, leaf in flatten_pytree(values)[0] if _has_digits(leaf)]
    return [
        (torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf).double().flatten() for leaf in leaves
    ]


def is_among(values: Tensor, known: Tensor) -> Tensor:
    """Return for each of `values`, which are no whole numbers, whether it is one of `known`; both are flat float64.

    `torch.isin` sorts all numbers, and takes seconds for those of an image. Few are equal, as a rule, so that it is given
    those only whose hash is that of one on the other side.
    """
    known = known[known != known.round()]
    bits = (len(values) + len(known)).bit_length() + 3  # one in eight, at most, has the hash of another number
    own, other = _hashed(values, bits), _hashed(known, bits)
    table = torch.zeros(1 << bits, dtype=torch.bool, device=values.device)
    table.index_fill_(0, other, True)
    found = table.index_select(0, own)
    table.zero_().index_fill_(0, own[found], True)
    return found.masked_scatter(found, torch.isin(values[found], known[table.index_select(0, other)]))


def _hashed(values: Tensor, bits: int) -> Tensor:
    """Return a number of so many bits for each float64."""
    number = values.view(torch.int64) * 0x5851F42D4C957F2D  # Knuth's multiplier of MMIX; it wraps around
    return number.bitwise_right_shift_(64 - bits).bitwise_and_((1 << bits) - 1)


def _has_digits(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def nudged(value: Tensor, precision: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return a tensor in which each number is as it was, or nearer to zero by one digit of its own precision or of
    `precision`: what has to be within bounds, such as a probability, stays so."""
    moved = torch.randint(2, value.shape, generator=generator, device="cpu").to(value.device, torch.bool)
    digit = max(torch.finfo(value.dtype).eps, torch.finfo(precision).eps)
    return torch.where(moved, value * (1 - digit), value)


def _nudged(call: Call, precision: torch.dtype, seed: int) -> Call:
    """Return a copy in which the numbers of parameters, buffers and arguments are nudged."""
    model, args, kwargs = copy.deepcopy(call[:3], dict(copies_of_computed(call.model)))
    generator = torch.Generator("cpu").manual_seed(seed)
    leaves, _ = flatten_pytree((args, dict(kwargs)))
    for tensor in (*model.parameters(), *model.buffers(), *(leaf for _, leaf in leaves)):
        if _has_digits(tensor):
            tensor.data = nudged(tensor.data, precision, generator)
    return call._replace(model=model, args=args, kwargs=kwargs)
