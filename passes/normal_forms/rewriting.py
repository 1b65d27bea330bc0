"""Replace a node by other calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from passes._torch import FakeTensorMode
from passes.ir.fake_calls import fake_call
from passes.ir.graph import add_call, copy_facts, set_value


@dataclass(frozen=True)
class At:
    """A node that is being replaced. New calls are added before it and take over its origin."""

    graph: Graph
    node: Node
    fake_mode: FakeTensorMode

    @property
    def operand(self) -> Node:
        """Return the first argument."""
        operand = self.node.args[0]
        assert isinstance(operand, Node)
        return operand

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.node):
            new = add_call(self.graph, op, args, kwargs)
        copy_facts(self.node, new)
        set_value(new, fake_call(self.fake_mode, op, args, kwargs))
        return new

    def at(self, node: Node) -> At:
        return At(self.graph, node, self.fake_mode)

    def replace(self, new: Node) -> bool:
        self.node.replace_all_uses_with(new)
        self.graph.erase_node(self.node)
        return True

    def arg(self, position: int, name: str, default: Any) -> Any:
        if len(self.node.args) > position:
            return self.node.args[position]
        return self.node.kwargs.get(name, default)


def as_int(value: Any) -> int:
    assert isinstance(value, int)
    return value


def is_returned(node: Node) -> bool:
    """Return whether the graph returns a value, which then must not share memory with another."""
    return any(user.op == "output" for user in node.users)
