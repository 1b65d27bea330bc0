"""A writer that replaces calls of a graph by others with the same facts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from passes._torch import fake_mode_of
from passes.ir.fake_calls import fake_call, is_viewable
from passes.ir.graph import (
    add_call,
    copy_facts,
    has_layout,
    layouts_of,
    made_for,
    note_of,
    set_layouts,
    set_made_for,
    set_note,
    set_value,
    tensor_of,
    value_of,
)

aten = torch.ops.aten


class Writer:
    """Adds calls before `before` that replace `facts` and take over its facts."""

    def __init__(self, node: Node) -> None:
        self.graph: Graph = node.graph
        self.fake_mode = fake_mode_of([value_of(node)])
        self.before, self.facts = node, node
        self.erased: set[Node] = set()

    def replace(self, old: Node, new: Node) -> None:
        self.read_instead(old, new)
        self.erase(old)

    def read_instead(self, old: Node, new: Node, but: Node | None = None) -> None:
        """Let all readers of `old`, `but` one, read `new` in the shape of `old`."""
        result = self.view(new, list(tensor_of(old).shape))
        if has_layout(old):
            set_layouts(result, *layouts_of(old))
        old.replace_all_uses_with(result, delete_user_cb=lambda user: user is not but)

    def erase(self, node: Node) -> None:
        """Erase unused calls, from `node` backwards."""
        queue = [node]
        while queue:
            dead = queue.pop()
            if dead not in self.erased and not dead.users and dead.op == "call_function":
                self.erased.add(dead)
                queue += dead.all_input_nodes
                self.graph.erase_node(dead)

    def view(self, value: Node, shape: list[int]) -> Node:
        held = tensor_of(value)
        if -1 in shape:
            rest = held.numel() // -math.prod(shape)
            shape = [rest if size == -1 else size for size in shape]
        if list(held.shape) == shape:
            return value
        return self.call(aten.view.default, value if is_viewable(held, shape) else self.copied(value), shape)

    def contiguous(self, value: Node) -> Node:
        return value if tensor_of(value).is_contiguous() else self.copied(value)

    def copied(self, value: Node) -> Node:
        return self.call(aten.clone.default, value, memory_format=torch.contiguous_format)

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.before):
            new = add_call(self.graph, op, args, kwargs)
        set_value(new, fake_call(self.fake_mode, op, args, kwargs))
        copy_facts(self.facts, new)
        set_note(new, note_of(self.facts))
        set_made_for(new, made_for(self.facts))
        return new
