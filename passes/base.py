"""What a pass is, what it is given, and what it says about what it did."""

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
    """One rewrite of a graph, in place.

    `run` is given a graph that is valid at `takes`, leaves one that is valid at `gives`, and returns True iff
    it changed the graph. The same graph in gives the same graph out, on every rank.
    """

    name: ClassVar[str]  # the name of its file
    takes: ClassVar[Stage]
    gives: ClassVar[Stage]

    @abc.abstractmethod
    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Rewrite `gm`; True iff it changed."""


@dataclass(frozen=True)
class Remark:
    """What a pass decided or declined, and for which node."""

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
    """What all passes of one run share. `remarks` and `edges` grow; the run owns them."""

    mesh: Mesh
    unknown_ops: Literal["replicate", "error"] = "replicate"
    remarks: list[Remark] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)  # how placements travelled, in the order in which they did
    programs: ProgramMemo = field(default_factory=ProgramMemo)

    def remark(self, pass_: Pass, node: Node, text: str, *, routine: bool = False) -> None:
        """Record what `pass_` decided or declined for `node`."""
        self.remarks.append(Remark(pass_.name, text, origin_of(node), node.name, routine))

    def priced(self, pass_: Pass, gm: GraphModule) -> Mesh:
        """The mesh with figures of its devices; those of `NOMINAL`, with a remark, where they are not known."""
        if self.mesh.hardware is not None:
            return self.mesh
        first = next(iter(gm.graph.nodes))
        self.remark(pass_, first, f"the figures of this device are not known: ordered by those of {NOMINAL}", routine=True)
        return self.mesh.on(hardware_named(NOMINAL))


class Observer(abc.ABC):
    """Looks at the graph around every pass; it does not change it."""

    @abc.abstractmethod
    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        """Called in front of each pass."""

    @abc.abstractmethod
    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        """Called behind each pass, at the stage that it gives."""
