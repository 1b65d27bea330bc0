"""The reason, or the error, for an op that runs on whole tensors because no rule says how to shard it."""

from __future__ import annotations

from typing import Literal

from torch.fx import Node

from passes.errors import UnknownOpError
from passes.ir.graph import is_random, origin_of
from passes.rules.rule import rule_of


def why_whole(node: Node, *, unknown_ops: Literal["replicate", "error"]) -> str:
    """Return why a call without an index space runs on whole tensors.

    Raises UnknownOpError for a call that draws random numbers, as every rank would draw its own, and for one without a
    rule if `unknown_ops` is `"error"`.
    """
    known = rule_of(node.target) is not None
    if is_random(node):
        raise UnknownOpError(
            f"{node.target} draws random numbers and has no sharding rule: each rank would draw its own. Draw with "
            f"torch.rand or torch.randn, or register a rule with autoshard.rule(op)(...){_place(node)}"
        )
    what = f"{node.target} has no sharding rule" if not known else f"{node.target} cannot be sharded as called here"
    if unknown_ops == "error" and not known:
        raise UnknownOpError(
            f"{what}; register one with autoshard.rule(op)(...), such as \"b d -> b d\", or allow it to run replicated "
            f"with Options(unknown_ops='replicate'){_place(node)}"
        )
    return what


def _place(node: Node) -> str:
    """Return the user's source line, the end of a message."""
    origin = origin_of(node)
    return f"\n  {origin.file}:{origin.line}: {origin.source.strip()}" if origin.file else ""
