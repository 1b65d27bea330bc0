"""A partitioned program as tasks and buffers: what runs as one kernel, what is in memory, what can move."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

from autoshard.compile.compiled import Split, split_program
from autoshard.config.options import Options, Overlap
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from examples.llama import TINY, Llama
from passes.cost.build_program import _with_deferrable, program_of, program_of_graph
from passes.cost.forward_backward import joined, phases, unchanged
from passes.cost.program import OPTIMIZER, Buffer, Program, Task
from passes.cost.program_memo import ProgramMemo
from passes.cost.scheduling.best_schedule import schedule
from passes.cost.simulate import simulate
from passes.errors import UserError
from passes.hardware.hardware import hardware_named
from passes.ir.mesh import Mesh
from passes.ir.text import parse_graph
from tests.cost.programs import gather, kernel
from tests.cost.programs import program as small
from tests.models import Case, build


@cache
def _split(name: str, axes: str, recipe: str) -> Split:
    tokens = torch.zeros(8, 16, dtype=torch.int64)
    deep = Case(Llama(replace(TINY, layers=16)), (tokens, tokens), {})
    case = deep if name == "deep" else build(name, dtype=torch.float32)
    options = Options(recipe=recipe, overlap=Overlap(bucket_bytes=0))
    return split_program(make_plan(PlanRequest(case.model, case.args, case.kwargs, Mesh(axes), options)).graph, mode="inductor")


def _program(name: str, axes: str, recipe: str, *, fused: bool = True, optimizer: str | None = "adamw") -> Program:
    split, mesh = _split(name, axes, recipe), Mesh(axes, hardware="h100")
    facts = {"outputs": split.outputs, "gradients": split.gradients}
    return program_of(split.forward, split.backward, mesh, **facts, fused=fused, optimizer=optimizer)


def _tasks(program: Program, kind: str) -> list[Task]:
    return [task for task in program.tasks if task.kind == kind]


def _check_dependencies(program: Program) -> None:
    made = {b.name for b in program.buffers} - {name for task in program.tasks for name in task.outputs}
    for task in program.tasks:
        assert made.issuperset(task.inputs), task.name
        made.update(task.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("name", "axes", "recipe"),
    [("gpt", "dp=2,tp=2", "fsdp+megatron"), ("llama", "dp=4", "fsdp"), ("conv_net", "dp=4", "ddp"), ("moe", "dp=2", "zero2")],
)
def test_every_task_reads_what_an_earlier_one_made(name: str, axes: str, recipe: str, fused: bool) -> None:
    program = _program(name, axes, recipe, fused=fused)
    _check_dependencies(program)
    assert len({task.name for task in program.tasks}) == len(program.tasks)
    assert all(task.seconds > 0 for task in program.tasks if task.kind != OPTIMIZER)


def test_waits_and_views_are_no_tasks() -> None:
    nodes = {node for task in _program("mlp", "dp=2", "fsdp").tasks for node in task.nodes}
    assert not any(node.startswith(("wait_tensor", "view", "permute", "slice")) for node in nodes)


def test_gathers_of_parameters_can_be_early_and_reductions_of_gradients_late() -> None:
    program = _program("mlp", "dp=2,tp=2", "fsdp+megatron")
    gathers = [task for task in program.tasks if task.prefetchable]
    assert {(task.kind, task.axes) for task in gathers} == {("all_gather", ("dp",))}
    late = [task for task in program.tasks if task.deferrable and task.backward]
    assert {task.axes for task in late if task.kind == "reduce_scatter"} == {("dp",)}
    path = [task for task in program.tasks if task.is_collective and not (task.prefetchable or task.deferrable)]
    assert path and all(task.axes == ("tp",) for task in path), "activations move inside the tensor-parallel group"


def test_reductions_can_be_late_where_the_end_of_padding_reads_the_coordinate_of_the_rank() -> None:
    tasks = [
        kernel("grad", 1.0, "x", backward=True),
        gather("reduced", 1.0, "grad", backward=True),
        kernel("cut", 1.0, "reduced", "coordinate.tp", backward=True),
        gather("other", 1.0, "grad", backward=True),
        kernel("sum", 1.0, "other", "grad", backward=True),
    ]
    names = dict.fromkeys(name for task in tasks for name in (*task.inputs, *task.outputs))
    buffers = {name: Buffer(name, 1, "gradient" if name in ("cut", "sum") else "temporary") for name in names}
    found = _with_deferrable(tasks, buffers, {"cut", "sum"})
    assert [task.name for task in found if task.deferrable] == ["reduced"], "a sum with what was computed is no move"


def test_fsdp_gathers_again_in_the_backward_and_zero2_does_not() -> None:
    again = {recipe: _program("mlp", "dp=2", recipe) for recipe in ("fsdp", "zero2")}
    assert any(task.backward for task in again["fsdp"].tasks if task.prefetchable)
    assert not any(task.backward for task in again["zero2"].tasks if task.prefetchable)
    kept = {n: sum(b.nbytes for b in p.buffers if b.kind == "gathered" and not b.backward) for n, p in again.items()}
    assert kept["fsdp"] >= kept["zero2"] > 0


def test_a_fused_program_has_fewer_kernels_and_moves_fewer_bytes() -> None:
    fused, apart = (_program("llama", "dp=4", "fsdp", fused=fused) for fused in (True, False))
    assert len(_tasks(fused, "compute")) < 0.6 * len(_tasks(apart, "compute"))
    assert sum(t.nbytes for t in _tasks(fused, "compute")) < sum(t.nbytes for t in _tasks(apart, "compute"))
    assert [t.flops for t in fused.tasks if "mm" in t.name] == [t.flops for t in apart.tasks if "mm" in t.name]


@pytest.mark.slow
def test_memory_is_by_kind() -> None:
    program = _program("gpt", "dp=4", "fsdp")
    kinds = {b.kind for b in program.buffers}
    assert {"parameter", "gradient", "optimizer", "input", "output", "activation", "gathered", "temporary"} <= kinds
    sizes = {b.fqn: b.nbytes for b in program.buffers if b.kind == "parameter"}
    for kind, ways in (("gradient", 1), ("optimizer", 2)):
        assert {b.fqn: b.nbytes for b in program.buffers if b.kind == kind} == {n: ways * s for n, s in sizes.items()}
    assert [b.nbytes for b in program.buffers if b.kind == "output"] == [4], "the loss"


@pytest.mark.parametrize(("optimizer", "states", "passes"), [("adamw", 2, 7), ("sgd", 0, 3)])
def test_an_optimizer_has_its_state_and_its_time(optimizer: str, states: int, passes: int) -> None:
    program = _program("mlp", "dp=2", "fsdp", optimizer=optimizer)
    parameters = sum(b.nbytes for b in program.buffers if b.kind == "parameter")
    assert sum(b.nbytes for b in program.buffers if b.kind == "optimizer") == states * parameters
    assert sum(task.nbytes for task in _tasks(program, OPTIMIZER)) == passes * parameters
    assert _tasks(_program("mlp", "dp=2", "fsdp", optimizer=None), OPTIMIZER) == []


def test_an_optimizer_that_is_not_known() -> None:
    with pytest.raises(UserError) as caught:
        _program("mlp", "dp=2", "fsdp", optimizer="lion")
    assert str(caught.value) == "unknown optimizer 'lion'; its memory and time are known for 'adamw', 'sgd', None"


def test_links_are_by_the_groups_of_the_mesh() -> None:
    program = _program("mlp", "dp=2,tp=8", "fsdp+megatron")
    assert {(t.axes, t.stream) for t in program.tasks if t.is_collective} == {(("dp",), "across"), (("tp",), "inside")}


def test_a_mesh_without_hardware_has_no_costs() -> None:
    split = _split("mlp", "dp=2", "fsdp")
    with pytest.raises(UserError, match=r"mesh dp=2 does not say .* hardware='h100'"):
        program_of(split.forward, split.backward, Mesh("dp=2"))
    with pytest.raises(UserError, match=r"unknown optimizer 'lion'; .* 'adamw', 'sgd', None"):
        program_of(split.forward, split.backward, Mesh("dp=2", hardware="h100"), optimizer="lion")


@pytest.mark.extended
def test_three_thousand_nodes_take_seconds() -> None:
    split = _split("deep", "dp=8", "fsdp")
    assert split.backward is not None
    assert len(split.forward.graph.nodes) + len(split.backward.graph.nodes) > 3000
    _program("deep", "dp=8", "fsdp")  # formulas are compiled once
    started = time.process_time()
    _program("deep", "dp=8", "fsdp")
    assert time.process_time() - started < 10, "a second on a quiet machine"


@pytest.mark.slow
def test_a_deep_model_on_one_node_hides_its_gathers() -> None:
    program = _program("deep", "dp=8", "fsdp")
    best = schedule(program)
    _check_dependencies(best.program)
    assert best.timeline.step_time < simulate(program).step_time


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fsdp", "zero2"])
def test_a_graph_by_itself_holds_what_it_holds_in_the_step(recipe: str) -> None:
    """Saved values stay to the end of the forward, and are there from the start of the backward."""
    split, mesh = _split("llama", "dp=4", recipe), Mesh("dp=4", hardware="h100")
    step = simulate(_program("llama", "dp=4", recipe, optimizer=None))
    border = next(n for n, task in enumerate(step.program.tasks) if task.backward)
    forward, backward = (simulate(program_of_graph(gm, mesh)) for gm in (split.forward, split.backward))
    assert forward.peak_memory == max(step.memory[:border])
    beside = step.memory[border] - backward.memory[0]  # inputs and parameters that the backward does not read
    assert 0 <= beside <= sum(buffer.nbytes for buffer in step.program.buffers if buffer.kind in ("input", "parameter"))
    assert backward.peak_memory + beside == pytest.approx(max(step.memory[border:]), rel=0.02)


@pytest.mark.parametrize("recipe", ["fsdp", "zero2"])
def test_the_phases_of_a_step_take_by_themselves_what_they_take_in_it(recipe: str) -> None:
    program = _program("llama", "dp=4", recipe)
    step, parts = simulate(program), list(phases(program))
    alone = [simulate(part) for part, _ in parts]
    ends = [sum(len(one.program.tasks) for one in alone[:number]) for number in range(len(alone) + 1)]
    assert len(alone) == 3 and simulate(joined(program, [part for part, _ in parts])).starts == step.starts
    assert sum(one.step_time for one in alone) == pytest.approx(step.step_time)
    assert [one.peak_memory for one in alone] == [max(step.memory[first:end]) for first, end in pairwise(ends)]
    for one, (_, least) in zip(alone, parts, strict=True):
        assert 0 < least <= step.step_time - one.step_time


def test_a_phase_that_reads_what_has_another_name_keeps_its_order() -> None:
    late, later = kernel("late", 1.0, "w", backward=True), kernel("later", 1.0, "made", backward=True)
    before = small(kernel("made", 1.0, "w"), later, late)
    after = small(kernel("part", 1.0, "w"), kernel("whole", 1.0, "part"), replace(later, inputs=("whole",)), late)
    known = unchanged(before, before.reordered([0, 2, 1]), after)
    assert list(known) == [1]
    assert known[1].tasks == (late, replace(later, inputs=("whole",)))
    assert unchanged(before, before, small(*before.tasks[:2], replace(late, seconds=2.0))).keys() == {0}


def test_a_program_is_made_again_only_for_a_graph_that_was_changed() -> None:
    gm, mesh = parse_graph(KEPT)
    mesh, programs = mesh.on(hardware_named("h100")), ProgramMemo()
    first = programs.of(gm, mesh, fused=True)
    assert programs.of(gm, mesh, fused=True) is first
    assert len(programs.of(gm, mesh, fused=False).tasks) > len(first.tasks)
    second = programs.of(gm, mesh, fused=True)
    assert second == first and second is not first
    x, neg, _, mm, _ = gm.graph.nodes
    mm.replace_input_with(neg, x)
    assert programs.of(gm, mesh, fused=True) == program_of_graph(gm, mesh) != first


KEPT = """
mesh dp=2
stage LOCAL
%x: f32[8, 8] = input("x")
%neg: f32[8, 8] = neg(%x)
%relu: f32[8, 8] = relu(%neg)
%mm: f32[8, 8] = mm(%relu, %neg)
return output("0") %mm
"""
