"""In which order the host issues a step's tasks, so that communication hides behind compute.

What an expert's runtime does, as list scheduling on the machine of `simulate`:

1. A gather of parameters, or in the backward of what was kept, is issued early, in the order of use, as long as the
   bytes gathered ahead of their use fit the window, and the memory that is left until then where that is short, and its
   link will be free before the next kernel ends: no queue builds up that others wait behind.
2. A reduction of gradients is issued as soon as it can start without holding up a kernel, its link permitting.
3. Any other collective is on the critical path: it is issued as soon as its operand is there.
4. Kernels keep their order, but one that would wait lets others go first: what is ready and stands at most
   `LOOKAHEAD` kernels further on, or what makes the operands of the next `LOOKAHEAD` gathers.
5. What leads to one gradient alone (a weight's) can wait: with `fill`, for such a gap, `HELD` kernels at most; and the
   last `held_seconds` of the backward for all the rest to be issued, so that the reduction that ends last has kernels
   beside it. Those whose reductions take longest go first then.

Of orders that are equally fast, the one that loses least where links are slower than they are thought to be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from passes.cost.bucket import Sort, bucket, seconds_by_sort
from passes.cost.movable import Facts, Unit
from passes.cost.program import Program
from passes.cost.simulate import Timeline, simulate

LOOKAHEAD = 32  # kernels; about those of a layer's half
HELD = 16  # kernels; about the weights of two layers
LATE = 4  # kernels behind reductions, which end in order but for those on another link
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
    found = _sizes_tried(program, buckets, memory_limit, windows, worst)
    return min(found, key=lambda one: _key(one.timeline, memory_limit))


def _sizes_tried(
    program: Program, buckets: Sequence[int], memory_limit: int | None, windows: Sequence[int], worst: float
) -> list[Schedule]:
    """The first size of buckets, and those others that join anything."""
    found: list[Schedule] = []
    for nbytes in buckets:
        joined = bucket(program, nbytes) if nbytes else program
        if joined is not program or not found:
            found.append(_schedule(joined, nbytes, memory_limit, windows))
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
    plain, *tries = _sizes_tried(program, (0, *buckets), memory_limit, windows, worst)
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
            facts = Facts.of(bucket(program, found | {sort: nbytes}))
            tried = _tried(
                facts,
                best.window_bytes,
                nbytes,
                fill=best.fill,
                held_seconds=best.held_seconds,
                room=best.room_bytes,
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


def _schedule(program: Program, bucket_bytes: int, memory_limit: int | None, counts: Sequence[int]) -> Schedule:
    facts, windows = Facts.of(program), _windows(program, counts)
    best = Schedule(program, facts.given, 0, False, 0.0, bucket_bytes)
    best = _best_window(facts, best, memory_limit, windows, fill=False)
    held = facts.last_seconds
    while 0 < held < facts.slack_seconds:
        tried = _tried(facts, best.window_bytes, bucket_bytes, held_seconds=held, room=best.room_bytes)
        if not _is_better(tried.timeline, best.timeline, memory_limit):
            break
        best, held = tried, 2 * held
    best = _best_window(facts, best, memory_limit, windows, fill=True)
    return _sturdier(facts, best, memory_limit, windows[-1])


def _sturdier(facts: Facts, best: Schedule, memory_limit: int | None, window: int) -> Schedule:
    """The same with all gathered ahead that `window` and memory have room for, where that is as fast and, should
    collectives be slower, faster: what is gathered just in time is late then."""
    if not 0 < best.window_bytes < window or not _fits(best.timeline, memory_limit):
        return best
    tried = _tried(facts, window, best.bucket_bytes, fill=best.fill, held_seconds=best.held_seconds)
    if not _fits(tried.timeline, memory_limit):
        tried = _within(facts, tried, memory_limit)
    if not _fits(tried.timeline, memory_limit) or tried.timeline.step_time > best.timeline.step_time:
        return best
    slow, slower = (simulate(one.program, links=SLOWER).step_time for one in (tried, best))
    return tried if slow < (1 - WORTH) * slower else best


def _best_window(
    facts: Facts, best: Schedule, memory_limit: int | None, windows: Sequence[int], *, fill: bool
) -> Schedule:
    """The better of `best` and the best window; one that takes too much memory is made as large as there is room."""
    fastest = float("inf")
    for window in windows:
        tried = _tried(facts, window, best.bucket_bytes, fill=fill)
        is_faster = tried.timeline.step_time < best.timeline.step_time
        if is_faster and not _fits(tried.timeline, memory_limit) and _fits(facts.given, memory_limit):
            tried = _within(facts, tried, memory_limit)
        if _is_better(tried.timeline, best.timeline, memory_limit):
            best = tried
        if tried.timeline.step_time > (1 - WORTH) * fastest:
            break
        fastest = tried.timeline.step_time
    return best


def _within(facts: Facts, found: Schedule, memory_limit: int | None) -> Schedule:
    """The same with less gathered ahead where memory is short: by what was over the limit, until that fits."""
    assert memory_limit is not None
    room = memory_limit
    for _ in range(TRIES):
        found = _tried(
            facts, found.window_bytes, found.bucket_bytes, fill=found.fill, held_seconds=found.held_seconds, room=room
        )
        if _fits(found.timeline, memory_limit):
            break
        room -= found.timeline.peak_memory - memory_limit
    return found


def _tried(
    facts: Facts,
    window: int,
    bucket_bytes: int,
    *,
    fill: bool = False,
    held_seconds: float = 0.0,
    room: int | None = None,
) -> Schedule:
    program = _ordered(facts, window, fill=fill, held_seconds=held_seconds, room=room)
    return Schedule(program, simulate(program), window, fill, held_seconds, bucket_bytes, room)


def prefetch(
    program: Program, window_bytes: int, *, fill: bool = False, held_seconds: float = 0.0, room: int | None = None
) -> Program:
    """`program` in the order of the module's text, or as it is where that is not faster."""
    ordered = _ordered(Facts.of(program), window_bytes, fill=fill, held_seconds=held_seconds, room=room)
    return ordered if simulate(ordered).step_time < simulate(program).step_time else program


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


