"""All decisions about one program, as data: what a user reads before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from autoshard.config.settings import Settings
from autoshard.inspection.difference import PlanDiff, difference
from autoshard.inspection.explanation import Explanation, explain
from autoshard.inspection.replan import Basis
from autoshard.inspection.report.page import format_page
from autoshard.inspection.report.table import format_html, format_plan
from autoshard.inspection.report.trace import format_trace
from autoshard.plans.codec import UNSAVED, encode
from autoshard.plans.collectives import Collective
from autoshard.plans.compatibility import structure
from autoshard.plans.outcome import Cost, Recomputation, Search
from autoshard.plans.plan_file import dump_plan, parse_plan, read_text, write_text
from autoshard.plans.values import Value
from passes.base import Remark
from passes.cost.simulate import Timeline
from passes.errors import PlanError, UserError
from passes.hardware.hardware import Hardware
from passes.ir.edges import Edge
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.ir.repeats import Run
from passes.search.solution import Solution


@dataclass(frozen=True)
class ShardingPlan:
    """What every value's layout is, which collectives run, and what a step costs.

    `graphs` holds the program as text, by stage name (`"CAPTURED"`, `"EXPLICIT"`, `"LOCAL"`, ...). There is a `cost`
    where a step was predicted: where the hardware is known and passes are not the user's own; of a recipe that runs on a
    CPU, where that was named. There is a `search` where there was one. A solved plan has a `solution`: the layouts of every
    node, by the names of the graph in which repeated layers are folded. Beside a cost stands the `timeline` that
    it was read off: every kernel and message of the step, and every buffer. `repeats` are the equal layers that the
    graphs from "PLACED" on leave out. `recomputation` is what the backward computes again, if anything.
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
    basis: Basis | None = field(default=None, compare=False, repr=False, metadata=UNSAVED)

    @property
    def fingerprint(self) -> str:
        """Of what the plan was made for: the model's graph, names and shapes, the mesh's axes, and the settings."""
        values = {**self.parameters, **self.inputs, **self.outputs}
        shapes = [(name, value.shape, value.dtype) for name, value in values.items()]
        facts = [str(self.mesh), encode(self.settings), shapes, structure(self.graphs.get("CAPTURED", ""))]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan as text in the form of a plan file; `from_json` gives an equal plan."""
        return dump_plan(self)

    @staticmethod
    def from_json(text: str) -> ShardingPlan:
        """Inverse of `to_json`. Raises PlanError that says what is damaged."""
        return parse_plan(ShardingPlan, text)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a plan file, as a whole or not at all. Raises PlanError where it cannot be written."""
        write_text(Path(path), self.to_json())

    @staticmethod
    def load(path: str | PathLike[str]) -> ShardingPlan:
        """Read a plan file. Raises PlanError that says what is damaged."""
        return parse_plan(ShardingPlan, read_text(Path(path)), source=f"the plan {path}")

    def __str__(self) -> str:
        return format_plan(self)

    def _repr_html_(self) -> str:
        return format_html(self)

    def to_trace(self, path: str | PathLike[str]) -> None:
        """Write the simulated step for https://ui.perfetto.dev or chrome://tracing.

        Raises UserError for a plan without one, PlanError where the file cannot be written.
        """
        write_text(Path(path), format_trace(self))

    def to_html(self, path: str | PathLike[str]) -> None:
        """Write the plan as one page that needs no network: modules, layouts, timeline, memory, roofline, graphs.

        Without a simulated step, timeline, memory and roofline say so. Raises PlanError where it cannot be written.
        """
        write_text(Path(path), format_page(self))

    def graph(self, stage: str) -> str:
        """The program at `stage`, in the text form. Raises UserError for a stage that was not kept."""
        if stage.upper() not in self.graphs:
            raise UserError(f"the plan has no graph at stage {stage!r}; stages are {', '.join(self.graphs)}")
        return self.graphs[stage.upper()]

    def count(self, kind: str, *, axis: str | None = None, backward: bool | None = None) -> int:
        """How many collectives of one kind there are, on one axis and in one direction if given."""
        chosen = [c for c in self.collectives if c.kind == kind and (axis is None or axis in c.axes)]
        return sum(backward is None or c.backward is backward for c in chosen)

    def explain(self, what: str) -> Explanation:
        """Why `what` is as it is: a parameter (`"layers.0.wq.weight"`), a module, an input or output, a value or collective
        (`"%mm_1"`), or a source line (`"model.py:42"`). What was chosen; each alternative with what the whole step costs
        when all else is chosen for it; who insisted; what it took its placement from; the passes that touched it.

        Raises UserError for a name that the plan does not have, with those that are near.
        """
        return explain(self, what)

    def diff(self, other: ShardingPlan) -> PlanDiff:
        """What is different in `other`: settings, time, memory, layouts, collectives; printed, a screen of text."""
        return difference(self, other)

    def replan(
        self,
        *,
        mesh: Mesh | DeviceMesh | str | None = None,
        hardware: str | Hardware | None = None,
        prove: bool = False,
        **options: Any,
    ) -> ShardingPlan:
        """What if: the plan of the same model on another mesh, on other hardware, or with other fields of `Options`
        (`params=`, `memory_limit=`, `recipe=`, ...). The model is not captured again.

        A plan that has to be searched for is the first good one, in seconds; how much better another could be is in its
        `search`. With `prove`, as with a recipe, it is equal to what `plan(...)` gives when asked for the same. Its passes
        are dumped where `dump=` says. Raises PlanError for a plan that does not hold its model: one that was loaded, or
        that runs.
        """
        if self.basis is None:
            raise PlanError(
                "this plan was loaded from a file, or runs, and does not hold the model that it was made for; make it again "
                "with autoshard.plan(model, mesh, args, options=...) and ask that one"
            )
        return self.basis.changed(mesh, hardware, options, prove=prove)
