"""The search: reduce the problem to what a bound on the step allows, solve it, and widen the bound if need be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch.fx import GraphModule, Node

from passes.errors import MemoryLimitError
from passes.ir.graph import OutputRole, item_of, operands, outputs_of, results_of, returned
from passes.ir.mesh import Mesh
from passes.ir.units import format_bytes
from passes.search.bound import Dual, Left
from passes.search.build import draft
from passes.search.bundles import Bundles, single
from passes.search.draft import Built, Draft, priced
from passes.search.evaluate import evaluate
from passes.search.experts import price
from passes.search.kernels import Kernels
from passes.search.model import Model, Plan
from passes.search.outline import Outline
from passes.search.prices import Prices
from passes.search.problem import Problem
from passes.search.refute import is_refuted
from passes.search.relax import Relaxation, Weights
from passes.search.relief import relief
from passes.search.room import Relief, Room
from passes.search.sides import Sides
from passes.search.solution import Placed, Solution, keys_of
from passes.search.weigh import weights_of

WIDENINGS = (0.01, 0.05, 0.2, 1.0, 5.0, 100.0)  # over the bound: how long a plan may take
WEIGHINGS = 8  # changes of weights by the program of what is near the bound, at most
GAIN = 5e-4  # of the bound: what one of `PATIENCE` of them in a row has to add, or the last was the last
PATIENCE = 2
CUTS = 6  # ... by the plans seen, where those of the computation alone point to one that does not fit
ROUGH = 1e-3  # of the bound: what a sweep adds at least, where weights are still far off
NEAR = 0.002  # over the bound: what is looked at for weights
NEAREST = (64, 32, 16, 8, 4, 2)  # choices of a variable: the first that make no large program
SWEEPS = 30  # of dual ascent; it stops before where the bound stays
DEAR = (4.0, 1e4)  # steps that all bytes of a plan are worth, where the least memory is asked for
LARGE = 5_000  # moves of a program that takes seconds
PROVABLE = 40_000  # moves of one that takes half a minute, and proves what it finds
PROOF = 0.01  # of the step: where no program proves more, that no plan is shorter by this is tried to be proven
FAR = 0.01  # of the bound: probing does not get further. Of 405B 0.3 % took it 289 probes; 1.7 % of a small model, 600 in vain
SEEN = 0.75  # of it: how far from the bound of some choices the best of those may be; closer takes HiGHS three times as long
STRIKES = 3  # sweeps that strike choices
GB = 1e9


@dataclass(frozen=True)
class Goal:
    """What is asked of a search. Bytes per device; seconds. The first plan is waited for beyond the time limit. `keep` says
    of parameters that the forward gathered whether they stay for the backward; None: each as the search finds. What is over
    the limit can be computed again for what `relief` says."""

    memory_limit: float | None = None
    gap: float = 0.005
    time_limit: float | None = None
    keep: bool | None = None
    relief: Relief = ()

    @property
    def room(self) -> Room | None:
        return None if self.memory_limit is None else Room(self.memory_limit, self.relief)


@dataclass(frozen=True, eq=False)
class Prepared:
    """The problem of a graph's layouts, to be solved for any goal."""

    outline: Outline
    draft: Draft
    kernels: Kernels
    built: Built
    searches: dict[Goal, _Search] = field(default_factory=dict, repr=False)  # the last, to go on with when asked the same

    @staticmethod
    def of(outline: Outline, draft: Draft, kernels: Kernels, deadline: float) -> Prepared:
        """With prices. Raises TimeoutError past `deadline` (by `time.perf_counter`)."""
        return Prepared(outline, draft, kernels, priced(draft, kernels, deadline))

    @property
    def graph(self) -> GraphModule:
        return self.outline.gm

    def on(self, mesh: Mesh, *, deadline: float = float("inf")) -> Prepared:
        """The same on other hardware, or on other links: what choices there are depends on the mesh's axes alone."""
        kernels = self.kernels.on(self.kernels.prices.on(mesh))
        return Prepared.of(self.outline, self.draft, kernels, deadline)

    def using(self, bundles: Bundles, *, deadline: float = float("inf")) -> Prepared:
        """The same with axes in `bundles`."""
        drafted = draft(self.outline, self.kernels.prices.mesh, bundles, deadline=deadline)
        return Prepared.of(self.outline, drafted, self.kernels, deadline)

    @cached_property
    def sides(self) -> Sides:
        return Sides(self.built.problem, self.kernels.prices)

    @cached_property
    def relief(self) -> Relief:
        """What can be freed by computing it again."""
        return relief(self.graph, self.draft, self.kernels)

    def solutions(self, goal: Goal) -> Iterator[Solution]:
        """Good layouts that fit the memory, then, where these are not proven to be the best, what a longer search finds.

        Raises MemoryLimitError where no plan was found that fits.
        """
        started = time.perf_counter()
        for plan, bound in self._search(goal).each():
            yield self._solution(plan, bound, started)

    def _search(self, goal: Goal) -> _Search:
        """One that found plans for the same goal, unless it had to hurry, or a new one."""
        held = self.searches.get(goal)
        if held is None or not held.found or goal.time_limit is not None:
            self.searches.clear()
            held = self.searches[goal] = _Search(self.sides, goal)
        return held

    def explore(self, goal: Goal) -> Searched:
        """The last of `solutions`, with what the search found out on the way.

        Raises MemoryLimitError where no plan was found that fits.
        """
        search = self._search(goal)
        plan, _ = list(search.each())[-1]
        return Searched(self.graph, self.built, plan, search.relaxation, goal.room)

    def least(self, *, keep: bool | None = None) -> Iterator[Solution]:
        """Layouts that take little memory, whatever they cost: the quickest of those first. `keep` is as in a `Goal`."""
        for worth in DEAR:
            started = time.perf_counter()
            plan = _Search(self.sides, Goal(keep=keep)).least(worth)
            if plan is not None:
                yield self._solution(plan, 0.0, started)

    def price(self, placed: GraphModule, *, gathers_again: bool, room: Room | None = None) -> Plan | None:
        """The plan with the layouts of `placed`, or with those most like it that the search considers; None where these do
        not go together. Parameters are gathered again in the backward, or kept."""
        return price(self.graph, self.built, self.sides, placed, gathers_again=gathers_again, room=room)

    def _solution(self, plan: Plan, bound: float, started: float) -> Solution:
        return _solution(self.graph, self.built, plan, bound, time.perf_counter() - started)


