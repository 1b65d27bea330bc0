"""Predict runs whose speed was published, as each was run: `python -m benchmarks.published`.

A row is one run: its model, parallelism, batch, sequence, recomputation, precision and chip. The table has the published
speed, the predicted one and their ratio, by kind of parallelism; `--json FILE` writes the rows. No figure of the cost
model is fitted to a row. Where a stack did not hide what autoshard would, the row is predicted without: its
tensor-parallel messages are awaited where they are sent. Nothing runs on devices. Words predict the rows alone whose names
have all of them: `python -m benchmarks.published 8B FSDP`. `--held-out` predicts runs that the cost model was not held against.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from autoshard import Mesh
from autoshard.config.axis_recipes import recipes_of
from autoshard.planner.chunking import layered
from autoshard.planner.effort import QUICK
from autoshard.planner.evaluation import Folded, fold, phases_of
from autoshard.planner.prediction import run_step
from autoshard.planner.problem import Problem, captured_problem
from autoshard.planner.recomputation import Settling, Trial, program_of_split
from autoshard.planner.request import PlanRequest
from benchmarks.held_out_runs import HELD_OUT
from benchmarks.published_runs import MEGATRON_2019, ROWS, TP, WITHOUT_SEQUENCE, Build, Row, Stack
from passes.base import PassContext
from passes.cost.collective_time import collective_seconds
from passes.cost.program import COMPUTE, Program, Task
from passes.cost.simulate import Timeline
from passes.ir.graph import copy_graph
from passes.ir.matmul_chunks.one_operator import make_one, why_not_one
from passes.ir.matmul_chunks.sites import sites_in
from passes.manager import PassManager
from passes.recipes import register_recipe


def predict(row: Row) -> float:
    """Return the seconds of a step as it was run: those of the last micro-batch, which is reduced and applied, of the
    others, and of the stages of a pipeline.

    A stage waits for as many micro-batches as there are other stages, each of a part of its layers (Narayanan et al. 2021,
    section 2.2).
    """
    register_recipe(WITHOUT_SEQUENCE)
    seconds = step(row.model, row.mesh, row.batch, row.stack).step_time + seconds_beside(row)
    others = row.micro_batches - 1 + (row.stages - 1) / row.chunks
    return seconds + others * _other_micro_batch(row) + _seconds_between_stages(row) if others else seconds


def _other_micro_batch(row: Row) -> float:
    """Return the seconds of a micro-batch before the last, after which nothing is updated.

    Ranks that hold whole parameters send each other nothing for it, and are left out.
    """
    stack = replace(row.stack, options=replace(row.stack.options, optimizer=None))
    if _shards_parameters(row):
        return step(row.model, row.mesh, row.batch, stack).step_time
    inner = ",".join(axis for axis in row.mesh.split(",") if axis.startswith(TP)) or "dp=1"
    ranks = Mesh(row.mesh).size // Mesh(inner).size
    stack = replace(stack, options=replace(stack.options, recipe=str(stack.options.recipe).removeprefix("ddp+")))
    return step(row.model, inner, row.batch // ranks, stack).step_time


def _shards_parameters(row: Row) -> bool:
    """Return whether each micro-batch gathers parameters."""
    recipe = str(row.stack.options.recipe)
    return "fsdp" in recipe or recipe == "hsdp"


def _seconds_between_stages(row: Row) -> float:
    """Return the seconds in which a stage of Megatron-LM sends and receives, while it computes nothing.

    After each chunk of a micro-batch a rank sends its part of the activations over the network while it receives another,
    and its node gathers the parts (section 4.1 of the paper), unless a layer reads a part of the sequence; as it does with the
    gradients.
    """
    if row.stages == 1:
        return 0.0
    mesh, machine = Mesh(row.mesh), row.stack.hardware
    with torch.device("meta"):
        model, (tokens, *_) = row.model(row.batch)
    config: Any = model.config
    parts = mesh.sizes[mesh.index(TP)]
    nbytes = 2 * tokens.numel() // (mesh.size // parts) * int(config.dim)
    sent = machine.across.setup + machine.across.latency + nbytes / parts / machine.across.bandwidth
    gathers = MEGATRON_2019 in str(row.stack.options.recipe)
    one = sent + (collective_seconds("all_gather", nbytes, mesh.group_shape((TP,)), machine) if gathers else 0.0)
    return 2 * (row.micro_batches * row.chunks + row.stages - 1) * one


def seconds_beside(row: Row) -> float:
    """Return the seconds of what the stack reads and writes beyond the program, in all micro-batches of a step."""
    with torch.device("meta"):
        model, (tokens, *_) = row.model(row.batch)
    mesh, stack = Mesh(row.mesh), row.stack
    count = sum(parameter.numel() for parameter in model.parameters())
    parts = mesh.sizes[mesh.index(TP)] if TP in mesh.names else 1
    is_sharded = _shards_parameters(row)
    owners = mesh.sizes[-1] if stack.options.recipe == "hsdp" else mesh.size if is_sharded else parts
    joins = row.micro_batches if is_sharded else 1
    config: Any = model.config
    logits = row.micro_batches * tokens.numel() * int(config.vocab) / mesh.size
    moved = stack.copied * joins * count / parts + stack.updated * count / owners + stack.scored * logits
    if any(stack.unfused):
        stream, inside = stack.unfused
        width = stream * config.dim + (inside * config.hidden if inside else 0)
        moved += logits / int(config.vocab) * config.layers * width
    return moved / stack.hardware.memory_bandwidth


def step(build: Build, mesh: str, batch: int, stack: Stack) -> Timeline:
    """Return the step of one micro-batch, with the orders and buckets that autoshard would choose."""
    with torch.device("meta"):
        model, args = build(batch)
    request = PlanRequest(model, args, {}, Mesh(mesh, hardware=stack.hardware), stack.options).checked()
    problem = captured_problem(request)
    folded = fold(problem)
    trial = _trial(problem, folded, stack)
    program = _pipelined(problem, folded, trial) if stack.pipelines else trial.program
    if stack.keeps_cast:
        program = _without_casts(program)
    if stack.runs_to_end:
        program = _run_to_end(program)
    return run_step(_awaited(program, stack.awaits, forward_alone=stack.hides_backward), stack.options)


def _trial(problem: Problem, folded: Folded, stack: Stack) -> Trial:
    gm, ctx = copy_graph(folded.graph), PassContext(problem.mesh)
    phases = phases_of(problem, gm, recipes_of(stack.options.recipe, problem.mesh))
    PassManager((*phases.place, *phases.lower)).run(gm, ctx)
    settling = Settling(problem, folded.repeats, gm, effort=QUICK)  # its order is not used
    if not stack.selective:
        return settling.settle()
    kinds = dict.fromkeys(settling.blocks.kind.values())
    return settling.trial(tuple(kind for kind in kinds if any(name in kind for name in stack.selective)))


def _pipelined(problem: Problem, folded: Folded, trial: Trial) -> Program:
    """Return the program with one of torch's operators wherever there is one."""
    split = trial.split
    assert split.backward is not None
    halves = [_fused(layered(half, split.forward, folded.repeats)) for half in (split.forward, split.backward)]
    return program_of_split(replace(split, forward=halves[0], backward=halves[1]), problem, folded.repeats)


