"""The state of propagation on one mesh axis."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from passes.base import Pass, PassContext
from passes.ir.graph import InputRole, pins_of, placeholders, tensor_of
from passes.ir.layout import Placement, R, Shard, is_even, is_storable, next_digit
from passes.ir.padding import PAD_END
from passes.ir.propagation_edges import Edge
from passes.propagation.placed import Placed
from passes.recipes.weights import weights_of


class Axis:
    """The placements that one axis has given so far, and the pins on it."""

    def __init__(self, owner: Pass, gm: GraphModule, ctx: PassContext, placed: Placed, number: int) -> None:
        self.owner, self.gm, self.ctx, self.placed, self.number = owner, gm, ctx, placed, number
        self.name, self.size = ctx.mesh.names[number], ctx.mesh.sizes[number]
        self.weights = weights_of(gm.graph)
        self.at: dict[Node, tuple[Placement, ...]] = {}  # placements of results on this axis
        self.is_data = any(isinstance(self.pinned(n), Shard) for n in placeholders(gm.graph, InputRole.INPUT))

    def of(self, value: Node) -> Placement:
        """Return the placement of a value, or of the first result of a call."""
        return self.at[value][0]

    def give(self, node: Node, needs: tuple[Placement, ...], results: tuple[Placement, ...]) -> None:
        self.at[node] = results
        self.placed.decide(node, needs, results)

    def pinned(self, node: Node) -> Placement | None:
        return next((pin.placement for pin in pins_of(node) if pin.axis == self.number), None)

    def pinned_by(self, node: Node) -> str:
        """Return the reason of the pin of `node`; empty if it has none."""
        return next((pin.reason for pin in pins_of(node) if pin.axis == self.number), "")

    def fits(self, node: Node, placement: Placement) -> bool:
        """Return whether `placement` can join those of `node` on earlier axes."""
        layout = self.placed.so_far(node).with_on(self.number, placement)
        is_legal = is_storable if any(user.target is PAD_END for user in node.users) else is_even
        return is_legal(layout, tuple(tensor_of(node).shape), self.ctx.mesh)

    def fitted(self, node: Node, pinned: Placement) -> Placement:
        """Return `pinned`, or the digit of its dim inside those that other axes already shard; `R` if neither fits."""
        if not isinstance(pinned, Shard) or self.fits(node, pinned):
            return pinned
        inside = next_digit(self.placed.so_far(node), pinned.dim, self.ctx.mesh, mirror=pinned.mirror > 0)
        if self.fits(node, inside):
            return inside
        self.remark(node, f"{pinned} does not fit beside what other axes shard; left whole")
        return R

    def remark(self, node: Node, text: str, *, routine: bool = False) -> None:
        self.ctx.remark(self.owner, node, f"on {self.name}: {text}", routine=routine)

    def log(self, node: Node, source: Node | None, why: str) -> None:
        """Record the source of a placement, unless it is `R` by default."""
        pinned_by = self.pinned_by(node)
        for placement in self.at[node][:1]:
            if why and (placement != R or pinned_by):
                name = "" if source is None or pinned_by else source.name
                self.ctx.edges.append(Edge(node.name, self.name, str(placement), name, why))
