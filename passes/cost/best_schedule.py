"""Search the orders that list scheduling makes of a step for the fastest: prefetch window, held kernels, bucket size.

Of orders that are equally fast, the one that loses least where links are slower than they are thought to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from passes.cost.bucketing import Bucketing, Sizes, Sort, seconds_by_sort
from passes.cost.list_scheduling import ordered
from passes.cost.movable_tasks import Facts
from passes.cost.program import Program
from passes.cost.simulate import Timeline, simulate

WINDOWS = (1, 2, 4, 8, 16)  # what `schedule` tries, in largest gathers
TRIES = 3  # of room, until a window fits
MORE_MEMORY = 1.05  # of what a program takes as it is given, where no limit is
HOPE = 0.25  # part of a step that buckets do not save
HIDDEN = 0.01  # part of a step that may be exposed without a size for each sort of message being looked for
HOPE_APART = 0.1  # part of a step that a size for each sort of message does not save beside a common one
WORTH = 0.002  # part of the step that a larger window, or more memory, must save
SLOWER = 1.5  # times as long as predicted, that collectives may take when kernels and other messages run beside them


@dataclass(frozen=True)
class Schedule:
    """A program in its best order found, and what it takes."""

    program: Program
    timeline: Timeline
    window_bytes: int  # 0: as it was given
    fill: bool
    held_seconds: float
    bucket_bytes: int  # 0: no collectives joined
    room_bytes: int | None = None  # that a gather ahead may bring memory to; None: all that the window allows


def schedule(
    program: Program,
    *,
    memory_limit: int | None = None,
    buckets: Sequence[int] = (0,),
    windows: Sequence[int] = WINDOWS,
    worst: float = float("inf"),
) -> Schedule:
    """The fastest order found that fits `memory_limit` bytes; where none fits, the smallest in memory.

    `buckets` are the sizes of buckets to try, in bytes; 0 joins nothing. `windows` are tried in this order, in largest
    gathers. Of a program that the first buckets make much slower than `worst` seconds, no others are tried.
    """
    found = _sizes_tried(_Joined(program), buckets, memory_limit, windows, worst)
    return min(found, key=lambda one: _key(one.timeline, memory_limit))


class _Orders:
    """Orders of a program: each is made once, whatever asks for it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._made: dict[tuple[bool, int, int | None], list[tuple[range, Timeline]]] = {}

    @cached_property
    def facts(self) -> Facts:
        return Facts.of(self.program)

    def tried(
        self,
        window: int,
        bucket_bytes: int,
        *,
        fill: bool = False,
        held_seconds: float = 0.0,
        room: int | None = None,
    ) -> Schedule:
        facts = self.facts
        key = (fill and bool(facts.slack), len(facts.last_slack(held_seconds)), room)
        known = self._made.setdefault(key, [])
        timeline = next((timeline for windows, timeline in known if window in windows), None)
        if timeline is None:
            found = ordered(facts, window, fill=fill, held_seconds=held_seconds, room=room)
            timeline = simulate(found.program)
            known.append((found.windows, timeline))
        return Schedule(timeline.program, timeline, window, fill, held_seconds, bucket_bytes, room)


class _Joined:
    """A program with its messages joined in buckets of some size."""

    def __init__(self, program: Program) -> None:
        self.bucketing = Bucketing(program)
        self._found: dict[tuple[tuple[int, ...], ...], _Orders] = {}

    def orders(self, nbytes: int | Sizes) -> _Orders:
        """Of the program with buckets of at most `nbytes`."""
        joinable = self.bucketing.buckets(nbytes)
        if joinable not in self._found:
            self._found[joinable] = _Orders(self.bucketing.joined(joinable))
        return self._found[joinable]


def _sizes_tried(
    joined: _Joined, buckets: Sequence[int], memory_limit: int | None, windows: Sequence[int], worst: float
) -> list[Schedule]:
    """The first size of buckets, and those others that join anything."""
    found: list[Schedule] = []
    for nbytes in buckets:
        orders = joined.orders(nbytes)
        if not found or orders.program is not joined.bucketing.program:
            found.append(_schedule(orders, nbytes, memory_limit, windows))
            if found[0].timeline.step_time > worst * (1 + HOPE):
                break
    return found


