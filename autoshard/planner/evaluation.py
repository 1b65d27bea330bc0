"""What a candidate plan would cost: its per-device program, made of a folded graph and run by the simulator."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
from autoshard.plans.collectives import collectives_of, with_remade
from autoshard.plans.outcome import Cost, Recomputation
from autoshard.plans.plan_values import inputs_of, layouts_by_name, results_by_name
from passes.base import Observer, Pass, PassContext, Remark
from passes.cost.simulate import Timeline
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
from passes.manager import PassManager
from passes.observers import Logger
from passes.propagate import Propagate
from passes.rematerialize import Rematerialize
from passes.search.model.axis_groups import AxisGroups
from passes.search.prepared import Prepared
from passes.search.solution import Solution
from passes.seed import Seed
from passes.solve import Solve

MARGIN = 1  # what the partitioner saves, and what is fused, differs next to a first or last layer that is unlike the others


@dataclass(frozen=True)
class Folded:
    """The captured graph, normalized, with its repeated layers left out.

    `placed` and `prepared` are what searches found out about it: layouts as a `Seed` propagates to, and the solver's problem
    by seed, mesh and groups of its axes. The next search, for another memory limit or other hardware, takes them from here.
    """

    graph: GraphModule
    repeats: Repeats
    remarks: tuple[Remark, ...]
    text: str
    placed: dict[Seed, GraphModule] = field(default_factory=dict, compare=False, repr=False)
    prepared: dict[tuple[Seed, Mesh, AxisGroups], Prepared] = field(default_factory=dict, compare=False, repr=False)


def fold(problem: Problem, *, whole: bool = False, progress: Progress = silent) -> Folded:
    """The graph that candidates are evaluated on: the captured one folded, if that is needed as a `whole` as well;
    otherwise no more than the layers that are kept is traced."""
    how, phases = Fold(_tags(problem), margin=MARGIN), Phases()
    if whole:
        return _normalized(problem, phases.prepare_folded(how))
    with uncollected():
        ctx = PassContext(problem.mesh)
        gm = shallow_graph(problem.captured, how, ctx, progress)
    return _normalized(problem, phases.prepare_folded(how)) if gm is None else _folded(problem, gm, ctx)


def refold(problem: Problem, before: Problem, folded: Folded) -> Folded | None:
    """`folded`, made for `before`, for another mesh or other options; None where other layers may be equal, as something
    else is said of their parameters."""
    if _tags(problem) != _tags(before) and not (_is_said_of_all(problem) and _is_said_of_all(before)):
        return None
    if str(problem.mesh) == str(before.mesh) and problem.mesh.ranks == before.mesh.ranks:
        return folded
    return replace(folded, text=format_graph(folded.graph, problem.mesh), placed={})


def _tags(problem: Problem) -> tuple[tuple[str, str], ...]:
    """Return what is said of parameters: layers of which something else is said are not equal."""
    constrained = [(one.name, f"{one.axis}:{one.placement}") for one in problem.parameter_constraints()]
    stored = [(name, layout.format(problem.mesh)) for name, layout in problem.stored.items()]
    return (*constrained, *stored)


def _is_said_of_all(problem: Problem) -> bool:
    """Return whether what is said of a parameter is said of all whose names differ from its in numbers alone."""
    said: dict[str, list[str]] = {}
    for name, tag in _tags(problem):
        said.setdefault(name, []).append(tag)
    alike: dict[str, set[tuple[str, ...]]] = {}
    for name in problem.captured.parameters:
        alike.setdefault(re.sub(r"\d+", "#", name), set()).add(tuple(said.get(name, ())))
    return all(len(tags) == 1 for tags in alike.values())


def _normalized(problem: Problem, passes: Passes) -> Folded:
    with uncollected():
        gm, ctx = copy_graph(problem.captured.graph_module), PassContext(problem.mesh)
        PassManager(passes).run(gm, ctx)
    return _folded(problem, gm, ctx)


def _folded(problem: Problem, gm: GraphModule, ctx: PassContext) -> Folded:
    gm = numbered(gm) if repeats_of(gm).runs else gm
    return Folded(gm, repeats_of(gm), tuple(ctx.remarks), format_graph(gm, problem.mesh))


@dataclass(frozen=True)
class Evaluation:
    """A candidate's program and how it runs. `facts` are of the graph of `folded`, by the names of a plan's fields;
    `chunking` says what could be saved in the `timeline` yet."""

    folded: Folded
    recipes: Recipes
    solution: Solution | None  # None: a recipe's
    facts: Mapping[str, Any]
    graphs: Mapping[str, str]
    remarks: tuple[Remark, ...]
    edges: tuple[Edge, ...]
    timeline: Timeline
    recomputation: Recomputation | None = None
    chunking: Chunking | None = None

    @property
    def least_time(self) -> float:
        """Seconds of the step in chunks, at least."""
        return self.timeline.step_time - (self.chunking.could_save if self.chunking is not None else 0.0)

    @property
    def freed(self) -> int:
        """Bytes of what is computed again rather than kept."""
        return (self.recomputation.freed or 0) if self.recomputation is not None else 0

    @property
    def cost(self) -> Cost:
        return cost_of(self.timeline)

    def largest(self, mesh: Mesh, most: int = 2) -> tuple[str, ...]:
        """The lines that make the largest values, and how large those are on a device."""
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
    """Run the pipeline on a copy of `folded`, and simulate what comes of it for all layers.

    Messages are joined in the program of all layers, so that those of equal layers stay equal until then. Where
    they are not (a recipe may lay out every other one alike), all layers are planned. A step slower than `worst` is not
    made to fit into memory, and where it is much slower, not all orders are tried.
    """
    try:
        with uncollected():
            return _evaluated(problem, folded, recipes, solution, worst, effort=effort)
    except UnlikeLayersError as error:
        return _evaluated_whole(problem, folded, recipes, solution, worst, error, effort=effort)


def in_chunks(problem: Problem, one: Evaluation) -> Evaluation:
    """Return the evaluation with messages in chunks, as far as the program will be compiled so."""
    if one.chunking is None:
        return one
    try:
        with uncollected():
            timeline, remarks = one.chunking.run()
        return replace(one, timeline=timeline, chunking=None, remarks=(*one.remarks, *remarks))
    except UnlikeLayersError as error:
        worst, effort = one.timeline.step_time, one.chunking.effort
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
    """Plan all layers, as equal ones are not equal in the program."""
    expanded = None if solution is None else solution.expanded(folded.repeats)
    whole, layers = _normalized(problem, Phases().prepare), folded.remarks[-1]
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
        trial.recomputation,
        chunking if chunking.could_save else None,  # of others the program need not be kept
    )


def phases_of(
    problem: Problem,
    gm: GraphModule,
    recipes: Recipes,
    solution: Solution | None = None,
    recomputation: Recomputation | None = None,
) -> Phases:
    """Return the passes that make the program of a candidate of `gm`, with what is computed again in it if that is known."""
    choose = Propagate() if solution is None else Solve(solution=solution)
    return Phases(problem.seed(gm, recipes), problem.cast, choose, None if recomputation is None else recomputation.kept)


def seeded(problem: Problem, folded: Folded, recipes: Recipes) -> GraphModule:
    """A copy of `folded` with pins and casts, as the search is given it."""
    gm = copy_graph(folded.graph)
    PassManager(phases_of(problem, gm, recipes).constrain).run(gm, PassContext(problem.mesh))
    return gm


@dataclass(frozen=True)
class Recorder(Observer):
    """Reads a plan's facts off the graph while shapes are global, and keeps the text of each stage after capture."""

    passes: tuple[Pass, ...]
    graphs: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        """Nothing to read yet."""

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
        if pass_.name == Rematerialize.name and changed:
            self.facts["collectives"] = with_remade(self.facts["collectives"], gm)
