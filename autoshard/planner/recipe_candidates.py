"""Try expert recipes that suit the mesh as candidates, the most promising by the solver's model first, then their variants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from autoshard.capture.garbage import uncollected
from autoshard.config.axis_recipes import recipes_of
from autoshard.config.progress import Progress
from autoshard.planner.evaluation import Folded, phases_of, seeded
from autoshard.planner.prediction import state_of
from autoshard.planner.problem import Problem, Recipes, freeing
from autoshard.planner.recipe_variants import apart, format_recipes, variants_of
from autoshard.planner.recomputation import SlowerError, memory_budget_of
from autoshard.planner.solver_candidate import OFF, Solved
from autoshard.planner.standings import SOLVED, SearchTask, Standings
from passes.base import PassContext
from passes.errors import RecipeError
from passes.ir.mesh import Mesh
from passes.ir.units import format_bytes
from passes.manager import PassManager
from passes.recipes import recipe_named, registered_recipes
from passes.recipes.context_parallel import CONTEXT, CONTEXT_AXES
from passes.search.prepared import Prepared

QUICKLY = "a quick answer: not simulated; plan.replan(..., prove=True) does"
STORED = "a later call, whose parameters are laid out already: not simulated"
TOO_MUCH = "takes too much memory by the solver's model: not simulated; plan.replan(..., prove=True) does"


@dataclass(frozen=True)
class Promise:
    """A recipe, and the seconds of its step by the solver's model; 0 if unknown."""

    name: str
    recipes: Recipes
    seconds: float


def try_recipes(task: SearchTask, standings: Standings, solved: Solved, progress: Progress) -> None:
    """Add recipes to the standings, the most promising first, until there is a good plan or all that the effort
    allows.
    """
    experts, is_needed = Experts(task.problem, task.folded), task.effort.recipes == "needed"
    is_stored = bool(task.problem.earlier) and standings.best is not None
    if is_needed and (is_stored or _is_answered(standings, solved)):
        for name, _ in experts:
            standings.decline(name, STORED if is_stored else QUICKLY)
        return
    promising: list[Promise] = []
    for name, recipes in experts:
        with standings.attempt(name):
            promising += _promising(task, standings, experts, solved.prepared, name, recipes)
    ordered = sorted(promising, key=lambda one: one.seconds)
    for one in ordered:
        if standings.best is not None and task.left <= 0:
            standings.decline_late(one.name)
        elif is_needed and standings.best is not None and len(standings.evaluated) > 1:
            standings.decline(one.name, QUICKLY)
        else:
            progress(one.name)
            _enter(task, standings, one)
    if not is_needed:
        _enter_variants(task, standings, ordered, progress)


def _enter(task: SearchTask, standings: Standings, one: Promise) -> None:
    """Enter a recipe's plan, unless it is proven to be slower than the best, before or by its simulation."""
    worst = float("inf") if task.effort.recipes == "all" else standings.worst_time
    with standings.attempt(one.name):
        try:
            standings.enter(one.name, task.evaluate(one.recipes, worst=worst))
        except SlowerError as slower:
            standings.decline(one.name, str(slower))


def _enter_variants(task: SearchTask, standings: Standings, tried: Sequence[Promise], progress: Progress) -> None:
    """Enter the variants of a recipe that chose between some by an estimate, where they decide something else: of the fastest
    such recipe, or, if all were proven to be slower than another plan, of the most promising one.
    """
    problem, found = task.problem, {one.name: one for one in tried if any(variants_of(one.recipes, task.problem.mesh))}
    if not found:
        return
    simulated = [name for name in found if name in standings.evaluated]
    fastest = min(simulated, key=lambda name: task.rank(standings.evaluated[name]), default=next(iter(found)))
    recipes = found[fastest].recipes
    for variant in apart(problem, task.folded, recipes, tuple(variants_of(recipes, problem.mesh)))[1:]:
        name = format_recipes(variant)
        if standings.best is not None and task.left <= 0:
            standings.decline_late(name)
        else:
            progress(name)
            _enter(task, standings, Promise(name, variant, 0.0))


def _is_answered(standings: Standings, solved: Solved) -> bool:
    """Return whether the simulator agrees with the solver's plan, and finds it best."""
    if standings.best != SOLVED or solved.objective is None:
        return False
    return standings.best_time <= solved.objective * (1 + OFF)


