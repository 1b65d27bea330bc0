"""Price the plan of a recipe by the search's objective, to hold that against the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from autoshard.planner.problem import Problem, Recipes
from autoshard.planner.recipe_candidates import Experts
from autoshard.planner.recomputation import memory_budget_of
from passes.ir.graph import (
    has_layout,
    has_needs,
    input_of,
    is_reshard,
    layouts_of,
    needs_of,
    note_of,
    operands,
    outputs_of,
    placeholders,
    results_of,
    returned,
)
from passes.ir.layout import Layout
from passes.recipes import recipe_named
from passes.search.model.memory_budget import MemoryBudget
from passes.search.model.skeleton import Member, Skeleton, VariableSkeleton, with_costs
from passes.search.model.step_structure import StepStructure
from passes.search.model.strategies import Strategy
from passes.search.model.transitions import Transitions
from passes.search.model.value_edges import values_of
from passes.search.prepared import Prepared
from passes.search.solvers.evaluate import Assignment, evaluate


def estimate(experts: Experts, recipes: Recipes, prepared: Prepared) -> float:
    """Return the seconds of a recipe's step."""
    problem = experts.problem
    budget, again = memory_budget_of(problem, prepared), _gathers_again(problem, recipes)
    found = recipe_assignment(prepared, experts.placed(recipes), gathers_again=again, budget=budget)
    assert found is not None, "a recipe's reshards have steps"
    return found.objective


def _gathers_again(problem: Problem, recipes: Recipes) -> bool:
    """Return whether all gathered parameters are gathered again in the backward."""
    axes = zip(problem.resharding(recipes), problem.mesh.sizes, strict=True)
    chosen = [recipe_named(name) for name, size in axes if name is not None and size > 1]
    storing = [recipe for recipe in chosen if recipe.store is not None]
    return bool(storing) and all(recipe.frees_gathered for recipe in storing)


def recipe_assignment(
    prepared: Prepared, placed: GraphModule, *, gathers_again: bool, budget: MemoryBudget | None = None
) -> Assignment | None:
    """Return the assignment with the layouts of `placed`: the graph with reshards added and every node placed.

    Each variable has one strategy, which the search need not consider, and reshards may be inside of a variable. Parameters are
    gathered again in the backward, or kept; transitions of other values are repeated where that is faster than to free the
    memory of their results otherwise. None if a reshard has no steps.
    """
    structure, skeleton, node_costs = prepared.structure, prepared.skeleton, prepared.node_costs
    layouts = _Layouts.of(structure, skeleton, placed)
    variables = tuple(layouts.variable(number, one) for number, one in enumerate(skeleton.variables))
    values = tuple(values_of(structure, skeleton.owners, skeleton.ends, frozenset(), is_placed=True))
    graph = with_costs(replace(skeleton, variables=variables, values=values), node_costs, float("inf"))
    transitions = Transitions(graph, node_costs.unit_costs)
    keeps = float("inf") if gathers_again else 0.0
    tried = (evaluate(transitions, [0] * len(variables), keeps=keeps, repeats=r, budget=budget) for r in (0.0, float("inf")))
    return min((one for one in tried if one is not None), key=lambda one: _rank(one, budget), default=None)


def _rank(assignment: Assignment, budget: MemoryBudget | None) -> tuple[bool, float]:
    """Return a key that is least for the fastest assignment that fits."""
    return budget is not None and not budget.fits(assignment.bytes), assignment.objective


@dataclass(frozen=True)
class _Layouts:
    """The layouts of a recipe, by variable and slot of its strategies."""

    skeleton: Skeleton
    results: Mapping[tuple[int, int], Layout]
    needs: Mapping[tuple[int, int], Layout]

    @staticmethod
    def of(structure: StepStructure, skeleton: Skeleton, placed: GraphModule) -> _Layouts:
        """Read them off `placed`; those of an output that follows an input are the value's."""
        there = {key: node for node, key in _keys(placed).items()}
        results, needs = dict[tuple[int, int], Layout](), dict[tuple[int, int], Layout]()
        for node, key in _keys(structure.gm).items():
            if node not in skeleton.owners or key not in there or not has_layout(there[key]):
                continue
            owner, other = skeleton.owners[node], there[key]
            results |= {(owner.variable, owner.results + i): layout for i, layout in enumerate(layouts_of(other))}
            if node.op == "call_function" and has_needs(other):
                needs |= {(owner.variable, owner.needs + i): layout for i, layout in enumerate(needs_of(other))}
        for position, value in enumerate(returned(placed.graph)):
            if position in skeleton.ends and isinstance(value, Node) and has_layout(value):
                end = skeleton.ends[position]
                needs[end.variable, end.slot] = layouts_of(value)[0]
        return _Layouts(skeleton, results, needs)

    def variable(self, number: int, one: VariableSkeleton) -> VariableSkeleton:
        """Return a variable with the recipe's strategy alone."""
        usual = one.strategies[0]
        known = self.results.get((number, 0))

        def of(side: Mapping[tuple[int, int], Layout], slot: int, other: Layout) -> Layout:
            return side.get((number, slot), known or other)

        own = Strategy(
            tuple(of(self.needs, slot, other) for slot, other in enumerate(usual.needs)),
            tuple(of(self.results, slot, other) for slot, other in enumerate(usual.results)),
        )
        members = tuple(self._member(member, own) for member in one.members)
        return replace(one, strategies=(own,), members=members)

    def _member(self, member: Member, own: Strategy) -> Member:
        if member.numbers is None:
            return replace(member, strategies=(own,))
        owner, node = self.skeleton.owners[member.node], member.node
        needs = own.needs[owner.needs : owner.needs + len(operands(node))]
        results = own.results[owner.results : owner.results + len(results_of(node))]
        return replace(member, strategies=(Strategy(needs, results),), numbers=None)


def _keys(gm: GraphModule) -> dict[Node, str]:
    """Return names of nodes that are the same with and without reshards: casts are named by their parameter or output."""
    keys = {node: node.name for node in gm.graph.nodes if not is_reshard(node)}
    for node in placeholders(gm.graph):
        casts = [user for user in _users(node) if user.op == "call_function" and note_of(user)]
        keys |= {cast: f"{input_of(node).name}#{number}" for number, cast in enumerate(casts)}
    for value, output in zip(returned(gm.graph), outputs_of(gm.graph), strict=True):
        number = 0
        while isinstance(value, Node) and value.op == "call_function" and note_of(value) and len(operands(value)) == 1:
            if not is_reshard(value):
                keys[value] = f"{output.name}#-{number}"
                number += 1
            value = operands(value)[0]
    return keys


def _users(node: Node) -> Iterator[Node]:
    """Yield the users of a value, also those that take it through a reshard."""
    for user in node.users:
        if is_reshard(user):
            yield from _users(user)
        else:
            yield user
