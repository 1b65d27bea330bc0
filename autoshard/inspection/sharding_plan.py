"""The plan that a user holds: the record of all decisions, with methods to print, explain, compare and save it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from autoshard.inspection.difference import PlanDiff, difference
from autoshard.inspection.explanation import Explanation, explain
from autoshard.inspection.replan import replanned
from autoshard.inspection.report.html_page import format_page
from autoshard.inspection.report.table import format_html, format_plan
from autoshard.inspection.report.trace import format_trace
from autoshard.planner.state import PlanningState
from autoshard.plans.codec import UNSAVED
from autoshard.plans.plan_file import dump_plan, parse_plan, read_text, write_text
from autoshard.plans.record import PlanRecord
from passes.errors import PlanError, UserError
from passes.hardware.hardware import Hardware
from passes.ir.mesh import Mesh


@dataclass(frozen=True, repr=False)
class ShardingPlan(PlanRecord):
    """A plan that can be printed, explained, compared, saved, and made again under other conditions.

    `state` is the planner's knowledge of the model; a plan that was loaded from a file, or that runs, has none.
    """

    state: PlanningState | None = field(default=None, compare=False, metadata=UNSAVED)

    @staticmethod
    def of(record: PlanRecord, state: PlanningState | None = None) -> ShardingPlan:
        """Return the plan with the decisions of `record`."""
        return ShardingPlan(**{one.name: getattr(record, one.name) for one in fields(PlanRecord)}, state=state)

    def to_json(self) -> str:
        """Return the plan as the text of a plan file; `from_json` gives an equal plan."""
        return dump_plan(self)

    @staticmethod
    def from_json(text: str) -> ShardingPlan:
        """Parse the text of `to_json`. Raises PlanError that says what is damaged."""
        return parse_plan(ShardingPlan, text)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a plan file atomically. Raises PlanError if it cannot be written."""
        write_text(Path(path), self.to_json())

    @staticmethod
    def load(path: str | PathLike[str]) -> ShardingPlan:
        """Read a plan file. Raises PlanError that says what is damaged."""
        if not str(path):
            raise PlanError("the plan has no path, but an empty text; give the path that it was saved to")
        return parse_plan(ShardingPlan, read_text(Path(path)), source=f"the plan {path}")

    def __str__(self) -> str:
        return format_plan(self)

    def _repr_html_(self) -> str:
        return format_html(self)

    def to_trace(self, path: str | PathLike[str]) -> None:
        """Write the simulated step for https://ui.perfetto.dev or chrome://tracing.

        Raises UserError for a plan without one, PlanError if the file cannot be written.
        """
        write_text(Path(path), format_trace(self))

    def to_html(self, path: str | PathLike[str]) -> None:
        """Write the plan as one page that needs no network: modules, layouts, timeline, memory, roofline, graphs.

        If no step was simulated, timeline, memory and roofline say so. Raises PlanError if the file cannot be written.
        """
        write_text(Path(path), format_page(self))

    def explain(self, what: str) -> Explanation:
        """Explain a parameter (`"layers.0.wq.weight"`), a module, an input or output, a value or collective
        (`"%mm_1"`), or a source line (`"model.py:42"`). A name that a parameter and an input have is the parameter's;
        `"input:scale"` is the input.

        The explanation has the chosen layout; each alternative with the predicted step when everything else is chosen
        to suit it; the constraints on it; where its placement came from; and the passes that changed it.

        Raises UserError for a name that the plan does not have, with similar names.
        """
        return explain(self, what, self.state)

    def diff(self, other: PlanRecord) -> PlanDiff:
        """Compare with `other`: settings, time, memory, layouts, collectives; about a screen of text when printed.

        Raises UserError for what is no plan.
        """
        if not isinstance(other, PlanRecord):
            raise UserError(f"plan.diff takes a plan, not {type(other).__name__}; ShardingPlan.load(path) reads a saved one")
        return difference(self, other)

    def replan(
        self,
        *,
        mesh: Mesh | DeviceMesh | str | None = None,
        hardware: str | Hardware | None = None,
        prove: bool = False,
        **options: Any,
    ) -> ShardingPlan:
        """Plan the same model on another mesh, on other hardware, or with other fields of `Options` (`params=`,
        `memory_limit=`, `recipe=`, ...), without capturing it again.

        If the plan has to be searched for, the first good one is returned after seconds, or this plan if that is faster and
        still fits; its `search` says how much better another could be. With `prove`, or with a recipe, it equals the result
        of `plan(...)` with the same options. Its passes are dumped only if `dump=` is given. Raises PlanError for a plan
        that does not hold its model: one that was loaded, or that runs.
        """
        if self.state is None:
            raise PlanError(
                "this plan was loaded from a file, or runs, and does not hold the model that it was made for; make it again "
                "with autoshard.plan(model, mesh, args, options=...) and ask that one"
            )
        return ShardingPlan.of(*replanned(self, self.state, mesh, hardware, options, prove=prove))
