"""Choose the inputs whose batch is padded."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from passes.ir.graph import InputRole, placeholders, tensor_of
from passes.ir.padding import Digit, Padded, Padding, is_gain, padded_size


def padded_inputs(gm: GraphModule, parts: int) -> tuple[Padded, ...]:
    """Return the inputs with the dim 0 of the first input that has dims, if `parts` does not divide it."""
    inputs = [node for node in placeholders(gm.graph, InputRole.INPUT) if tensor_of(node).dim() > 0]
    batch = tensor_of(inputs[0]).shape[0] if inputs else 0
    if not is_gain(batch, parts):
        return ()
    padding = Padding(0, Digit(1, batch, 1), padded_size(batch, parts))
    users = ((node, _first_user(node)) for node in inputs if tensor_of(node).shape[0] == batch)
    return tuple(Padded(node, padding, user) for node, user in users if user is not None)


def _first_user(node: Node) -> Node | None:
    return next((user for user in node.users if user.op != "output"), None)
