"""The program unrolled from a few layers is that of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from autoshard.capture.capture import capture
from autoshard.compile.compiled import split_program
from autoshard.phases import Phases
from passes.base import Pass, PassContext
from passes.cost.build_program import program_of
from passes.cost.program import Buffer, Program, Task
from passes.cost.unroll import unroll
from passes.errors import UnlikeLayersError
from passes.fold import Fold
from passes.ir.folded_layers import Repeats, Run
from passes.ir.graph import repeats_of
from passes.ir.mesh import Mesh
from passes.manager import PassManager
from passes.seed import Seed
from tests import models

MESH = Mesh("dp=4,tp=2", hardware="h100")


def step(layers: Sequence[int], kinds: Callable[[int], int] = lambda layer: 0) -> Program:
    """Return forward, backward and update of the given layers of a chain."""
    tasks: list[Task] = [Task("start", "compute", "compute", 1.0, ("x",), ("h.start",))]
    buffers = [Buffer("x", 8, "input"), Buffer("h.start", 8, "activation")]
    last = "h.start"
    for k in layers:
        tasks.append(_task(f"gather.{k}", k, (f"w.{k}",), (f"g.{k}",), kinds(k), kind="all_gather"))
        tasks.append(_task(f"forward.{k}", k, (last, f"g.{k}", "x"), (f"h.{k}",), kinds(k)))
        last = f"h.{k}"
    tasks.append(Task("loss", "compute", "compute", 2.0, (last,), ("d.loss",), backward=True))
    last = "d.loss"
    for number, k in reversed(list(enumerate(layers))):
        before = f"h.{layers[number - 1]}" if number else "h.start"
        tasks.append(_task(f"backward.{k}", k, (last, before), (f"d.{k}", f"u.{k}"), kinds(k), backward=True))
        tasks.append(_task(f"total.{k}", None, (f"u.{k}",), (f"v.{k}",), kinds(k), backward=True))
        last = f"d.{k}"
    tasks.append(Task("end", "compute", "compute", 3.0, (last,), (), backward=True))
    tasks += [_task(f"update.{k}", k, (f"w.{k}", f"v.{k}"), (), kinds(k), kind="optimizer") for k in layers]
    for k in layers:
        for name, kind in (("w", "parameter"), ("g", "gathered"), ("h", "activation"), ("d", "temporary")):
            buffers.append(Buffer(f"{name}.{k}", 8 + kinds(k), kind, f"layers.{k}.a"))
        buffers += [Buffer(f"{name}.{k}", 4, "gradient", f"layers.{k}.w") for name in ("u", "v")]
    return Program(tuple(tasks), (*buffers, Buffer("d.loss", 8, "temporary")), MESH)


def _task(
    name: str,
    layer: int | None,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    weight: int,
    *,
    kind: str = "compute",
    backward: bool = False,
) -> Task:
    stream = "inside" if kind == "all_gather" else "compute"
    fqn = "" if layer is None else f"layers.{layer}.a"
    return Task(name, kind, stream, 1.0 + weight, inputs, outputs, fqn=fqn, backward=backward)


def described(program: Program) -> list[object]:
    """Describe all but names: tasks in order, what they read by which task made it, buffers of no task by what they are."""
    made = {name: (number, k) for number, task in enumerate(program.tasks) for k, name in enumerate(task.outputs)}
    buffers = {buffer.name: replace(buffer, name="", node="") for buffer in program.buffers}
    found: list[object] = []
    for task in program.tasks:
        reads = [made.get(name, buffers[name]) for name in task.inputs]
        writes = [buffers[name] for name in task.outputs]
        found.append((replace(task, name="", inputs=(), outputs=(), nodes=(), steps=()), reads, writes))
    return found


def test_copies_stand_where_the_layers_did_and_read_their_neighbours() -> None:
    repeats = Repeats((Run("layers", (1,), (2, 3, 4, 5), (6,)),))
    unrolled = unroll(step([0, 1, 6, 7]), repeats)
    assert described(unrolled) == described(step(range(8)))
    assert len({task.name for task in unrolled.tasks}) == len(unrolled.tasks)
    assert "forward.1@layers.3" in [task.name for task in unrolled.tasks]


def test_a_period_of_layers_is_copied_as_one() -> None:
    repeats = Repeats((Run("layers", (1, 2), (3, 4, 5, 6), (7, 8)),))
    alternating = step([0, 1, 2, 7, 8, 9], lambda layer: layer % 2)
    assert described(unroll(alternating, repeats)) == described(step(range(10), lambda layer: layer % 2))


def test_two_runs_of_one_list_are_unrolled_each() -> None:
    repeats = Repeats((Run("layers", (1,), (2,), (3,)), Run("layers", (5,), (6, 7), (8,))))
    odd = step([0, 1, 3, 4, 5, 8, 9], lambda layer: layer == 4)
    assert described(unroll(odd, repeats)) == described(step(range(10), lambda layer: layer == 4))


def test_nothing_removed_is_nothing_to_unroll() -> None:
    program = step(range(4))
    assert unroll(program, Repeats()) == program


def test_layers_that_came_out_unlike_are_refused() -> None:
    repeats = Repeats((Run("layers", (1,), (2, 3), (4,)),))
    folded = step([0, 1, 4, 5])
    slower = [replace(task, seconds=9.0) if task.name == "forward.4" else task for task in folded.tasks]
    expected = r"4 are equal in the model but not in the program: .* is 1\.0, that of .* is 9\.0"
    with pytest.raises(UnlikeLayersError, match=expected):
        unroll(replace(folded, tasks=tuple(slower)), repeats)
    fewer = [task for task in folded.tasks if task.name != "update.4"]
    with pytest.raises(UnlikeLayersError, match="they have 5 and 4 tasks"):
        unroll(replace(folded, tasks=tuple(fewer)), repeats)


def test_a_bucket_of_several_layers_is_refused() -> None:
    folded = step([0, 1, 4, 5])
    bucket = Task("bucket", "all_reduce", "inside", 1.0, ("u.1", "u.4"), ("b",), fqn="norm", backward=True)
    joined = replace(folded, tasks=(*folded.tasks, bucket), buffers=(*folded.buffers, Buffer("b", 8, "gradient")))
    with pytest.raises(UnlikeLayersError, match="bucket reads values of several layers"):
        unroll(joined, Repeats((Run("layers", (1,), (2, 3), (4,)),)))


@pytest.mark.slow
@pytest.mark.parametrize("recipes", [("fsdp", "ddp"), ("zero2", "fsdp")])
def test_a_folded_mlp_unrolls_to_the_whole_one(recipes: tuple[str, ...]) -> None:
    case = models.mlp(sizes=(64,) * 10)
    whole, _ = planned(case, recipes)
    folded, repeats = planned(case, recipes, Fold(margin=1))
    assert repeats.runs == (Run("layers", (2,), (3, 4), (5,)),)
    assert described(unroll(folded, repeats)) == described(whole)


@pytest.mark.slow
def test_a_folded_mlp_of_alternating_sizes_unrolls_by_twos() -> None:
    case = models.mlp(sizes=(64, 32) * 7)
    whole, _ = planned(case, ("zero2", "fsdp"))
    folded, repeats = planned(case, ("zero2", "fsdp"), Fold(margin=1))
    assert repeats.runs[0].period == 2
    assert described(unroll(folded, repeats)) == described(whole)


@pytest.mark.slow
def test_a_folded_decoder_unrolls_to_the_whole_one() -> None:
    case = models.gpt(layers=7, dim=64)
    whole, _ = planned(case, ("zero2", "megatron"))
    folded, repeats = planned(case, ("zero2", "megatron"), Fold(margin=1))
    assert repeats.runs == (Run("blocks", (2,), (3,), (4,)),)
    assert described(unroll(folded, repeats)) == described(whole)


def planned(case: models.Case, recipes: tuple[str, ...], *fold: Pass) -> tuple[Program, Repeats]:
    gm = capture(case.model.float(), case.args, case.kwargs, training=True).graph_module
    phases = Phases(Seed(recipes))
    PassManager((*phases.prepare, *fold, *phases.place, *phases.lower, *phases.rematerialize)).run(gm, PassContext(MESH))
    split = split_program(gm, mode="inductor")
    program = program_of(split.forward, split.backward, MESH, outputs=split.outputs, gradients=split.gradients)
    return program, repeats_of(gm)
