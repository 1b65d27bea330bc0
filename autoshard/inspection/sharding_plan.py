"""A plan as a user holds it: the record of all decisions, and the questions that it answers."""

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
from passes.errors import PlanError
from passes.hardware.hardware import Hardware
from passes.ir.mesh import Mesh


@dataclass(frozen=True, repr=False)
class ShardingPlan(PlanRecord):
    """A record that can be printed, questioned, compared, saved, and made again under other conditions.

    `state` is what the planner knows of the model; a plan that was loaded from a file, or that runs, has none.
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
        """Invert `to_json`. Raises PlanError that says what is damaged."""
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

    def explain(self, what: str) -> Explanation:
        """Explain `what`: a parameter (`"layers.0.wq.weight"`), a module, an input or output, a value or collective
        (`"%mm_1"`), or a source line (`"model.py:42"`). What was chosen; each alternative with what the whole step costs
        when all else is chosen for it; which constraints hold; what it took its placement from; the passes that touched it.

        Raises UserError for a name that the plan does not have, with those that are near.
        """
        return explain(self, what, self.state)

    def diff(self, other: PlanRecord) -> PlanDiff:
        """Compare with `other`: settings, time, memory, layouts, collectives; printed, a screen of text."""
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
        `memory_limit=`, `recipe=`, ...). The model is not captured again.

        A plan that has to be searched for is the first good one, in seconds; how much better another could be is in its
        `search`. With `prove`, as with a recipe, it is equal to what `plan(...)` gives for the same options. Its passes
        are dumped where `dump=` says. Raises PlanError for a plan that does not hold its model: one that was loaded, or
        that runs.
        """
        if self.state is None:
            raise PlanError(
                "this plan was loaded from a file, or runs, and does not hold the model that it was made for; make it again "
                "with autoshard.plan(model, mesh, args, options=...) and ask that one"
            )
        return ShardingPlan.of(*replanned(self.state, mesh, hardware, options, prove=prove))
