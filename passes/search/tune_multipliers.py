"""Find assignments that fit the memory, and the multipliers with the highest bound."""

from __future__ import annotations

from passes.search.model.factor_graph import MOMENTS, RESOURCES
from passes.search.model.memory_budget import GB, MemoryBudget
from passes.search.search_state import PRUNING_SWEEPS, SearchState, WarmStart
from passes.search.solvers.multipliers import Multipliers
from passes.search.solvers.restriction import Restriction, cheapest

ROUNDS = 16  # of tuning by the linear program of the strategies near the bound, at most
ROUNDS_AGAIN = 2  # the same from where a search of other prices ended, whose multipliers are near
GAIN = 5e-4  # of the bound: a round that adds less to the last one is idle
PATIENCE = 2  # idle rounds in a row end the tuning
ROUGH = 1e-3  # of the bound: a sweep that adds less is the last while multipliers are still far off
NEAR = (0.002, 0.01, 0.05)  # of the bound: strategies within this of it are in the linear program, further ones if need be
FAR = 0.01  # of the bound: a linear program that takes so much more lacks strategies of those that are further from the bound
CHEAPEST = (64, 32, 16, 8, 4, 2)  # strategies of a variable: the first of these that makes no large program
LARGE = 5_000  # transitions of a program that HiGHS takes seconds for, where few variables have many strategies
LARGE_EACH = 10  # the same for each variable, where many variables, as of unlike layers, have few
PROVABLE = 40_000  # transitions of a program that HiGHS takes half a minute for, and proves what it finds
OVER = 1e3  # steps that as many bytes over the limit cost as the smallest assignment has, in a linear program that none fits
SMALL_GAP = 0.0075  # of the step: to which the first program is solved; closer takes HiGHS three times as long
SMALL_MEMORY_STEPS = (4.0, 1e4)  # steps that all bytes together cost, where an assignment of little memory is wanted


def fit_memory(state: SearchState, budget: MemoryBudget) -> bool:
    """Look at the assignments to which the relaxation rounds if only bytes count; return False if by its bound none fits.

    Then it also looks at those of little memory where seconds count too, as the message about it names the smallest.
    """
    usual, segments = state.relaxation.multipliers, ((0.0,) * len(RESOURCES),) * len(state.factor_graph.segments)
    state.reweigh(Multipliers(segments, (1 / GB,) * len(MOMENTS)), ROUGH)
    if state.dual.bound > (budget.most + (len(MOMENTS) - 1) * budget.limit) / GB:
        state.reweigh(usual, ROUGH)
        for steps in SMALL_MEMORY_STEPS:
            raise_price_of_bytes(state, steps)
        return False
    state.reweigh(usual, ROUGH)
    return True


def raise_price_of_bytes(state: SearchState, steps: float) -> None:
    """Ascend where all bytes of an assignment cost as much as so many steps."""
    state.ascend(ROUGH)
    if state.seen:
        byte = steps * state.fastest / max(1.0, state.smallest)
        state.reweigh(Multipliers(state.relaxation.multipliers.segments, (byte / len(MOMENTS),) * len(MOMENTS)), ROUGH)


def tune(state: SearchState) -> None:
    """Tune the multipliers to raise the bound, then solve the program of all strategies that were near it.

    The multipliers are the duals of the linear program of the strategies near the bound. Strategies near the bound
    under those join the program, and so on. A linear program whose step is far from the bound lacks strategies: those
    further from the bound join it. Where a program gets too large for HiGHS, the tuning ends, and only strategies near the bound
    under the best multipliers are solved for.
    """
    best = state.dual_bound, state.relaxation.multipliers
    level, restriction, idle, last = 0, _near_bound(state, 0), 0, 0.0
    if state.warm_start is not None:
        restriction = restriction.joined(state.warm_start.restriction)
    for _ in range(ROUNDS if state.warm_start is None else ROUNDS_AGAIN):
        found = state.formulation(restriction).multipliers(state.clock.for_program, _price_over(state))
        if state.is_done or found is None:
            break
        multipliers, seconds = found
        state.reweigh(multipliers)
        idle = 0 if state.dual_bound - last > GAIN * best[0] else idle + 1
        last = state.dual_bound
        if last > best[0]:
            best = last, state.relaxation.multipliers
        if state.is_done:
            break
        before, restriction = restriction.size, restriction.joined(_near_bound(state, level))
        if idle == PATIENCE or (idle and restriction.size == before):  # the same program has the same duals
            level += 1
            lacked = seconds - best[0]
            if lacked <= max(FAR, state.goal.gap / 2) * best[0] or level == len(NEAR):
                break
            if not state.goal.is_worthwhile(lacked, restriction.size):
                break
            idle, restriction = 0, restriction.joined(_near_bound(state, level))
        if restriction.size > PROVABLE:
            break
    if state.relaxation.multipliers is not best[1]:
        state.reweigh(best[1])
    if not state.is_done:
        if restriction.size > PROVABLE:
            restriction = _near_bound(state, 1)
        state.left = WarmStart(state.relaxation.multipliers, restriction)
        gap = max(state.goal.gap / 2, SMALL_GAP)
        assignment, _ = state.formulation(restriction).solve(gap, state.clock.for_program, nodes=1)
        state.offer_solved(assignment)


def _price_over(state: SearchState) -> float | None:
    """Return the seconds that a byte over the limit costs, None if an assignment fits or none was seen."""
    if state.budget is None or state.bounds.incumbent is not None or not state.seen:
        return None
    return OVER * state.fastest / max(1.0, state.smallest)


def _near_bound(state: SearchState, level: int) -> Restriction:
    """Return the strategies near the bound, or the cheapest where those make a large program, and the assignments seen; more of
    them at each `level`."""
    bound, dual = state.dual.bound, state.dual.copied()
    dual.prune(bound + NEAR[level] * state.dual_bound, PRUNING_SWEEPS)
    seen = [assignment.strategies for assignment in state.seen]
    restrictions = (cheapest(dual, most, seen) for most in CHEAPEST)
    most = max(LARGE, LARGE_EACH * len(state.factor_graph.variables)) * 2**level
    return next((one for one in restrictions if one.size <= most), cheapest(dual, 0, seen))
