"""Sharding rules: the index space of an op, and the rows that follow from it.

A rule says which factors index the operands and results of a call. Its rows follow from that; each row is a way to run
the op on ONE mesh axis without communication:

- sharding a factor shards every operand and result that has it; an operand without it is replicated,
  a result without it is partial (the factor is summed over);
- an op that is linear in some operands maps partial values to partial values.

A layout on several axes is one row per axis, so a rule does not grow with the mesh.
"""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from passes._torch import OpOverload
from passes.errors import UserError
from passes.ir.call import Call, call_of
from passes.ir.fake_calls import KNOWN, described
from passes.ir.layout import Layout, Partial, Placement, R, Shard
from passes.ir.mesh import Mesh

Dims = tuple[tuple[str, ...], ...]  # per dim, its factors, outermost first; () for a dim of size 1


@dataclass(frozen=True)
class Linear:
    """A group of operands in which the op is jointly linear (all others replicated): partial in, partial out.

    `ops` are the reductions that pass: `("sum",)` for a linear op, all of them for one that only moves elements. All
    results become partial. Without operands, the result itself may be partial, as zeros are.
    """

    operands: tuple[int, ...]
    ops: tuple[str, ...] = ("sum",)


@dataclass(frozen=True)
class Reach:
    """The elements of a neighbour's part that the local form of a call reads: each part must have as many.

    `sends` has an entry per message: the kind of collective, the operand that it is a part of, or as large as a part of, and
    how many elements of the sharded dim a rank gives.
    """

    elements: int
    sends: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Space:
    """The index space of a call: its factors, the dims that they index, and how each may be sharded."""

    sizes: Mapping[str, int]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    blocked: frozenset[str] = frozenset()  # factors that the op needs whole
    reductions: Mapping[str, str] = field(default_factory=dict)  # factor -> op, where it is not "sum"
    linear: tuple[Linear, ...] = ()
    partial_operands: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # ^ factor -> operands that must be partial when it is sharded (an accumulator that the op adds to)
    counted: frozenset[str] = frozenset()
    # ^ factors on which the op counts positions: they may be sharded, but not padded. A search leaves them whole, as it prices
    # the op and not the calls that a rank makes instead
    numbered: frozenset[str] = frozenset()
    # ^ factors whose positions are numbers that the call reads or gives, as an index is: padding may stand at their end only
    unpadded: frozenset[str] = frozenset()
    # ^ factors that may be sharded, but not padded, as where a negative number counts from the end
    replicated_results: frozenset[int] = frozenset()  # results that are equal on all ranks, whatever is sharded
    held: Mapping[str, int] = field(default_factory=dict)
    # ^ factor -> elements that one side of the call has of it, the rest being padding at the end of the parts
    reaches: Mapping[str, Reach] = field(default_factory=dict)
    # ^ factor -> what the local form reads of other parts: it may be sharded at its first digit alone, and not be padded. A
    # search leaves it whole, but on axes for sequences
    rings: Mapping[str, str] = field(default_factory=dict)
    # ^ factor that a call needs whole -> the factor with which it may be sharded all the same, at the same digit: the local
    # form passes the parts of its operands around the ranks. No row of `rows`, and nothing that a search tries
    masks: frozenset[int] = frozenset()  # operands in which minus infinity, or False, hides what is padded of the others
    rows: dict[tuple[str, Shard, int], Row | None] = field(default_factory=dict, init=False, compare=False, repr=False)
    # ^ the cache of `factor_row`, by factor, digit and size of the axis

    def can_pad(self, factor: str, outer: int) -> bool:
        """Return whether a digit of `factor`, with `outer` digits before it, may be padded."""
        if factor in self.blocked or factor in self.counted or factor in self.unpadded or factor in self.reaches:
            return False
        return outer == 1 or factor not in self.numbered


@dataclass(frozen=True)
class Row:
    """One way to run an op on one axis without communication."""

    label: str  # the factor sharded, "P(...)" for a linear row, "R"
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.operands))} -> {', '.join(map(str, self.results))}"


def replicated_row(operands: int, results: int) -> Row:
    """Return the row in which every rank computes everything."""
    return Row("R", (R,) * operands, (R,) * results)


def factor_row(space: Space, factor: str, outer: int, size: int, *, mirror: int = 0) -> Row | None:
    """Return the row that shards `factor` at digit `outer` over `size` ranks, None if the op has none.

    With `mirror`, the digit counts backwards in every second half, as that of a `Shard`.
    """
    key = factor, Shard(0, outer, mirror), size
    if key not in space.rows:
        space.rows[key] = _factor_row(space, *key)
    return space.rows[key]