def _ordered(
    facts: Facts, window_bytes: int, *, fill: bool, held_seconds: float, room: int | None = None
) -> Program:
    scheduler = _Scheduler(facts, window_bytes, fill=fill, held_seconds=held_seconds)
    if room is not None:
        scheduler.room = Room([room - nbytes for nbytes in facts.given.memory])
    return facts.program.reordered(scheduler.run())


class Room:
    """Bytes left at each turn of a program as it is given."""

    def __init__(self, free: list[int]) -> None:
        self.tables = [free]  # of twice as many turns each
        while (reach := 1 << (len(self.tables) - 1)) < len(free):
            last = self.tables[-1]
            self.tables.append([min(pair) for pair in zip(last, last[reach:], strict=False)])

    def least(self, first: int, last: int) -> int:
        """Of the turns from `first` to `last`."""
        level = (last - first + 1).bit_length() - 1
        table = self.tables[level]
        return min(table[first], table[last + 1 - (1 << level)])


class _Queue:
    """Tasks in program order, some of which are issued."""

    def __init__(self, numbers: list[int], issued: list[bool]) -> None:
        self.numbers, self.issued, self.head = numbers, issued, 0

    def first(self) -> int | None:
        """The first that is not issued."""
        numbers, issued, at = self.numbers, self.issued, self.head
        while at < len(numbers) and issued[numbers[at]]:
            at += 1
        self.head = at
        return numbers[at] if at < len(numbers) else None

    def waiting(self, limit: int) -> list[int]:
        """The first `limit` that are not issued."""
        found: list[int] = []
        if self.first() is not None:
            numbers, issued = self.numbers, self.issued
            for at in range(self.head, len(numbers)):
                if not issued[numbers[at]]:
                    found.append(numbers[at])
                    if len(found) == limit:
                        break
        return found


