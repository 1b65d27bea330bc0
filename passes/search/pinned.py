"""What a search says of the layouts that it did not choose: each with all else solved again around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.fx import Node

from passes.ir.graph import item_of
from passes.ir.layout import Layout
from passes.search.bound import NEVER, Dual
from passes.search.evaluate import evaluate
from passes.search.find import Searched
from passes.search.model import COMPUTE, Model, Plan
from passes.search.sides import Sides

SWEEPS = 5  # of dual ascent from where the search ended, with one choice fixed
NEAREST = 2  # choices of every variable in the program of an alternative, beside those of the plans in hand
GAP = 0.0025


@dataclass(frozen=True)
class Alternative:
    """The whole model with one value laid out so, and everything else chosen for that. Seconds; bytes per device."""

    layout: Layout
    is_chosen: bool  # by the search
    step: float | None  # of the best plan found, by the model of the search; None: nothing goes together with it
    bound: float  # no plan with this layout is better
    compute: float = 0.0
    communication: float = 0.0  # hidden or not, on all links
    memory: float = 0.0
    fits: bool = True


def alternatives(
    searched: Searched, node: Node, *, asked: Layout, most: int, solved: int
) -> tuple[Alternative, ...]:
    """Layouts of what `node` makes that the search considers, the quickest first: the `most` promising by the search's own
    bounds, the chosen one and the one `asked` for. None for what the search did not decide.

    The plan of each is what its bound points to; for the `solved` most promising, and the one asked for, a program of
    what is near it is solved as well.
    """
    source, position = item_of(node) or (node, 0)
    owner = searched.built.owners.get(searched.built.first[source])
    if owner is None:
        return ()
    variable = searched.built.problem.variables[owner.variable]
    groups: dict[Layout, list[int]] = {}
    for number, choice in enumerate(variable.choices):
        groups.setdefault(choice.results[owner.results + position], []).append(number)
    pinned = _Pinned(searched)
    chosen = searched.plan.picked[owner.variable]
    least = searched.relaxation.dual.least(owner.variable)
    ranked = sorted(groups, key=lambda layout: (float(least[groups[layout]].min()), str(layout)))
    kept = [one for i, one in enumerate(ranked) if i < most or chosen in groups[one] or one == asked]
    found = []
    for rank, layout in enumerate(kept):
        dual, is_chosen = pinned.dual(owner.variable, groups[layout]), chosen in groups[layout]
        plans = [searched.plan] if is_chosen else pinned.plans(owner.variable, dual)
        if not is_chosen and (rank < solved or layout == asked):
            plans += pinned.solved(owner.variable, groups[layout], dual, plans)
        found.append(pinned.alternative(layout, plans, dual, is_chosen=is_chosen))
    return tuple(sorted(found, key=lambda one: (one.step is None, not one.fits, one.step or 0.0, not one.is_chosen)))


class _Pinned:
    """The relaxation at the end of a search, with one variable's choices struck but for a few."""

    def __init__(self, searched: Searched) -> None:
        self.searched, self.room = searched, searched.room
        self.problem, self.relaxation = searched.built.problem, searched.relaxation
        self.sides: Sides = self.relaxation.sides
        byte = self.relaxation.weights.byte
        self.paid = 0.0 if self.room is None else self.room.worth(byte, self.problem.base)

    def dual(self, variable: int, numbers: Sequence[int]) -> Dual:
        dual = self.relaxation.dual.copied()
        others = self._others(variable, numbers)
        dual.choices[variable] = np.where(others, NEVER, dual.choices[variable])
        dual.struck[variable] = dual.struck[variable] | others
        dual.ascend(SWEEPS, 1e-4)
        return dual

    def _others(self, variable: int, numbers: Sequence[int]) -> NDArray[np.bool_]:
        others = np.ones(len(self.problem.variables[variable].choices), dtype=np.bool_)
        others[list(numbers)] = False
        return others

    def plans(self, variable: int, dual: Dual) -> list[Plan]:
        """What the dual points to, decided from the pinned variable on; and the search's plan with this alone changed."""
        rest = [other for other in range(len(self.problem.variables)) if other != variable]
        decoded = dual.decode([variable, *rest])
        changed = list(self.searched.plan.picked)
        changed[variable] = decoded[variable]
        found = []
        for picked in (decoded, changed):
            for keeps in dict.fromkeys((self.relaxation.weights.byte, 0.0, float("inf"))):
                plan = evaluate(self.sides, picked, keeps=keeps, room=self.room)
                found += [plan] if plan is not None else []
        return found

    def solved(self, variable: int, numbers: Sequence[int], dual: Dual, plans: Sequence[Plan]) -> list[Plan]:
        """The best plan among choices near the bound and those of the plans in hand."""
        left = dual.nearest(NEAREST, [self.searched.plan.picked, *(plan.picked for plan in plans)])
        left.choices[variable] &= ~self._others(variable, numbers)
        model = Model(self.sides, left, self.room)
        plan, _ = model.solve(GAP, None, nodes=1)
        return [] if plan is None else [plan]

    def alternative(self, layout: Layout, plans: Sequence[Plan], dual: Dual, *, is_chosen: bool) -> Alternative:
        bound = max(0.0, dual.bound - self.paid)
        if not plans:
            return Alternative(layout, is_chosen, None, bound)
        best = min(plans, key=lambda plan: (not self._fits(plan), plan.objective))
        variables = zip(self.problem.variables, best.picked, strict=True)
        return Alternative(
            layout,
            is_chosen,
            best.objective,
            min(bound, best.objective),
            sum(float(variable.seconds[choice]) for variable, choice in variables),
            float(best.busy[:, COMPUTE + 1 :].sum()),
            best.memory,
            self._fits(best),
        )

    def _fits(self, plan: Plan) -> bool:
        return self.room is None or self.room.fits(plan.memory)
