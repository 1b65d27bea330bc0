"""Dynamo: branches that clamp a tensor only if some of its values are not finite.

    if not torch.isfinite(x).all():
        x = torch.clamp(x, min=-most, max=most)

A graph takes one path for all values. It may take this branch for all, as the clamp does not change finite values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Node

_READS = frozenset({"LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"})
_OTHERS = frozenset(
    {
        *("LOAD_FAST", "LOAD_CONST", "STORE_FAST", "BINARY_OP", "UNARY_NEGATIVE"),
        *("PUSH_NULL", "KW_NAMES", "PRECALL", "CALL", "CALL_KW", "CACHE", "NOP", "POP_TOP"),
    }
)
_NAMES = frozenset({"torch", "finfo", "dtype", "max", "min", "clamp", "clamp_", "nan_to_num", "nan_to_num_"})
_CLAMPS, _REPLACES = ("clamp", "clamp_"), ("nan_to_num", "nan_to_num_")
_LARGE = 0.98  # of the largest number of a dtype: the least bound of a clamp, as models clamp float16 to 65,504 - 1,000


def takes_branch(tx: Any, truth: Callable[[object], bool], jump: Any, condition: Node) -> bool:
    """Trace the branch that follows a jump, up to where the jump leads, if it only clamps a tensor that the condition finds not
    to be finite. Return whether it was traced so.

    `tx` is dynamo's translator. The code behind the jump runs if `truth(condition)` is false.
    """
    checked, end = _checked(condition, truth), tx.indexof[jump.target]
    branch = tx.instructions[tx.instruction_pointer : end]
    if checked is None or not branch or not all(map(_may_clamp, branch)):
        return False
    known, before = set(condition.graph.nodes), dict(tx.symbolic_locals)
    while tx.instruction_pointer != end:
        tx.step()
    made = list(takewhile(lambda node: node not in known, reversed(condition.graph.nodes)))
    assigned = {name: one for name, one in tx.symbolic_locals.items() if one is not before.get(name)}
    return (
        len(made) == 1
        and _keeps_finite_values(made[0], checked)
        and all(_node_of(one) in (None, made[0]) for one in assigned.values())
        and all((_node_of(before[name]), _node_of(assigned[name])) == (checked, made[0]) for name in assigned.keys() & before)
    )


def _checked(condition: Node, truth: Callable[[object], bool]) -> Node | None:
    """Return the tensor of which a branch runs if not all values are finite; None for other conditions."""
    whole, kinds = ("all", ("isfinite",)) if truth is operator.truth else ("any", ("isinf", "isnan"))
    found = condition.args[0] if condition.args and _name_of(condition) == whole else None
    return _operand(found) if isinstance(found, Node) and _name_of(found) in kinds else None


def _may_clamp(instruction: Any) -> bool:
    """Return whether an instruction may be part of a clamp; what the branch computes is looked at when it is traced."""
    if instruction.opname in _READS:
        return instruction.argval in _NAMES
    return instruction.opname in _OTHERS


def _keeps_finite_values(made: Node, checked: Node) -> bool:
    """Return whether a call returns the finite values of a tensor as they are."""
    name, example = _name_of(made), made.meta["example_value"]
    if made.all_input_nodes != [checked] or not example.is_floating_point():
        return False
    if name in _CLAMPS:
        given: dict[str, Any] = dict(zip(("input", "min", "max"), made.args, strict=False)) | made.kwargs
        least = _LARGE * torch.finfo(example.dtype).max
        low, high = given.get("min"), given.get("max")
        return (low is None or bool(low <= -least)) and (high is None or bool(high >= least))
    return name in _REPLACES


def _operand(node: Node) -> Node | None:
    found = node.args[0] if node.args else node.kwargs.get("input")
    return found if isinstance(found, Node) else None


def _name_of(node: Node) -> str:
    """Return the name of the function of torch, or of the tensor's method, that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _node_of(variable: Any) -> Node | None:
    """Return the node of a tensor of dynamo's; None for other values."""
    return variable.as_proxy().node if variable.is_tensor() else None
