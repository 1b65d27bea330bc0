"""Prepare a graph for searches, and search it: for any goal, on other hardware, with other axis groups."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch.fx import GraphModule

from passes.ir.mesh import Mesh
from passes.search.goal import Goal
from passes.search.model.axis_groups import AxisGroups, single_axes
from passes.search.model.factor_graph import FactorGraph
from passes.search.model.kernels_bound import kernels_bound
from passes.search.model.memory_budget import MemoryBudget, RecomputationCurve
from passes.search.model.node_costs import NodeCosts
from passes.search.model.skeleton import Skeleton, with_costs
from passes.search.model.step_structure import StepStructure
from passes.search.model.transitions import Transitions
from passes.search.model.unit_costs import USUAL, Hiding, UnitCosts
from passes.search.model.variables import make_skeleton
from passes.search.optimize import optimize
from passes.search.recomputation_savings import recomputation_savings
from passes.search.search_state import SearchState, WarmStart
from passes.search.solution import Solution, solution_of, strategies_of
from passes.search.solvers.evaluate import Assignment, evaluate
from passes.search.solvers.relaxation import Relaxation
from passes.search.tune_multipliers import SMALL_MEMORY_STEPS, raise_price_of_bytes


@dataclass(frozen=True, eq=False)
class Prepared:
    """The factor graph of a CAPTURED graph, to be searched for any goal."""

    structure: StepStructure
    skeleton: Skeleton
    node_costs: NodeCosts
    factor_graph: FactorGraph
    corrected: Transitions | None = None  # with the prices of some corrected
    warm_start: WarmStart | None = None  # of its searches
    searches: dict[Goal, _Search] = field(default_factory=dict, repr=False)  # the last, which goes on for an equal goal
    proven: dict[Goal, float] = field(default_factory=dict, repr=False)  # seconds that no plan is better than, by the last bound

    @staticmethod
    def of(structure: StepStructure, skeleton: Skeleton, node_costs: NodeCosts, deadline: float) -> Prepared:
        """Add costs. Raises TimeoutError past `deadline` (by `time.perf_counter`)."""
        return Prepared(structure, skeleton, node_costs, with_costs(skeleton, node_costs, deadline))

    @property
    def graph(self) -> GraphModule:
        """Return the CAPTURED graph."""
        return self.structure.gm

    def on(self, mesh: Mesh, *, deadline: float = float("inf")) -> Prepared:
        """Return the same on other hardware or other links, as strategies only depend on the mesh's axes."""
        node_costs = self.node_costs.on(self.node_costs.unit_costs.on(mesh))
        return Prepared.of(self.structure, self.skeleton, node_costs, deadline)

    def corrected_by(self, solution: Solution, seconds: float, exposed: Mapping[str, float] | None = None) -> Prepared:
        """Return the same with the transitions of `solution` dearer by `seconds` in all, as its step was simulated: first those
        that the device waits for, by the seconds of `exposed`, as of `Transitions.corrected`.
        """
        strategies = strategies_of(self.graph, self.skeleton, self.factor_graph, solution)
        return self._priced(self.transitions.corrected(strategies, seconds, exposed or {}))

    def price(self, solution: Solution) -> float:
        """Return the seconds of a solution's step by the prices of this problem."""
        strategies = strategies_of(self.graph, self.skeleton, self.factor_graph, solution)
        keeps, repeats = (0.0 if solution.kept else float("inf")), (float("inf") if solution.repeated else 0.0)
        found = evaluate(self.transitions, strategies, keeps=keeps, repeats=repeats)
        assert found is not None, "the transitions are those of a solution"
        return found.objective

    def with_messages_apart(self) -> Prepared:
        """Return the same with each message as dear as one that is sent by itself, which joins no other."""
        return self._priced(Transitions(self.factor_graph, self.node_costs.unit_costs.apart()))

    def using(self, axis_groups: AxisGroups, *, deadline: float = float("inf")) -> Prepared:
        """Return the same with other axis groups."""
        skeleton = make_skeleton(self.structure, self.node_costs.unit_costs.mesh, axis_groups, deadline=deadline)
        return Prepared.of(self.structure, skeleton, self.node_costs, deadline)

    @cached_property
    def transitions(self) -> Transitions:
        """Return the transitions of the factor graph with their terms."""
        return self.corrected or Transitions(self.factor_graph, self.node_costs.unit_costs)

    @cached_property
    def kernels_bound(self) -> float:
        """Return a lower bound, in seconds, of the simulated step of every plan."""
        return kernels_bound(self.structure, self.node_costs)

    @cached_property
    def recomputation(self) -> RecomputationCurve:
        """Estimate what recomputing values frees and costs."""
        return recomputation_savings(self.graph, self.skeleton, self.node_costs)

    def solutions(self, goal: Goal) -> Iterator[Solution]:
        """Yield good layouts that fit the memory, then the result of a longer search, unless they are proven to be the
        best.

        Raises MemoryLimitError if no plan was found that fits, or none before all were proven to take the goal's cutoff.
        """
        started, search = time.perf_counter(), self._search(goal)
        try:
            for assignment, bound in search.results():
                yield self._solution(assignment, bound, started)
        finally:
            self.proven[goal] = search.state.bounds.lower

    def runners_up(self) -> Iterator[Solution]:
        """Yield the other layouts that the last search found to fit the memory, the fastest first."""
        for search in self.searches.values():
            started, state = time.perf_counter(), search.state
            fitting = sorted(filter(state.fits, state.seen), key=lambda assignment: assignment.objective)
            known = {tuple(assignment.strategies) for assignment, _ in search.found}
            for assignment in fitting:
                if (strategies := tuple(assignment.strategies)) not in known:
                    known.add(strategies)
                    yield self._solution(assignment, 0.0, started)

    def explore(self, goal: Goal) -> Searched:
        """Return the last of `solutions`, with everything that the search found out.

        Raises MemoryLimitError if no plan was found that fits.
        """
        search = self._search(goal)
        assignment, _ = list(search.results())[-1]
        return Searched(self.graph, self.skeleton, assignment, search.state.relaxation, goal.budget)

    def smallest(self, *, keep_gathered: bool | None = None) -> Iterator[Solution]:
        """Yield layouts that take little memory, whatever they cost: the fastest of those first.

        `keep_gathered` is as in a `Goal`.
        """
        for steps in SMALL_MEMORY_STEPS:
            started, state = time.perf_counter(), SearchState(self.transitions, Goal(keep_gathered=keep_gathered))
            raise_price_of_bytes(state, steps)
            smallest = min(state.seen, key=lambda assignment: assignment.memory, default=None)
            if smallest is not None:
                yield self._solution(smallest, 0.0, started)

    def _search(self, goal: Goal) -> _Search:
        """Return the search that found plans for the same goal, unless it was cut short, or a new one."""
        held = self.searches.get(goal)
        if held is None or not held.found or goal.time_limit is not None:
            self.searches.clear()
            held = self.searches[goal] = _Search(SearchState(self.transitions, goal, self.warm_start))
        return held

    def _priced(self, transitions: Transitions) -> Prepared:
        """Return the same with other prices, to be searched from where the last search ended."""
        left = next((search.state.left for search in self.searches.values()), None)
        return replace(self, corrected=transitions, warm_start=left, searches={}, proven={})

    def _solution(self, assignment: Assignment, bound: float, started: float) -> Solution:
        seconds = time.perf_counter() - started
        return solution_of(self.graph, self.skeleton, self.factor_graph, assignment, bound=bound, seconds=seconds)


