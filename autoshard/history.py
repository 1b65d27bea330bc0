"""What each pass did to the values of a program."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import GraphModule

from passes.base import Observer, Pass, PassContext
from passes.ir.graph import Stage
from passes.ir.text import GAP, format_node


@dataclass(frozen=True)
class Touch:
    """A pass made, changed or removed the node of this name."""

    pass_name: str
    what: str  # "added", "changed" or "removed"
    node: str
    line: str  # of the graph's text behind the pass; in front of it, for what was removed


@dataclass(frozen=True)
class History(Observer):
    """Compares the lines of a graph's text in front of every pass and behind it, up to collectives: after that, shapes are
    those of one device, and every line is another."""

    touches: list[Touch] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        if not self.lines:
            self.lines.update(_lines(gm, ctx))

    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        if not changed or pass_.gives > Stage.COLLECTIVE:
            return
        new = _lines(gm, ctx)
        for name, line in new.items():
            if name not in self.lines:
                self.touches.append(Touch(pass_.name, "added", name, line))
            elif line != self.lines[name]:
                self.touches.append(Touch(pass_.name, "changed", name, line))
        self.touches.extend(Touch(pass_.name, "removed", n, line) for n, line in self.lines.items() if n not in new)
        self.lines.clear()
        self.lines.update(new)


def _lines(gm: GraphModule, ctx: PassContext) -> dict[str, str]:
    return {node.name: format_node(node, ctx.mesh).partition(GAP)[0] for node in gm.graph.nodes if node.op != "output"}
