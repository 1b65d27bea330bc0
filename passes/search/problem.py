"""The search as numbers: variables with choices, values that move between them, and what each costs.

A variable is an op (or a parameter with its gradient, or the inputs with the outputs that follow them) of every layer
that is tied to it. A value goes from the variable that makes it to those that use it; where layouts differ it
moves, once for all users that need the same layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch.fx import Node

from passes.ir.layout import Layout
from passes.search.choices import Choice

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Busy = tuple[float, float, float]  # seconds of computation, of the link inside a node, and of the one across


@dataclass(frozen=True)
class Move:
    """Seconds of a reshard: on the links, and of local steps on the device."""

    inside: float = 0.0
    across: float = 0.0
    local: float = 0.0

    @property
    def total(self) -> float:
        return self.inside + self.across + self.local


@dataclass(frozen=True)
class Use:
    """The operand `slot` of a variable's choices."""

    variable: int
    slot: int


@dataclass(frozen=True, eq=False)
class Variable:
    """One decision. Costs are of all nodes that it stands for, one entry per choice."""

    name: str
    nodes: tuple[Node, ...]
    choices: tuple[Choice, ...]
    segment: int
    seconds: Floats
    state: Floats  # bytes that stay: parameters, gradients, optimizer state
    held: Floats  # bytes of operands and results of one node while it runs


@dataclass(frozen=True, eq=False)
class Value:
    """What a variable makes, and the users in one direction of the step."""

    name: str
    node: Node
    maker: Use  # `slot` is the result's
    uses: tuple[Use, ...]
    shape: tuple[int, ...]
    itemsize: int
    count: int  # how many of them there are in the whole model
    segment: int
    hides: bool = False  # a parameter's gather or a gradient's reduction: beside compute
    is_parameter: bool = False
    again: int = -1  # for a parameter used in the backward: the value of the same in the forward
    saved: bool = False  # kept from the forward for the backward, as the backward uses it
    is_counted: bool = False  # `state` of the maker has it, unless it is a term
    backward: int = -1  # segment that could move it again instead of keeping what was moved
    is_term: bool = False  # a gradient in front of its cast to the dtype that it is reduced in: terms stay terms


@dataclass(frozen=True)
class Segment:
    """A part of the step within which communication can hide: a layer's forward or backward, and what is around."""

    name: str
    layers: int  # how many it stands for
    exposed: float  # the part of its hiding communication that has nothing to hide behind


@dataclass(frozen=True, eq=False)
class Problem:
    """`base` are bytes that no choice changes."""

    variables: tuple[Variable, ...]
    values: tuple[Value, ...]
    segments: tuple[Segment, ...]
    base: float = 0.0
    layouts: dict[Layout, int] = field(default_factory=dict)

    def made(self, value: Value) -> Ints:
        """Layout numbers that the maker's choices give the value."""
        choices = self.variables[value.maker.variable].choices
        return np.array([self._number(choice.results[value.maker.slot]) for choice in choices])

    def needed(self, use: Use) -> Ints:
        """Layout numbers that the user's choices need."""
        choices = self.variables[use.variable].choices
        return np.array([self._number(choice.needs[use.slot]) for choice in choices])

    def _number(self, layout: Layout) -> int:
        return self.layouts.setdefault(layout, len(self.layouts))

    def layout(self, number: int) -> Layout:
        if len(self._listed) != len(self.layouts):
            self._listed[:] = list(self.layouts)
        return self._listed[number]

    _listed: list[Layout] = field(default_factory=list)
