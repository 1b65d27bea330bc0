"""Choose the row of a rule that a call runs by on one axis."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from passes.ir.graph import operands, results_of, tensor_of
from passes.ir.layout import Partial, Placement, R, Shard
from passes.propagation.axis import Axis
from passes.propagation.partial_sums import is_aside, is_zero, wish
from passes.rules.rule import Row, Space, linear_row, replicated_row, row_giving, row_sharding, rule_of
from passes.rules.unknown import why_whole

BY_BYTES = "the fewest bytes move"
AS_PARAMETER = "a gradient is sharded as its parameter"


@dataclass(frozen=True)
class Call:
    """A call with the placements of its operands."""

    node: Node
    inputs: tuple[Node, ...]
    have: tuple[Placement, ...]


def choose(axis: Axis, call: Call, wanted: Placement | None) -> tuple[Row, str]:
    """Return a row and the reason for it; `wanted` is the sharding that a parameter gives its gradient."""
    replicated = replicated_row(len(call.inputs), len(results_of(call.node)))
    space = axis.placed.space_of(call.node)
    if space is None:
        _remark_unknown(axis, call)
        return replicated, "no rule shards it"
    rows = _rows(axis, call, space, wanted)
    if wanted is not None and (row := next((r for r in rows if r.results[0] == wanted), None)) is not None:
        _remark_moves(axis, call, row, AS_PARAMETER)
        return row, AS_PARAMETER
    if (row := next((r for r in rows if r.operands == call.have), None)) is not None:
        return row, "follows its operands"
    if (row := next((r for r in rows if _is_free(call, r)), None)) is not None:
        return row, "follows an operand; whole ones take their part"
    return _least_moved(axis, call, (*rows, replicated))


def _least_moved(axis: Axis, call: Call, rows: tuple[Row, ...]) -> tuple[Row, str]:
    """Resolve a conflict: a sharded parameter stays where it is, then the fewest bytes move."""
    chosen = min(rows, key=lambda row: _moved(axis, call, row))
    moves_weight, _ = _moved(axis, call, chosen)
    has_weight = any(v in axis.weights and isinstance(p, Shard) for v, p in zip(call.inputs, call.have, strict=True))
    why = "a parameter stays" if has_weight and not moves_weight else BY_BYTES
    _remark_moves(axis, call, chosen, why)
    return chosen, why


def _rows(axis: Axis, call: Call, space: Space, wanted: Placement | None) -> list[Row]:
    """Return the rows that follow an operand, stay partial, or give what users or a parameter need, in this order."""
    placed = list(enumerate(call.have))
    found = [row_sharding(space, i, p, axis.size) for i, p in placed if isinstance(p, Shard)]
    found += _partial_rows(call, space)
    wishes = [(i, wish(axis, call.inputs[i])) for i, p in placed if isinstance(p, Partial)]
    found += [row_sharding(space, i, wished, axis.size) for i, wished in wishes if wished is not None]
    if wanted is not None:
        found.append(row_giving(space, 0, wanted, axis.size))
    rows = dict.fromkeys(row for row in found if row is not None)
    return [row for row in rows if axis.placed.allows(call.node, row)]


def _partial_rows(call: Call, space: Space) -> list[Row | None]:
    """Return rows that keep a value partial, if all other operands are numbers, indices or zero."""
    inputs, have = call.inputs, call.have
    found: list[Row | None] = []
    for linear in space.linear:
        first = next((have[i] for i in linear.operands if isinstance(have[i], Partial)), None)
        others = [i for i in range(len(have)) if i not in linear.operands]
        if not isinstance(first, Partial) or first.op not in linear.ops:
            continue
        joint = all(have[i] == first or is_zero(inputs[i]) for i in linear.operands)
        if joint and all(have[i] == R and is_aside(inputs[i]) for i in others):
            found.append(linear_row(space, linear, first.op))
    return found


def _is_free(call: Call, row: Row) -> bool:
    """Return whether a rank holds everything that `row` needs."""
    for value, placement, need in zip(call.inputs, call.have, row.operands, strict=True):
        if placement != need and not (placement == R and (isinstance(need, Shard) or is_zero(value))):
            return False
    return True


def _moved(axis: Axis, call: Call, row: Row) -> tuple[bool, int]:
    """Return whether a sharded parameter moves, and the number of moved bytes."""
    moves_weight, nbytes = False, 0
    for value, placement, need in zip(call.inputs, call.have, row.operands, strict=True):
        if placement in (need, R):
            continue
        tensor = tensor_of(value)
        whole = 2 if isinstance(placement, Partial) and need == R else 1  # an all-reduce is a reduce-scatter and a gather
        nbytes += tensor.numel() * tensor.element_size() * whole
        moves_weight |= value in axis.weights and isinstance(placement, Shard)
    return moves_weight, nbytes


def _remark_moves(axis: Axis, call: Call, row: Row, why: str) -> None:
    if any(not isinstance(p, Partial) and p not in (n, R) for p, n in zip(call.have, row.operands, strict=True)):
        text = f"{why}: operands {_join(call.have)} become {_join(row.operands)}, giving {_join(row.results)}"
        axis.remark(call.node, text, routine=why != BY_BYTES)


def _remark_unknown(axis: Axis, call: Call) -> None:
    what = why_whole(call.node, unknown_ops=axis.ctx.unknown_ops)
    moved = any(p != R for p in call.have)
    if moved or rule_of(call.node.target) is None:
        size = sum(tensor_of(v).numel() * tensor_of(v).element_size() for v in operands(call.node))
        cost = f"{size} bytes of operands are gathered" if moved else "its operands are whole already"
        axis.ctx.remark(axis.owner, call.node, f"{what}: runs replicated on {axis.name}; {cost}")


def _join(placements: tuple[Placement, ...]) -> str:
    return ", ".join(map(str, placements))
