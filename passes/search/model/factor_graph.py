"""The factor graph that a search labels: variables with strategies, values between them, segments of the step.

A variable stands for an op (or a parameter with its gradient, or the inputs with the outputs that follow them) in every
layer that is tied to it; it takes one of its strategies. A value goes from the variable that makes it to those that use
it, with a pairwise factor per user. If layouts differ there is a transition, one for all users that need the same
layout. A segment is a part of the step within which compute can hide communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch.fx import Node

from passes.ir.layout import Layout, Shard
from passes.search.model.strategies import Strategy

# Kernels as messages inside a node slow them down, and as those between nodes do; these links; each of them without the time in
# which one layer's kernels run and no gradient is there, or nothing is left to gather; the critical path:
RESOURCES = BESIDE_INSIDE, BESIDE_ACROSS, INSIDE, ACROSS, LATE_INSIDE, LATE_ACROSS, PATH = range(7)
LINKS = INSIDE, ACROSS
# When the forward ends, all that it saves is there, when the backward ends, all gradients; in between, some of both:
MOMENTS = FORWARD_END, BACKWARD_END = range(2)
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Port:
    """An operand, or a result, of a variable: its position (`slot`) in the strategies.

    An operand may be the value with its dims permuted: in the `order` of these of the value's; None: as they are.
    """

    variable: int
    slot: int
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class Variable:
    """A decision of the search. Costs are of all nodes that it stands for, one entry per strategy."""

    name: str
    nodes: tuple[Node, ...]
    strategies: tuple[Strategy, ...]
    segment: int
    loads: Floats  # [resource, strategy] in seconds, on its segment
    state: Floats  # [moment, strategy] bytes that are there: parameters, gradients, optimizer state, inputs, saved results
    working: Floats  # bytes of operands and results of one node while it runs

    @property
    def seconds(self) -> Floats:
        """Return the seconds of kernels, per strategy."""
        found: Floats = self.loads[BESIDE_INSIDE]
        return found


@dataclass(frozen=True, eq=False)
class Value:
    """A result of a variable, and its users in one direction of the step."""

    name: str
    node: Node
    maker: Port
    users: tuple[Port, ...]
    shape: tuple[int, ...]
    itemsize: int
    count: int  # how many of them there are in the whole model
    segment: int
    hides: bool = False  # its transition is a parameter's gather or a gradient's reduction, which runs beside compute
    first: float = 0.0  # if it hides: the part of them that is of the layer with which the segment begins
    last: float = 0.0  # and of that with which it ends
    is_parameter: bool = False
    gathered_in_forward: int = -1  # of a parameter used in the backward: the number of the same in the forward
    cast_from: int = 0  # bytes per element of the parameter that the backward casts again before it gathers this value
    is_saved: bool = False  # kept from the forward for the backward, in the layout that the backward needs
    is_counted: bool = False  # `state` of the maker has its bytes already, unless it is partial
    repeat_segment: int = -1  # the segment of the backward that can repeat its transition instead of keeping the result
    stays_partial: bool = False  # it may not be reduced: a gradient before its cast to the dtype that it is reduced in
    is_of_kernel: bool = False  # made by a kernel of its own, with which no copy is fused
    is_for_kernels: bool = False  # read by one
    read_again: int = 0  # bytes of the whole tensors that the rest of its kernel reads again if a message splits the kernel
    products: tuple[int, ...] = ()  # variables of matrix products that read its rows: its gather can be sent in chunks
    terms: tuple[int, ...] = ()  # variables of matrix products that it is the sum of: its reduction can be sent in chunks


@dataclass(frozen=True)
class Segment:
    """A part of the step within which compute can hide communication: a layer's forward or backward, or what is
    around."""

    name: str
    layers: int  # how many it stands for
    exposed: float  # the part of its hiding communication that has no compute to hide beside
    exposed_between: float = 1.0  # the part of its other communication, which some kernels wait for
    is_backward: bool = False

    def loads_of_calls(self, seconds: Floats, outer: Floats, awaited: Floats) -> Floats:
        """Return the load [resource, strategy] of calls that take `seconds` [of kernels, of each link, strategy], of which those
        of kernels on the critical path are `awaited`. Those of a backward's first layer, or a forward's last, are `outer`.

        A link sends no gradient before the first is there, and nothing while the last layer uses what was gathered last, but for
        what that layer's calls send.
        """
        kernels, sent = seconds[0], seconds[1:]
        late = outer[0] + sent - outer[1:] if self.exposed else sent
        return np.stack([kernels, kernels, *sent, *late, awaited])


@dataclass(frozen=True)
class Together:
    """The messages of a segment that are joined, of one kind: of each of its `layers`, `times` the bytes of one. The part
    `exposed` of those of this value has no compute to hide beside, and no less than one message (None: all have). Gradients are
    made within `seconds`.
    """

    kind: Literal["gather", "reduction"]
    times: float
    layers: int
    exposed: float | None
    seconds: float

    def waiting(self, joined: float) -> float:
        """Return the part of this value's messages that kernels wait for, if those of so many layers are `joined`."""
        if self.exposed is None:
            return 0.0
        return self.exposed * min(1.0, joined) + max(0.0, joined - 1.0) / self.layers


