"""Describe one device's training step as tasks on streams and buffers in memory.

Programs are simulated, scheduled and reported. They know no tensors and no graph. Their tasks stand in the order in which
the host issues them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from passes.cost.contention import Contention
from passes.ir.mesh import Mesh

COMPUTE, INSIDE, ACROSS = "compute", "inside", "across"  # the streams: kernels, links inside a node, links across
STREAMS = (COMPUTE, INSIDE, ACROSS)
OPTIMIZER = "optimizer"
STATE = ("parameter", "buffer", "gradient", "optimizer")  # kinds of buffers that belong to the model
PERSISTENT = (*STATE, "input", "output")  # kinds that stay live to the end of the step


@dataclass(frozen=True)
class Buffer:
    """Describe memory that one task writes and others read; a view is not a buffer of its own.

    `kind` is one of
    - parameter, buffer, optimizer: the model's state; live from start to end
    - input: the batch; live from start to end, as the caller holds it
    - gradient, output: live from when it is computed to the end
    - gathered: computed from parameters alone (an all-gather's result and copies of it)
    - activation: computed by the forward, read by the backward
    - temporary: all others
    """

    name: str
    nbytes: int
    kind: str
    fqn: str = ""  # a parameter's own (also for its gradient and optimizer state), or the module that computes it
    node: str = ""  # name of the graph's node that computes it
    backward: bool = False


@dataclass(frozen=True)
class Task:
    """Describe one kernel (a fused region counts as one), one collective, or the update of one parameter.

    Collectives run on the stream of their link, all others on the compute stream. A task that reads a collective's
    result waits for it, so a program has no wait tasks. An operator that computes and sends at once is a kernel that
    occupies its link's stream as well.
    """

    name: str
    kind: str  # "compute", "optimizer", or that of a collective: "all_gather", "reduce_scatter", ...
    stream: str  # "compute", "inside" or "across"
    seconds: float
    inputs: tuple[str, ...] = ()  # names of buffers
    outputs: tuple[str, ...] = ()  # names of buffers, each written by this task alone
    workspace: int = 0  # bytes that it needs while it runs, besides its inputs and outputs
    link: str = ""  # of a kernel that sends: the stream that it occupies besides its own
    sending: float = 0.0  # of such a kernel: seconds of it in which the link is in use
    waiting: float = 0.0  # of those, seconds in which it computes nothing
    in_place: bool = False  # an output takes the memory of an input of its size that no later task reads
    axes: tuple[str, ...] = ()  # of a collective
    dtype: str = ""  # of a collective: "f32"
    reduction: str = ""  # of a collective that reduces: "sum", "max"
    nbytes: int = 0  # of a collective: of its larger side, per rank; else bytes read and written
    flops: float = 0.0
    fqn: str = ""  # the module that it comes from
    nodes: tuple[str, ...] = ()  # names of the graph's nodes that it runs
    steps: tuple[str, ...] = ()  # ids of the plan's collectives that it runs
    backward: bool = False
    prefetchable: bool = False  # depends on parameters, or on what the forward kept: it may start at any time
    deferrable: bool = False  # leads to gradients or outputs alone: it may end at any time

    @property
    def is_collective(self) -> bool:
        """Return whether the task runs on the stream of a link."""
        return self.stream != COMPUTE

    @property
    def is_sending(self) -> bool:
        """Return whether the task is a collective, or a kernel that sends."""
        return self.stream != COMPUTE or self.link != ""

    def span_of_link(self, start: float, end: float) -> tuple[float, float]:
        """Return when a task that runs from `start` to `end` uses its link: a kernel sends first."""
        return (start, end) if self.is_collective else (start, start + self.sending)

    def span_of_compute(self, start: float, end: float) -> tuple[float, float]:
        """Return when a kernel that runs from `start` to `end` computes: not while it waits for its link."""
        return start + self.waiting, end


@dataclass(frozen=True)
class Program:
    """Tasks in issue order; `mesh` gives the hardware and the groups of collectives."""

    tasks: tuple[Task, ...] = field(repr=False)
    buffers: tuple[Buffer, ...] = field(repr=False)
    mesh: Mesh

    @property
    def contention(self) -> Contention:
        """Return the hardware's contention, none if the hardware is unknown."""
        hardware = self.mesh.hardware
        return Contention() if hardware is None else Contention.of(hardware)

    @cached_property
    def index(self) -> Index:
        """Return the same program with tasks and buffers by number."""
        numbers = {buffer.name: number for number, buffer in enumerate(self.buffers)}
        return Index(
            [tuple([numbers[name] for name in task.inputs]) for task in self.tasks],
            [tuple([numbers[name] for name in task.outputs]) for task in self.tasks],
            [_NUMBERS[task.stream] for task in self.tasks],
            [_NUMBERS[task.link] if task.link else 0 for task in self.tasks],
            [task.seconds for task in self.tasks],
            [2 if task.kind == OPTIMIZER else int(task.backward) for task in self.tasks],
            [buffer.nbytes for buffer in self.buffers],
        )

    def reordered(self, order: Sequence[int]) -> Program:
        """Return the same tasks in another order: `order` holds their numbers."""
        program = replace(self, tasks=tuple([self.tasks[number] for number in order]))
        vars(program)["index"] = self.index.reordered(order)
        return program


_NUMBERS = {stream: number for number, stream in enumerate(STREAMS)}


@dataclass(frozen=True)
class Index:
    """The tasks and buffers of a program by number. Lists are by task unless stated otherwise."""

    inputs: list[tuple[int, ...]]  # buffers
    outputs: list[tuple[int, ...]]
    streams: list[int]  # numbers in STREAMS
    holds: list[int]  # the number of the link's stream that a task occupies besides its own, or 0
    seconds: list[float]
    calls: list[int]  # 0: forward, 1: backward, 2: update
    sizes: list[int]  # bytes per buffer

    @cached_property
    def makers(self) -> list[int]:
        """Return, per buffer, the task that writes it; -1 if it is live before the first task."""
        makers = [-1] * len(self.sizes)
        for number, outputs in enumerate(self.outputs):
            for buffer in outputs:
                makers[buffer] = number
        return makers

    @cached_property
    def readers(self) -> list[list[int]]:
        """Return, per buffer, the tasks that read it, in order."""
        readers: list[list[int]] = [[] for _ in self.sizes]
        for number, inputs in enumerate(self.inputs):
            for buffer in inputs:
                readers[buffer].append(number)
        return readers

    @cached_property
    def sources(self) -> list[list[int]]:
        """Return the tasks that write each task's inputs, one per input that a task writes."""
        makers = self.makers
        return [[makers[buffer] for buffer in inputs if makers[buffer] >= 0] for inputs in self.inputs]

    @cached_property
    def targets(self) -> list[list[int]]:
        """Return the tasks that read each task's outputs, one per read."""
        readers = self.readers
        return [[reader for buffer in outputs for reader in readers[buffer]] for outputs in self.outputs]

    def reordered(self, order: Sequence[int]) -> Index:
        """Return the index of the same tasks in another order."""
        return Index(
            [self.inputs[number] for number in order],
            [self.outputs[number] for number in order],
            [self.streams[number] for number in order],
            [self.holds[number] for number in order],
            [self.seconds[number] for number in order],
            [self.calls[number] for number in order],
            self.sizes,
        )
