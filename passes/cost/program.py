"""One device's training step as tasks on streams and buffers in memory: what is simulated, scheduled and reported.

A program knows no tensors and no graph. Its tasks stand in the order in which the host issues them.
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
STATE = ("parameter", "buffer", "gradient", "optimizer")  # kinds of buffers that are the model's
PERSISTENT = (*STATE, "input", "output")  # kinds that stay to the end


@dataclass(frozen=True)
class Buffer:
    """Memory that one task writes and others read; views of it are no buffers.

    `kind` is one of
    - parameter, buffer, optimizer: the model's state; there from the start to the end
    - input: the batch; there from the start to the end, as the caller holds it
    - gradient, output: there from when it is made to the end
    - gathered: made of parameters alone (an all-gather's result and copies of it)
    - activation: made by the forward, read by the backward
    - temporary: all others
    """

    name: str
    nbytes: int
    kind: str
    fqn: str = ""  # a parameter's own (also for its gradient and optimizer state), or the module that made it
    node: str = ""  # name of the graph's node that makes it
    backward: bool = False


@dataclass(frozen=True)
class Task:
    """One kernel (a fused region counts as one), one collective, or one parameter's update.

    Collectives run on the stream of their link, all others on the compute stream. A task that reads a collective's
    result waits for it: there are no waits in a program. An operator that computes and sends at once is a kernel that
    holds its link's stream as well.
    """

    name: str
    kind: str  # "compute", "optimizer", or that of a collective: "all_gather", "reduce_scatter", ...
    stream: str  # "compute", "inside" or "across"
    seconds: float
    inputs: tuple[str, ...] = ()  # names of buffers
    outputs: tuple[str, ...] = ()  # names of buffers, each made by this task alone
    workspace: int = 0  # bytes that it needs while it runs, beside its inputs and outputs
    link: str = ""  # of a kernel that sends: the stream that it holds beside its own
    sending: float = 0.0  # of such a kernel: seconds of it in which the link is in use
    waiting: float = 0.0  # and those of them in which it computes nothing
    in_place: bool = False  # an output takes the memory of an input of its size that no later task reads
    axes: tuple[str, ...] = ()  # of a collective
    dtype: str = ""  # of a collective: "f32"
    nbytes: int = 0  # of a collective: of its larger side, per rank; else bytes read and written
    flops: float = 0.0
    fqn: str = ""  # the module that it comes from
    nodes: tuple[str, ...] = ()  # names of the graph's nodes that it runs
    steps: tuple[str, ...] = ()  # of a collective: those of the plan that it runs, by id
    backward: bool = False
    prefetchable: bool = False  # reads what parameters give, or what was kept from the forward: it may start at any time
    deferrable: bool = False  # only gradients come of it: it may end at any time

    @property
    def is_collective(self) -> bool:
        return self.stream != COMPUTE

    @property
    def is_sending(self) -> bool:
        """Whether it is a collective, or a kernel that sends."""
        return self.stream != COMPUTE or self.link != ""

    def span_of_link(self, start: float, end: float) -> tuple[float, float]:
        """When its link is in use, if it sends at all and runs from `start` to `end`: a kernel sends first."""
        return (start, end) if self.is_collective else (start, start + self.sending)

    def span_of_compute(self, start: float, end: float) -> tuple[float, float]:
        """When it computes, if it is a kernel that runs from `start` to `end`."""
        return start + self.waiting, end


@dataclass(frozen=True)
class Program:
    """Tasks in issue order; `mesh` gives the hardware and the groups of collectives."""

    tasks: tuple[Task, ...] = field(repr=False)
    buffers: tuple[Buffer, ...] = field(repr=False)
    mesh: Mesh

    @property
    def contention(self) -> Contention:
        """The hardware's; none where that is not known."""
        hardware = self.mesh.hardware
        return Contention() if hardware is None else Contention(hardware.contention, hardware.link_contention)

    @cached_property
    def index(self) -> Index:
        """The same by number."""
        numbers = {buffer.name: number for number, buffer in enumerate(self.buffers)}
        makers: list[int] = [-1] * len(self.buffers)
        readers: list[list[int]] = [[] for _ in self.buffers]
        inputs, outputs = [], []
        for number, task in enumerate(self.tasks):
            inputs.append(tuple(numbers[name] for name in task.inputs))
            outputs.append(tuple(numbers[name] for name in task.outputs))
            for buffer in inputs[-1]:
                readers[buffer].append(number)
            for buffer in outputs[-1]:
                makers[buffer] = number
        streams = [STREAMS.index(task.stream) for task in self.tasks]
        holds = [STREAMS.index(task.link) if task.link else 0 for task in self.tasks]
        return Index(inputs, outputs, makers, readers, streams, holds)

    def reordered(self, order: Sequence[int]) -> Program:
        """The same tasks in another order: that of their numbers in `order`."""
        program = replace(self, tasks=tuple([self.tasks[number] for number in order]))
        vars(program)["index"] = self.index.reordered(order)
        return program


@dataclass(frozen=True)
class Index:
    """Tasks and buffers of a program by their numbers."""

    inputs: list[tuple[int, ...]]  # per task, buffers
    outputs: list[tuple[int, ...]]
    makers: list[int]  # per buffer, a task; -1: there before the first one
    readers: list[list[int]]
    streams: list[int]  # per task, its stream's number in STREAMS
    holds: list[int]  # per task, the number of the link's stream that it holds beside its own, or 0

    def reordered(self, order: Sequence[int]) -> Index:
        """The index of the same tasks in another order."""
        place = [0] * len(order)
        for new, old in enumerate(order):
            place[old] = new
        return Index(
            [self.inputs[number] for number in order],
            [self.outputs[number] for number in order],
            [place[maker] if maker >= 0 else -1 for maker in self.makers],
            [sorted([place[reader] for reader in readers]) for readers in self.readers],
            [self.streams[number] for number in order],
            [self.holds[number] for number in order],
        )