@dataclass(frozen=True, eq=False)
class Searched:
    """The best plan of a problem, and what bounds all others."""

    graph: GraphModule
    built: Built
    plan: Plan
    relaxation: Relaxation  # under the weights with the highest bound that was found
    room: Room | None  # that it was asked for


def find(gm: GraphModule, mesh: Mesh, goal: Goal) -> Solution:
    """The layouts of a CAPTURED graph with the least predicted step that fits the memory.

    Raises ConstraintError for pins that no layout meets, MemoryLimitError where no plan was found that fits.
    """
    started = time.perf_counter()
    prepared = prepare(gm, mesh)
    if goal.time_limit is not None:
        goal = replace(goal, time_limit=goal.time_limit - (time.perf_counter() - started))
    return list(prepared.solutions(goal))[-1]


def prepare(
    gm: GraphModule, mesh: Mesh, bundles: Bundles | None = None, *, deadline: float = float("inf")
) -> Prepared:
    """The problem of a CAPTURED graph, with each axis by itself where no `bundles` of them are given.

    Raises ConstraintError for pins that no layout meets, TimeoutError past `deadline` (by `time.perf_counter`).
    """
    assert mesh.hardware is not None
    kernels = Kernels(gm.graph, Prices(mesh, mesh.hardware))
    outline = Outline(gm)
    return Prepared.of(outline, draft(outline, mesh, bundles or single(mesh), deadline=deadline), kernels, deadline)


def plans(problem: Problem, prices: Prices, goal: Goal) -> Iterator[tuple[Plan, float]]:
    """A good plan; then, where it is not proven to be the best, the best found: each with what no plan is better than, in
    seconds.

    Raises MemoryLimitError where no plan was found that fits the limit.
    """
    yield from _Search(Sides(problem, prices), goal).run()


def solve(problem: Problem, prices: Prices, goal: Goal) -> tuple[Plan, float]:
    """The last of `plans`."""
    return list(plans(problem, prices, goal))[-1]


