"""Try expert recipes that suit the mesh as candidates, then their variants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from autoshard.capture.garbage import uncollected
from autoshard.config.axis_recipes import recipes_of
from autoshard.config.progress import Progress
from autoshard.planner.evaluation import Folded, folded_as, phases_of, seeded
from autoshard.planner.paddings.batch_padding import gaining_axes
from autoshard.planner.prediction import state_of
from autoshard.planner.problem import Problem, Recipes, freeing, padded_for
from autoshard.planner.recipe_variants import apart, format_recipes, variants_of
from autoshard.planner.recomputation import SlowerError
from autoshard.planner.solver_candidate import OFF, Solved
from autoshard.planner.standings import SOLVED, SearchTask, Standings
from passes.base import PassContext
from passes.errors import RecipeError
from passes.ir.mesh import Mesh
from passes.ir.units import format_bytes
from passes.manager import PassManager
from passes.recipes import registered_recipes
from passes.recipes.context_parallel import CONTEXT, CONTEXT_AXES

QUICKLY = "a quick answer: not simulated; plan.replan(..., prove=True) does"
STORED = "a later call, whose parameters are laid out already: not simulated"
_Rank = tuple[float, ...]  # simulated recipes are before others, then by fit and step, or by a bound of the step


def try_recipes(task: SearchTask, standings: Standings, solved: Solved, progress: Progress) -> None:
    """Add recipes to the standings, of those that pad the batch and dims as the problem does; none if only those that are needed
    are asked for, and there is a good plan.
    """
    experts, is_needed = Experts(task.problem, task.folded), task.effort.recipes == "needed"
    is_stored = bool(task.problem.earlier) and standings.best is not None
    if is_needed and (is_stored or _is_answered(standings, solved)):
        decline_recipes(standings, STORED if is_stored else QUICKLY)
        return
    ranks: dict[Recipes, _Rank] = {}
    for name, recipes in experts.padded_alike:
        if (rank := _enter(task, standings, experts, name, recipes, progress)) is not None:
            ranks[recipes] = rank
    if not is_needed:
        _enter_variants(task, standings, experts, ranks, progress)


def decline_recipes(standings: Standings, note: str) -> None:
    """Leave out the recipes that pad the batch and dims as the problem does, and say why."""
    for name, _ in Experts(standings.task.problem, standings.task.folded).padded_alike:
        standings.decline(name, note)


def _enter(
    task: SearchTask, standings: Standings, experts: Experts, name: str, recipes: Recipes, progress: Progress
) -> _Rank | None:
    """Enter a recipe's plan, unless it is proven not to fit, or to be slower than the best. Return its rank, or that of a plan
    that is as fast as is proven; None if nothing is.
    """
    if standings.best is not None and task.left <= 0:
        standings.decline_late(name)
        return None
    progress(name)
    is_choosy = standings.worst_time < float("inf") and task.effort.recipes != "all"
    with standings.attempt(name):
        if is_choosy and (state := experts.state(recipes)) > task.limit:
            standings.decline(name, f"takes {format_bytes(state)} for parameters, gradients and optimizer: not simulated")
            return None
        try:
            evaluation = task.evaluate(recipes, worst=standings.worst_time if is_choosy else float("inf"))
        except SlowerError as slower:
            standings.decline(name, str(slower))
            return 1.0, slower.seconds
        standings.enter(name, evaluation)
        return 0.0, *task.rank(evaluation)
    return None


def _enter_variants(
    task: SearchTask, standings: Standings, experts: Experts, ranks: Mapping[Recipes, _Rank], progress: Progress
) -> None:
    """Enter the variants of a recipe that chose between some by an estimate, where they decide something else: of the fastest
    such recipe, simulated or, if none was, as far as is proven.
    """
    problem, mesh = task.problem, task.problem.mesh
    fastest = min((one for one in ranks if any(variants_of(one, mesh))), key=lambda one: ranks[one], default=None)
    if fastest is None:
        return
    for variant in apart(problem, task.folded, fastest, tuple(variants_of(fastest, mesh)))[1:]:
        _enter(task, standings, experts, format_recipes(variant), variant, progress)


def _is_answered(standings: Standings, solved: Solved) -> bool:
    """Return whether the simulator agrees with the solver's plan, and finds it best."""
    if standings.best != SOLVED or solved.objective is None:
        return False
    return standings.best_time <= solved.objective * (1 + OFF)


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


def is_padded_alike(problem: Problem, folded: Folded, recipes: Recipes) -> bool:
    """Return whether the batch and dims are padded in `problem` as they are where these `recipes` are given."""
    other = padded_for(replace(problem, pads=True), recipes)
    return gaining_axes(other) == gaining_axes(problem) and folded_as(other, folded).text == folded.text


@dataclass(frozen=True)
class Experts:
    """The recipes that suit a mesh, and what they store."""

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

    @property
    def padded_alike(self) -> Iterator[tuple[str, Recipes]]:
        """Yield those that pad the batch and dims as they are padded in the problem, where they are asked for by name."""
        yield from ((name, recipes) for name, recipes in self if is_padded_alike(self.problem, self.folded, recipes))

    def state(self, recipes: Recipes) -> int:
        """Return the bytes of parameters, gradients and optimizer state on a device."""
        placed, optimizer = self.placed(recipes), self.problem.options.optimizer
        return state_of(placed, self.folded.repeats, self.problem.mesh, optimizer)

    def placed(self, recipes: Recipes) -> GraphModule:
        """Return the graph with the recipes' layouts, which are the same whether what is gathered is kept or not."""
        recipes = freeing(recipes, frees_gathered=False)
        seed = self.problem.seed(self.folded.graph, recipes)
        if seed not in self.folded.placed:
            with uncollected():
                gm = seeded(self.problem, self.folded, recipes)
                phases = phases_of(self.problem, gm, recipes)
                PassManager((phases.choose, *phases.make_explicit)).run(gm, PassContext(self.problem.mesh))
            self.folded.placed[seed] = gm
        return self.folded.placed[seed]