def bucketed(
    program: Program,
    buckets: Sequence[int],
    *,
    memory_limit: int | None = None,
    windows: Sequence[int] = WINDOWS,
    worst: float = float("inf"),
) -> tuple[dict[Sort, int], Schedule]:
    """The size of buckets, of those to try, for each sort of message, and the best order with them: the best common one,
    then each its own where that is faster and more than a hundredth is exposed. None is joined where that saves next to
    nothing: what copies take in a graph is not known to the last bit. `worst`: as for `schedule`; of a program that is much
    slower with a common size, no sizes apart are tried."""
    joined = _Joined(program)
    plain, *tries = _sizes_tried(joined, (0, *buckets), memory_limit, windows, worst)
    seconds = seconds_by_sort(program)
    none = dict.fromkeys(seconds, 0)
    if not tries:
        return none, plain
    best = min(tries, key=lambda one: _key(one.timeline, memory_limit))
    found = dict.fromkeys(seconds, best.bucket_bytes)
    is_worse = best.timeline.step_time > worst * (1 + HOPE_APART)
    is_hidden = best.timeline.exposed < HIDDEN * best.timeline.step_time
    for sort in seconds if len(seconds) > 1 and not (is_worse or is_hidden) else ():
        others = [nbytes for nbytes in (0, *buckets) if nbytes != found[sort]]
        for nbytes in others if seconds[sort] > WORTH * best.timeline.step_time else ():
            orders = joined.orders(found | {sort: nbytes})
            tried = orders.tried(
                best.window_bytes, nbytes, fill=best.fill, held_seconds=best.held_seconds, room=best.room_bytes
            )
            if _is_better(tried.timeline, best.timeline, memory_limit):
                best, found[sort] = tried, nbytes
    is_worth = best.timeline.step_time < (1 - WORTH) * plain.timeline.step_time
    return (found, best) if is_worth and _is_better(best.timeline, plain.timeline, memory_limit) else (none, plain)


def memory_cap(given: Timeline, memory_limit: int | None) -> int:
    """Bytes that an order may take: the limit, but what is over it as it is given may stay so; None: a twentieth more."""
    if memory_limit is None:
        return int(MORE_MEMORY * given.peak_memory)
    return max(memory_limit, given.peak_memory)


def _schedule(orders: _Orders, bucket_bytes: int, memory_limit: int | None, counts: Sequence[int]) -> Schedule:
    facts, windows = orders.facts, _windows(orders.program, counts)
    best = Schedule(orders.program, facts.given, 0, False, 0.0, bucket_bytes)
    best = _best_window(orders, best, memory_limit, windows, fill=False)
    held = facts.last_seconds
    while 0 < held < facts.slack_seconds:
        tried = orders.tried(best.window_bytes, bucket_bytes, held_seconds=held, room=best.room_bytes)
        if not _is_better(tried.timeline, best.timeline, memory_limit):
            break
        best, held = tried, 2 * held
    best = _best_window(orders, best, memory_limit, windows, fill=True)
    return _sturdier(orders, best, memory_limit, windows[-1])


def _sturdier(orders: _Orders, best: Schedule, memory_limit: int | None, window: int) -> Schedule:
    """The same with all gathered ahead that `window` and memory have room for, where that is as fast and, should
    collectives be slower, faster: what is gathered just in time is late then."""
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
    """The better of `best` and the best window; one that takes too much memory is made as large as there is room."""
    fastest = float("inf")
    for window in windows:
        tried = orders.tried(window, best.bucket_bytes, fill=fill)
        is_faster = tried.timeline.step_time < best.timeline.step_time
        if is_faster and not _fits(tried.timeline, memory_limit) and _fits(orders.facts.given, memory_limit):
            tried = _within(orders, tried, memory_limit)
        if _is_better(tried.timeline, best.timeline, memory_limit):
            best = tried
        if tried.timeline.step_time > (1 - WORTH) * fastest:
            break
        fastest = tried.timeline.step_time
    return best


def _within(orders: _Orders, found: Schedule, memory_limit: int | None) -> Schedule:
    """The same with less gathered ahead where memory is short: by what was over the limit, until that fits."""
    assert memory_limit is not None
    room = memory_limit
    for _ in range(TRIES):
        found = orders.tried(
            found.window_bytes, found.bucket_bytes, fill=found.fill, held_seconds=found.held_seconds, room=room
        )
        if _fits(found.timeline, memory_limit):
            break
        room -= found.timeline.peak_memory - memory_limit
    return found


def prefetch(
    program: Program, window_bytes: int, *, fill: bool = False, held_seconds: float = 0.0, room: int | None = None
) -> Program:
    """`program` in the order of `passes.cost.list_scheduling`, or as it is where that is not faster."""
    found = ordered(Facts.of(program), window_bytes, fill=fill, held_seconds=held_seconds, room=room).program
    return found if simulate(found).step_time < simulate(program).step_time else program


def _windows(program: Program, counts: Sequence[int]) -> tuple[int, ...]:
    sizes = {buffer.name: buffer.nbytes for buffer in program.buffers}
    largest = max((sizes[name] for task in program.tasks if task.prefetchable for name in task.outputs), default=0)
    return tuple(largest * count for count in counts) if largest else (0,)


def _is_better(one: Timeline, other: Timeline, memory_limit: int | None) -> bool:
    """Whether `one` has the smaller key, and where both fit, saves enough for the memory that it takes more.

    Its memory is asked for only where it tells.
    """
    key = _key(other, memory_limit)
    if key[0] == 0.0 and one.step_time > (1 - WORTH) * other.step_time:
        return one.step_time < other.step_time and one.peak_memory <= other.peak_memory
    return _key(one, memory_limit) < key


def _fits(timeline: Timeline, memory_limit: int | None) -> bool:
    return memory_limit is None or timeline.peak_memory <= memory_limit


def _key(timeline: Timeline, memory_limit: int | None) -> tuple[float, float]:
    if _fits(timeline, memory_limit):
        return (0.0, timeline.step_time)
    return (float(timeline.peak_memory), timeline.step_time)
