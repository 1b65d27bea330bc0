"""Record what each pass did to the values of a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule

from passes.base import Observer, Pass, PassContext
from passes.ir.graph import Stage
from passes.ir.text import GAP, format_node


@dataclass(frozen=True)
class Touch:
    """One change of a node by a pass (added, changed or removed), or on the way to a stage if passes are not known."""

    pass_name: str  # or the stage's
    what: str  # "added", "changed" or "removed"
    node: str
    line: str  # of the graph's text after the pass; for a removed node, before it


@dataclass(frozen=True)
class History(Observer):
    """Observer that compares the lines of a graph's text before and after every pass.

    It stops at collectives: later, shapes are those of one device, and every line differs.
    """

    touches: list[Touch] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        if not self.lines:
            self.lines.update(_lines(gm, ctx))

    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        if not changed or pass_.gives > Stage.COLLECTIVE:
            return
        new = _lines(gm, ctx)
        self.touches.extend(touches_between(pass_.name, self.lines, new))
        self.lines.clear()
        self.lines.update(new)


def touches_between(name: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Touch]:
    """Yield what `name` did, by comparing the lines by node before and after it."""
    for node, line in new.items():
        if node not in old:
            yield Touch(name, "added", node, line)
        elif line != old[node]:
            yield Touch(name, "changed", node, line)
    yield from (Touch(name, "removed", node, line) for node, line in old.items() if node not in new)


def lines_of(text: str) -> dict[str, str]:
    """Return the lines of a graph's text by node, without comments."""
    lines = (line.partition(GAP)[0] for line in text.splitlines() if line.startswith("%"))
    return {line.partition(":")[0].removeprefix("%"): line for line in lines}


def _lines(gm: GraphModule, ctx: PassContext) -> dict[str, str]:
    return {node.name: format_node(node, ctx.mesh).partition(GAP)[0] for node in gm.graph.nodes if node.op != "output"}
