"""Derive a plan's predicted cost, and the time of each collective, from a simulated step."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch.fx import GraphModule

from autoshard.config.options import Options
from autoshard.planner.effort import FULL, Effort
from autoshard.plans.collectives import Collective
from autoshard.plans.outcome import Cost, Memory
from passes.cost.awaited import awaited_at_once
from passes.cost.forward_backward import joined, phase_of, phases
from passes.cost.optimizer_step import copies_of
from passes.cost.program import Program, Task
from passes.cost.scheduling.best_schedule import bucketed
from passes.cost.scheduling.bucketing import sizes
from passes.cost.simulate import Timeline, simulate
from passes.errors import UserError
from passes.ir.collectives import SEND
from passes.ir.folded_layers import Repeats
from passes.ir.graph import InputRole, input_of, layout_of, placeholders, tensor_of, trained_parameters
from passes.ir.layout import local_shape
from passes.ir.mesh import Mesh

SMALL = 0.1  # part of the seconds that are hidden: kernels that hide less of them are not named


def run_step(
    program: Program,
    options: Options,
    worst: float = float("inf"),
    *,
    effort: Effort = FULL,
    known: Mapping[int, Program] = MappingProxyType({}),
    in_any_memory: bool = False,
) -> Timeline:
    """Simulate one step as it will be compiled, with the best buckets and order found that fit in memory.

    Without overlap, each collective is awaited where it is issued. Forward and backward are optimized separately. For a
    step much slower than `worst` seconds, the first good order is taken. `known` has the phases, by number, that are
    optimized already. With `in_any_memory`, the best order counts whether it fits or not.
    """
    given = options.hiding
    if given is None:
        return simulate(awaited_at_once(program))
    limit = None if in_any_memory else options.memory_bytes(memory_of(program.mesh))
    buckets = sizes(given.bucket_bytes)[1:]
    tried = buckets[-effort.bucket_sizes :]
    found = list[Program]()
    for phase, others in phases(program):
        if (number := phase_of(phase.tasks[0])) in known:
            phase = known[number]
        elif any(task.is_collective for task in phase.tasks):
            _, best = bucketed(phase, tried, memory_limit=limit, windows=effort.windows, worst=worst - others)
            phase = best.program
        found.append(phase)
    return simulate(joined(program, found))


def memory_of(mesh: Mesh) -> int:
    """Return the memory of one device in bytes. Raises UserError if the hardware is unknown."""
    if mesh.hardware is None:
        raise UserError(
            "the figures of this device are not known, so that no step can be predicted: give Options(hardware='h100') or "
            "another preset, measure it with `python -m autoshard calibrate`, or choose a recipe"
        )
    return mesh.hardware.memory_bytes


def state_of(placed: GraphModule, repeats: Repeats, mesh: Mesh, optimizer: str | None) -> int:
    """Return the bytes of parameters, gradients and optimizer state on a device, a lower bound for programs of these
    layouts.

    Layers that `repeats` leaves out are counted.
    """
    trained = trained_parameters(placed.graph)
    total = 0
    for node in placeholders(placed.graph, InputRole.PARAMETER):
        tensor, fqn = tensor_of(node), input_of(node).name
        stored = math.prod(local_shape(layout_of(node), tensor.shape, mesh)) * tensor.element_size()
        copies = copies_of(optimizer) if fqn in trained else 1
        total += copies * stored * repeats.count(fqn)
    return total


def cost_of(timeline: Timeline) -> Cost:
    """Return the cost of a simulated step."""
    memory = Memory.of(timeline.memory_by_kind)
    return Cost(timeline.step_time, timeline.compute, timeline.communication, timeline.exposed, memory)


def timed(collectives: Sequence[Collective], timeline: Timeline) -> tuple[Collective, ...]:
    """Return the collectives of the whole model in the order of the step, each with its message and its time.

    Those of a folded graph also represent those of the layers that it leaves out: a task of such a layer runs
    `all_gather_3@layers.7`.
    """
    known = {one.id: one for one in collectives}
    found: dict[str, Collective] = {}
    sent = Counter((step, task.backward) for task in timeline.program.tasks if task.is_collective for step in task.steps)
    for task, exposed in timeline.exposed_by_task:
        for one, share in _shares(task, known):
            chunks = max(sent[one.id, False], sent[one.id, True])
            before = found.get(one.id, replace(one, seconds=0.0, exposed=0.0, chunks=chunks))
            assert before.seconds is not None and before.exposed is not None
            found[one.id] = replace(
                before,
                bucket=task.name if len(task.steps) > 1 else None,
                seconds=before.seconds + share * task.seconds,
                exposed=before.exposed + share * exposed,
            )
    hiding = _hiding(timeline, known)
    return tuple(replace(one, behind=hiding.get(name, ())) for name, one in found.items())


def _hiding(timeline: Timeline, known: Mapping[str, Collective]) -> dict[str, tuple[str, ...]]:
    """Return, per collective that is sent to neighbours, the names of the kernels that compute meanwhile, but for those that
    hide a small part of it.
    """
    seconds = dict[str, dict[str, float]]()
    for task, start, end in zip(timeline.program.tasks, timeline.starts, timeline.ends, strict=True):
        for step in task.steps:
            if task.is_collective and _of_layer(step, known).kind == SEND.name:
                own = seconds.setdefault(step, {})
                for kernel, beside in timeline.kernels_beside(start, end):
                    own[_name_of(kernel)] = own.get(_name_of(kernel), 0.0) + beside
    return {
        step: tuple(name for name in sorted(own, key=own.__getitem__, reverse=True) if own[name] >= SMALL * sum(own.values()))
        for step, own in seconds.items()
    }


def _name_of(kernel: Task) -> str:
    """Return `"mm"` for a kernel whose last node is `mm_3`."""
    return re.sub(r"(_\d+)?(@.*)?$", "", kernel.nodes[-1] if kernel.nodes else kernel.name)


def timed_as(collectives: Sequence[Collective], known: Sequence[Collective]) -> tuple[Collective, ...]:
    """Return `collectives` with the times of matching ones in `known`: equal kind, bytes and origin, in order.

    Names differ between a folded graph, which the prediction was made on, and the program of all layers.
    """
    times: dict[object, list[Collective]] = {}
    for one in known:
        times.setdefault(_likeness(one), []).append(one)
    found = []
    for one in collectives:
        same = times.get(_likeness(one))
        like = same.pop(0) if same else one
        one = replace(one, seconds=like.seconds, exposed=like.exposed, behind=like.behind)
        found.append(replace(one, bucket=like.bucket, chunks=like.chunks))
    return tuple(found)


def _likeness(one: Collective) -> object:
    return one.kind, one.axes, one.bytes, one.backward, one.recomputed, one.origin, one.reason


def _shares(task: Task, known: Mapping[str, Collective]) -> Iterator[tuple[Collective, float]]:
    """Yield the plan's collectives that a task runs, and the part of its bytes that each has."""
    run = [_of_layer(step, known) for step in task.steps]
    total = sum(one.bytes for one in run)
    for one in run:
        yield one, one.bytes / total if total else 1 / len(run)


def _of_layer(step: str, known: Mapping[str, Collective]) -> Collective:
    name, _, layer = step.partition("@")
    one = known[name]
    if not layer:
        return one
    prefix, _, _ = layer.rpartition(".")
    inside = one.origin.fqn.removeprefix(f"{prefix}.").partition(".")[2]
    return replace(one, id=step, origin=replace(one.origin, fqn=f"{layer}.{inside}" if inside else layer))
