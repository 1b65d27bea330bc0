"""Unroll the program of a folded graph into that of the whole model: copy the tasks and buffers of the kept layers.

A folded graph keeps two periods of equal layers around the removed ones (`Run.below`, `Run.above`), both with equal
neighbours. Compared task by task, they show what a copy reads: where the upper period reads the lower one, a copy reads the
period below it; where the lower period reads the upper one, the period above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from passes.cost.program import Buffer, Program, Task
from passes.errors import UnlikeLayersError
from passes.ir.folded_layers import Repeats, Run, index_in, moved_to

T = TypeVar("T", Task, Buffer)


def unroll(program: Program, repeats: Repeats) -> Program:
    """Return `program` with the tasks and buffers of the removed layers.

    The names of copies, and of the plan's collectives that they run, end in the layer: `mm_3@layers.7`. Copies of the
    forward follow the lower kept layers, copies of the backward the upper ones.

    Raises UnlikeLayersError if the kept layers differ in the program, as when one bucket holds gradients of two layers:
    plan the whole graph then.
    """
    for run in repeats.runs:
        program = _unrolled(program, run)
    return program


def _unrolled(program: Program, run: Run) -> Program:
    layers = _layers(program, run.prefix)
    lower, upper = (_Period.of(program, run, kept, layers) for kept in (run.below, run.above))
    _check_alike(program, run, lower, upper)
    _check_readers(program, run, lower, upper, layers)
    reads = [_reads(program, run, lower, upper, member) for member in range(len(lower.tasks))]
    copier = _Copier(program, run, lower, upper, tuple(reads))
    copies = dict(copier.copies())
    kept = dict(copier.kept_tasks())
    tasks: list[Task] = []
    for number, task in enumerate(program.tasks):
        tasks.append(kept.get(number, task))
        tasks += copies.get(number, ())
    kept_buffers = dict(copier.kept_buffers())
    buffers = [kept_buffers.get(buffer.name, buffer) for buffer in program.buffers]
    return replace(program, tasks=tuple(tasks), buffers=(*buffers, *copier.buffers()))


@dataclass(frozen=True)
class _Period:
    """The kept layers on one side of the removed ones: tasks in order, buffers in the order of their tasks."""

    tasks: tuple[int, ...]  # numbers in the program
    layers: tuple[int, ...]  # of each task, the position of its layer among the kept ones
    buffers: tuple[Buffer, ...]  # first those that no task writes
    buffer_layers: tuple[int, ...]
    numbers: Mapping[str, int]  # of the buffers, by name

    @staticmethod
    def of(program: Program, run: Run, kept: tuple[int, ...], layers: Sequence[int | None]) -> _Period:
        """Find the tasks and buffers of the `kept` layers; `layers` gives the layer of each task."""
        places = {index: place for place, index in enumerate(kept)}
        tasks = [(number, places[layer]) for number, layer in enumerate(layers) if layer in places]
        made = {name for task in program.tasks for name in task.outputs}
        by_name = {buffer.name: buffer for buffer in program.buffers}
        buffers = []
        for buffer in program.buffers:
            layer = index_in(run.prefix, buffer.fqn)
            if buffer.name not in made and layer in places:
                buffers.append((buffer, places[layer]))
        for number, place in tasks:
            buffers += [(by_name[name], place) for name in program.tasks[number].outputs]
        return _Period(
            tuple(number for number, _ in tasks),
            tuple(place for _, place in tasks),
            tuple(buffer for buffer, _ in buffers),
            tuple(place for _, place in buffers),
            {buffer.name: number for number, (buffer, _) in enumerate(buffers)},
        )


def _layers(program: Program, prefix: str) -> list[int | None]:
    """Return, per task, the index of its layer; a task of the enclosing module belongs to the layer of its latest input."""
    makers = {name: number for number, task in enumerate(program.tasks) for name in task.outputs}
    layers: list[int | None] = []
    for task in program.tasks:
        layer = index_in(prefix, task.fqn)
        if layer is None and (not task.fqn or prefix.startswith(f"{task.fqn}.")):
            latest = max((makers[name] for name in task.inputs if name in makers), default=None)
            layer = layers[latest] if latest is not None else None
        layers.append(layer)
    return layers


def _check_alike(program: Program, run: Run, lower: _Period, upper: _Period) -> None:
    counts = ("tasks", len(lower.tasks), len(upper.tasks)), ("buffers", len(lower.buffers), len(upper.buffers))
    for what, below, above in counts:
        if below != above:
            raise _unlike(run, f"they have {below} and {above} {what}")
    for one, other in zip(lower.tasks, upper.tasks, strict=True):
        _check_same(run, _kind_of_task, program.tasks[one], program.tasks[other])
    for buffers in zip(lower.buffers, upper.buffers, strict=True):
        _check_same(run, _kind_of_buffer, *buffers)


def _check_same(run: Run, kind_of: Callable[[Run, T], Mapping[str, object]], one: T, other: T) -> None:
    kinds = kind_of(run, one), kind_of(run, other)
    for name, value in kinds[0].items():
        if value != kinds[1][name]:
            raise _unlike(run, f"{name} of {one.name} is {value}, that of {other.name} is {kinds[1][name]}")


def _check_readers(program: Program, run: Run, lower: _Period, upper: _Period, layers: Sequence[int | None]) -> None:
    """Raise if a task reads values of several layers: `Fold` rules that out, but a bucket may join layers later."""
    for number, task in enumerate(program.tasks):
        layer = layers[number]
        reads_lower = any(name in lower.numbers for name in task.inputs)
        reads_upper = any(name in upper.numbers for name in task.inputs)
        if layer in run.below or layer in run.above:
            continue
        is_between = layer is None and reads_lower and reads_upper
        is_astray = layer is not None and (
            (reads_lower and layer > run.below[-1]) or (reads_upper and layer < run.above[0])
        )
        if is_between or is_astray:
            raise _unlike(run, f"{task.name} reads values of several layers")


def _kind_of_task(run: Run, task: Task) -> dict[str, object]:
    """Return the properties of a task that are the same in every layer."""
    relative = {"fqn": _relative(run, task.fqn), "inputs": len(task.inputs), "outputs": len(task.outputs)}
    return vars(task) | relative | {"name": "", "nodes": (), "steps": ()}


def _kind_of_buffer(run: Run, buffer: Buffer) -> dict[str, object]:
    """Return the properties of a buffer that are the same in every layer.

    Which values are saved may differ: the lower layers decide for all.
    """
    return vars(buffer) | {"name": "", "node": "", "kind": "", "fqn": _relative(run, buffer.fqn)}


def _relative(run: Run, fqn: str) -> str:
    """Return `fqn` without the index of its layer: a fused kernel may reach into the next layer."""
    return fqn if index_in(run.prefix, fqn) is None else moved_to(run.prefix, 0, fqn)


def _unlike(run: Run, why: str) -> UnlikeLayersError:
    kept = [f"{run.prefix}.{index}" for index in (run.below[0], run.above[0])]
    return UnlikeLayersError(f"{kept[0]} and {kept[1]} are equal in the model but not in the program: {why}")


@dataclass(frozen=True)
class _Read:
    """An input of a task: a buffer outside of the layers, one of its own period, or one `shift` periods further."""

    outside: str
    buffer: int = -1
    shift: int = 0


def _reads(program: Program, run: Run, lower: _Period, upper: _Period, member: int) -> tuple[_Read, ...]:
    tasks = program.tasks[lower.tasks[member]], program.tasks[upper.tasks[member]]
    found = []
    for below, above in zip(tasks[0].inputs, tasks[1].inputs, strict=True):
        if above in upper.numbers and lower.numbers.get(below) == upper.numbers[above]:
            found.append(_Read("", upper.numbers[above]))
        elif above in lower.numbers and below not in lower.numbers:
            found.append(_Read("", lower.numbers[above], -1))
        elif below in upper.numbers and above not in upper.numbers:
            found.append(_Read("", upper.numbers[below], 1))
        elif below == above and below not in lower.numbers:
            found.append(_Read(below))
        else:
            raise _unlike(run, f"{tasks[0].name} reads {below}, {tasks[1].name} reads {above}")
    return tuple(found)


@dataclass(frozen=True)
class _Copier:
    """Makes the copies. Period 0 is the lower one, 1 to `run.copies` are the copies, the last is the upper one."""

    program: Program
    run: Run
    lower: _Period
    upper: _Period
    reads: tuple[tuple[_Read, ...], ...]

    def kept_tasks(self) -> Iterator[tuple[int, Task]]:
        """Yield the tasks of the kept layers with their new neighbours, by number."""
        for period, kept in ((0, self.lower), (self.run.copies + 1, self.upper)):
            for member, number in enumerate(kept.tasks):
                task = self.program.tasks[number]
                yield number, replace(task, inputs=self._inputs(period, member), fqn=self._fqn(task.fqn, period))

    def kept_buffers(self) -> Iterator[tuple[str, Buffer]]:
        """Yield the buffers of the kept layers, by name: a kernel that reaches into the next layer computes a value of it."""
        for period, kept in ((0, self.lower), (self.run.copies + 1, self.upper)):
            for buffer in kept.buffers:
                yield buffer.name, replace(buffer, fqn=self._fqn(buffer.fqn, period))

    def copies(self) -> Iterator[tuple[int, list[Task]]]:
        """Yield numbers of tasks of the folded program, each with the copies that follow it."""
        for members, is_forward in self._segments():
            copies = range(1, self.run.copies + 1)
            last = (self.lower if is_forward else self.upper).tasks[members[-1]]
            order = copies if is_forward else reversed(copies)
            yield last, [self._task(member, period) for period in order for member in members]

    def _segments(self) -> Iterator[tuple[range, bool]]:
        """Yield runs of tasks that the program runs in all lower layers before the upper ones, or the other way round."""
        lower, upper = self.lower.tasks, self.upper.tasks
        start = 0
        for end in range(1, len(lower) + 1):
            is_forward = lower[start] < upper[start]
            goes_on = end < len(lower) and (lower[end] < upper[start] if is_forward else upper[end] < lower[start])
            if not goes_on:
                yield range(start, end), is_forward
                start = end

    def _task(self, member: int, period: int) -> Task:
        task = self.program.tasks[self.lower.tasks[member]]
        layer = self._layer(self.lower.layers[member], period)
        names = self._names[period]
        place = f"@{self.run.prefix}.{layer}"
        return replace(
            task,
            name=task.name + place,
            inputs=self._inputs(period, member),
            outputs=tuple(names[self.lower.numbers[name]] for name in task.outputs),
            steps=tuple(step + place for step in task.steps),
            fqn=self._fqn(task.fqn, period),
        )

    def _inputs(self, period: int, member: int) -> tuple[str, ...]:
        """Return the names of the inputs of task `member` in a period."""
        task = None
        if period == 0:
            task = self.program.tasks[self.lower.tasks[member]]
        elif period == self.run.copies + 1:
            task = self.program.tasks[self.upper.tasks[member]]
        found = []
        for slot, read in enumerate(self.reads[member]):
            other = period + read.shift
            if task is not None and not 0 <= other <= self.run.copies + 1:
                found.append(task.inputs[slot])
            else:
                found.append(read.outside or self._names[other][read.buffer])
        return tuple(found)

    def buffers(self) -> Iterator[Buffer]:
        """Yield the buffers of the copies."""
        for period in range(1, self.run.copies + 1):
            for number, buffer in enumerate(self.lower.buffers):
                yield replace(buffer, name=self._names[period][number], fqn=self._fqn(buffer.fqn, period))

    @cached_property
    def _names(self) -> list[tuple[str, ...]]:
        """Return the names of each period's buffers."""
        names = [tuple(buffer.name for buffer in self.lower.buffers)]
        for period in range(1, self.run.copies + 1):
            suffixes = [f"@{self.run.prefix}.{self._layer(place, period)}" for place in range(self.run.period)]
            named = zip(self.lower.buffers, self.lower.buffer_layers, strict=True)
            names.append(tuple(f"{buffer.name}{suffixes[place]}" for buffer, place in named))
        return [*names, tuple(buffer.name for buffer in self.upper.buffers)]

    def _layer(self, place: int, period: int) -> int:
        return self.run.removed[(period - 1) * self.run.period + place]

    def _fqn(self, fqn: str, period: int) -> str:
        """Return the name in another period that corresponds to `fqn` in the lower layers (for the last period: in the
        upper ones)."""
        run = self.run
        index = index_in(run.prefix, fqn)
        if index is None:
            return fqn
        is_last = period > run.copies
        if index in (run.below if is_last else run.above):
            neighbour = run.below.index(index) - run.period if is_last else run.above.index(index) + run.period
            return moved_to(run.prefix, self._index(period * run.period + neighbour), fqn)
        return fqn if is_last else moved_to(run.prefix, self._index(period * run.period + index - run.below[0]), fqn)

    def _index(self, place: int) -> int:
        """Return the index of the layer that is `place` layers after the first lower one."""
        layers = self.run.below + self.run.removed + self.run.above
        return layers[place] if 0 <= place < len(layers) else layers[0] + place
