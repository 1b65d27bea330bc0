"""Search the orders of a step that list scheduling gives for the fastest: by prefetch window, held kernels, bucket size.

Among equally fast orders, the one that loses least if links are slower than predicted is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from passes.cost.program import Program
from passes.cost.scheduling.bucketing import Bucketing, Growing, Hidden, Size, Sizes, Sort, seconds_by_sort
from passes.cost.scheduling.least_step import least_step
from passes.cost.scheduling.list_scheduling import list_schedule
from passes.cost.scheduling.movable_tasks import MovableTasks
from passes.cost.shrink import Tried, shrink
from passes.cost.simulate import Timeline, simulate

# Heuristics: `python -m benchmarks.overlap` shows, for each case, what the order exposes and the lower bound of any order.
WINDOWS = (1, 2, 4, 8, 16)  # prefetch windows to try, in largest gathers: doubled until that saves nothing
BUDGET_TRIES = 3  # memory budgets to try until a window fits: many windows are tried, each with its budgets
MORE_MEMORY = 1.05  # times the memory of the given order, allowed without a limit: 5 % for prefetches
MOST_SAVED_APART = 0.25  # fraction of a step that sizes by sort of message save at most over a common size, by assumption
HIDDEN = 0.01  # fraction of a step: if less is exposed with a common bucket size, sizes by sort cannot save more
WORTH = 0.002  # fraction of a step that a larger window, or more memory, must save: less is within the model's error
FEWER = 4  # times fewer bytes than in the smallest bucket, tried for one sort alone: one of few bytes fills it late
SLOWER = 1.5  # times the predicted seconds of collectives, to break ties: a margin for effects that are not modelled


@dataclass(frozen=True)
class Schedule:
    """A program in its best order found, with its timeline and the choices that gave it."""

    program: Program
    timeline: Timeline
    window_bytes: int  # 0: the given order
    fill: bool
    held_seconds: float
    bucket_bytes: Size  # 0: no collectives are bucketed
    memory_budget: int | None = None  # bytes that a prefetch may bring memory to; None: all that the window allows


def schedule(
    program: Program,
    *,
    memory_limit: int | None = None,
    buckets: Sequence[int] = (0,),
    windows: Sequence[int] = WINDOWS,
    worst: float = float("inf"),
) -> Schedule:
    """Return the fastest order found that fits `memory_limit` bytes; if none fits, the one with least memory.

    `buckets` are the bucket sizes to try, in bytes; 0 joins nothing. `windows` are tried in this order, in largest
    gathers. Other bucket sizes than the first that give a step longer than `worst` seconds in any order are not tried.
    """
    found = _sizes_tried(_Joined(program), buckets, memory_limit, windows, worst)
    return min(found, key=lambda one: _key(one.timeline, memory_limit))


class _Orders:
    """Computes each order of a program once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._made: dict[tuple[bool, int, int | None], list[tuple[range, Timeline]]] = {}

    @cached_property
    def movable(self) -> MovableTasks:
        """Return which tasks of the program can move."""
        return MovableTasks.of(self.program)

    def tried(
        self,
        window: int,
        bucket_bytes: Size,
        *,
        fill: bool = False,
        held_seconds: float = 0.0,
        memory_budget: int | None = None,
    ) -> Schedule:
        """Return the order that list scheduling makes with these choices."""
        movable = self.movable
        key = (fill and bool(movable.slack), len(movable.last_slack(held_seconds)), memory_budget)
        known = self._made.setdefault(key, [])
        timeline = next((timeline for windows, timeline in known if window in windows), None)
        if timeline is None:
            found = list_schedule(
                movable, window, fill=fill, held_seconds=held_seconds, memory_budget=memory_budget
            )
            timeline = simulate(found.program)
            known.append((found.windows, timeline))
        return Schedule(timeline.program, timeline, window, fill, held_seconds, bucket_bytes, memory_budget)


class _Joined:
    """Buckets the collectives of a program by several sizes, and orders each result."""

    def __init__(self, program: Program) -> None:
        self.bucketing = Bucketing(program)
        self._found: dict[tuple[tuple[int, ...], ...], _Orders] = {}

    def orders(self, nbytes: Size | Sizes) -> _Orders:
        """Return the orders of the program with buckets of at most `nbytes`."""
        joinable = self.bucketing.buckets(nbytes)
        if joinable not in self._found:
            self._found[joinable] = _Orders(self.bucketing.joined(joinable))
        return self._found[joinable]


