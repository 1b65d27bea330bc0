"""Evaluate a candidate plan: make its per-device program from a folded graph, and simulate it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from typing import Any

from torch.fx import GraphModule

from autoshard.capture.garbage import uncollected
from autoshard.capture.shallow import shallow_graph
from autoshard.config.progress import Progress, silent
from autoshard.phases import Passes, Phases
from autoshard.planner.chunking import Chunking
from autoshard.planner.effort import Effort
from autoshard.planner.prediction import cost_of
from autoshard.planner.problem import Problem, Recipes
from autoshard.planner.recomputation import Settling
from autoshard.plans.collectives import collectives_of, sends_of, with_remade
from autoshard.plans.outcome import Cost, Recomputation
from autoshard.plans.plan_values import inputs_of, layouts_by_name, results_by_name
from passes.base import Observer, Pass, PassContext, Remark
from passes.cost.program import Program
from passes.cost.simulate import Timeline, simulate
from passes.errors import UnlikeLayersError
from passes.fold import Fold
from passes.ir.folded_layers import Repeats
from passes.ir.graph import InputRole, OutputRole, Stage, copy_graph, origin_of, repeats_of, tensor_of
from passes.ir.layout import local_shape
from passes.ir.mesh import Mesh
from passes.ir.numbering import numbered
from passes.ir.propagation_edges import Edge
from passes.ir.text import format_graph, format_type
from passes.ir.units import format_bytes
from passes.localize import Localize
from passes.manager import PassManager
from passes.normalize import Normalize
from passes.observers import Logger
from passes.pad import Pad
from passes.propagate import Propagate
from passes.rematerialize import Rematerialize
from passes.search.model.axis_groups import AxisGroups
from passes.search.model.unit_costs import Hiding
from passes.search.prepared import Prepared
from passes.search.solution import Solution
from passes.seed import Seed
from passes.solve import Solve

PreparedKey = tuple[Seed, Mesh, AxisGroups, str | None, Hiding]  # the second last is the optimizer
MARGIN = 1  # layers kept at each end: saved values and fusions differ next to a first or last layer that is unlike the others


@dataclass(frozen=True)
class Folded:
    """The captured graph, normalized, without its repeated layers.

    `placed` and `prepared` cache the results of searches: layouts propagated from a `Seed`, and the solver's problem
    by `PreparedKey`. The next search, for another memory limit or other hardware, starts from them. `others` are the graph with
    other dims padded.
    """

    graph: GraphModule
    repeats: Repeats
    remarks: tuple[Remark, ...]
    text: str
    pad: Pad  # by which it was padded
    placed: dict[Seed, GraphModule] = field(default_factory=dict, compare=False, repr=False)
    prepared: dict[PreparedKey, Prepared] = field(default_factory=dict, compare=False, repr=False)
    others: dict[Pad, Folded] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_padded(self) -> bool:
        """Return whether some dims are longer than in the model."""
        return any(remark.pass_name == Pad.name for remark in self.remarks)

    @property
    def is_split(self) -> bool:
        """Return whether some products of the model are several here."""
        return any(remark.pass_name == Normalize.name for remark in self.remarks)


def fold(problem: Problem, *, whole: bool = False, progress: Progress = silent) -> Folded:
    """Return the graph that candidates are evaluated on.

    With `whole`, the whole captured graph is traced, as the caller needs it too, and folded; otherwise only the layers
    that are kept are traced.
    """
    how, phases = equal_layers(problem, margin=MARGIN), Phases(pad=problem.pad)
    if whole:
        return _normalized(problem, phases.prepare_folded(how))
    with uncollected():
        ctx = PassContext(problem.mesh)
        gm = shallow_graph(problem.captured, phases.prepare_folded(how), how, ctx, progress)
    return _normalized(problem, phases.prepare_folded(how)) if gm is None else _folded(problem, gm, ctx)


def folded_as(problem: Problem, folded: Folded) -> Folded:
    """Return the folded graph of `problem`, given that of the same model and mesh with other dims padded."""
    pad = problem.pad
    if _is_padded_by(folded, pad):
        return folded
    if pad not in folded.others:
        folded.others[pad] = replace(fold(problem), others=folded.others)
        folded.others[folded.pad] = folded
    return folded.others[pad]


def _is_padded_by(folded: Folded, pad: Pad) -> bool:
    """Return whether the graph surely is the one that `pad` gives."""
    parts = zip(astuple(pad), astuple(folded.pad), strict=True)
    is_plain = not (folded.is_padded or folded.is_split)
    return pad == folded.pad or (is_plain and all(one in (1, other) for one, other in parts))


def prepared(problem: Problem) -> Folded:
    """Return the captured graph as passes take it, with the layers that it has."""
    return _normalized(problem, Phases(pad=problem.pad).prepare)


def equal_layers(problem: Problem, *, margin: int = 0) -> Fold:
    """Return the pass that folds layers which are equal in the model and to the user's constraints."""
    return Fold(_tags(problem), margin=margin)


