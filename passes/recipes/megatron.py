"""Tensor and sequence parallelism on one axis, as Megatron-LM does it, found in the graph.

Shoeybi et al. 2019 (column- then row-parallel linears, vocabulary-parallel embedding and loss) and
Korthikanti et al. 2022 (what lies between is sharded on the sequence).

Linears are taken in program order. One whose input already carries a sharding of the contracted factor
is row-parallel; any other is column-parallel, and the sharding of its result is carried on through the
rules: activation functions, heads, attention, the loss. Where an op cannot carry it on, the linears it
came from try another digit (a fused projection is sharded inside each of its parts), and then stay whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from passes.ir.graph import (
    InputRole,
    input_of,
    is_reshard,
    is_tensor,
    item_of,
    operands,
    origin_of,
    placeholders,
    results_of,
    tensor_of,
)
from passes.ir.layout import Placement, R, Shard
from passes.ir.mesh import Mesh
from passes.recipes.weights import on_parameter, weights_of
from passes.rules.rule import Row, Space, factor_row, row_giving, row_sharding, space_of

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.bmm.default)
_SHAPES = (aten.view.default, aten.add.Tensor)  # lead from a product to the shape that model code sees


@dataclass
class TensorParallel:
    """What the recipe decides on its axis: parameters, pinned values, and what it says about them."""

    parameters: dict[str, tuple[Placement, str]] = field(default_factory=dict)  # FQN -> placement, reason
    pins: dict[Node, tuple[Placement, str]] = field(default_factory=dict)  # value -> placement, reason
    remarks: list[tuple[Node, str]] = field(default_factory=list)


def tensor_parallel(gm: GraphModule, mesh: Mesh, axis: int, data_digits: int) -> TensorParallel:
    """Decide `axis` for a normalized graph. `data_digits` is how many ways data axes split the batch."""
    search = _Search(gm, mesh.sizes[axis])
    while search.carry():
        pass
    return search.decide(data_digits)


@dataclass(frozen=True)
class _Linear:
    """A product of an activation and a weight; positions are operand indices."""

    node: Node
    space: Space
    activation: int
    weight: int

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(f for f in self._factors(self.weight) if f in _result_factors(self.space) and f not in self._x)

    @property
    def contracted(self) -> tuple[str, ...]:
        return tuple(f for f in self._factors(self.weight) if f not in _result_factors(self.space))

    @property
    def _x(self) -> tuple[str, ...]:
        return self._factors(self.activation)

    def _factors(self, operand: int) -> tuple[str, ...]:
        return tuple(f for dim in self.space.operands[operand] for f in dim)


def _result_factors(space: Space) -> tuple[str, ...]:
    return tuple(f for dims in space.results for dim in dims for f in dim)


class _Search:
    """Owns the state of one search: which digits each linear may still try."""

    def __init__(self, gm: GraphModule, size: int) -> None:
        self.gm, self.size = gm, size
        self.weights = weights_of(gm.graph)
        self.forward = _forward_nodes(gm)
        self.linears = self._find_linears()
        self.digits = {node: self._digits(linear) for node, linear in self.linears.items()}
        self.blockers: dict[Node, Node] = {}  # linear -> the first call that its columns could not be sharded past
        self.reset()

    def reset(self) -> None:
        self.carried: dict[Node, tuple[Placement | None, ...]] = {}
        self.sources: dict[Node, tuple[Node, ...]] = {}
        self.columns: dict[Node, Placement] = {}
        self.rows: dict[Node, Placement] = {}
        self.stream: dict[Node, None] = {}
        self.placed: dict[Node, tuple[Placement, Node]] = {}  # parameter placeholder -> placement, by whom

    def carry(self) -> bool:
        """Carry shardings through the forward; True where a linear had to change, so that it starts again."""
        self.reset()
        return not all(self._linear(node) if node in self.linears else self._op(node) for node in self.forward)

    def _linear(self, node: Node) -> bool:
        linear = self.linears[node]
        x = operands(node)[linear.activation]
        carried = self.carried.get(x, (None,))[0]
        if isinstance(carried, Shard):
            row = row_sharding(linear.space, linear.activation, carried, self.size)
            if row is None:
                return self._blocked(node)
            if not isinstance(row.operands[linear.weight], Shard):
                return self._carry_on(node, row)
            if not self._place(operands(node)[linear.weight], row.operands[linear.weight], node):
                return self._blocked(node)
            self.rows[node] = row.operands[linear.weight]
            self.stream[node] = None
            return True
        if not self.digits[node]:
            self.stream[node] = None
            return True
        row = factor_row(linear.space, linear.columns[0], self.digits[node][0], self.size)
        assert row is not None
        if not self._place(operands(node)[linear.weight], row.operands[linear.weight], node):
            return self._retry(node)
        self.columns[node] = row.operands[linear.weight]
        self.carried[node], self.sources[node] = row.results, (node,)
        return True

    def _op(self, node: Node) -> bool:
        inputs = operands(node)
        if not any(isinstance(p, Shard) for i in inputs for p in self.carried.get(i, ())):
            if node.target is aten.embedding.default or any(i in self.stream for i in inputs):
                self.stream[node] = None
            return True
        if (item := item_of(node)) is not None:
            source, position = item
            self.carried[node] = (self.carried[source][position],)
            self.sources[node] = self.sources[source]
            return True
        space = space_of(node)
        if space is None:
            return self._blocked(node)
        first = next(i for i, v in enumerate(inputs) if isinstance(self.carried.get(v, (None,))[0], Shard))
        placement = self.carried[inputs[first]][0]
        assert placement is not None
        row = row_sharding(space, first, placement, self.size)
        return self._carry_on(node, row) if row is not None else self._blocked(node)

    def _carry_on(self, node: Node, row: Row) -> bool:
        """Take `row` at `node`, if its other operands can follow."""
        inputs = operands(node)
        for value, need in zip(inputs, row.operands, strict=True):
            have = self.carried.get(value, (None,))[0]
            if have == need or (have is None and not isinstance(need, Shard)):
                continue
            if have is not None or value in self.stream:
                return self._blocked(node)
            if value in self.weights and not self._place(value, need, node):
                return self._blocked(node)
        self.carried[node] = tuple(p if isinstance(p, Shard) else None for p in row.results)
        self.sources[node] = tuple(dict.fromkeys(s for v in inputs for s in self.sources.get(v, ())))
        return True

    def _place(self, value: Node, placement: Placement, by: Node) -> bool:
        """Shard the parameter behind `value`; False where it cannot be, or already is otherwise."""
        parameter = self.weights[value]
        wanted = on_parameter(value, placement, self.weights, self.size)
        if wanted is None:
            return False
        return self.placed.setdefault(parameter, (wanted, by))[0] == wanted

    def _blocked(self, node: Node) -> bool:
        """No sharding gets past `node`: one linear that it came from tries something else."""
        for value in operands(node):
            for source in reversed(self.sources.get(value, ())):
                if self.digits[source]:
                    self.blockers.setdefault(source, node)
                    return self._retry(source)
        raise AssertionError(f"{node} blocks a sharding that nobody made")

    def _retry(self, linear: Node) -> bool:
        self.digits[linear] = self.digits[linear][1:]
        return False

    def _find_linears(self) -> dict[Node, _Linear]:
        found = {}
        for node in self.forward:
            if node.target not in _PRODUCTS:
                continue
            left, right = (value in self.weights for value in operands(node))
            space = space_of(node)
            if left != right and space is not None:
                linear = _Linear(node, space, activation=int(left), weight=int(right))
                if len(linear.columns) == 1 and len(linear.contracted) == 1:
                    found[node] = linear
        return found

    def _digits(self, linear: _Linear) -> tuple[int, ...]:
        """Digits to try on the columns: contiguous, then inside the parts that slices cut the result into."""
        columns = linear.space.sizes[linear.columns[0]]
        outers = (1, *_parts(linear.node, columns))
        return tuple(o for o in dict.fromkeys(outers) if columns % (o * self.size) == 0)

    def decide(self, data_digits: int) -> TensorParallel:
        decided = TensorParallel()
        for parameter, (placement, by) in self.placed.items():
            role = "column" if by in self.columns else "row" if by in self.rows else "with its column"
            decided.parameters[input_of(parameter).name] = (placement, f"megatron: {role}-parallel")
        self._embeddings(decided)
        for node in self.forward:
            if node in self.rows:
                self._pin_stream(decided, node, data_digits, "row-parallel output")
            elif node.target is aten.embedding.default and _depends_on_input(operands(node)[1]):
                self._pin_stream(decided, node, data_digits, "embedding")
        for node in self.linears:
            if node not in self.columns and node not in self.rows:
                self._whole(decided, node)
        return decided

    def _embeddings(self, decided: TensorParallel) -> None:
        for node in self.forward:
            if node.target is not aten.embedding.default:
                continue
            table, index = operands(node)
            if table not in self.weights or not _depends_on_input(index):
                continue
            name = input_of(self.weights[table]).name
            if tensor_of(table).shape[0] % self.size:
                text = f"{name}: {tensor_of(table).shape[0]} rows do not divide by {self.size}; not sharded"
                decided.remarks.append((node, text))
                continue
            wanted = on_parameter(table, Shard(0), self.weights, self.size)
            if wanted is not None:
                decided.parameters.setdefault(name, (wanted, "megatron: vocabulary-parallel"))

    def _whole(self, decided: TensorParallel, node: Node) -> None:
        linear = self.linears[node]
        name = input_of(self.weights[operands(node)[linear.weight]]).name
        x = operands(node)[linear.activation]
        decided.remarks.append((node, f"{name} stays whole: {self._why(node)}"))
        shared = [other for other in self.columns if operands(other)[self.linears[other].activation] is x]
        if shared:
            decided.pins[node] = (R, "megatron: whole beside column-parallel linears")

    def _why(self, node: Node) -> str:
        """Why a linear has neither columns nor rows."""
        linear = self.linears[node]
        columns = linear.space.sizes[linear.columns[0]]
        if columns % self.size:
            return f"its {columns} columns do not divide by {self.size}"
        if (blocker := self.blockers.get(node)) is not None:
            place = f", {origin_of(blocker)}" if str(origin_of(blocker)) else ""
            return f"its columns cannot be sharded past {_name(blocker)}{place}"
        return "its columns cannot be sharded through to a row"

    def _pin_stream(self, decided: TensorParallel, node: Node, data_digits: int, what: str) -> None:
        placement = self._stream_placement(node, data_digits)
        if placement is None:
            text = f"{what} is not sequence-parallel: neither sequence nor batch divides by {self.size}"
            decided.remarks.append((node, text))
        decided.pins[node] = (placement or R, f"megatron: {what}")

    def _stream_placement(self, node: Node, data_digits: int) -> Placement | None:
        """The placement between blocks: the sequence (dim 1), else more of the batch (dim 0)."""
        shaped = node
        while tensor_of(shaped).dim() < 3:
            view = next((u for u in shaped.users if u.target in _SHAPES or is_reshard(u)), None)
            if view is None or tensor_of(view).dim() < 2:
                break
            shaped = view
        shape = tensor_of(shaped).shape
        tries = [Shard(1)] if len(shape) > 2 and shape[1] % self.size == 0 else []
        tries += [Shard(0, data_digits)] if shape[0] % (data_digits * self.size) == 0 else []
        for placement in tries:
            found = self._back(shaped, node, placement)
            if found is not None:
                return found
        return None

    def _back(self, value: Node, target: Node, placement: Shard) -> Shard | None:
        while value is not target:
            if is_reshard(value):
                value = operands(value)[0]
                continue
            space = space_of(value)
            row = row_giving(space, 0, placement, self.size) if space is not None else None
            if row is None or not isinstance(row.operands[0], Shard):
                return None
            value, placement = operands(value)[0], row.operands[0]
        return placement


def _forward_nodes(gm: GraphModule) -> tuple[Node, ...]:
    """Calls that do not depend on a tangent, in order."""
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


def _parts(node: Node, columns: int) -> tuple[int, ...]:
    """Numbers of equal parts that slices, or a view, cut the last dim of `node`'s result into."""
    found: list[int] = []
    seen: set[Node] = set()
    queue = [node]
    while queue:
        value = queue.pop(0)
        for user in value.users:
            if user in seen or not is_tensor(user):
                continue
            seen.add(user)
            if user.target is aten.slice.Tensor:
                length = tensor_of(user).shape[-1]
                if length and columns % length == 0 and length < columns:
                    found.append(columns // length)
            elif user.target is aten.view.default and tensor_of(user).shape[-1] != columns:
                shape, inner = tensor_of(user).shape, 1
                for size in reversed(shape):
                    inner *= size
                    if columns % inner == 0 and inner < columns:
                        found.append(columns // inner)
            elif user.target in (aten.view.default, aten.add.Tensor) or tensor_of(user).shape == tensor_of(node).shape:
                queue.append(user)
    return tuple(dict.fromkeys(found))


def _depends_on_input(node: Node) -> bool:
    queue, seen = [node], set()
    while queue:
        value = queue.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.op == "placeholder" and input_of(value).role is InputRole.INPUT:
            return True
        queue.extend(value.all_input_nodes)
    return False


def _name(node: Node) -> str:
    """`sort`, `add.Tensor`: the op as graphs are written."""
    return str(node.target).removeprefix("aten.").removesuffix(".default")