def _sizes_tried(
    joined: _Joined, buckets: Sequence[Size], memory_limit: int | None, windows: Sequence[int], worst: float
) -> list[Schedule]:
    """Return the best order for the first bucket size, and for each other that joins anything and could be fast enough."""
    found: list[Schedule] = []
    for nbytes in buckets:
        orders = joined.orders(nbytes)
        is_other = orders.program is not joined.bucketing.program
        if not found or (is_other and least_step(orders.program) <= worst):
            found.append(_schedule(orders, nbytes, memory_limit, windows))
    return found


def bucketed(
    program: Program,
    buckets: Sequence[int],
    *,
    memory_limit: int | None = None,
    windows: Sequence[int] = WINDOWS,
    worst: float = float("inf"),
) -> tuple[dict[Sort, Size], Schedule]:
    """Return the bucket size for each sort of message, out of `buckets`, and the best order with these sizes.

    First the best common size is found, for messages that kernels wait for and for those that hide. If more than `HIDDEN` of
    the step stays exposed, the size between the smallest and the largest is tried too, then each sort's size is changed alone,
    also to less than the smallest, to buckets that grow and to buckets for messages that hide, and kept if that is faster. If
    bucketing saves less than `WORTH` of the step, nothing is joined: the time of the copies in a graph is not known so
    precisely. `worst`: as for `schedule`; if the best common size is much slower, none are tried by sort.
    """
    joined = _Joined(program)
    hidden = tuple(map(Hidden, buckets))
    plain, *tries = _sizes_tried(joined, (0, *buckets, *hidden), memory_limit, windows, worst)
    seconds = seconds_by_sort(program)
    none: dict[Sort, Size] = dict.fromkeys(seconds, 0)
    if not tries:
        return none, plain
    best = min(tries, key=lambda one: _key(one.timeline, memory_limit))
    is_worse = best.timeline.step_time > worst * (1 + MOST_SAVED_APART)
    is_hidden = best.timeline.exposed < HIDDEN * best.timeline.step_time
    if len(buckets) > 1 and not (is_worse or is_hidden):
        # Large buckets have less latency, but are sent late: between, links are used sooner.
        buckets = (*buckets, math.isqrt(min(buckets) * max(buckets)))
        tries += _sizes_tried(joined, buckets[-1:], memory_limit, windows, worst)
        best = min(tries, key=lambda one: _key(one.timeline, memory_limit))
    found: dict[Sort, Size] = dict.fromkeys(seconds, best.bucket_bytes)
    growing = tuple(map(Growing, buckets))
    alone = (0, min(buckets) // FEWER, *buckets) if len(seconds) > 1 else ()  # of one sort, these are the common sizes
    sizes: tuple[Size, ...] = (*alone, *growing, *hidden)
    for sort in seconds if not (is_worse or is_hidden) else ():
        others = [nbytes for nbytes in sizes if nbytes != found[sort]]
        for nbytes in others if seconds[sort] > WORTH * best.timeline.step_time else ():
            orders = joined.orders(found | {sort: nbytes})
            tried = orders.tried(
                best.window_bytes,
                nbytes,
                fill=best.fill,
                held_seconds=best.held_seconds,
                memory_budget=best.memory_budget,
            )
            if _is_better(tried.timeline, best.timeline, memory_limit):
                best, found[sort] = tried, nbytes
    is_worth = best.timeline.step_time < (1 - WORTH) * plain.timeline.step_time
    return (found, best) if is_worth and _is_better(best.timeline, plain.timeline, memory_limit) else (none, plain)


def memory_cap(given: Timeline, memory_limit: int | None) -> int:
    """Return the bytes that an order may take: the limit, or what the given order takes if that is more.

    Without a limit it is `MORE_MEMORY` times what the given order takes.
    """
    if memory_limit is None:
        return int(MORE_MEMORY * given.peak_memory)
    return max(memory_limit, given.peak_memory)


def _schedule(orders: _Orders, bucket_bytes: Size, memory_limit: int | None, counts: Sequence[int]) -> Schedule:
    movable, windows = orders.movable, _windows(orders.program, counts)
    best = Schedule(orders.program, movable.given, 0, False, 0.0, bucket_bytes)
    best = _best_window(orders, best, memory_limit, windows, fill=False)
    held = movable.last_seconds
    while 0 < held < movable.slack_seconds:
        tried = orders.tried(
            best.window_bytes, bucket_bytes, held_seconds=held, memory_budget=best.memory_budget
        )
        if not _is_better(tried.timeline, best.timeline, memory_limit):
            break
        best, held = tried, 2 * held
    best = _best_window(orders, best, memory_limit, windows, fill=True)
    return _more_robust(orders, best, memory_limit, windows[-1])


def _more_robust(orders: _Orders, best: Schedule, memory_limit: int | None, window: int) -> Schedule:
    """Return the order with everything prefetched that `window` and memory allow, if it is as fast and more robust.

    More robust means faster with collectives that are `SLOWER` times as slow, when a gather that arrives just in time
    is late.
    """
    if not 0 < best.window_bytes < window or not _fits(best.timeline, memory_limit):
        return best
    tried = orders.tried(window, best.bucket_bytes, fill=best.fill, held_seconds=best.held_seconds)
    if not _fits(tried.timeline, memory_limit):
        tried = _within(orders, tried, memory_limit)
    if not _fits(tried.timeline, memory_limit) or tried.timeline.step_time > best.timeline.step_time:
        return best
    slow, slower = (simulate(one.program, links=SLOWER).step_time for one in (tried, best))
    return tried if slow < (1 - WORTH) * slower else best


def _best_window(
    orders: _Orders, best: Schedule, memory_limit: int | None, windows: Sequence[int], *, fill: bool
) -> Schedule:
    """Return the better of `best` and the best window; a window that takes too much memory is limited to what fits."""
    fastest = float("inf")
    for window in windows:
        tried = orders.tried(window, best.bucket_bytes, fill=fill)
        is_faster = tried.timeline.step_time < best.timeline.step_time
        if is_faster and not _fits(tried.timeline, memory_limit) and _fits(orders.movable.given, memory_limit):
            tried = _within(orders, tried, memory_limit)
        if _is_better(tried.timeline, best.timeline, memory_limit):
            best = tried
        if tried.timeline.step_time > (1 - WORTH) * fastest:
            break
        fastest = tried.timeline.step_time
    return best


def _within(orders: _Orders, found: Schedule, memory_limit: int | None) -> Schedule:
    """Return the same order with less prefetched where memory is short: less by the excess, until it fits."""
    assert memory_limit is not None

    def attempt(budget: float) -> Tried[Schedule]:
        tried = orders.tried(
            found.window_bytes,
            found.bucket_bytes,
            fill=found.fill,
            held_seconds=found.held_seconds,
            memory_budget=int(budget),
        )
        excess = tried.timeline.peak_memory - memory_limit
        return Tried(tried, budget - excess if excess > 0 else None)

    last = shrink(memory_limit, attempt, tries=BUDGET_TRIES)
    assert last is not None
    return last


def prefetch(
    program: Program,
    window_bytes: int,
    *,
    fill: bool = False,
    held_seconds: float = 0.0,
    memory_budget: int | None = None,
) -> Program:
    """Return `program` in the order of list scheduling, or unchanged if that is not faster."""
    movable = MovableTasks.of(program)
    found = list_schedule(
        movable, window_bytes, fill=fill, held_seconds=held_seconds, memory_budget=memory_budget
    ).program
    return found if simulate(found).step_time < simulate(program).step_time else program


def _windows(program: Program, counts: Sequence[int]) -> tuple[int, ...]:
    """Return the prefetch windows in bytes: `counts` times the largest gather."""
    sizes = {buffer.name: buffer.nbytes for buffer in program.buffers}
    largest = max((sizes[name] for task in program.tasks if task.prefetchable for name in task.outputs), default=0)
    return tuple(largest * count for count in counts) if largest else (0,)


def _is_better(one: Timeline, other: Timeline, memory_limit: int | None) -> bool:
    """Return whether `one` has the smaller key and, if both fit, saves enough to justify more memory.

    Its memory, which is slow to compute, is computed only if it matters.
    """
    key = _key(other, memory_limit)
    if key[0] == 0.0 and one.step_time > (1 - WORTH) * other.step_time:
        return one.step_time < other.step_time and one.peak_memory <= other.peak_memory
    return _key(one, memory_limit) < key


def _fits(timeline: Timeline, memory_limit: int | None) -> bool:
    return memory_limit is None or timeline.peak_memory <= memory_limit


def _key(timeline: Timeline, memory_limit: int | None) -> tuple[float, float]:
    """Return the key to minimise: the step time of those that fit, then the memory of the others."""
    if _fits(timeline, memory_limit):
        return (0.0, timeline.step_time)
    return (float(timeline.peak_memory), timeline.step_time)
