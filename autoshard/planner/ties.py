"""Choose between plans whose steps are nearer than a prediction can tell: by memory, then by simplicity."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autoshard.plans.outcome import Cost

# Part of a step, and of a peak: plans that differ by less are equal. A choice, not a measurement: published steps are
# predicted within 12 % (`python -m benchmarks.published`), and most of that error is common to two plans of one model.
TIE = 0.01


def preferred(costs: Mapping[str, Cost], simple: Collection[str]) -> str | None:
    """Return the name of the best plan: fast as the fastest, of those small as the smallest, of those a `simple` one.

    Of several, the fastest; if equal, the first. None if there are no plans.
    """
    if not costs:
        return None
    fastest = min(cost.step_time for cost in costs.values())
    fast = {name: cost for name, cost in costs.items() if cost.step_time <= fastest * (1 + TIE)}
    smallest = min(cost.peak_memory for cost in fast.values())
    small = [name for name, cost in fast.items() if cost.peak_memory <= smallest * (1 + TIE)]
    return min(small, key=lambda name: (name not in simple, costs[name].step_time))