def _fused(gm: GraphModule) -> GraphModule:
    for site in sites_in(gm):
        if not why_not_one(site):
            make_one(site, "published")
    return gm


def _without_casts(program: Program) -> Program:
    """Return the program with casts of parameters that take no time."""
    return replace(program, tasks=tuple(replace(t, seconds=0.0) if _reads_weights(t) else t for t in program.tasks))


def _reads_weights(task: Task) -> bool:
    """Return whether a kernel of the forward reads parameters alone."""
    return not (task.backward or task.is_sending) and all(name.startswith("parameter.") for name in task.inputs)


def _run_to_end(program: Program) -> Program:
    """Return the program with what the recomputation of a layer leaves out, as nothing reads it, run again as well."""
    again = {(_layer(task), node) for task in program.tasks if task.backward for node in task.nodes}
    left, tasks = defaultdict[str, list[Task]](list), list[Task]()
    for task in program.tasks:
        if not (task.backward or _reads_weights(task)) and (_layer(task), task.nodes[-1]) not in again:
            left[_layer(task)].append(replace(task, name=f"again.{task.name}", inputs=(), outputs=(), backward=True))
    for task in program.tasks:
        if task.backward and (layer := _layer(task)):
            tasks += left.pop(layer, ())
        tasks.append(task)
    return replace(program, tasks=tuple(tasks))


def _layer(task: Task) -> str:
    """Return the layer that a task is of ("blocks.3"), or "" for none."""
    found = re.match(r"\w+\.\d+", task.fqn)
    return found[0] if found else ""


def _awaited(program: Program, axes: tuple[str, ...], *, forward_alone: bool = False) -> Program:
    """Return the program with the messages over each of `axes` awaited where they are sent: nothing runs beside.

    With `forward_alone`, those of the backward are not.
    """
    waits = [_is_awaited(task, axes) and not (forward_alone and task.backward) for task in program.tasks]
    tasks = [_awaited_task(task) if is_awaited else task for task, is_awaited in zip(program.tasks, waits, strict=True)]
    return replace(program, tasks=tuple(tasks))


def _is_awaited(task: Task, axes: tuple[str, ...]) -> bool:
    return task.is_collective and len(task.axes) == 1 and task.axes[0] in axes


def _awaited_task(task: Task) -> Task:
    return replace(task, kind="compute", stream=COMPUTE, prefetchable=False, deferrable=False)


# Table -------------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of the names of rows; by default all rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file")
    parser.add_argument("--held-out", action="store_true", help="predict runs that the cost model was not held against")
    given = parser.parse_args()
    rows, found = [row for row in (HELD_OUT if given.held_out else ROWS) if all(word in row.name for word in given.words)], []
    for row in rows:
        predicted = row.speed(row, predict(row))
        ratio = predicted / row.published
        found.append({"name": row.name, "kind": row.kind, "published": row.published, "predicted": predicted, "ratio": ratio})
        print(f"{row.name:32} {row.kind:16} {row.published:7.1f} {row.unit:8} {predicted:8.1f}  {ratio:.3f}", flush=True)
    if found:
        _summarize(rows, found)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def _summarize(rows: Sequence[Row], found: Sequence[dict[str, object]]) -> None:
    ratios = [float(str(row["ratio"])) for row in found]
    print(f"{len(ratios)} rows: {min(ratios):.3f} to {max(ratios):.3f}, median {statistics.median(ratios):.3f}")
    for kind in dict.fromkeys(row["kind"] for row in found):
        own = [float(str(row["ratio"])) for row in found if row["kind"] == kind]
        print(f"  {kind:16} {statistics.median(own):.3f}")
    for machine in dict.fromkeys(row.stack.hardware for row in rows):
        print(f"{machine.name}: published figures, but for {', '.join(machine.assumed)}, which are assumed")


if __name__ == "__main__":
    main()