def _promising(
    task: SearchTask,
    standings: Standings,
    experts: Experts,
    prepared: Prepared | None,
    name: str,
    recipes: Recipes,
) -> tuple[Promise, ...]:
    """Return the recipe if it may be worth a simulation; otherwise decline it."""
    if (undivided := task.problem.undivided(recipes)) is not None:
        standings.decline(name, undivided)
        return ()
    seconds, fits = 0.0, True  # unknown without the solver's model
    if prepared is not None and task.left > 0:
        seconds, fits = experts.estimate(recipes, prepared)
    if standings.best is not None and task.effort.recipes == "needed" and not fits:
        standings.decline(name, TOO_MUCH)
        return ()
    is_choosy = standings.best is not None and task.effort.recipes != "all"
    if is_choosy and (state := experts.state(recipes)) > task.limit:
        standings.decline(name, f"takes {format_bytes(state)} for parameters, gradients and optimizer: not simulated")
        return ()
    return (Promise(name, recipes, seconds),)


def expert_names() -> Iterator[str]:
    """Yield every recipe that a search enters alone, then each that splits the batch with each that does not: `fsdp+megatron`."""
    recipes = tuple(recipe for recipe in registered_recipes() if recipe.in_search)
    yield from (recipe.name for recipe in recipes)
    for inner in recipes:
        if not inner.carries_batch:
            yield from (f"{outer.name}+{inner.name}" for outer in recipes if outer.carries_batch)


def context_names(mesh: Mesh) -> Iterator[str]:
    """Yield recipes for a mesh that has axes for the sequence, each with `context` there: `fsdp+context+megatron`."""
    others = [axis for axis in range(mesh.ndim) if mesh.names[axis] not in CONTEXT_AXES]
    if len(others) == mesh.ndim:
        return
    beside = Mesh(tuple(mesh.names[axis] for axis in others), tuple(mesh.sizes[axis] for axis in others))
    for name in expert_names() if others else ("",):
        try:
            chosen = iter(recipes_of(name, beside) if others else ())
        except RecipeError:
            continue
        yield "+".join(str(next(chosen)) if axis in others else CONTEXT.name for axis in range(mesh.ndim))


@dataclass(frozen=True)
class Experts:
    """Estimates for recipes before they are simulated."""

    problem: Problem
    folded: Folded

    def __iter__(self) -> Iterator[tuple[str, Recipes]]:
        """Yield recipes by name; of equivalent ones only the first."""
        seen: set[Recipes] = set()
        for name in (*expert_names(), *context_names(self.problem.mesh)):
            try:
                recipes = recipes_of(name, self.problem.mesh)
            except RecipeError:
                continue
            if (alike := self.problem.resharding(recipes)) not in seen:
                seen.add(alike)
                yield name, recipes

    def estimate(self, recipes: Recipes, prepared: Prepared) -> tuple[float, bool]:
        """Return the seconds of a step, and whether it fits; 0 and True if the model cannot tell."""
        budget = memory_budget_of(self.problem, prepared)
        plan = prepared.evaluate_recipe(self._placed(recipes), gathers_again=self._gathers_again(recipes), budget=budget)
        return (0.0, True) if plan is None else (plan.objective, budget.fits(plan.memory))

    def state(self, recipes: Recipes) -> int:
        """Return the bytes of parameters, gradients and optimizer state on a device."""
        placed, optimizer = self._placed(recipes), self.problem.options.optimizer
        return state_of(placed, self.folded.repeats, self.problem.mesh, optimizer)

    def _gathers_again(self, recipes: Recipes) -> bool:
        """Return whether all gathered parameters are gathered again in the backward."""
        axes = zip(self.problem.resharding(recipes), self.problem.mesh.sizes, strict=True)
        chosen = [recipe_named(name) for name, size in axes if name is not None and size > 1]
        storing = [recipe for recipe in chosen if recipe.store is not None]
        return bool(storing) and all(recipe.frees_gathered for recipe in storing)

    def _placed(self, recipes: Recipes) -> GraphModule:
        """Return the graph with the recipes' layouts, shared by the variants that gather again and that do not."""
        if self._gathers_again(recipes):
            recipes = freeing(recipes, frees_gathered=False)
        seed = self.problem.seed(self.folded.graph, recipes)
        if seed not in self.folded.placed:
            with uncollected():
                gm = seeded(self.problem, self.folded, recipes)
                phases = phases_of(self.problem, gm, recipes)
                PassManager((phases.choose, *phases.make_explicit)).run(gm, PassContext(self.problem.mesh))
            self.folded.placed[seed] = gm
        return self.folded.placed[seed]