def refold(problem: Problem, before: Problem, folded: Folded) -> Folded | None:
    """Return `folded`, made for `before`, for another mesh or other options.

    Returns None if different layers may be equal now, since constraints on their parameters changed, or on another mesh, other
    dims are padded.
    """
    if _tags(problem) != _tags(before) and not (_is_said_of_all(problem) and _is_said_of_all(before)):
        return None
    if str(problem.mesh) == str(before.mesh) and problem.mesh.ranks == before.mesh.ranks:
        return folded_as(problem, folded)
    if not _is_padded_by(folded, problem.pad):
        return None
    return replace(folded, text=format_graph(folded.graph, problem.mesh), placed={}, others={})


def _tags(problem: Problem) -> tuple[tuple[str, str], ...]:
    """Return the constraints on parameters as text; layers with different ones are not equal."""
    constrained = [(one.name, f"{one.axis}:{one.placement}") for one in problem.parameter_constraints()]
    stored = [(name, layout.format(problem.mesh)) for name, layout in problem.stored.items()]
    return (*constrained, *stored)


def _is_said_of_all(problem: Problem) -> bool:
    """Return whether parameters whose names differ in numbers only all have the same constraints."""
    by_name: dict[str, list[str]] = {}
    for name, tag in _tags(problem):
        by_name.setdefault(name, []).append(tag)
    alike: dict[str, set[tuple[str, ...]]] = {}
    for name in problem.captured.parameters:
        alike.setdefault(re.sub(r"\d+", "#", name), set()).add(tuple(by_name.get(name, ())))
    return all(len(tags) == 1 for tags in alike.values())


@uncollected()
def _normalized(problem: Problem, passes: Passes) -> Folded:
    gm, ctx = copy_graph(problem.captured.graph_module), PassContext(problem.mesh)
    PassManager(passes).run(gm, ctx)
    return _folded(problem, gm, ctx)


@uncollected()
def _folded(problem: Problem, gm: GraphModule, ctx: PassContext) -> Folded:
    gm = numbered(gm) if repeats_of(gm).runs else gm
    return Folded(gm, repeats_of(gm), tuple(ctx.remarks), format_graph(gm, problem.mesh), problem.pad)


@dataclass(frozen=True)
class Evaluation:
    """A candidate's program and its simulated step.

    `facts` are fields of a plan by name, for the graph of `folded`; `chunking` can still shorten the `timeline`, whose tasks are
    those of `lowered` in a better order.
    """

    folded: Folded
    recipes: Recipes
    solution: Solution | None  # None: of a recipe
    facts: Mapping[str, Any]
    graphs: Mapping[str, str]
    remarks: tuple[Remark, ...]
    edges: tuple[Edge, ...]
    timeline: Timeline
    lowered: Program
    recomputation: Recomputation | None = None
    chunking: Chunking | None = None

    @property
    def least_time(self) -> float:
        """Return a lower bound, in seconds, of the step with messages in chunks."""
        return self.timeline.step_time - (self.chunking.could_save if self.chunking is not None else 0.0)

    @property
    def freed(self) -> int:
        """Return the bytes that recomputation frees."""
        return (self.recomputation.freed or 0) if self.recomputation is not None else 0

    @property
    def cost(self) -> Cost:
        return cost_of(self.timeline)

    @cached_property
    def least_memory(self) -> int:
        """Return the bytes that the step needs at its peak; a better order may take more, where there is more."""
        return min(self.timeline.peak_memory, simulate(self.lowered).peak_memory)

    def largest(self, mesh: Mesh, most: int = 2) -> tuple[str, ...]:
        """Return the source lines of the largest values, with their sizes on a device."""
        layouts, found = self.facts["layouts"], dict[str, tuple[int, str]]()
        for node in self.folded.graph.graph.nodes:
            if node.op == "call_function" and node.name in layouts and str(origin_of(node)):
                tensor = tensor_of(node)
                count = math.prod(local_shape(layouts[node.name], tensor.shape, mesh)) * tensor.element_size()
                key = str(origin_of(node))
                found[key] = max(found.get(key, (0, "")), (count, format_type(tensor)))
        ordered = sorted(found.items(), key=lambda item: -item[1][0])
        return tuple(f"{place}: {kind}, {format_bytes(count)} on a device" for place, (count, kind) in ordered[:most])


def evaluate(
    problem: Problem,
    folded: Folded,
    recipes: Recipes,
    solution: Solution | None = None,
    *,
    effort: Effort,
    worst: float = float("inf"),
) -> Evaluation:
    """Run the pipeline on a copy of `folded`, and simulate the resulting program with all layers.

    Messages are bucketed after the layers are unrolled, so that equal layers stay equal until then. If they are not
    equal (a recipe may lay out every other one alike), all layers are planned. For a step slower than `worst`, the
    program is not made to fit into memory, and if it is much slower, fewer orders are tried. Raises SlowerError if it is
    proven to be slower before it is simulated.
    """
    try:
        with uncollected():
            return _evaluated(problem, folded, recipes, solution, worst, effort=effort)
    except UnlikeLayersError as error:
        return _evaluated_whole(problem, folded, recipes, solution, worst, error, effort=effort)