class _Search:
    """Bounds from below and plans from above, until they meet."""

    def __init__(self, sides: Sides, goal: Goal) -> None:
        self.problem, self.sides, self.goal, self.room = sides.problem, sides, goal, goal.room
        self.started = time.perf_counter()
        self.relaxation = Relaxation(sides)
        self.best: Plan | None = None
        self.smallest = float("inf")  # bytes of the smallest plan seen
        self.bound = 0.0
        self.plans: list[Plan] = []  # that relaxations pointed to, whether they fit or not
        self.is_tired = False  # what is left is too much to go on
        self.paid = 0.0  # seconds that the limit is worth at the price on bytes
        self.found: list[tuple[Plan, float]] = []
        self._rest = self.run()

    def each(self) -> Iterator[tuple[Plan, float]]:
        """Those of `run`, from the first, however often it is asked for them."""
        yield from tuple(self.found)
        for one in self._rest:
            self.found.append(one)
            yield one

    def run(self) -> Iterator[tuple[Plan, float]]:
        relaxation = self.relaxation
        if self.goal.time_limit is not None:
            relaxation.dual.deadline = self.started + self.goal.time_limit
        relaxation.dual.ascend(SWEEPS)
        self._look(relaxation)
        if self.best is None and self.room is not None:
            self._fit(relaxation, self.room)
        if not self._is_proven() and not self._is_late():
            self._weigh(relaxation)
        if self.best is not None:
            yield self._found(self.best)
        if self._is_proven():
            return
        for widening in WIDENINGS:
            if self._is_proven() or self._is_late() or self.is_tired:
                break
            is_known = self.best is not None and self._struck(relaxation.dual, self.best.objective).left().size <= PROVABLE
            worst = float("inf") if is_known else (relaxation.dual.bound - self.paid) * (1 + widening)
            self._search(relaxation.dual, worst)
            self.is_tired = self.is_tired or is_known  # all that is better than the best was in it
        if self.best is None:
            raise self._too_small()
        if not self._is_proven() and not self._is_late():
            self._refute(relaxation.dual, self.best.objective * (1 - PROOF))
        yield self._found(self.best)

    def _refute(self, dual: Dual, worst: float) -> None:
        if self.bound < worst <= (1 + FAR) * self.bound and is_refuted(self.problem, self._struck(dual, worst)):
            self.bound = worst

    def _found(self, best: Plan) -> tuple[Plan, float]:
        return best, min(self.bound, best.objective)

    def least(self, worth: float) -> Plan | None:
        """The smallest plan that the relaxation points to where all bytes of a plan are worth so many steps."""
        relaxation = self.relaxation
        relaxation.dual.ascend(SWEEPS, ROUGH)
        self._look(relaxation)
        if self.plans:
            byte = worth * min(plan.objective for plan in self.plans) / max(1.0, self.smallest)
            self._reweigh(relaxation, replace(relaxation.weights, byte=byte), ROUGH)
        return min(self.plans, key=lambda plan: plan.memory, default=None)

    def _fit(self, relaxation: Relaxation, room: Room) -> None:
        """Look for a price on bytes under which the relaxation points to plans that fit.

        First bytes alone count: where even that bound is over the most that fits, no plan does.
        """
        self._reweigh(relaxation, Weights(((0.0, 0.0, 0.0),) * len(self.problem.segments), 1 / GB), ROUGH)
        if relaxation.dual.bound > (room.most - self.problem.base) / GB:
            raise self._too_small()
        if not self.plans:
            return
        weights = weights_of(self.plans, room)
        for _ in range(CUTS):
            self._reweigh(relaxation, weights, ROUGH)
            if self.best is not None and self._is_late():
                break
            weights = weights_of(self.plans, room).between(weights)

    def _look(self, relaxation: Relaxation) -> None:
        """Take the bound, and the plan that the dual points to if it fits."""
        dual, byte = relaxation.dual, relaxation.weights.byte
        self.bound = max(self.bound, dual.bound - self.paid)
        picked = dual.decode(range(len(dual.choices)))
        for keeps in dict.fromkeys((byte, 0.0, float("inf"))):
            plan = self._kept(evaluate(self.sides, picked, keeps=keeps, room=self.room))
            if plan is None:
                return
            self.plans.append(plan)
            self.smallest = min(self.smallest, plan.memory)
            if self._fits(plan):
                self._take(plan)

    def _fits(self, plan: Plan) -> bool:
        return self.room is None or self.room.fits(plan.memory)

    def _kept(self, plan: Plan | None) -> Plan | None:
        """A plan of the same choices that keeps what it is told to."""
        if plan is None or self.goal.keep is None:
            return plan
        keeps, byte = 0.0 if self.goal.keep else float("inf"), self.relaxation.weights.byte
        return evaluate(self.sides, plan.picked, keeps=keeps, repeats=byte, room=self.room)

    def _take_solved(self, plan: Plan | None) -> None:
        """Take what a program found, which keeps what it likes."""
        told = self._kept(plan)
        if told is plan or (told is not None and self._fits(told)):
            self._take(told)

    def _take(self, plan: Plan | None) -> None:
        if plan is not None and (self.best is None or plan.objective < self.best.objective):
            self.best = plan

    def _weigh(self, relaxation: Relaxation) -> None:
        """Look for the weights with the highest bound.

        The linear program of what is near the bound tells weights; what is near the bound under those joins it, and so
        on. New weights are taken halfway, as those of few choices swing. What is left has good plans: the best of all
        mixtures of those seen, or near it.
        """
        best = relaxation.dual.bound - self.paid, relaxation.weights
        left, idle = self._near(relaxation), 0
        for _ in range(WEIGHINGS):
            weights = self._model(left).weights(self._left())
            if self._is_proven() or self._is_late() or weights is None:
                break
            self._reweigh(relaxation, weights.between(best[1]))
            gain = relaxation.dual.bound - self.paid - best[0]
            idle = 0 if gain > GAIN * best[0] else idle + 1
            if gain > 0:
                best = best[0] + gain, relaxation.weights
            if self._is_proven():
                break
            before, left = left.size, left.joined(self._near(relaxation))
            if idle == PATIENCE or (idle and left.size == before):  # the same program would tell the same weights
                break
        if relaxation.weights is not best[1]:
            self._reweigh(relaxation, best[1])
        if not self._is_proven() and not self._is_late():
            plan, _ = self._model(left).solve(max(self.goal.gap / 2, SEEN * PROOF), self._left(), nodes=1)
            self._take_solved(plan)

    def _near(self, relaxation: Relaxation) -> Left:
        """The choices near the bound, and those of the plans seen: fewer, where that makes a large program."""
        bound = relaxation.dual.bound
        struck = relaxation.dual.copied()
        struck.strike(bound + NEAR * (bound - self.paid), STRIKES)
        plans = [plan.picked for plan in self.plans]
        lefts = (struck.nearest(most, plans) for most in NEAREST)
        return next((left for left in lefts if left.size <= LARGE), struck.nearest(0, plans))

    def _model(self, left: Left) -> Model:
        return Model(self.sides, left, self.room)

    def _reweigh(self, relaxation: Relaxation, weights: Weights, tolerance: float = 1e-4) -> None:
        relaxation.reweigh(weights)
        self.paid = 0.0 if self.room is None else self.room.worth(weights.byte, self.problem.base)
        relaxation.dual.ascend(SWEEPS, tolerance)
        self._look(relaxation)

    def _search(self, dual: Dual, worst: float) -> None:
        """The best of the plans that are shorter than `worst`."""
        if self.best is not None:
            worst = min(worst, self.best.objective)
        least, left = worst, self._struck(dual, worst).left()
        if left.is_possible:
            self.is_tired = self.best is not None and (left.size > PROVABLE or self._is_late())
            if self.is_tired:
                return
            model = self._model(left)
            plan, bound = model.solve(self.goal.gap / 2, self._left())
            self._take_solved(plan)
            least = min(worst, bound)
        self.bound = max(self.bound, least)

    def _struck(self, dual: Dual, worst: float) -> Dual:
        """Without what is in no plan shorter than `worst`."""
        struck = dual.copied()
        struck.strike(worst + self.paid, STRIKES)
        return struck

    def _is_proven(self) -> bool:
        return self.best is not None and self.best.objective - self.bound <= self.goal.gap * self.best.objective

    def _left(self) -> float | None:
        if self.goal.time_limit is None:
            return None
        return max(0.1, self.goal.time_limit - (time.perf_counter() - self.started))

    def _is_late(self) -> bool:
        return self.goal.time_limit is not None and time.perf_counter() - self.started > self.goal.time_limit

    def _too_small(self) -> MemoryLimitError:
        limit = self.goal.memory_limit or 0.0
        return MemoryLimitError(
            f"no layouts fit {format_bytes(limit)} per device; the smallest plan found needs "
            f"{format_bytes(self.smallest)}: give more memory, more devices, or a smaller batch"
        )


