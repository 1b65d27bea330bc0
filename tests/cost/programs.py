"""Small programs for the tests of the simulator and of what reorders programs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from passes.cost.program import ACROSS, COMPUTE, INSIDE, Buffer, Program, Task
from passes.hardware.hardware import hardware_named
from passes.ir.mesh import Mesh

MESH = Mesh("dp=2")


def contended(given: Program, contention: float, links: float = 0.0) -> Program:
    """Return the program where collectives slow kernels down, and kernels collectives by `links`."""
    slow = replace(hardware_named("h100"), name="slow", contention=contention, link_contention=links)
    return replace(given, mesh=Mesh("dp=2", hardware=slow))


def kernel(name: str, seconds: float, *inputs: str, **facts: object) -> Task:
    """Return a kernel that makes the buffer of its name."""
    return Task(name, "compute", COMPUTE, seconds, inputs, (name,), **facts)


def gather(name: str, seconds: float, *inputs: str, stream: str = INSIDE, **facts: object) -> Task:
    return Task(name, "all_gather", stream, seconds, inputs, (name,), axes=("dp",), **facts)


def program(*tasks: Task, sizes: dict[str, int] | None = None, kinds: dict[str, str] | None = None) -> Program:
    """Return a program of `tasks` in issue order. Buffers are what they name; those that none makes are parameters."""
    sizes, kinds = sizes or {}, kinds or {}
    made = {name for task in tasks for name in task.outputs}
    names = dict.fromkeys(name for task in tasks for name in (*task.inputs, *task.outputs))
    buffers = (
        Buffer(name, sizes.get(name, 1), kinds.get(name, "temporary" if name in made else "parameter")) for name in names
    )
    return Program(tasks, tuple(buffers), MESH)


@st.composite
def programs(draw: st.DrawFn, largest: int = 12) -> Program:
    """Draw random programs: each task reads results of earlier ones, and runs on any of the streams."""
    tasks: list[Task] = []
    for number in range(draw(st.integers(1, largest))):
        earlier = [task.name for task in tasks] + ["w"]
        inputs = draw(st.lists(st.sampled_from(earlier), max_size=3, unique=True))
        seconds = float(draw(st.integers(0, 5)))
        stream = draw(st.sampled_from((COMPUTE, COMPUTE, INSIDE, ACROSS)))
        in_place = draw(st.booleans())
        make = kernel(f"t{number}", seconds, *inputs, workspace=draw(st.integers(0, 3)), in_place=in_place)
        tasks.append(make if stream == COMPUTE else gather(f"t{number}", seconds, *inputs, stream=stream))
    sizes = {task.name: draw(st.integers(0, 4)) for task in tasks}
    kinds = {task.name: draw(st.sampled_from(("temporary", "activation", "gradient"))) for task in tasks}
    return program(*tasks, sizes=sizes, kinds=kinds)
