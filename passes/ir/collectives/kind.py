"""The table of collectives and local steps: one entry holds all that the library knows of a kind.

A reshard is lowered to steps, each a call of `Kind.step` in a COLLECTIVE graph, whose layouts say what moves.
`Kind.lower` turns it into functional collectives in a LOCAL graph. To add a kind, `register` one entry; text, parser,
router, cost, verification, simulated ranks and reports read the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch
from torch.fx import Node

from passes._torch import OpOverload
from passes.ir.collectives.formulas import Where, least, ring_formula, switch_formula, tree_formula
from passes.ir.collectives.lowering import StepCall
from passes.ir.layout import Layout, Placement, R, Shard
from passes.ir.mesh import Mesh

Step = Callable[..., torch.Tensor]
Simulated = Callable[[Sequence[Sequence[Any]]], Sequence[Any]]


def _always(layout: Layout, after: Layout, axis: int, shape: tuple[int, ...], mesh: Mesh) -> bool:
    return True


def _nothing(where: Where) -> tuple[sympy.Expr, sympy.Expr]:
    return sympy.Integer(0), sympy.Integer(0)


@dataclass(frozen=True)
class Fabric:
    """The features of a machine that decide by which formula a collective is timed."""

    where: Where = "inside"
    switch: bool = False  # the switch of a node adds
    scatter_sends_all: bool = False  # as gloo, whose reduce-scatter is an all-reduce, and which has rings alone


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of collective or local step.

    Sizes that `received` and `pieces` are given are those of a rank's part before and after it, and the ranks of the
    group; both take numbers and sympy expressions.
    """

    step: Step  # its call in a COLLECTIVE graph: step(value, axes); named as the kind
    moves: Callable[[Placement, Placement], bool]  # whether it takes an axis from one placement to another
    lower: Callable[[StepCall], Node]  # its calls in a LOCAL graph
    ops: Mapping[OpOverload, Simulated] = field(default_factory=dict)
    """Functional collectives that it becomes. From the arguments of the call on each rank of a group, the results.

    Complex numbers come as pairs of real ones, in a last dim of the operand and of the result.
    """
    received: Callable[[Any, Any, Any], Any] | None = None  # units that a rank receives, in parts of equal size; None: none
    pieces: Callable[[int, int, int], int] | None = None  # the same as it is sent, padding included: routes compare it
    seconds: Callable[[Fabric], sympy.Expr] | None = None  # in `formulas.SYMBOLS`
    sent: Callable[[Where], tuple[sympy.Expr, sympy.Expr]] = _nothing  # bytes of a rank in its node, and between nodes
    is_reshard: bool = True  # keeps the value: a way from one layout to another may take it
    bucket: Literal["gather", "reduction"] | None = None
    """Join neighbours into one message: results of all ranks side by side ("gather"), or terms of the results, a row per
    rank that gets them ("reduction"). None: each is sent by itself.
    """
    sweeps: Callable[[Fabric], int] | None = None  # times that its bytes go around a ring; None: it uses no ring
    timed: Callable[[torch.Tensor, torch.Tensor, int, str], torch.Tensor] | None = None
    """Functional collective that calibration times: of a rank's part, the whole, the ranks and the group."""
    takes_one_axis: bool = False  # several axes cannot move in one message
    fits: Callable[[Layout, Layout, int, tuple[int, ...], Mesh], bool] = _always  # beyond that both layouts are legal
    counts_ranks: bool = False  # the argument before the group is how many ranks it has
    in_place: bool = False  # the result may stand in the operand's memory
    source: str = ""  # of the formulas

    @property
    def name(self) -> str:
        return self.step.__name__

    @property
    def communicates(self) -> bool:
        return self.received is not None

    @property
    def gathers(self) -> bool:
        """Return whether the result is made of the operands of all ranks, unchanged."""
        return self.moves(Shard(0), R)


KINDS: dict[str, Kind] = {}  # by name, in the order of registration
_BY_STEP: dict[object, Kind] = {}
_BY_OP: dict[object, Kind] = {}


def quickest(fabric: Fabric, *, sweeps: int) -> sympy.Expr:
    """Return the seconds of the quickest algorithm: a ring of so many sweeps, a tree, or the switch. Gloo has rings alone."""
    ring = ring_formula(fabric.where, sweeps=sweeps)
    if fabric.scatter_sends_all:
        return ring
    return least(ring, tree_formula(fabric.where), *([switch_formula(fabric.where)] if fabric.switch else []))


def register(kind: Kind) -> Kind:
    """Add `kind` to the table, before anything is planned. Raises ValueError if its name or one of its ops is taken."""
    if kind.name in KINDS or any(op in _BY_OP for op in kind.ops):
        ops = ", ".join(map(str, kind.ops))
        raise ValueError(f"there is a collective {kind.name!r} already, or one that becomes {ops}")
    KINDS[kind.name] = _BY_STEP[kind.step] = kind
    _BY_OP.update(dict.fromkeys(kind.ops, kind))
    return kind


def unregister(kind: Kind) -> None:
    """Remove `kind` from the table."""
    del KINDS[kind.name], _BY_STEP[kind.step]
    for op in kind.ops:
        del _BY_OP[op]


def kind_of_step(node: Node) -> Kind | None:
    """Return the kind of a step of a COLLECTIVE graph; None for any other node."""
    return _BY_STEP.get(node.target) if node.op == "call_function" else None


def kind_of_op(target: object) -> Kind | None:
    """Return the kind that becomes this functional collective; None for any other op."""
    return _BY_OP.get(target)


def kind_between(have: Placement, to: Placement) -> Kind | None:
    """Return the kind that takes an axis of a value from one placement to another, None if there is none."""
    if have == to:
        return None
    return next((kind for kind in KINDS.values() if kind.is_reshard and kind.moves(have, to)), None)


def is_step(node: Node) -> bool:
    """Return whether the node is one step of a lowered reshard."""
    return kind_of_step(node) is not None


def is_collective(node: Node) -> bool:
    """Return whether the node is a step that sends data."""
    kind = kind_of_step(node)
    return kind is not None and kind.communicates


def step_axes(node: Node) -> tuple[str, ...]:
    """Return the axes that a step moves."""
    axes = node.args[1]
    assert isinstance(axes, tuple | list)
    return tuple(str(axis) for axis in axes)


def step_kind(node: Node) -> Kind:
    """Return the kind of a step."""
    kind = kind_of_step(node)
    assert kind is not None, node
    return kind