class _Scheduler:
    """Issues tasks one by one, and keeps the clocks that `simulate` will find."""

    def __init__(self, facts: Facts, window_bytes: int, *, fill: bool, held_seconds: float) -> None:
        program = facts.program
        self.facts, self.tasks, self.index, self.window = facts, program.tasks, program.index, window_bytes
        self.streams = program.index.streams
        self.sizes = [buffer.nbytes for buffer in program.buffers]
        self.clocks = [0.0, 0.0, 0.0]  # the first is also the time at hand
        self.ready = [0.0] * len(self.sizes)  # per buffer, when it is made
        self.turns = [0.0] * len(self.tasks)  # per task, when its operands are made, as far as their makers are issued
        self.missing = list(facts.missing)
        self.issued = [False] * len(self.tasks)
        self.order: list[int] = []
        self.ahead = 0  # bytes gathered and not read yet
        self.unread = [False] * len(self.sizes)
        self.units, self.unit = facts.units, 0
        self.in_unit = {number for unit in self.units for number in unit.tasks}
        self.makers = [number for unit in self.units for number in unit.tasks[:-1]]  # of the units' operands
        self.firsts = [0, *accumulate(len(unit.tasks) - 1 for unit in self.units)]  # per unit, in them
        self.room: Room | None = None
        self.is_late = facts.is_late
        self.fillers = set(facts.slack if fill else ())
        self.held_last = facts.last_slack(held_seconds)
        self.urgent: list[int] = []  # collectives whose operands' makers are issued
        self.reductions: tuple[deque[int], ...] = (deque(), deque(), deque())  # by stream
        self.late = self.held = self.path = self.last = _Queue([], self.issued)
        self.phase: set[int] = set()

    def run(self) -> list[int]:
        """All tasks in the order of issue."""
        for phase in self.facts.phases:
            self._begin(phase)
            while self._step():
                pass
            self.clocks[0] = max(self.clocks)
        assert len(self.order) == len(self.tasks), "a task waits for one behind it"
        return self.order

    def _begin(self, phase: list[int]) -> None:
        self.phase = set(phase)
        waiting = [number for number in phase if number not in self.in_unit]
        kernels = [number for number in waiting if self.streams[number] == 0]
        self.late = _Queue([n for n in kernels if self.is_late[n]], self.issued)
        last = [n for n in self.held_last if n in self.phase]
        self.last = _Queue(last, self.issued)  # not in the order of the program: what others read may stand far behind them
        fillers = self.fillers.difference(last)
        held = [n for n in kernels if n in fillers]
        self.held = _Queue(held, self.issued)
        apart = {*last, *held}
        others = [n for n in waiting if not (self.is_late[n] or n in apart or self.tasks[n].deferrable)]
        self.path = _Queue(others, self.issued)
        for number in waiting:
            if self.missing[number] == 0:
                self._operands_made(number)

    def _step(self) -> bool:
        """Issue what can start now, or wait until something can; False when the phase has ended."""
        kernel = self._kernel()
        if kernel is None:
            return self._communicate(self.clocks[0]) or self._wait()
        self._read(kernel)
        if not self._communicate(self.clocks[0] + self.tasks[kernel].seconds):
            self._issue(kernel)
        return True

    def _kernel(self) -> int | None:
        """The kernel whose turn it is; None where each has to wait."""
        late = self._startable(self.late, LATE)
        if late is not None:
            return late
        if self.held.first() is not None:
            held = self.held.waiting(HELD + 1)
            if len(held) > HELD and all([self._can_start(number) for number in held]):
                return held[0]
        kernel = self._startable(self.path, LOOKAHEAD)
        if kernel is None:
            kernel = self._startable(self.held, HELD + 1)
        if kernel is None:
            kernel = self._startable(self.last, len(self.tasks))
        return self._ahead() if kernel is None else kernel

    def _ahead(self) -> int | None:
        """A kernel that makes the operand of a later gather."""
        for number in self.makers[self.firsts[self.unit] : self.firsts[min(self.unit + LOOKAHEAD, len(self.units))]]:
            if not self.issued[number] and number in self.phase and self._can_start(number):
                return number
        return None

    def _startable(self, queue: _Queue, limit: int) -> int | None:
        """The first kernel that can start, of the first `limit` tasks that wait."""
        if queue.first() is None:
            return None
        numbers, issued, streams, missing, turns = queue.numbers, queue.issued, self.streams, self.missing, self.turns
        now = self.clocks[0]
        for at in range(queue.head, len(numbers)):
            number = numbers[at]
            if issued[number]:
                continue
            if streams[number] == 0 and missing[number] == 0 and turns[number] <= now:
                return number
            limit -= 1
            if not limit:
                return None
        return None

    def _can_start(self, number: int) -> bool:
        return self.streams[number] == 0 and self.missing[number] == 0 and self.turns[number] <= self.clocks[0]

    def _communicate(self, until: float) -> bool:
        """Issue collectives; those that can wait only on a link that is free before `until`."""
        count = len(self.order)
        for number in [n for n in self.urgent if self.turns[n] <= self.clocks[0]]:
            self.urgent.remove(number)
            self._issue(number)
        while self.unit < len(self.units) and self._gather(self.units[self.unit], until):
            self.unit += 1
        for stream, queue in enumerate(self.reductions):
            while queue and self.clocks[stream] <= until and self.turns[queue[0]] <= self.clocks[0]:
                self._issue(queue.popleft())
        return len(self.order) > count

    def _gather(self, unit: Unit, until: float) -> bool:
        """Issue a gather, if it is time."""
        if unit.tasks[-1] not in self.phase or any(self.ready[buffer] > self.clocks[0] for buffer in unit.reads):
            return False
        waiting = self.path.first()
        is_due = unit.use <= (len(self.tasks) if waiting is None else waiting)
        if not is_due:
            assert waiting is not None
            ahead = self.ahead + unit.nbytes
            if ahead > self.window or self.clocks[unit.stream] > until:
                return False
            if self.room is not None and ahead > self.room.least(waiting, unit.use - 1):
                return False
        for number in unit.tasks:
            if not self.issued[number]:
                self._issue(number)
        for buffer in self.index.outputs[unit.tasks[-1]]:
            self.unread[buffer] = True
        self.ahead += unit.nbytes
        return True

    def _wait(self) -> bool:
        """Go on to the next time at which something can start; False where there is none."""
        queues = (
            self.late.waiting(LATE),
            self.held.waiting(HELD + 1),
            self.path.waiting(LOOKAHEAD),
            self.last.waiting(len(self.tasks)),
        )
        waiting = [number for queue in queues for number in queue if self.missing[number] == 0]
        heads = [(stream, queue[0]) for stream, queue in enumerate(self.reductions) if queue]
        times = [self.turns[number] for number in (*waiting, *self.urgent, *(head for _, head in heads))]
        times += [self.clocks[stream] for stream, _ in heads]
        if self.unit < len(self.units):
            unit = self.units[self.unit]
            times += [self.clocks[unit.stream], *(self.ready[buffer] for buffer in unit.reads)]
        later = [time for time in times if time > self.clocks[0]]
        if later:
            self.clocks[0] = min(later)
        return bool(later)

    def _issue(self, number: int) -> None:
        stream, clocks, turns, missing = self.streams[number], self.clocks, self.turns, self.missing
        held = self.index.holds[number]
        end = clocks[stream] = max(clocks[0], clocks[stream or held], turns[number]) + self.tasks[number].seconds
        if held:
            clocks[held] = end
        self.issued[number] = True
        self.order.append(number)
        self._read(number)
        for buffer in self.index.outputs[number]:
            self.ready[buffer] = end
            for reader in self.index.readers[buffer]:
                missing[reader] -= 1
                if end > turns[reader]:
                    turns[reader] = end
                if missing[reader] == 0:
                    self._operands_made(reader)

    def _read(self, number: int) -> None:
        """Count what a task reads as no longer gathered ahead."""
        if not self.ahead:
            return
        for buffer in self.index.inputs[number]:
            if self.unread[buffer]:
                self.unread[buffer] = False
                self.ahead -= self.sizes[buffer]

    def _operands_made(self, number: int) -> None:
        if self.streams[number] == 0 or number in self.in_unit or number not in self.phase:
            return
        if not self.tasks[number].deferrable:
            self.urgent.append(number)
        elif number in self.facts.last:
            self.reductions[self.streams[number]].appendleft(number)
        else:
            self.reductions[self.streams[number]].append(number)