def _factor_row(space: Space, factor: str, digit: Shard, size: int) -> Row | None:
    if factor in space.rings:
        return _ring_row(space, factor, digit, size)
    if not _splits(space, factor, digit, size):
        return None
    operands: list[Placement] = []
    accumulators = space.partial_operands.get(factor, ())
    for i, dims in enumerate(space.operands):
        at = _place(space, dims, factor, digit)
        operands.append(at if at is not None else Partial() if i in accumulators else R)
    results: list[Placement] = []
    for i, dims in enumerate(space.results):
        at = _place(space, dims, factor, digit)
        whole = R if i in space.replicated_results else Partial(space.reductions.get(factor, "sum"))
        results.append(at if at is not None else whole)
    return Row(factor, tuple(operands), tuple(results))


def _splits(space: Space, factor: str, digit: Shard, size: int) -> bool:
    if factor in space.blocked or space.sizes[factor] % (digit.outer * size):
        return False
    if factor in space.reaches and (digit.outer > 1 or space.sizes[factor] // size < space.reaches[factor].elements):
        return False
    return _is_padded_alike(space, factor, digit, size)


def _ring_row(space: Space, factor: str, digit: Shard, size: int) -> Row | None:
    """Return the row that shards a factor and the one that goes with it: nothing is partial."""
    other = space.rings[factor]
    if other in space.counted and digit.outer != (2 * digit.mirror or 1):  # pieces of one block, or chunks of its halves
        return None
    if space.sizes[factor] % (digit.outer * size) or not _splits(space, other, digit, size) or factor in space.held:
        return None
    placed = [
        tuple(_place(space, dims, other, digit) or _place(space, dims, factor, digit) or R for dims in side)
        for side in (space.operands, space.results)
    ]
    return Row(factor, *placed)


def _is_padded_alike(space: Space, factor: str, digit: Shard, size: int) -> bool:
    """Return whether parts of the elements that are held, with padding at their ends, are parts of the factor."""
    held = space.held.get(factor)
    return held is None or (digit.outer == 1 and -(-held // size) * size == space.sizes[factor])


def linear_row(space: Space, linear: Linear, op: str) -> Row:
    """Return the row that maps partial operands of one linear group to partial results."""
    operands = tuple(Partial(op) if i in linear.operands else R for i in range(len(space.operands)))
    return Row(f"P({op})", operands, (Partial(op),) * len(space.results))


def _place(space: Space, dims: Dims, factor: str, digit: Shard) -> Shard | None:
    for dim, factors in enumerate(dims):
        if factor in factors:
            before = math.prod(space.sizes[f] for f in factors[: factors.index(factor)])
            return Shard(dim, before * digit.outer, digit.mirror)
    return None


def factor_at(space: Space, dims: Dims, placement: Shard, size: int) -> tuple[str, int] | None:
    """Return the factor, and the digit in it, that `placement` shards on an axis of `size`.

    Returns None if the digit spans two factors, or the halves of a mirrored one are in another factor.
    """
    if placement.dim >= len(dims):
        return None
    before = 1
    for factor in dims[placement.dim]:
        length = space.sizes[factor]
        if placement.outer % before == 0 and (before * length) % (placement.outer * size) == 0:
            digit = placement.outer // before
            return None if placement.mirror and digit % (2 * placement.mirror) else (factor, digit)
        before *= length
    return None


def rows(space: Space, size: int) -> tuple[Row, ...]:
    """Return all rows with a contiguous digit of each factor, on an axis of `size`."""
    found = [replicated_row(len(space.operands), len(space.results))]
    for factor in space.sizes:
        row = None if factor in space.rings else factor_row(space, factor, 1, size)
        if row is not None and row not in found:
            found.append(row)
    for linear in space.linear:
        found += [row for op in linear.ops if (row := linear_row(space, linear, op)) not in found]
    return tuple(found)


def row_sharding(space: Space, operand: int, placement: Placement, size: int) -> Row | None:
    """Return the row in which `operand` has `placement`."""
    if isinstance(placement, Shard):
        at = factor_at(space, space.operands[operand], placement, size)
        return factor_row(space, *at, size, mirror=placement.mirror) if at is not None else None
    if isinstance(placement, Partial):
        for linear in space.linear:
            if operand in linear.operands and placement.op in linear.ops:
                return linear_row(space, linear, placement.op)
    return None


def row_giving(space: Space, result: int, placement: Placement, size: int) -> Row | None:
    """Return the row in which `result` has the sharding `placement`, or, for a call without operands, is partial."""
    if isinstance(placement, Partial):
        free = (linear for linear in space.linear if not linear.operands and placement.op in linear.ops)
        return next((linear_row(space, linear, placement.op) for linear in free), None)
    if not isinstance(placement, Shard):
        return None
    at = factor_at(space, space.results[result], placement, size)
    return factor_row(space, *at, size, mirror=placement.mirror) if at is not None else None


@dataclass(frozen=True)
class Message:
    """A value that a local form sends, in words, and why it does: the plan shows both."""

    what: str
    why: str


class LocalCall(abc.ABC):
    """The interface of local forms: a call that is to be made on per-device tensors.

    `args`, `kwargs` and `operands` hold per-device nodes. `emit` adds an op before the node that is replaced; a local
    form returns the node that gives the result (or the tuple of results), a node for each
    result, or None to keep the call.
    """

    call: Call  # global shapes
    mesh: Mesh
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Node, ...]

    @abc.abstractmethod
    def emit(self, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        """Add a call on per-device values."""

    @abc.abstractmethod
    def emit_copy(self, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        """Add a call that only moves elements: the backward makes it again, rather than that its result is kept for it."""

    @abc.abstractmethod
    def send(self, op: OpOverload, *args: Any, axes: tuple[int, ...], message: Message) -> Node:
        """Add a functional collective over the group of `axes`, which is its last argument; it is to be awaited."""

    @abc.abstractmethod
    def item(self, results: Node, number: int) -> Node:
        """Take one of the results of a call that gives several."""

    @abc.abstractmethod
    def local_shape(self, result: int = 0) -> tuple[int, ...]:
        """Return the per-device shape of a result."""

    @abc.abstractmethod
    def operand_layout(self, operand: int) -> Layout:
        """Return the layout of a tensor operand."""

    @abc.abstractmethod
    def result_layout(self, result: int = 0) -> Layout:
        """Return the layout of a result."""

    @abc.abstractmethod
    def positions(self, layout: Layout, dim: int, size: int) -> Node:
        """Return the global index of each per-device index of a dim of global `size`: i64[local size]."""

    @abc.abstractmethod
    def coordinate(self, axis: int) -> Node:
        """Return this rank's coordinate on an axis: i64[1]."""

    @abc.abstractmethod
    def seed(self) -> Node:
        """Return the step's seed: i64[], equal on all ranks."""

    @abc.abstractmethod
    def number(self) -> int:
        """Return the ordinal of the call among the graph's random ops, equal on all ranks."""


def remade(call: LocalCall, **changes: Any) -> Node:
    """Repeat the call on per-device operands, with some arguments (by name) changed."""
    positional = [p.name for p in call.call.op._schema.arguments if not p.kwarg_only][: len(call.args)]
    args = [changes.pop(name, value) for name, value in zip(positional, call.args, strict=True)]
    return call.emit(call.call.op, *args, **{**call.kwargs, **changes})


SpaceOf = Callable[[Call], Space | None]
LocalForm = Callable[[LocalCall], Node | tuple[Node, ...] | None]


@dataclass(frozen=True)
class Rule:
    """The index space of an op's calls, and the local form of a call.

    A `space` of None allows the replicated row only. Without `local`, the same op is called on per-device tensors. An op that
    is `whole` exists in graphs of global shapes alone: `local` replaces each call.
    `text` is the string that `rule` was called with, if it made this rule.
    """

    space: SpaceOf
    local: LocalForm | None = None
    text: str = ""
    whole: bool = False


_RULES: dict[OpOverload, Rule] = {}
_NAMED: dict[str, Rule] = {}  # ops that exist only after torch has imported the module that defines them
_TAGGED: dict[torch.Tag, Rule] = {}
_SPACES: dict[Any, Space | None] = {}  # the cache of `space_of`, by the form of a call


def register(*ops: OpOverload, space: SpaceOf, local: LocalForm | None = None, whole: bool = False) -> None:
    """Give `ops` a rule; a later registration replaces an earlier one."""
    for op in ops:
        _RULES[op] = Rule(space, local, whole=whole)


def register_named(*names: str, space: SpaceOf, local: LocalForm | None = None) -> None:
    """Give a rule to ops by name, such as `"prims.iota.default"`: they may be defined later."""
    for name in names:
        _NAMED[name] = Rule(space, local)


def register_tag(tag: torch.Tag, *, space: SpaceOf) -> None:
    """Give a rule to every functional op with `tag` that has none of its own, custom ops included."""
    _TAGGED[tag] = Rule(space)


def registered() -> tuple[OpOverload, ...]:
    """Return the ops with a rule of their own."""
    return tuple(_RULES)


def rule(
    *ops: OpOverload, local: LocalForm | None = None, linear: bool = True, replace: bool = False
) -> Callable[[str], None]:
    """Give `ops` a rule as a factor string: `rule(aten.mm.default)("m k, k n -> m n")`.

    Operands are separated by commas, dims by spaces. `(b s)` is a dim merged of two factors, `1` a dim of size 1, `s!`
    a factor that the op needs whole. A factor missing in a result is summed over. With `linear`, the op is linear in
    each operand separately, like an einsum. With `replace`, the rule replaces one that the op already has. Raises
    UserError if an argument is no op, if the number of tensors is not that of the op, or if the op has another rule.
    """
    for op in ops:
        if not isinstance(op, OpOverload):
            raise UserError(f"rule({op}): give an overload of an op, such as torch.ops.mylib.scale.default")

    def with_factors(text: str) -> None:
        space = _einsum(text, linear=linear)
        for op in ops:
            _check_counts(op, text)
            known = _RULES.get(op)
            if known is not None and not replace and known.text != text:
                raise UserError(
                    f"rule({op})({text!r}): the op has a rule{f' already: {known.text!r}' if known.text else ''}; write "
                    f"rule({op}, replace=True)({text!r}) to put this one in its place"
                )
        for op in ops:
            _RULES[op] = Rule(space, local, text)

    return with_factors


def _check_counts(op: OpOverload, text: str) -> None:
    """Raise UserError if a rule has another number of tensors than the op takes or returns."""
    for what, given, types in zip(
        (("takes", "before"), ("gives", "after")),
        map(_parse_dims, text.split("->", 1)),
        ([a.type for a in op._schema.arguments], [r.type for r in op._schema.returns]),
        strict=True,
    ):
        kinds = [str(one) for one in types if "Tensor" in str(one)]
        least = sum(kind == "Tensor" for kind in kinds)
        if any("List" in kind for kind in kinds) or least <= len(given) <= len(kinds):
            continue
        count = str(least) if least == len(kinds) else f"{least} to {len(kinds)}"
        (verb, side) = what
        raise UserError(
            f"rule({op})({text!r}): the op {verb} {count} tensor{'' if count == '1' else 's'}, the rule has {len(given)} {side} "
            "'->'; write the dims of each tensor, with a comma between tensors"
        )


def rule_of(op: object) -> Rule | None:
    """Return the rule of an op, None if it has none."""
    if not isinstance(op, OpOverload):
        return None
    if op not in _RULES and str(op) in _NAMED:
        _RULES[op] = _NAMED[str(op)]
    if op in _RULES or op._schema.is_mutable:
        return _RULES.get(op)
    return next((rule for tag, rule in _TAGGED.items() if tag in op.tags), None)


def space_of(node: Node) -> Space | None:
    """Return the index space of a call, cached for all calls of one form; None if no rule knows it."""
    rule = rule_of(node.target)
    if rule is None:
        return None
    form = rule, node.target, described(node.args), described(node.kwargs)
    if form not in _SPACES:
        if len(_SPACES) == KNOWN:
            _SPACES.clear()
        _SPACES[form] = rule.space(call_of(node))
    return _SPACES[form]


def _einsum(text: str, *, linear: bool) -> SpaceOf:
    left, arrow, right = text.partition("->")
    if not arrow:
        raise UserError(f"a rule reads 'm k, k n -> m n'; {text!r} has no '->'")
    blocked = frozenset(word[:-1] for word in re.findall(r"\w+!", text))
    operands, results = (_parse_dims(side) for side in (left, right))

    def space(call: Call) -> Space | None:
        tensors = call.operands
        if len(tensors) != len(operands):
            return None
        sizes: dict[str, int] = {}
        for tensor, dims in zip((*tensors, *call.results), (*operands, *results), strict=True):
            if tensor.ndim != len(dims):
                return None
            for length, factors in zip(tensor.shape, dims, strict=True):
                if len(factors) == 1:
                    sizes[factors[0]] = length
        groups = tuple(Linear((i,)) for i in range(len(tensors))) if linear else ()
        return Space(sizes, operands, results, blocked, linear=groups)

    return space


def _parse_dims(side: str) -> tuple[Dims, ...]:
    tensors: list[Dims] = []
    for part in side.split(","):
        dims: list[tuple[str, ...]] = []
        for merged, single in re.findall(r"\(([^)]*)\)|(\w+)!?", part):
            words = merged.replace("!", "").split() if merged else [single]
            dims.append(tuple(word for word in words if word != "1"))
        tensors.append(tuple(dims))
    return tuple(tensors)
