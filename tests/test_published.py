"""Published runs are predicted as they were run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import published
from benchmarks.held_out_runs import EAGER_GATE, EAGER_NORM, EAGER_SUM, fms_stack, unfused
from benchmarks.published import (
    _awaited,
    _other_micro_batch,
    _run_to_end,
    _seconds_between_stages,
    _without_casts,
    predict,
    seconds_beside,
)
from benchmarks.published_runs import (
    CLIP,
    EAGER_LOSS,
    FOREACH,
    FSDP_COPIES,
    ROWS,
    Row,
    Stack,
    _gpt_rate,
    _pipeline_row,
    gpt_config,
    llama_row,
    titan_stack,
)
from examples import gpt, llama
from passes.cost.collective_time import collective_seconds
from passes.cost.program import Task
from passes.cost.simulate import Timeline, simulate
from passes.hardware.hardware import Group
from passes.recipes import registry
from tests.cost.programs import gather, kernel, program


def test_a_message_of_tensor_parallelism_is_awaited_where_it_is_sent() -> None:
    message = replace(gather("g", 2.0, "w", prefetchable=True), axes=("tp",))
    given = program(kernel("a", 1.0), message, kernel("b", 3.0, "a"), kernel("c", 1.0, "g"))
    assert simulate(given).step_time == 5.0
    assert simulate(_awaited(given, ("tp",))).step_time == 7.0
    other = replace(given, tasks=tuple(replace(task, axes=("dp",) if task.axes else ()) for task in given.tasks))
    assert _awaited(other, ("tp",)) == other
    backward = replace(given, tasks=tuple(replace(task, backward=True) for task in given.tasks))
    assert _awaited(given, ("tp",), forward_alone=True) == _awaited(given, ("tp",))
    assert _awaited(backward, ("tp",), forward_alone=True) == backward


def test_a_checkpoint_that_is_not_compiled_runs_a_layer_to_its_end_again() -> None:
    def of(layer: str, name: str, *inputs: str, seconds: float, backward: bool = False) -> Task:
        task = kernel(name, seconds, *inputs, backward=backward)
        return replace(task, fqn=f"blocks.{layer}.mlp", nodes=(name.removeprefix("backward."),))

    given = program(
        of("0", "cast", "parameter.w", seconds=4.0),
        of("0", "up", "x", seconds=1.0),
        of("0", "down", "up", "cast", seconds=2.0),
        of("0", "backward.up", "x", seconds=1.0, backward=True),
        of("0", "backward.grad", "backward.up", seconds=3.0, backward=True),
    )
    whole = _run_to_end(given)
    assert [task.name for task in whole.tasks] == ["cast", "up", "down", "again.down", "backward.up", "backward.grad"]
    assert simulate(whole).step_time == simulate(given).step_time + 2.0


def test_a_stack_that_keeps_parameters_as_they_are_multiplied_casts_none() -> None:
    given = program(kernel("cast", 4.0, "parameter.w"), kernel("up", 1.0, "x", "cast"))
    assert simulate(_without_casts(given)).step_time == 1.0


def test_stages_send_a_part_of_each_chunk_both_ways_and_gather_it() -> None:
    tiny = gpt.Config(layers=4, dim=8, heads=2, vocab=16, seq=4)
    row = _pipeline_row("tiny", 1.0, tiny, "dp=2,tp=2", 4, 3, 2, 2)
    a100 = row.stack.hardware
    nbytes = 2 * 2 * tiny.seq * tiny.dim
    gathered = collective_seconds("all_gather", nbytes, Group(2), a100)
    sent = a100.across.setup + a100.across.latency + nbytes / 2 / a100.across.bandwidth
    assert _seconds_between_stages(row) == pytest.approx(2 * (3 * 2 + 1) * (sent + gathered))


def test_a_stack_s_bytes_are_counted_for_what_they_are() -> None:
    stack = titan_stack("fsdp")
    assert (stack.copied, stack.updated, stack.scored) == (FSDP_COPIES, CLIP + FOREACH, EAGER_LOSS)


@pytest.mark.parametrize(("recipe", "parts"), [("fsdp", 16), ("hsdp", 8)])
def test_a_rank_updates_the_parameters_that_it_stores(recipe: str, parts: int) -> None:
    stack = replace(fms_stack("a100", 400, recipe), scored=0, unfused=(0, 0))
    row = llama_row("tiny", recipe, 1.0, llama.TINY, "nodes=2,dp=8", 16, stack, seq=32)
    with torch.device("meta"):
        parameters = sum(one.numel() for one in row.model(1)[0].parameters())
    expected = (CLIP + FOREACH) * parameters / parts / stack.hardware.memory_bandwidth
    assert seconds_beside(row) == pytest.approx(expected)


def test_parameters_that_are_sharded_are_joined_for_each_micro_batch() -> None:
    def seconds(recipe: str, micro_batches: int) -> float:
        stack = replace(titan_stack(recipe), scored=0)
        row = llama_row("tiny", recipe, 1.0, llama.TINY, "dp=8", 16, stack, seq=32)
        return seconds_beside(replace(row, micro_batches=micro_batches))

    with torch.device("meta"):
        parameters = sum(one.numel() for one in llama.Llama(llama.TINY).parameters())
    again = FSDP_COPIES * parameters / titan_stack("fsdp").hardware.memory_bandwidth
    assert seconds("fsdp", 3) - seconds("fsdp", 1) == pytest.approx(2 * again)
    assert seconds("ddp", 3) == seconds("ddp", 1)


def test_a_micro_batch_of_sharded_parameters_is_predicted_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes = list[tuple[str, int, str]]()

    def noted(build: object, mesh: str, batch: int, stack: Stack) -> Timeline:
        meshes.append((mesh, batch, str(stack.options.recipe)))
        assert stack.options.optimizer is None
        return simulate(program(kernel("a", 1.0)))

    monkeypatch.setattr(published, "step", noted)
    for recipe in ("fsdp", "hsdp", "ddp+megatron_2019", "megatron"):
        mesh = "tp=2" if recipe == "megatron" else "dp=4,tp=2"
        _other_micro_batch(llama_row("tiny", recipe, 1.0, llama.TINY, mesh, 8, titan_stack(recipe), seq=32))
    assert meshes == [
        ("dp=4,tp=2", 8, "fsdp"),
        ("dp=4,tp=2", 8, "hsdp"),
        ("tp=2", 2, "megatron_2019"),
        ("tp=2", 8, "megatron"),
    ]


def test_an_eager_layer_that_is_computed_again_runs_its_forward_twice() -> None:
    once, twice = unfused("none"), unfused("block")
    assert twice == (once[0] + 2 * (EAGER_SUM[0] + EAGER_NORM[0]), once[1] + EAGER_GATE[0])
    eager = replace(titan_stack("fsdp"), unfused=once)
    rows = [llama_row("tiny", "fsdp", 1.0, llama.TINY, "dp=2", 4, one, seq=32) for one in (eager, titan_stack("fsdp"))]
    moved = 4 * 32 // 2 * llama.TINY.layers * (once[0] * llama.TINY.dim + once[1] * llama.TINY.hidden)
    longer = moved / eager.hardware.memory_bandwidth
    assert seconds_beside(rows[0]) - seconds_beside(rows[1]) == pytest.approx(longer)


def test_a_node_s_network_is_shared_by_its_devices() -> None:
    assert fms_stack("h100", 800, "fsdp").hardware.across.bandwidth == 800e9 / 8 / 8


def test_the_rate_of_a_gpt_is_the_paper_s() -> None:
    row = next(row for row in ROWS if row.name.startswith("GPT 1.7B"))
    assert _gpt_rate(gpt_config(24, 2304, 24))(row, 3.528) == pytest.approx(137, rel=1e-3)


def tiny(*, pipelines: bool = False, block: bool = False) -> Row:
    stack = titan_stack("fsdp+megatron", block=block, pipelines=pipelines)
    return llama_row("tiny", "fsdp + tp", 1.0, llama.TINY, "dp=2,tp=2", 4, stack, seq=32)


@pytest.mark.slow
def test_a_row_is_predicted_with_its_recomputation_and_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RECIPES", dict(registry._RECIPES))  # no other test sees the recipe of 2019
    assert 0 < predict(tiny()) < predict(tiny(block=True))
    assert predict(tiny(pipelines=True)) != predict(tiny())
