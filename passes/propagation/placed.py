"""The state of propagation: placements of results and operands, one axis after the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, GraphModule, Node

from passes.base import PassContext
from passes.ir.graph import (
    InputRole,
    is_reshard,
    operands,
    pins_of,
    placeholders,
    results_of,
    set_layouts,
    set_needs,
    tensor_of,
)
from passes.ir.layout import Layout, Placement, R, Shard, is_even, is_storable
from passes.ir.padding import CUT_END, PAD_END, padded_forms
from passes.rules.rule import Row, Space, space_of


def batches(graph: Graph) -> tuple[Node, ...]:
    """Return the inputs, and the padded forms of inputs that are split instead of them."""
    inputs = placeholders(graph, InputRole.INPUT)
    padded = [value for node in inputs for value in padded_forms(node)]
    return (*inputs, *(user for value in padded for user in value.users if is_reshard(user)))


class Placed:
    """Placements decided so far, axis by axis: those of each node's results, and those needed of its operands.

    Axes that split the inputs come first; later axes split the same dims further.
    """

    def __init__(self, gm: GraphModule, ctx: PassContext) -> None:
        self.gm, self.mesh = gm, ctx.mesh
        pins = [pin for node in batches(gm.graph) for pin in pins_of(node)]
        data = {pin.axis for pin in pins if isinstance(pin.placement, Shard)}
        self.order = sorted(range(ctx.mesh.ndim), key=lambda axis: axis not in data)
        self.results: dict[Node, list[tuple[Placement, ...]]] = {}
        self.needs: dict[Node, list[tuple[Placement, ...]]] = {}
        self._spaces: dict[Node, Space | None] = {}  # of calls, for all axes

    def allows(self, node: Node, row: Row) -> bool:
        """Return whether `row` on the next axis fits the digits that earlier axes already use."""
        needs, results = self.needs.get(node, []), self.results.get(node, [])
        for is_result, earlier, new in ((False, needs, row.operands), (True, results, row.results)):
            split = [i for i, placement in enumerate(new) if isinstance(placement, Shard)]
            values = (results_of(node) if is_result else operands(node)) if split else ()
            for i in split:
                value = values[i]
                tensor = tensor_of(value) if isinstance(value, Node) else value
                is_legal = is_storable if node.target is (CUT_END if is_result else PAD_END) else is_even
                layout = self._layout([*(placements[i] for placements in earlier), new[i]])
                if not is_legal(layout, tuple(tensor.shape), self.mesh):
                    return False
        return True

    def _layout(self, placements: Sequence[Placement]) -> Layout:
        found: list[Placement] = [R] * self.mesh.ndim
        for axis, placement in zip(self.order, placements, strict=False):
            found[axis] = placement
        return Layout(tuple(found))

    def decide(self, node: Node, needs: tuple[Placement, ...], results: tuple[Placement, ...]) -> None:
        self.needs.setdefault(node, []).append(needs)
        self.results.setdefault(node, []).append(results)

    def so_far(self, node: Node) -> Layout:
        """Return the layout of a value's first result, `R` on axes not decided yet."""
        return self._layout([results[0] for results in self.results.get(node, [])])

    def adopt(self, new: Node, source: Node) -> None:
        """Give `new`, a reshard of `source` for the current axis, the placements of `source` on earlier axes."""
        for results in self.results[source][:-1]:
            self.decide(new, results, results)

    def write(self) -> None:
        """Set the layouts and needed layouts of all nodes."""
        for node in self.gm.graph.nodes:
            if node in self.results:
                set_layouts(node, *(self._layout(p) for p in zip(*self.results[node], strict=True)))
            if node in self.needs and node.op != "placeholder":
                set_needs(node, tuple(self._layout(p) for p in zip(*self.needs[node], strict=True)))

    def space_of(self, node: Node) -> Space | None:
        """Return the index space of a call; None where no rule knows it."""
        if node not in self._spaces:
            self._spaces[node] = space_of(node)
        return self._spaces[node]
