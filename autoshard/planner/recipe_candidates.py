"""The experts' recipes that go with a mesh, and what they cost by the solver's model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule

from autoshard.capture.garbage import uncollected
from autoshard.config.axis_recipes import recipes_of
from autoshard.planner.evaluation import Folded, phases_of, seeded
from autoshard.planner.prediction import state_of
from autoshard.planner.problem import Problem, Recipes, freeing
from autoshard.planner.recomputation import room_for
from passes.base import PassContext
from passes.errors import RecipeError
from passes.manager import PassManager
from passes.recipes import recipe_named, registered_recipes
from passes.search.prepared import Prepared


def expert_names() -> Iterator[str]:
    """Yield what is tried: every recipe alone, then each that carries the batch with each that does not: `fsdp+megatron`."""
    recipes = registered_recipes()
    yield from (recipe.name for recipe in recipes)
    for inner in recipes:
        if not inner.carries_batch:
            yield from (f"{outer.name}+{inner.name}" for outer in recipes if outer.carries_batch)


@dataclass(frozen=True)
class Experts:
    """What is known of recipes before they are simulated."""

    problem: Problem
    folded: Folded

    def __iter__(self) -> Iterator[tuple[str, Recipes]]:
        """By name; of those that come to the same, the first."""
        seen: set[Recipes] = set()
        for name in expert_names():
            try:
                recipes = recipes_of(name, self.problem.mesh)
            except RecipeError:
                continue
            if (alike := self.problem.resharding(recipes)) not in seen:
                seen.add(alike)
                yield name, recipes

    def estimate(self, recipes: Recipes, prepared: Prepared) -> tuple[float, bool]:
        """Seconds of a step, and whether it fits; 0 and True where the model cannot tell."""
        room = room_for(self.problem, prepared)
        plan = prepared.evaluate_recipe(self._placed(recipes), gathers_again=self._gathers_again(recipes), budget=room)
        return (0.0, True) if plan is None else (plan.objective, room.fits(plan.memory))

    def state(self, recipes: Recipes) -> int:
        """Bytes that a device holds of the model, at least."""
        placed, optimizer = self._placed(recipes), self.problem.options.optimizer
        return state_of(placed, self.folded.repeats, self.problem.mesh, optimizer)

    def _gathers_again(self, recipes: Recipes) -> bool:
        """Whether parameters are gathered once more in the backward, all of them that are gathered."""
        axes = zip(self.problem.resharding(recipes), self.problem.mesh.sizes, strict=True)
        chosen = [recipe_named(name) for name, size in axes if name is not None and size > 1]
        storing = [recipe for recipe in chosen if recipe.store is not None]
        return bool(storing) and all(recipe.frees_gathered for recipe in storing)

    def _placed(self, recipes: Recipes) -> GraphModule:
        """The layouts, which are the same where parameters are gathered again and where they are kept."""
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
