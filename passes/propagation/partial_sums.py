"""Decide where a partial sum is reduced, and to which sharding."""

from __future__ import annotations

from torch.fx import Node

from passes._torch import OpOverload
from passes.cost.kernel_time import kernel_flops
from passes.ir.call import call_of
from passes.ir.graph import is_reshard, is_tensor, operands, results_of, tensor_of
from passes.ir.layout import Partial, Placement, R, Shard
from passes.ir.reached_values import all_followed
from passes.propagation.axis import Axis
from passes.rules.rule import row_giving, row_sharding

LOOKAHEAD = 8  # ops to look ahead for a sharding of a partial value: from a row-parallel linear past a residual and a norm


def reduction(axis: Axis, node: Node) -> Placement | None:
    """Return the placement to which a partial value is reduced before its users.

    None if each user reduces it or keeps it partial.
    """
    if not is_tensor(node) or axis.of(node) != Partial("sum") or tensor_of(node).numel() == 1:
        return None
    users = [user for user in node.users if not is_reshard(user)]
    if len(users) < 2 or len(users) < len(node.users) or all(_passes_on(axis, user, node) for user in users):
        return None
    wished = wish(axis, node)
    return wished if wished is not None and axis.fits(node, wished) else R


def _passes_on(axis: Axis, user: Node, value: Node) -> bool:
    """Return whether `user`, and all that reads its result, keep a partial operand partial, as far as operands show."""

    def following(read: tuple[Node, Node]) -> list[tuple[Node, Node]] | None:
        user, value = read
        if user.op == "output":
            return []
        return [(reader, user) for reader in user.users] if _keeps_partial(axis, user, value) else None

    return all_followed((user, value), following)


def _keeps_partial(axis: Axis, user: Node, value: Node) -> bool:
    """Return whether the result of `user` is partial if its operand `value` is."""
    space, inputs = axis.placed.space_of(user), operands(user)
    for linear in () if space is None else space.linear:
        if not all(i in linear.operands for i, v in enumerate(inputs) if v is value):
            continue
        joint = all(_may_be_partial(axis, inputs[i]) for i in linear.operands)
        if joint and all(is_aside(v) for i, v in enumerate(inputs) if i not in linear.operands):
            return True
    return False


def _may_be_partial(axis: Axis, value: Node) -> bool:
    return value not in axis.at or axis.of(value) == Partial("sum") or is_zero(value)


def wish(axis: Axis, value: Node, depth: int = LOOKAHEAD) -> Placement | None:
    """Return the placement of `value` that fits the other operands of its users, None if none is known."""
    for user in value.users:
        if user.op == "output" or depth == 0:
            continue
        found = _wish_of(axis, user, value, depth)
        if found is not None:
            return found
    return _shared_work(axis, value) if depth == LOOKAHEAD else None


def _shared_work(axis: Axis, value: Node) -> Placement | None:
    """Return the sharding of dim 0 with which ranks share the products of `value` with whole matrices; None if there are
    no such products."""
    for user in value.users:
        if not isinstance(user.target, OpOverload) or not kernel_flops(call_of(user)):
            continue
        space, position = axis.placed.space_of(user), operands(user).index(value)
        if space is not None and row_sharding(space, position, Shard(0), axis.size) is not None:
            return Shard(0)
    return None


def _wish_of(axis: Axis, user: Node, value: Node, depth: int) -> Placement | None:
    if is_reshard(user):
        pinned = axis.pinned(user)
        return pinned if isinstance(pinned, Shard) else None
    space = axis.placed.space_of(user)
    if space is None:
        return None
    inputs = operands(user)
    position = inputs.index(value)
    for i, other in enumerate(inputs):
        held = axis.at.get(other, (R,))[0]
        if other is not value and isinstance(held, Shard):
            row = row_sharding(space, i, held, axis.size)
            if row is not None:
                return row.operands[position]
    if len(results_of(user)) != 1:
        return None
    later = wish(axis, user, depth - 1)
    row = row_giving(space, 0, later, axis.size) if later is not None else None
    return row.operands[position] if row is not None else None


def is_aside(value: Node) -> bool:
    """Return whether a value is a number or an index, which a sum may pass without growing."""
    tensor = tensor_of(value)
    return tensor.numel() == 1 or not tensor.is_floating_point()


def is_zero(value: Node) -> bool:
    """Return whether the value is zero everywhere, and so equals its own partial sum."""
    return str(value.target) == "aten.full.default" and bool(value.args[1] == 0)
