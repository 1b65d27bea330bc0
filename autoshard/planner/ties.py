"""Choose between plans whose steps are nearer than a prediction can tell: by sturdiness, by memory, then by simplicity."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from passes.cost.simulate import Timeline

# Part of a step, and of a peak: plans that differ by less are equal. A choice, not a measurement: published steps are
# predicted within 12 % (`python -m benchmarks.published`), and most of that error is common to two plans of one model.
TIE = 0.01


def preferred(timelines: Mapping[str, Timeline], simple: Collection[str]) -> str | None:
    """Return the name of the best plan, or None if there are no plans.

    Of those as fast as the fastest, these are kept in turn: the ones that slower links lengthen least, the smallest, and
    those with a `simple` name. Of several, the fastest; if equal, the first.
    """
    kept = timelines
    for measure in (_seconds, _slowed, _bytes):
        kept = _least(kept, measure)
    return min(kept, key=lambda name: (name not in simple, kept[name].step_time), default=None)


def _least(timelines: Mapping[str, Timeline], measure: Callable[[Timeline], float]) -> dict[str, Timeline]:
    """Return the timelines whose measure equals the least one."""
    measures = {name: measure(one) for name, one in timelines.items()}
    most = min(measures.values(), default=0.0) * (1 + TIE)
    return {name: timelines[name] for name, found in measures.items() if found <= most}


def _seconds(timeline: Timeline) -> float:
    return timeline.step_time


def _slowed(timeline: Timeline) -> float:
    return timeline.slowed_step_time


def _bytes(timeline: Timeline) -> float:
    return timeline.peak_memory
