"""All decisions about one program, as data: what a user reads before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.report.table import format_plan
from autoshard.settings import Settings
from passes.base import Remark
from passes.errors import UserError
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.ir.plan import Collective, Cost, Search, Value


@dataclass(frozen=True)
class ShardingPlan:
    """What every value's layout is, which collectives run, and what a step costs.

    `graphs` holds the program as text, by stage name (`"CAPTURED"`, `"EXPLICIT"`, `"LOCAL"`, ...). Without hardware
    there is no `cost`; without a search (a recipe was asked for) no `search`.
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

    def __str__(self) -> str:
        return format_plan(self)

    def graph(self, stage: str) -> str:
        """The program at `stage`, in the text form. Raises UserError for a stage that was not kept."""
        if stage.upper() not in self.graphs:
            raise UserError(f"the plan has no graph at stage {stage!r}; stages are {', '.join(self.graphs)}")
        return self.graphs[stage.upper()]

    def count(self, kind: str, *, axis: str | None = None, backward: bool | None = None) -> int:
        """How many collectives of one kind there are, on one axis and in one direction if given."""
        chosen = [c for c in self.collectives if c.kind == kind and (axis is None or axis in c.axes)]
        return sum(backward is None or c.backward is backward for c in chosen)
