"""Rewrite the program of the whole mesh into the program of one device, which is the same on every rank."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from passes._torch import OpOverload, fake_empty, fake_mode_of
from passes.base import Pass, PassContext
from passes.ir.call import Call, call_of
from passes.ir.collectives import StepCall, is_step, kind_of_op, step_axes, step_kind
from passes.ir.fake_calls import fake_call, is_viewable
from passes.ir.graph import (
    Input,
    InputRole,
    Stage,
    Transfer,
    add_call,
    copy_facts,
    draw_of,
    has_layout,
    is_random,
    is_recompute,
    is_tensor,
    layout_of,
    layouts_of,
    needs_of,
    note_of,
    operands,
    placeholders,
    results_of,
    set_input,
    set_layouts,
    set_note,
    set_recompute,
    set_stands_for,
    set_transfer,
    set_value,
    stands_for,
    tensor_of,
    transfer_of,
    value_of,
)
from passes.ir.layout import Layout, Placement, Shard, local_shape, replicated
from passes.ir.mesh import Mesh
from passes.rules.local_forms.masked import mirrored
from passes.rules.rule import LocalCall, Message, rule_of

aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class Localize(Pass):
    """Make every call on per-device tensors.

    1. Placeholders get the shape of one rank's part.
    2. A step of a reshard becomes a functional collective and its wait, between views.
    3. An op whose rule has a local form (shape arguments, masked lookups, random numbers) is replaced by it;
       every other op stays as it is.
    4. A collective of complex numbers is one of pairs of real numbers, since neither gloo nor NCCL has one of complex numbers.

    The rank's coordinates are placeholders, so that the graph is equal on all ranks.

    Before:

        mesh tp=2
        stage COLLECTIVE
        %x: f32[4, 8] {tp:S(0)} = input("x")
        %relu: f32[4, 8] {tp:S(0)} = relu(%x)
        %all_gather: f32[4, 8] {tp:R} = all_gather(%relu, ["tp"])
        return output("output") %all_gather

    After:

        mesh tp=2
        stage LOCAL
        %x: f32[2, 8] {tp:S(0)} = input("x")
        %relu: f32[2, 8] {tp:S(0)} = relu(%x)
        %all_gather_into_tensor: f32[4, 8] = _c10d_functional.all_gather_into_tensor(%relu, 2, "autoshard:tp=2:tp")
        %wait_tensor: f32[4, 8] {tp:R} = _c10d_functional.wait_tensor(%all_gather_into_tensor)
        return output("output") %wait_tensor
    """

    name: ClassVar[str] = "localize"
    takes: ClassVar[Stage] = Stage.COLLECTIVE
    gives: ClassVar[Stage] = Stage.LOCAL

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        rewriter = _Rewriter(gm, ctx.mesh)
        for node in list(gm.graph.nodes):
            if node.op == "placeholder":
                rewriter.placeholder(node)
            elif node.op == "call_function" and node not in rewriter.replaced:
                rewriter.call(node)
        rewriter.emitter.erase_skipped()
        return rewriter.changed


class _Rewriter:
    """Replaces the program of the whole mesh, node by node."""

    def __init__(self, gm: GraphModule, mesh: Mesh) -> None:
        self.graph, self.mesh = gm.graph, mesh
        self.emitter = _Emitter(gm, mesh)
        self.shapes = self.emitter.shapes
        self.calls = {n: call_of(n) for n in gm.graph.nodes if isinstance(n.target, OpOverload)}
        self.replaced: set[Node] = set()  # items of a call that was replaced by a node for each of them
        self.changed = False

    def placeholder(self, node: Node) -> None:
        held = value_of(node)
        if isinstance(held, torch.Tensor):
            self.shapes[node] = tuple(held.shape)
            local = local_shape(layout_of(node), held.shape, self.mesh)
            self.changed |= local != tuple(held.shape)
            set_value(node, self.emitter.empty(local, held))

    def call(self, node: Node) -> None:
        self.emitter.at = node
        self.emitter.note_backward(node)
        set_stands_for(node, (node.name,))
        results = results_of(node)
        if results:
            self.shapes[node] = tuple(results[0].shape)
        if is_step(node):
            self._replace(node, self._step(node))
        elif node.target is operator.getitem or not isinstance(node.target, OpOverload):
            set_value(node, self.emitter.run(node.target, node.args, node.kwargs))
        else:
            self._op(node)

    def _op(self, node: Node) -> None:
        rule = rule_of(node.target)
        sharded = any(not layout.is_replicated for layout in (*layouts_of(node), *needs_of(node)))
        if rule is None or rule.local is None or not (sharded or rule.whole or is_random(node)):
            self._refresh(node)
            return
        new = rule.local(_LocalCall(self.emitter, node, self.calls[node]))
        if new is None:
            self._refresh(node)
        elif isinstance(new, Node):
            self._replace(node, new)
        else:
            self._replace_items(node, new)

    def _replace_items(self, node: Node, new: tuple[Node, ...]) -> None:
        """Replace each item that is taken from the results of `node`."""
        for item in list(node.users):
            self.replaced.add(item)
            number = item.args[1]
            assert isinstance(number, int)
            made = new[number]
            if is_tensor(item):
                self.shapes[item] = tuple(tensor_of(item).shape)
                set_stands_for(item, (item.name,))
                self._replace(item, made)
            else:
                item.replace_all_uses_with(made)
                self.graph.erase_node(item)
        self.graph.erase_node(node)

    def _refresh(self, node: Node) -> None:
        """Keep the call, on per-device operands."""
        if node.target is aten.view.default:
            new = self.emitter.emit(aten.view.default, *node.args)
            self._replace(node, new)
            return
        set_value(node, self.emitter.run(node.target, node.args, node.kwargs))

    def _replace(self, node: Node, new: Node) -> None:
        if new is node:
            return
        self.changed = True
        if not has_layout(new):
            set_layouts(new, *layouts_of(node))
        self.shapes[new] = self.shapes[node]
        set_stands_for(new, (*stands_for(new), *stands_for(node)))
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def _step(self, node: Node) -> Node:
        value = operands(node)[0]
        axes = tuple(self.mesh.index(axis) for axis in step_axes(node))
        shape = self.shapes[node]
        before, after = needs_of(node)[0], layout_of(node)
        call = StepCall(self.emitter, self.mesh, value, shape, before, after, axes, tuple(node.args[2:]))
        return step_kind(node).lower(call)


class _Emitter:
    """Adds per-device calls before the current node, and computes their fake values."""

    def __init__(self, gm: GraphModule, mesh: Mesh) -> None:
        self.graph, self.mesh = gm.graph, mesh
        self.fake_mode = fake_mode_of([value_of(n) for n in gm.graph.nodes if "val" in n.meta])
        self.at: Node = next(iter(gm.graph.nodes))
        self.shapes: dict[Node, tuple[int, ...]] = {}  # global shapes of nodes already localized
        self.inputs: dict[Input, Node] = {}
        self.last_placeholder = [n for n in gm.graph.nodes if n.op == "placeholder"][-1:]
        self.randoms = 0
        self.pairs: set[Node] = set()  # results of collectives, not yet awaited, that stand for complex numbers
        self.skipped: list[Node] = []  # views that were viewed again
        self.backward = set(placeholders(gm.graph, InputRole.TANGENT))  # and all that depends on them

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor like another, of another shape."""
        as_given = tuple(shape) == tuple(like.shape) and not like.is_contiguous()
        return fake_empty(self.fake_mode, shape, like.dtype, like.device, like.stride() if as_given else None)

    def emit(self, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        """Add a call before the node at hand. A view that strides forbid is made on a copy."""
        if op is aten.view.default:
            source, shape = self._unviewed(args[0]), args[1]
            held = tensor_of(source)
            if tuple(shape) == tuple(held.shape):
                return source
            if not is_viewable(held, shape):
                source = self._add(aten.clone.default, (source,), {"memory_format": torch.contiguous_format})
            args = (source, shape)
        return self._add(op, args, kwargs)

    def emit_copy(self, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        """Add a call that the backward makes again, unless it depends on gradients of outputs."""
        new = self.emit(op, *args, **kwargs)
        set_recompute(new, new not in self.backward)
        return new

    def item(self, results: Node, number: int) -> Node:
        """Add the taking of one of a call's results."""
        return self._add(operator.getitem, (results, number), {})

    def _unviewed(self, source: Node) -> Node:
        """Return what a view of a view is a view of."""
        if source.target is not aten.view.default or has_layout(source):
            return source
        self.skipped.append(source)
        return _as_node(source.args[0])

    def erase_skipped(self) -> None:
        """Erase views that were made only to be viewed again."""
        for view in dict.fromkeys(reversed(self.skipped)):
            if not view.users:
                self.graph.erase_node(view)

    def _add(self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        kind = kind_of_op(op)
        if kind is not None and tensor_of(args[0]).is_complex():
            sent = self._add(op, (self._pairs(args[0]), *args[1:]), kwargs)
            self.pairs.add(sent)
            return sent
        if op is _WAIT and args[0] in self.pairs:
            self.pairs.remove(args[0])
            return self._add(aten.view_as_complex.default, (self._add(op, args, kwargs),), {})
        with self.graph.inserting_before(self.at):
            new = add_call(self.graph, op, args, kwargs)
        copy_facts(self.at, new)
        self.note_backward(new)
        set_value(new, self.run(op, args, kwargs))
        set_note(new, note_of(self.at))
        set_recompute(new, is_recompute(self.at))
        if kind is not None:
            set_transfer(new, Transfer(kind.name, self.mesh.axes_of_group(str(args[-1])), (self.at.name,)))
        return new

    def _pairs(self, value: Node) -> Node:
        """View complex numbers as pairs of real ones, in a last dim, which no collective cuts."""
        if _is_conjugate(value):
            twice = self._add(aten._conj.default, (value,), {})  # Inductor would take a clone for a no-op
            value = self._add(aten._conj_physical.default, (twice,), {})
        return self._add(aten.view_as_real.default, (value,), {})

    def send(self, message: Message, op: OpOverload, *args: Any) -> Node:
        """Add a collective that a local form makes. In the backward, what it gives is never kept from the forward."""
        new = self._add(op, args, {})
        transfer = transfer_of(new)
        assert transfer is not None, op
        set_transfer(new, replace(transfer, what=message.what))
        set_note(new, f"{Localize.name}: {message.why}")
        set_recompute(new, self.at in self.backward and new not in self.backward)
        return new

    def note_backward(self, node: Node) -> None:
        """Remember a call that depends on gradients of outputs."""
        if any(value in self.backward for value in node.all_input_nodes):
            self.backward.add(node)

    def run(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the fake value of a call."""
        return fake_call(self.fake_mode, target, args, kwargs)

    def coordinate(self, axis: int) -> Node:
        """Return this rank's place on a mesh axis: i64[1]."""
        return self._input(Input(InputRole.COORDINATE, self.mesh.names[axis]), (1,))

    def seed(self) -> Node:
        """Return the step's seed: i64[]."""
        return self._input(Input(InputRole.SEED, "step"), ())

    def _input(self, what: Input, shape: tuple[int, ...]) -> Node:
        if what not in self.inputs:
            with self.graph.inserting_after(*self.last_placeholder):
                new = self.graph.placeholder(f"{what.role.value}_{what.name}")
            set_input(new, what)
            set_layouts(new, replicated(self.mesh))
            device = next((tensor_of(n).device for n in self.shapes if is_tensor(n)), torch.device("cpu"))
            set_value(new, fake_empty(self.fake_mode, shape, torch.int64, device))
            self.shapes[new] = shape
            self.last_placeholder = [new]
            self.inputs[what] = new
        return self.inputs[what]

    def next_random(self) -> int:
        self.randoms += 1
        return self.randoms - 1


class _LocalCall(LocalCall):
    """The node at hand, as the local form of a rule sees it."""

    def __init__(self, emitter: _Emitter, node: Node, call: Call) -> None:
        self._emitter, self._node = emitter, node
        self.mesh, self.call = emitter.mesh, call
        self.args, self.kwargs = tuple(node.args), dict(node.kwargs)
        self.operands = operands(node)

    def emit(self, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        return self._emitter.emit(op, *args, **kwargs)

    def emit_copy(self, op: OpOverload, *args: Any, **kwargs: Any) -> Node:
        return self._emitter.emit_copy(op, *args, **kwargs)

    def send(self, op: OpOverload, *args: Any, axes: tuple[int, ...], message: Message) -> Node:
        group = self.mesh.group_name(tuple(self.mesh.names[axis] for axis in axes))
        return self._emitter.send(message, op, *args, group)

    def item(self, results: Node, number: int) -> Node:
        return self._emitter.item(results, number)

    def local_shape(self, result: int = 0) -> tuple[int, ...]:
        return local_shape(self.result_layout(result), self.call.results[result].shape, self.mesh)

    def operand_layout(self, operand: int) -> Layout:
        return needs_of(self._node)[operand]

    def result_layout(self, result: int = 0) -> Layout:
        return layouts_of(self._node)[result]

    def coordinate(self, axis: int) -> Node:
        return self._emitter.coordinate(axis)

    def positions(self, layout: Layout, dim: int, size: int) -> Node:
        axes = layout.axes_on(dim)
        device = next(iter(self._emitter.shapes)).meta["val"].device
        local = size // math.prod(self.mesh.sizes[axis] for axis in axes)
        index = self.emit(
            torch.ops.prims.iota.default, local, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False
        )
        return self._insert_digits(index, layout, axes, size) if axes else index

    def _insert_digits(self, index: Node, layout: Layout, axes: tuple[int, ...], size: int) -> Node:
        """Put the axes' digits between the digits that are left in a per-device index."""
        rest, weight = index, 1
        total: Node | None = None
        for axis in reversed(axes):
            placement = layout.on(axis)
            assert isinstance(placement, Shard)
            length = size // (placement.outer * self.mesh.sizes[axis]) // weight
            inside = self.emit(aten.mul.Tensor, self.emit(aten.remainder.Scalar, rest, length), weight)
            rest = self.emit(aten.div.Tensor_mode, rest, length, rounding_mode="floor")
            others = (self.mesh.sizes[a] for a in axes if placement.mirror and _is_between(layout.on(a), placement))
            mirror = placement.mirror // math.prod(others)
            place = mirrored(self, self.coordinate(axis), rest, mirror, self.mesh.sizes[axis])
            for term in (inside, self.emit(aten.mul.Tensor, place, weight * length)):
                total = term if total is None else self.emit(aten.add.Tensor, total, term)
            weight *= length * self.mesh.sizes[axis]
        assert total is not None
        return self.emit(aten.add.Tensor, total, self.emit(aten.mul.Tensor, rest, weight))

    def seed(self) -> Node:
        return self._emitter.seed()

    def number(self) -> int:
        draw = draw_of(self._node)
        return self._emitter.next_random() if draw is None else draw


def _is_between(other: Placement, placement: Shard) -> bool:
    """Return whether another digit of a dim stands between a mirrored one and the one that says in which half it is."""
    return isinstance(other, Shard) and placement.half < other.outer < placement.outer


def _is_conjugate(value: Node) -> bool:
    """Return whether the memory of a value may hold its conjugate."""
    while isinstance(value.target, OpOverload) and value.target.is_view:
        if value.target is aten._conj.default:
            return True
        value = _as_node(value.args[0])
    return False


def _as_node(value: Any) -> Node:
    assert isinstance(value, Node)
    return value