def _solution(gm: GraphModule, built: Built, plan: Plan, bound: float, seconds: float) -> Solution:
    keys, problem, picked = keys_of(gm), built.problem, plan.picked
    nodes: dict[str, Placed] = {}
    for node in gm.graph.nodes:
        if node.op == "output" or not results_of(node) or item_of(node) is not None:
            continue
        owner = built.owners[built.first[node]]
        choice = problem.variables[owner.variable].choices[picked[owner.variable]]
        count = 0 if node.op == "placeholder" else len(operands(node))
        nodes[keys[node]] = Placed(
            choice.needs[owner.needs : owner.needs + count],
            choice.results[owner.results : owner.results + len(results_of(node))],
        )
    outputs = {}
    for position, (value, output) in enumerate(zip(returned(gm.graph), outputs_of(gm.graph), strict=True)):
        if output.role is OutputRole.OUTPUT and isinstance(value, Node):
            use = built.ends.get(position)
            if use is not None:
                outputs[output.name] = problem.variables[use.variable].choices[picked[use.variable]].needs[use.slot]
            else:
                outputs[output.name] = nodes[keys[value]].results[0]
    kept, again = (
        {built.first[problem.values[number].node] for number in numbers} for numbers in (plan.kept, plan.again)
    )
    kept_keys, again_keys = (
        tuple(keys[node] for node in gm.graph.nodes if built.first.get(node) in nodes) for nodes in (kept, again)
    )
    return Solution(
        nodes, outputs, kept_keys, again_keys, plan.objective, bound, plan.memory, seconds, len(problem.variables)
    )
