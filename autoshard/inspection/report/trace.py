"""The simulated step in Chrome's trace format, which Perfetto reads.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (times in microseconds).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autoshard.inspection.report.timeline import memory_by_turn, timeline_of
from autoshard.plans.collectives import Collective
from autoshard.plans.record import PlanRecord
from passes.cost.program import ACROSS, COMPUTE, INSIDE, STREAMS
from passes.cost.simulate import Timeline

MICROSECONDS = 1e6
TRACKS = {COMPUTE: "compute", INSIDE: "links inside a node", ACROSS: "links between nodes"}
EXPOSED = len(STREAMS)  # the track of exposed communication, below the links


def format_trace(plan: PlanRecord) -> str:
    """Return a track per stream and one of exposed communication, with memory by kind as counters.

    Raises UserError for a plan without a simulated step.
    """
    timeline = timeline_of(plan)
    collectives = {one.id: one for one in plan.collectives}
    events = [*_tracks(plan, timeline), *_tasks(timeline, collectives), *_exposed(timeline), *_memory(timeline)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"


def _tracks(plan: PlanRecord, timeline: Timeline) -> Iterator[dict[str, Any]]:
    hardware = f" {plan.mesh.hardware.name}" if plan.mesh.hardware else ""
    yield _named("process_name", f"one of {plan.mesh.size}{hardware}: {plan.mesh}", 0)
    used = {task.stream for task in timeline.program.tasks}
    names = [(number, TRACKS[stream]) for number, stream in enumerate(STREAMS) if stream in used]
    for number, name in (*names, (EXPOSED, "exposed communication")):
        yield _named("thread_name", name, number)
        yield {"ph": "M", "pid": 0, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}


def _named(what: str, name: str, track: int) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": track, "name": what, "args": {"name": name}}


def _tasks(timeline: Timeline, collectives: dict[str, Collective]) -> Iterator[dict[str, Any]]:
    exposed = {task.name: seconds for task, seconds in timeline.exposed_by_task}
    for task, start, end in zip(timeline.program.tasks, timeline.starts, timeline.ends, strict=True):
        facts: dict[str, Any] = {"module": task.fqn, "bytes": task.nbytes}
        if task.is_collective:
            carried = [collectives[step] for step in task.steps if step in collectives]
            facts |= {"axes": ".".join(task.axes), "exposed_us": exposed[task.name] * MICROSECONDS}
            facts["for"] = "; ".join(dict.fromkeys(f"{one.origin}: {one.reason}" for one in carried))
        else:
            facts |= {"flops": task.flops, "nodes": ", ".join(task.nodes)}
        yield {
            "ph": "X",
            "pid": 0,
            "tid": STREAMS.index(task.stream),
            "name": task.name,
            "cat": f"{task.kind},{'backward' if task.backward else 'forward'}",
            "ts": start * MICROSECONDS,
            "dur": (end - start) * MICROSECONDS,
            "args": facts,
        }


def _exposed(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the intervals in which the device computes nothing; overlapping ones of two links are one."""
    clock = 0.0
    for number, start, end in sorted(timeline.exposed_spans, key=lambda span: span[1:]):
        start, clock = max(start, clock), max(end, clock)
        if start < end:
            yield {
                "ph": "X",
                "pid": 0,
                "tid": EXPOSED,
                "name": timeline.program.tasks[number].name,
                "cat": "exposed",
                "cname": "terrible",
                "ts": start * MICROSECONDS,
                "dur": (end - start) * MICROSECONDS,
            }


def _memory(timeline: Timeline) -> Iterator[dict[str, Any]]:
    by_kind = memory_by_turn(timeline)
    for turn, time in enumerate(timeline.turns):
        live = {kind: sizes[turn] for kind, sizes in by_kind.items()}
        yield {"ph": "C", "pid": 0, "name": "memory", "ts": time * MICROSECONDS, "args": live}
