"""Store all decisions about one program; `ShardingPlan` adds the methods that users call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.config.settings import Settings
from autoshard.config.validation import check_choice
from autoshard.plans.codec import encode
from autoshard.plans.collectives import Collective
from autoshard.plans.outcome import Cost, Recomputation, Search
from autoshard.plans.plan_values import Value
from passes.base import Remark
from passes.cost.simulate import Timeline
from passes.errors import UserError
from passes.ir.collectives.kind import KINDS
from passes.ir.folded_layers import Run
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.ir.propagation_edges import Edge
from passes.ir.text import GAP
from passes.ir.units import format_seconds
from passes.search.solution import Solution


@dataclass(frozen=True, repr=False)
class PlanRecord:
    """The layout of every value, the collectives that run, and the cost of a step.

    `graphs` holds the program as text, by stage name (`"CAPTURED"`, `"EXPLICIT"`, `"LOCAL"`, ...). There is a `cost`
    if a step was predicted: on known hardware, without passes of the user's own, and for a recipe on a CPU only if the
    user named it. There is a `search` if there was one. A solved plan has a `solution`: the layouts of every node, by
    the names of the graph in which repeated layers are folded. With a cost comes the `timeline` that it was computed
    from: every kernel and message of the step, and every buffer. `repeats` are the equal layers that the graphs from
    "PLACED" on leave out. `recomputation` is what the backward recomputes, if anything. `pads` says that
    dims may be padded, if axes do not divide them, and products with unequal parts split: those that `compute_axes` together
    do not divide. `padded_axes` split the batch, but do not divide that of this plan: the inputs are whole on them. `batch_axes`
    are those that the caller split the batch over before there was a plan (None: the plan was free to choose).
    """

    mesh: Mesh
    recipes: tuple[str | None, ...]
    parameters: Mapping[str, Value]
    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]
    layouts: Mapping[str, Layout]
    collectives: tuple[Collective, ...]
    remarks: tuple[Remark, ...]
    graphs: Mapping[str, str]
    settings: Settings
    cost: Cost | None = None
    search: Search | None = None
    solution: Solution | None = None
    timeline: Timeline | None = None
    repeats: tuple[Run, ...] = ()
    edges: tuple[Edge, ...] = ()
    recomputation: Recomputation | None = None
    pads: bool = True
    padded_axes: tuple[str, ...] = ()
    compute_axes: tuple[str, ...] = ()
    batch_axes: tuple[str, ...] | None = None

    @property
    def fingerprint(self) -> str:
        """Return a hash of what the plan was made for: the model's graph, names and shapes, the mesh's axes, and the
        settings.
        """
        values = {**self.parameters, **self.inputs, **self.outputs}
        shapes = [(name, value.shape, value.dtype) for name, value in values.items()]
        facts = [str(self.mesh), encode(self.settings), shapes, structure(self.graphs.get("CAPTURED", ""))]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def graph(self, stage: str) -> str:
        """Return the program at `stage`, in the text form. Raises UserError for a stage that was not kept."""
        if stage.upper() not in self.graphs:
            raise UserError(f"the plan has no graph at stage {stage!r}; stages are {', '.join(self.graphs)}")
        return self.graphs[stage.upper()]

    def count(self, kind: str, *, axis: str | None = None, backward: bool | None = None) -> int:
        """Count the collectives of one kind, on one axis and in one direction if given. Raises UserError for an unknown kind, and
        MeshError for an unknown axis."""
        known = [one.name for one in KINDS.values() if one.communicates]
        check_choice("plan.count", "kind", kind, known)
        if axis is not None:
            self.mesh.index(axis)
        chosen = [c for c in self.collectives if c.kind == kind and (axis is None or axis in c.axes)]
        return sum(backward is None or c.backward is backward for c in chosen)

    def __repr__(self) -> str:
        chosen = self.search.chosen if self.search else " x ".join(dict.fromkeys(filter(None, self.recipes))) or "no recipe"
        facts = [str(self.mesh), chosen, f"{len(self.parameters)} parameters", f"{len(self.collectives)} collectives"]
        facts += [format_seconds(self.cost.step_time)] if self.cost else []
        return f"{type(self).__name__}({', '.join(facts)})"


def structure(graph: str) -> list[str]:
    """Return the lines of a graph's text without the mesh and source lines, since a moved line does not change the
    program.
    """
    lines = (line.partition(f"{GAP}# ")[0] for line in graph.splitlines())
    return [line for line in lines if line.startswith(("%", "return", " "))]
