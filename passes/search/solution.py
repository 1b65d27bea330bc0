"""What a search found: layouts by name, so that they hold for a folded graph and for the whole one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch.fx import GraphModule, Node

from passes.ir.folded_layers import Repeats, expand_names
from passes.ir.graph import input_of, note_of, operands, outputs_of, placeholders, returned
from passes.ir.layout import Layout

T = TypeVar("T")


@dataclass(frozen=True)
class Placed:
    """Layouts of a node: needed of each operand, and of each result."""

    needs: tuple[Layout, ...]
    results: tuple[Layout, ...]


@dataclass(frozen=True)
class Solution:
    """A plan's layouts, and how good it is by the model of the search.

    `nodes` are by key (`keys_of`), `outputs` by the output's path; `kept` are keys of values that are a parameter,
    moved for the forward and kept for the backward rather than moved again; `again` those of other values that are moved
    again rather than kept. Seconds; bytes.
    """

    nodes: Mapping[str, Placed]
    outputs: Mapping[str, Layout]
    kept: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    objective: float = 0.0  # predicted step
    bound: float = 0.0  # no plan is better than this
    memory: float = 0.0  # predicted, per device
    seconds: float = field(default=0.0, compare=False)  # the search took
    variables: int = 0

    @property
    def gap(self) -> float:
        """How much better, as part of the objective, a plan could be at most."""
        return max(0.0, 1.0 - self.bound / self.objective) if self.objective else 0.0

    def expanded(self, repeats: Repeats) -> Solution:
        """The same for the graph that was folded."""
        kept, again = (tuple(_expanded(repeats, dict.fromkeys(keys))) for keys in (self.kept, self.again))
        return replace(self, nodes=_expanded(repeats, self.nodes), kept=kept, again=again)


def _expanded(repeats: Repeats, kept: Mapping[str, T]) -> dict[str, T]:
    """As `expand_names`, for keys too that are a parameter's name and a number."""
    found = expand_names(repeats, kept)
    numbered = [(key, *key.rpartition("#")[::2]) for key in kept if "#" in key]
    for removed, name in repeats.parameters.items():
        found |= {f"{removed}#{number}": kept[key] for key, owner, number in numbered if owner == name}
    return found


def keys_of(gm: GraphModule) -> dict[Node, str]:
    """Names of nodes that are the same in the folded graph and in the whole one.

    A node of the program has its own name; one that a pass added is told by the parameter or output next to it.
    """
    keys = {node: node.name for node in gm.graph.nodes}
    for node in placeholders(gm.graph):
        _walk(node, input_of(node).name, keys, down=True)
    for value, output in zip(returned(gm.graph), outputs_of(gm.graph), strict=True):
        if isinstance(value, Node):
            _walk(value, output.name, keys, down=False)
    return keys


def _walk(node: Node, name: str, keys: dict[Node, str], *, down: bool) -> None:
    """Name the chain of added nodes behind a placeholder, or in front of what is returned."""
    number = 0
    if down:
        for user in node.users:
            if user.op == "call_function" and note_of(user) and len(operands(user)) == 1:
                keys[user] = f"{name}#{number}"
                number += 1
        return
    while node.op == "call_function" and note_of(node) and len(operands(node)) == 1:
        keys[node] = f"{name}#-{number}"
        node, number = operands(node)[0], number + 1
