"""Find the linears of a model: products of an activation and a weight, and convolutions, linear in their channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from passes._torch import ALIGNED_CONVOLUTION
from passes.ir.graph import InputRole, is_tensor, operands, placeholders, results_of, tensor_of
from passes.rules.rule import Space, space_of

aten = torch.ops.aten

_PRODUCTS = (
    "aten.mm.default",
    "aten.bmm.default",
    "aten.convolution.default",
    "autoshard.aligned_convolution.default",
    "transformers.grouped_mm_fallback.default",  # by name: transformers need not be installed
)
# Ops whose result has the columns of their operand: what lies between a product and the slices that cut its result.
_MOVES = (
    aten.view.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.unsqueeze.default,
    aten.squeeze.dims,
    aten.clone.default,
    aten.flip.default,
    torch.ops.prims.rev.default,
)


@dataclass(frozen=True)
class Linear:
    """A product of an activation and a weight, with one factor of columns and one that is contracted."""

    node: Node
    space: Space
    activation: int  # position among the operands
    weight: int

    @property
    def columns(self) -> str:
        """Return the factor of the weight that appears in the result."""
        return self._columns[0]

    @property
    def column_count(self) -> int:
        return self.space.sizes[self.columns]

    @property
    def is_plain(self) -> bool:
        return len(self._columns) == 1 and len(self._contracted) == 1

    @property
    def _columns(self) -> tuple[str, ...]:
        kept, x = self._result, self._factors(self.activation)
        return tuple(f for f in self._channels if f in kept and f not in x)

    @property
    def _contracted(self) -> tuple[str, ...]:
        return tuple(f for f in self._channels if f not in self._result)

    @property
    def _channels(self) -> tuple[str, ...]:
        """Return the factors of the weight, but for the positions of a kernel, which are never sharded."""
        return tuple(f for f in self._factors(self.weight) if f not in self.space.blocked)

    @property
    def _result(self) -> tuple[str, ...]:
        return tuple(f for dims in self.space.results for dim in dims for f in dim)

    def _factors(self, operand: int) -> tuple[str, ...]:
        return tuple(f for dim in self.space.operands[operand] for f in dim)

    @property
    def column_dim(self) -> int:
        """Return the dim of the result that the columns are."""
        return next(dim for dim, factors in enumerate(self.space.results[0]) if self.columns in factors)

    @property
    def is_convolution(self) -> bool:
        return self.node.target in (aten.convolution.default, ALIGNED_CONVOLUTION)

    @property
    def x(self) -> Node:
        return operands(self.node)[self.activation]

    @property
    def w(self) -> Node:
        return operands(self.node)[self.weight]


def forward_nodes(gm: GraphModule) -> tuple[Node, ...]:
    """Return the calls that do not depend on a tangent, in order."""
    backward: set[Node] = set(placeholders(gm.graph, InputRole.TANGENT))
    forward = []
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if any(value in backward for value in node.all_input_nodes):
            backward.add(node)
        elif results_of(node):
            forward.append(node)
    return tuple(forward)


def find_linears(forward: tuple[Node, ...], weights: dict[Node, Node]) -> dict[Node, Linear]:
    """Return the linears among `forward`, by node; `weights` are the forms of parameters."""
    found = {}
    for node in forward:
        if str(node.target) not in _PRODUCTS or (node.target is aten.convolution.default and len(operands(node)) != 2):
            continue
        left, right = (value in weights for value in operands(node)[:2])
        space = space_of(node)
        if left == right or space is None:
            continue
        linear = Linear(node, space, activation=int(left), weight=int(right))
        if linear.is_plain:
            found[node] = linear
    return found


def digits_of(linear: Linear, size: int) -> tuple[int, ...]:
    """Return the digits to try on the columns: contiguous, then inside the parts that slices cut the result into."""
    columns = linear.column_count
    outers = (1, *_parts(linear.node, columns, linear.column_dim - tensor_of(linear.node).dim()))
    return tuple(o for o in dict.fromkeys(outers) if columns % (o * size) == 0)


def _parts(node: Node, columns: int, dim: int) -> tuple[int, ...]:
    """Return the numbers of equal parts that slices, or a view, cut `dim` (from the end) of `node`'s result into."""
    found: list[int] = []
    seen: set[Node] = set()
    queue = [node]
    while queue:
        value = queue.pop(0)
        for user in value.users:
            if user in seen or not is_tensor(user):
                continue
            seen.add(user)
            if _keeps_columns(user, node, columns, dim):
                queue.append(user)
            elif user.target is aten.slice.Tensor:
                found += _sliced(user, columns, dim)
            elif user.target is aten.view.default and dim == -1:
                found += _viewed(user, columns)
    return tuple(dict.fromkeys(found))


def _keeps_columns(user: Node, node: Node, columns: int, dim: int) -> bool:
    """Return whether `dim` of `user` still is the columns of `node`: a view, a sum, a scale, or an op of its shape."""
    shape = tensor_of(user).shape
    is_scale = user.target is aten.mul.Tensor and len(operands(user)) == 1
    is_moved = user.target in (*_MOVES, aten.add.Tensor) and len(shape) >= -dim and shape[dim] == columns
    return is_scale or is_moved or shape == tensor_of(node).shape


def _sliced(piece: Node, columns: int, dim: int) -> list[int]:
    length = tensor_of(piece).shape[dim]
    return [columns // length] if length and columns % length == 0 and length < columns else []


def _viewed(view: Node, columns: int) -> list[int]:
    found, inner = [], 1
    for size in reversed(tensor_of(view).shape):
        inner *= size
        if inner and columns % inner == 0 and inner < columns:
            found.append(columns // inner)
    return found
