"""Base classes of passes and observers, and the context and remarks that passes share."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch.fx import GraphModule, Node

from passes.cost.program_memo import ProgramMemo
from passes.hardware.hardware import hardware_named
from passes.ir.graph import Origin, Stage, origin_of
from passes.ir.mesh import Mesh
from passes.ir.propagation_edges import Edge

NOMINAL = "h100"  # whose figures stand for those of devices that are not known


@dataclass(frozen=True)
class Pass(abc.ABC):
    """A rewrite of a graph, in place.

    `run` gets a graph that is valid at `takes`, leaves one that is valid at `gives`, and returns True iff it changed
    the graph. The same input gives the same output, on every rank.
    """

    name: ClassVar[str]  # the name of its file
    takes: ClassVar[Stage]
    gives: ClassVar[Stage]

    @abc.abstractmethod
    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Rewrite `gm`; return True iff it changed."""


@dataclass(frozen=True)
class Remark:
    """A decision of a pass, or the reason why it left a node alone."""

    pass_name: str
    text: str
    origin: Origin
    node: str
    routine: bool = False  # follows from a recipe or constraint; kept, but not shown at first sight

    def __str__(self) -> str:
        where = f"%{self.node}, {self.origin}" if str(self.origin) else f"%{self.node}"
        return f"{self.pass_name}: {self.text} [{where}]"


@dataclass(frozen=True)
class PassContext:
    """The state that all passes of one run share; passes append to `remarks` and `edges`."""

    mesh: Mesh
    unknown_ops: Literal["replicate", "error"] = "replicate"
    remarks: list[Remark] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)  # the propagation steps of placements, in order
    programs: ProgramMemo = field(default_factory=ProgramMemo)

    def remark(self, pass_: Pass, node: Node, text: str, *, routine: bool = False) -> None:
        """Record what `pass_` decided or declined for `node`."""
        self.remarks.append(Remark(pass_.name, text, origin_of(node), node.name, routine))

    def priced(self, pass_: Pass, gm: GraphModule) -> Mesh:
        """Return the mesh with its hardware's figures; if they are unknown, with those of `NOMINAL`, and add a
        remark."""
        if self.mesh.hardware is not None:
            return self.mesh
        first = next(iter(gm.graph.nodes))
        self.remark(pass_, first, f"the figures of this device are not known: ordered by those of {NOMINAL}", routine=True)
        return self.mesh.on(hardware_named(NOMINAL))


class Observer(abc.ABC):
    """A read-only callback around every pass."""

    @abc.abstractmethod
    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        """Look at the graph before each pass."""

    @abc.abstractmethod
    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        """Look at the graph after each pass, at the stage that it gives."""