class _Search:
    """A search that can be resumed, and yields again what it found."""

    def __init__(self, state: SearchState) -> None:
        self.state = state
        self.found: list[tuple[Assignment, float]] = []
        self._rest = optimize(state)

    def results(self) -> Iterator[tuple[Assignment, float]]:
        """Yield all results, from the first."""
        yield from tuple(self.found)
        for one in self._rest:
            self.found.append(one)
            yield one


@dataclass(frozen=True, eq=False)
class Searched:
    """The best assignment that a search found, and the relaxation that bounds all others."""

    graph: GraphModule
    skeleton: Skeleton
    assignment: Assignment
    relaxation: Relaxation  # under the multipliers with the highest bound that was found
    budget: MemoryBudget | None

    @property
    def factor_graph(self) -> FactorGraph:
        """Return the factor graph that was searched."""
        return self.relaxation.factor_graph


def prepare(
    gm: GraphModule,
    mesh: Mesh,
    axis_groups: AxisGroups | None = None,
    *,
    optimizer: str | None = "adamw",
    hiding: Hiding = USUAL,
    deadline: float = float("inf"),
) -> Prepared:
    """Prepare a CAPTURED graph to be trained by `optimizer`, with each axis by itself where no `axis_groups` are given.

    Raises ConstraintError for pins that no layout meets, TimeoutError past `deadline` (by `time.perf_counter`).
    """
    structure = StepStructure(gm)
    node_costs = NodeCosts(structure, UnitCosts.of(mesh, hiding), optimizer)
    skeleton = make_skeleton(structure, mesh, axis_groups or single_axes(mesh), deadline=deadline)
    return Prepared.of(structure, skeleton, node_costs, deadline)


def least_time(gm: GraphModule, mesh: Mesh, *, optimizer: str | None, hiding: Hiding) -> float:
    """Return a lower bound, in seconds, of the simulated step of every plan of a CAPTURED graph; none is searched for."""
    structure = StepStructure(gm)
    return kernels_bound(structure, NodeCosts(structure, UnitCosts.of(mesh, hiding), optimizer))


def best_solution(gm: GraphModule, mesh: Mesh, goal: Goal) -> Solution:
    """Return the layouts of a CAPTURED graph with the least predicted step that fits the memory.

    Raises ConstraintError for pins that no layout meets, MemoryLimitError where no plan was found that fits.
    """
    started = time.perf_counter()
    prepared = prepare(gm, mesh)
    if goal.time_limit is not None:
        goal = replace(goal, time_limit=goal.time_limit - (time.perf_counter() - started))
    return list(prepared.solutions(goal))[-1]
