"""No collective is anonymous: what holds of those of every plan that a test makes; `tests/conftest.py` asks."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule

from autoshard.plans.collectives import Collective
from passes.ir.collectives import is_step
from passes.ir.graph import origin_of

MOVED = ("parameter ", "gradient ", "input ", "output ", "tangent ", "buffer ", "%")


def check_named(collectives: Sequence[Collective], gm: GraphModule) -> None:
    """Fail unless every collective of `gm` says where it comes from, which pass made it, why, and what it moves.

    It is in a module, or of a line with calls that are in none.
    """
    calls = [origin_of(node) for node in gm.graph.nodes if node.op == "call_function" and not is_step(node)]
    outside = {(origin.file, origin.line) for origin in calls if not origin.fqn}
    for one in collectives:
        name, _, reason = one.reason.partition(": ")
        assert name.isidentifier() and reason, one
        is_returned = ": output needs " in one.reason and one.what.startswith(("parameter ", "buffer "))  # no line made it
        has_line = one.origin.file and one.origin.line and one.origin.source
        assert is_returned or has_line, one
        assert is_returned or one.origin.fqn or (one.origin.file, one.origin.line) in outside, one
        assert one.what.startswith(MOVED), one