def in_chunks(problem: Problem, one: Evaluation) -> Evaluation:
    """Return the evaluation with messages in chunks, as the program will be compiled."""
    if one.chunking is None:
        return one
    try:
        with uncollected():
            timeline, remarks = one.chunking.run()
        return replace(one, timeline=timeline, chunking=None, remarks=(*one.remarks, *remarks))
    except UnlikeLayersError as error:
        worst, effort = float("inf"), one.chunking.effort
        whole = _evaluated_whole(problem, one.folded, one.recipes, one.solution, worst, error, effort=effort)
        return in_chunks(problem, whole)


def _evaluated_whole(
    problem: Problem,
    folded: Folded,
    recipes: Recipes,
    solution: Solution | None,
    worst: float,
    error: UnlikeLayersError,
    *,
    effort: Effort,
) -> Evaluation:
    """Evaluate all layers, since those that are equal in the model are not in the program.

    `folded` may be traced from few layers, so that it does not name the nodes of the others.
    """
    expanded = None if solution is None else solution.expanded(fold(problem, whole=True).repeats)
    whole, layers = prepared(problem), folded.remarks[-1]
    remark = Remark("fold", f"all layers are planned: {error}", layers.origin, layers.node)
    return _evaluated(problem, replace(whole, remarks=(remark,)), recipes, expanded, worst, effort=effort)


def _evaluated(
    problem: Problem, folded: Folded, recipes: Recipes, solution: Solution | None, worst: float, *, effort: Effort
) -> Evaluation:
    gm, ctx = copy_graph(folded.graph), PassContext(problem.mesh, unknown_ops=problem.options.unknown_ops)
    phases = phases_of(problem, gm, recipes, solution)
    passes = (*phases.place, *phases.lower)
    recorder = Recorder(passes)
    PassManager(passes, (recorder, Logger())).run(gm, ctx)
    trial = Settling(problem, folded.repeats, gm, worst, effort).settle()
    PassManager(replace(phases, kept=trial.kept).rematerialize, (recorder,)).run(gm, ctx)
    chunking = Chunking(problem, folded.repeats, trial, effort)
    return Evaluation(
        folded,
        recipes,
        solution,
        recorder.facts,
        recorder.graphs,
        tuple(ctx.remarks),
        tuple(ctx.edges),
        trial.timeline,
        trial.program,
        trial.recomputation,
        chunking if chunking.could_save else None,
    )


def phases_of(
    problem: Problem,
    gm: GraphModule,
    recipes: Recipes,
    solution: Solution | None = None,
    recomputation: Recomputation | None = None,
) -> Phases:
    """Return the passes that make a candidate's program from `gm`, with `recomputation` if that is known."""
    choose = Propagate() if solution is None else Solve(solution=solution)
    kept = None if recomputation is None else recomputation.kept
    return Phases(problem.seed(gm, recipes), problem.cast, choose, kept, problem.pad)


def seeded(problem: Problem, folded: Folded, recipes: Recipes) -> GraphModule:
    """Return a copy of `folded` with pins and casts, as a search starts from."""
    gm = copy_graph(folded.graph)
    PassManager(phases_of(problem, gm, recipes).constrain).run(gm, PassContext(problem.mesh))
    return gm


@dataclass(frozen=True)
class Recorder(Observer):
    """Observer that reads a plan's facts off the graph while shapes are global, and keeps the text of each later
    stage.
    """

    passes: tuple[Pass, ...]
    graphs: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        """Do nothing: facts are read after a pass."""

    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        last = [one for one in self.passes if one.gives is pass_.gives][-1]
        if (pass_ is last or pass_.name == Rematerialize.name) and pass_.gives is not Stage.CAPTURED:
            self.graphs[pass_.gives.name] = format_graph(gm, ctx.mesh)
        if pass_.gives is Stage.COLLECTIVE:
            self.facts.update(
                parameters=inputs_of(gm, InputRole.PARAMETER),
                inputs=inputs_of(gm, InputRole.INPUT),
                outputs=results_by_name(gm, OutputRole.OUTPUT),
                layouts=layouts_by_name(gm),
                collectives=collectives_of(gm, ctx.mesh),
            )
        if pass_.name == Localize.name:
            self.facts["collectives"] = (*self.facts["collectives"], *sends_of(gm, ctx.mesh))
        if pass_.name == Rematerialize.name and changed:
            self.facts["collectives"] = with_remade(self.facts["collectives"], gm)
