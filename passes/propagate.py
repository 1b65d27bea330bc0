"""Follow the rules along the data flow from what is pinned; fast, explainable, no cost model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from passes.base import Pass, PassContext
from passes.ir.edges import Edge
from passes.ir.graph import (
    InputRole,
    OutputRole,
    Pin,
    Stage,
    add_pin,
    add_reshard,
    input_of,
    is_reshard,
    is_tensor,
    item_of,
    operands,
    outputs_of,
    pins_of,
    placeholders,
    results_of,
    returned,
    tensor_of,
)
from passes.ir.layout import Partial, Placement, R, Shard, is_even, next_digit
from passes.placed import Placed
from passes.recipes.weights import weights_of
from passes.rules.rule import Row, Space, linear_row, replicated_row, row_giving, row_sharding, rule_of
from passes.rules.unknown import why_whole

_BY_BYTES = "the fewest bytes move"
_AS_PARAMETER = "a gradient is sharded as its parameter"
_LOOKAHEAD = 8  # ops: how far a partial value looks for the sharding that its users will want


@dataclass(frozen=True)
class Propagate(Pass):
    """Give every value a layout and every operand a needed layout, one axis after the other.

    On each axis, in program order, a node takes a row of its rule:

    1. A gradient is made with the sharding that its parameter is computed with.
    2. A row that every operand already has: no communication.
    3. A row that operands reach without communication: a replicated one takes its part.
    4. Otherwise the operands conflict: a sharded parameter stays where it is; then the fewest bytes move;
       then the first operand keeps its placement. A remark says what moved.
    5. No rule, or no row: the op runs replicated, with a remark.

    A partial value stays partial through ops that only move it and sums of partial values. One that
    several users take is reduced once, in front of them: to the sharding that they want, else to `R`.

    Before:

        mesh tp=2
        stage CAPTURED
        %w: f32[8, 6] pinned(tp:S(0) "params") = parameter("w")
        %x: f32[4, 8] = input("x")
        %mm: f32[4, 6] = mm(%x, %w)
        %relu: f32[4, 6] = relu(%mm)
        return output("output") %relu

    After:

        mesh tp=2
        stage PLACED
        %w: f32[8, 6] {tp:S(0)} pinned(tp:S(0) "params") = parameter("w")
        %x: f32[4, 8] {tp:R} = input("x")
        %mm: f32[4, 6] {tp:P(sum)} = mm(%x{tp:S(1)}, %w)
        %relu: f32[4, 6] {tp:R} = relu(%mm{tp:R})
        return output("output") %relu
    """

    name: ClassVar[str] = "propagate"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.PLACED

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        placed = Placed(gm, ctx)
        for axis in placed.order:
            _Axis(self, gm, ctx, placed, axis).run()
        placed.write()
        return True


class _Axis:
    """Propagation on one axis."""

    def __init__(self, owner: Pass, gm: GraphModule, ctx: PassContext, placed: Placed, axis: int) -> None:
        self.owner, self.gm, self.ctx, self.placed, self.axis = owner, gm, ctx, placed, axis
        self.size = ctx.mesh.sizes[axis]
        self.weights = weights_of(gm.graph)
        self.at: dict[Node, tuple[Placement, ...]] = {}  # placements of results on this axis
        self.wanted = self._wanted()
        self.is_data = any(isinstance(self._pinned(n), Shard) for n in placeholders(gm.graph, InputRole.INPUT))

    def run(self) -> None:
        node: Node | None = next(iter(self.gm.graph.nodes))
        while node is not None and node.op != "root":
            following = node.next
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                self._output(node)
            elif is_reshard(node):
                self._reshard(node)
            elif results_of(node):
                self._op(node)
            node = following

    def _placeholder(self, node: Node) -> None:
        if input_of(node).role is not InputRole.TANGENT:
            self._give(node, (), (self._pinned(node) or R,))
            self._log(node, None, self._insisted(node))

    def _reshard(self, node: Node) -> None:
        placement = self._of(operands(node)[0])
        self.at[node] = (placement,)
        wanted = self._pinned(node) or self._reduction(node) or placement
        self._give(node, (placement,), (self._fitted(node, wanted),))
        self._log(node, operands(node)[0], self._insisted(node) or "as what it is made of")

    def _insisted(self, node: Node) -> str:
        """Who insists on a placement of `node`; empty where nobody does."""
        return next((pin.reason for pin in pins_of(node) if pin.axis == self.axis), "")

    def _log(self, node: Node, source: Node | None, why: str) -> None:
        """What is whole by default is not worth an entry."""
        for placement in self.at[node][:1]:
            if why and (placement != R or self._insisted(node)):
                name = "" if source is None or self._insisted(node) else source.name
                self.ctx.edges.append(Edge(node.name, self.ctx.mesh.names[self.axis], str(placement), name, why))

    def _fitted(self, node: Node, pinned: Placement) -> Placement:
        """`pinned`, or the digit of its dim inside those that other axes already shard."""
        if not isinstance(pinned, Shard) or self._fits(node, pinned):
            return pinned
        inside = next_digit(self.placed.so_far(node), pinned.dim, self.ctx.mesh)
        if self._fits(node, inside):
            return inside
        axis = self.ctx.mesh.names[self.axis]
        self.ctx.remark(self.owner, node, f"on {axis}: {pinned} does not fit beside what other axes shard; left whole")
        return R

    def _op(self, node: Node) -> None:
        if (item := item_of(node)) is not None:
            source, position = item
            self._give(node, (self.at[source][position],), (self.at[source][position],))
            self._log(node, source, "a part of it")
        else:
            inputs = operands(node)
            row, why = self._choose(node, inputs, tuple(self._of(value) for value in inputs))
            self._give(node, row.operands, row.results)
            kept = (v for v, n in zip(inputs, row.operands, strict=True) if n != R and self._of(v) == n)
            self._log(node, next(kept, inputs[0] if inputs else None), why)
        self._reduce(node)

    def _give(self, node: Node, needs: tuple[Placement, ...], results: tuple[Placement, ...]) -> None:
        self.at[node] = results
        self.placed.decide(node, needs, results)

    def _of(self, value: Node) -> Placement:
        if value not in self.at:
            assert input_of(value).role is InputRole.TANGENT, value
            output = self._output_for(value)
            self._give(value, (), (self._output_placement(output),))
            self._log(value, output, "as the output that it is the gradient of")
        return self.at[value][0]

    def _output_for(self, tangent: Node) -> Node:
        for value, output in zip(returned(self.gm.graph), outputs_of(self.gm.graph), strict=True):
            if output.role is OutputRole.OUTPUT and output.name == input_of(tangent).name:
                assert isinstance(value, Node)
                return value
        raise AssertionError(f"no output for tangent {input_of(tangent).name}")

    def _pinned(self, node: Node) -> Placement | None:
        return next((pin.placement for pin in pins_of(node) if pin.axis == self.axis), None)

    # --- choosing a row

    def _choose(self, node: Node, inputs: tuple[Node, ...], have: tuple[Placement, ...]) -> tuple[Row, str]:
        """A row, and why it is that one."""
        replicated = replicated_row(len(inputs), len(results_of(node)))
        space = self.placed.space_of(node)
        if space is None:
            self._unknown(node, have)
            return replicated, "no rule shards it"
        found = self._rows(node, space, inputs, have)
        wanted = self.wanted.get(node)
        if wanted is not None and (row := next((r for r in found if r.results[0] == wanted), None)) is not None:
            self._explain(node, have, row, _AS_PARAMETER)
            return row, _AS_PARAMETER
        for row in found:
            if row.operands == have:
                return row, "follows its operands"
        for row in found:
            if all(_is_free(*edge) for edge in zip(inputs, have, row.operands, strict=True)):
                return row, "follows an operand; whole ones take their part"
        chosen = min((*found, replicated), key=lambda row: self._rank(node, inputs, have, row))
        moved_weight, _ = self._rank(node, inputs, have, chosen)
        stays = any(v in self.weights and isinstance(p, Shard) for v, p in zip(inputs, have, strict=True))
        why = "a parameter stays" if stays and not moved_weight else _BY_BYTES
        self._explain(node, have, chosen, why)
        return chosen, why

    def _rows(self, node: Node, space: Space, inputs: tuple[Node, ...], have: tuple[Placement, ...]) -> list[Row]:
        found: list[Row] = []
        for i, placement in enumerate(have):
            row = row_sharding(space, i, placement, self.size) if isinstance(placement, Shard) else None
            found += [row] if row is not None else []
        found += self._partial_rows(space, inputs, have)
        for i, placement in enumerate(have):
            if isinstance(placement, Partial):
                wish = self._wish(inputs[i], _LOOKAHEAD)
                row = row_sharding(space, i, wish, self.size) if wish is not None else None
                found += [row] if row is not None else []
        if self.wanted.get(node) is not None:
            row = row_giving(space, 0, self.wanted[node], self.size)
            found += [row] if row is not None else []
        return [row for row in dict.fromkeys(found) if self.placed.allows(node, row)]

    def _partial_rows(self, space: Space, inputs: tuple[Node, ...], have: tuple[Placement, ...]) -> list[Row]:
        """Rows that leave a value partial: all that is not partial is a number, an index, or zero."""
        found = []
        for linear in space.linear:
            group = [have[i] for i in linear.operands]
            first = next((p for p in group if isinstance(p, Partial)), None)
            others = [i for i in range(len(have)) if i not in linear.operands]
            if first is None or first.op not in linear.ops:
                continue
            joint = all(have[i] == first or _is_zero(inputs[i]) for i in linear.operands)
            if joint and all(have[i] == R and _is_aside(inputs[i]) for i in others):
                found.append(linear_row(space, linear, first.op))
        return found

    def _rank(self, node: Node, inputs: tuple[Node, ...], have: tuple[Placement, ...], row: Row) -> tuple[bool, int]:
        moved_weight, moved_bytes = False, 0
        for value, placement, need in zip(inputs, have, row.operands, strict=True):
            if placement in (need, R):
                continue
            tensor = tensor_of(value)
            whole = 2 if isinstance(placement, Partial) and need == R else 1
            moved_bytes += tensor.numel() * tensor.element_size() * whole
            moved_weight |= value in self.weights and isinstance(placement, Shard)
        return moved_weight, moved_bytes

    def _explain(self, node: Node, have: tuple[Placement, ...], row: Row, why: str) -> None:
        partial_only = all(isinstance(p, Partial) or p in (n, R) for p, n in zip(have, row.operands, strict=True))
        if not partial_only:
            axis = self.ctx.mesh.names[self.axis]
            text = f"on {axis}: {why}: operands {_join(have)} become {_join(row.operands)}, giving {_join(row.results)}"
            self.ctx.remark(self.owner, node, text, routine=why != _BY_BYTES)

    def _unknown(self, node: Node, have: tuple[Placement, ...]) -> None:
        known = rule_of(node.target) is not None
        what = why_whole(node, unknown_ops=self.ctx.unknown_ops)
        size = sum(tensor_of(v).numel() * tensor_of(v).element_size() for v in operands(node))
        moved = any(p != R for p in have)
        if moved or not known:
            axis = self.ctx.mesh.names[self.axis]
            cost = f"{size} bytes of operands are gathered" if moved else "its operands are whole already"
            self.ctx.remark(self.owner, node, f"{what}: runs replicated on {axis}; {cost}")

    # --- partial values

    def _reduce(self, node: Node) -> None:
        """Reduce a partial result once, where more than one user would have to."""
        placement = self._reduction(node)
        if placement is None:
            return
        why = "as its users are sharded" if placement != R else "whole, for several users"
        new = add_reshard(node, f"propagate: partial sum: {why}")
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        add_pin(new, Pin(self.axis, placement, "propagate"))
        if node in self.weights:
            self.weights[new] = self.weights[node]
        self.placed.adopt(new, node)
        self._give(new, (self.at[node][0],), (placement,))
        axis = self.ctx.mesh.names[self.axis]
        self.ctx.edges.append(Edge(new.name, axis, str(placement), node.name, f"a sum is reduced {why}"))

    def _reduction(self, node: Node) -> Placement | None:
        """What a partial value is reduced to in front of its users; None where it is not."""
        if not is_tensor(node) or self.at[node][0] != Partial("sum") or tensor_of(node).numel() == 1:
            return None
        users = [user for user in node.users if not is_reshard(user)]
        if len(users) < 2 or len(users) < len(node.users) or all(self._passes_on(user, node) for user in users):
            return None
        wish = self._wish(node, _LOOKAHEAD)
        return wish if wish is not None and self._fits(node, wish) else R

    def _fits(self, node: Node, placement: Placement) -> bool:
        """Whether `placement` can join those of `node` on the axes before."""
        layout = self.placed.so_far(node).with_on(self.axis, placement)
        return is_even(layout, tuple(tensor_of(node).shape), self.ctx.mesh)

    def _passes_on(self, user: Node, value: Node) -> bool:
        """Whether `user` keeps a partial operand partial, as far as can be seen from here."""
        if user.op == "output":
            return True
        space = self.placed.space_of(user)
        if space is None:
            return False
        for linear in space.linear:
            inputs = operands(user)
            mine = [i for i, v in enumerate(inputs) if v is value]
            if not all(i in linear.operands for i in mine):
                continue
            joint = all(self._may_be_partial(inputs[i]) for i in linear.operands)
            if joint and all(_is_aside(v) for i, v in enumerate(inputs) if i not in linear.operands):
                return all(self._passes_on(u, user) for u in user.users)
        return False

    def _may_be_partial(self, value: Node) -> bool:
        return value not in self.at or self.at[value][0] == Partial("sum") or _is_zero(value)

    def _wish(self, value: Node, depth: int) -> Placement | None:
        """The placement of `value` that the other operands of its users ask for; None where none is known."""
        for user in value.users:
            if user.op == "output" or depth == 0:
                continue
            found = self._wish_of(user, value, depth)
            if found is not None:
                return found
        return None

    def _wish_of(self, user: Node, value: Node, depth: int) -> Placement | None:
        if is_reshard(user):
            pinned = self._pinned(user)
            return pinned if isinstance(pinned, Shard) else None
        space = self.placed.space_of(user)
        if space is None:
            return None
        inputs = operands(user)
        position = inputs.index(value)
        for i, other in enumerate(inputs):
            held = self.at.get(other, (R,))[0]
            if other is not value and isinstance(held, Shard):
                row = row_sharding(space, i, held, self.size)
                if row is not None:
                    return row.operands[position]
        if len(results_of(user)) != 1:
            return None
        later = self._wish(user, depth - 1)
        row = row_giving(space, 0, later, self.size) if later is not None else None
        return row.operands[position] if row is not None else None

    # --- outputs

    def _wanted(self) -> dict[Node, Placement]:
        """Shardings that graph outputs ask of the values they come from, through ops that only move or add."""
        wanted: dict[Node, Placement] = {}
        for value, output in zip(returned(self.gm.graph), outputs_of(self.gm.graph), strict=True):
            if isinstance(value, Node) and output.role is OutputRole.GRADIENT:
                self._want(value, self._computed(output.name), wanted)
        return wanted

    def _want(self, value: Node, placement: Placement | None, wanted: dict[Node, Placement]) -> None:
        if not isinstance(placement, Shard) or value in wanted or value.op == "placeholder":
            return
        if is_reshard(value):
            self._want(operands(value)[0], placement, wanted)
            return
        wanted[value] = placement
        space = self.placed.space_of(value)
        everything = set(range(len(operands(value))))
        if space is None or not any(set(linear.operands) == everything for linear in space.linear):
            return
        row = row_giving(space, 0, placement, self.size)
        if row is not None:
            for operand, need in zip(operands(value), row.operands, strict=True):
                self._want(operand, need, wanted)

    def _computed(self, name: str) -> Placement | None:
        """The placement on this axis that a parameter is computed with (it may be stored otherwise)."""
        for node in placeholders(self.gm.graph, InputRole.PARAMETER):
            if input_of(node).name != name:
                continue
            placement = self._pinned(node)
            value = node
            while len(value.users) == 1 and (user := next(iter(value.users))) in self.weights:
                if is_reshard(user):
                    return self._pinned(user) or placement
                value = user
            return placement
        return None

    def _output(self, node: Node) -> None:
        needs = []
        for value, output in zip(returned(self.gm.graph), outputs_of(self.gm.graph), strict=True):
            if not isinstance(value, Node) or not is_tensor(value):
                continue
            if output.role is OutputRole.OUTPUT:
                needs.append(self._output_placement(value))
            else:
                needs.append(self._stored(output.name.removeprefix("input:"), output.role))
        self.placed.needs.setdefault(node, []).append(tuple(needs))

    def _output_placement(self, value: Node) -> Placement:
        """As pinned; else this rank's part on a data axis, whole on the others."""
        if is_reshard(value) and (pinned := self._pinned(value)) is not None:
            return pinned
        placement = self._of(value)
        return placement if isinstance(placement, Shard) and self.is_data else R

    def _stored(self, name: str, role: OutputRole) -> Placement:
        for node in placeholders(self.gm.graph):
            if input_of(node).name == name and input_of(node).role is not InputRole.TANGENT:
                return self._pinned(node) or R
        raise AssertionError(f"{role.value} of unknown {name}")


def _is_free(value: Node, placement: Placement, need: Placement) -> bool:
    """Whether a rank gets what it needs from what it has."""
    return placement == need or (placement == R and (isinstance(need, Shard) or _is_zero(value)))


def _is_aside(value: Node) -> bool:
    """Whether a value is a number or an index: a sum passes it without growing."""
    tensor = tensor_of(value)
    return tensor.numel() == 1 or not tensor.is_floating_point()


def _is_zero(value: Node) -> bool:
    """Whether the value is zero everywhere, and so is its own partial sum."""
    return str(value.target) == "aten.full.default" and bool(value.args[1] == 0)


def _join(placements: tuple[Placement, ...]) -> str:
    return ", ".join(map(str, placements))