@dataclass(frozen=True, eq=False)
class FactorGraph:
    """Variables, values and segments; layouts are numbered as they are met."""

    variables: tuple[Variable, ...]
    values: tuple[Value, ...]
    segments: tuple[Segment, ...]
    layouts: dict[Layout, int] = field(default_factory=dict)
    _listed: list[Layout] = field(default_factory=list)

    def made(self, value: Value) -> Ints:
        """Return, per strategy of the maker, the number of the layout that it gives the value."""
        strategies = self.variables[value.maker.variable].strategies
        return np.array([self._number(strategy.results[value.maker.slot]) for strategy in strategies])

    def needed(self, user: Port) -> Ints:
        """Return, per strategy of the user, the number of the layout that it needs of the value."""
        strategies = self.variables[user.variable].strategies
        needs = [strategy.needs[user.slot] for strategy in strategies]
        return np.array([self._number(need if user.order is None else _permuted(need, user.order)) for need in needs])

    def layout(self, number: int) -> Layout:
        """Return the layout of a number."""
        if len(self._listed) != len(self.layouts):
            self._listed[:] = list(self.layouts)
        return self._listed[number]

    def together(self, value: Value) -> Together | None:
        """Return what the message of a parameter or a gradient is joined with; None for any other value."""
        if not value.hides:
            return None
        segment = self.segments[value.segment]
        joined = self._joined.get((value.segment, value.is_parameter), 0.0)
        kind: Literal["gather", "reduction"] = "gather" if value.is_parameter else "reduction"
        seconds = 0.0 if value.is_parameter else self._kernel_seconds[value.segment]
        exposed = (value.first if value.is_parameter else value.last) if segment.exposed else None
        return Together(kind, joined / max(1, math.prod(value.shape)), segment.layers, exposed, seconds)

    @cached_property
    def _kernel_seconds(self) -> dict[int, float]:
        """Return the least seconds of the kernels of each segment."""
        found = dict.fromkeys(range(len(self.segments)), 0.0)
        for variable in self.variables:
            found[variable.segment] += float(variable.seconds.min())
        return found

    @cached_property
    def _joined(self) -> dict[tuple[int, bool], float]:
        """Return the elements that one layer of a segment gathers, or reduces; of a value and its cast, one is sent."""
        makers = {value.maker.variable for value in self.values if value.is_parameter}
        found: dict[tuple[int, bool], float] = {}
        for value in self.values:
            is_made_of = any(user.variable in makers for user in value.users)
            if value.hides and is_made_of != value.is_parameter:
                key = value.segment, value.is_parameter
                elements = math.prod(value.shape) * value.count / self.segments[value.segment].layers
                found[key] = found.get(key, 0.0) + elements
        return found

    def _number(self, layout: Layout) -> int:
        return self.layouts.setdefault(layout, len(self.layouts))


def _permuted(layout: Layout, order: Sequence[int]) -> Layout:
    """Return the layout of a value whose dims, in this order, have `layout`."""
    return Layout(tuple(replace(p, dim=order[p.dim]) if isinstance(p, Shard) else p for p in layout.placements))
