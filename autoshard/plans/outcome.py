"""Data of a plan's predicted cost, and of the search that chose it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field

from passes.ir.units import format_bytes


@dataclass(frozen=True)
class Memory:
    """Peak memory of one device in a step, in bytes by kind of content; the kinds add up to the peak."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0  # kept for the backward
    gathered: int = 0  # parameters gathered for use
    buffers: int = 0
    inputs: int = 0
    outputs: int = 0
    temporary: int = 0  # everything else that is live, including workspace of kernels

    @staticmethod
    def of(by_kind: Mapping[str, int]) -> Memory:
        """Return the memory from bytes by the kind of a program's buffers: "parameter", "activation", ...,
        "workspace".
        """
        names = {kind: kind for kind in ("gathered", "optimizer", "temporary")} | {"workspace": "temporary"}
        totals: dict[str, int] = {}
        for kind, count in by_kind.items():
            name = names.get(kind, f"{kind}s")
            totals[name] = totals.get(name, 0) + count
        return Memory(**totals)

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def __str__(self) -> str:
        """Return `"activations 22.1 GiB, parameters 3.7 GiB"`: the largest first, without empty kinds."""
        sizes = sorted(asdict(self).items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes if size) or "nothing"


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one step on the mesh's hardware: times in seconds, memory in bytes of one device.

    `plan.cost` is that of the plan, `candidate.cost` that of a plan that was considered. `compute + exposed_comm` is at
    most `step_time`.
    """

    step_time: float  # seconds of forward, backward and the optimizer's update
    compute: float  # seconds during which the device computes
    communication: float  # seconds during which at least one link is busy
    exposed_comm: float  # of those, seconds during which the device computes nothing
    memory: Memory

    @property
    def hidden_comm(self) -> float:
        """Return the seconds of communication during which the device computes."""
        return self.communication - self.exposed_comm

    @property
    def peak_memory(self) -> int:
        """Return the bytes of one device at the peak of a step."""
        return self.memory.total


@dataclass(frozen=True)
class Recomputation:
    """The values that the backward recomputes to save memory, beyond those that cost next to nothing.

    It is everything in a layer but its inputs and the values in `kept`.
    """

    kept: tuple[str, ...]  # values inside of layers: "layers.*.attention.wq mm"
    compute: float | None = None  # seconds of recomputation in a step; None: nothing was simulated
    communication: float | None = None
    freed: int | None = None  # bytes that recomputation saves; None: nothing was simulated


@dataclass(frozen=True)
class Candidate:
    """A plan that was considered: a recipe's, or the solver's. `plan.search.candidates` has them all."""

    name: str  # "fsdp+megatron", "solved"
    cost: Cost | None  # None: not simulated, or impossible for this model and mesh
    fits: bool  # in the memory limit
    note: str = ""  # why there is no cost, or what it trades


@dataclass(frozen=True)
class Search:
    """The way a plan was chosen (`plan.search`), and the bound on better ones. Times in seconds, memory in bytes."""

    chosen: str  # name of a candidate
    candidates: tuple[Candidate, ...]
    memory_limit: int  # bytes per device
    objective: float | None  # step time that the solver minimised, in seconds; None: nothing was solved
    bound: float | None  # lower bound of the objective over all plans that the solver can choose
    least: float | None = None  # lower bound of their simulated steps
    seconds: float = field(default=0.0, compare=False)  # that the search took

    @property
    def step_time(self) -> float | None:
        """Return the simulated step of the chosen candidate, in seconds."""
        return next((one.cost.step_time for one in self.candidates if one.name == self.chosen and one.cost), None)

    @property
    def gap(self) -> float | None:
        """Return how much faster another plan could be than the chosen one is simulated, at most, as a part of its step.

        It is as good as the solver's model. None where the model proves nothing: it has no bound, or one above the step.
        """
        if self.bound is None or self.step_time is None or self.bound > self.step_time:
            return None
        return (self.step_time - self.bound) / self.step_time if self.step_time else 0.0

    @property
    def solver_gap(self) -> float | None:
        """Return how much better another plan could be than the solver's own, at most, as a part of the objective.

        Both are by the solver's model.
        """
        if self.objective is None or self.bound is None:
            return None
        return (self.objective - self.bound) / self.objective if self.objective else 0.0
