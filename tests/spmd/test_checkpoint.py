"""What the backward computes again changes no bit of a step, and takes the memory that is predicted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autoshard.compile import Mode, Split, compile_program, split_program
from autoshard.options import Options
from autoshard.plan import ShardingPlan
from autoshard.planner import make_plan, plan_ahead
from autoshard.simulation import Call
from passes.cost.from_graph import program_of
from passes.cost.simulate import simulate
from passes.ir.graph import Input, InputRole, OutputRole, origin_of, placeholders, saving_of
from passes.ir.mesh import Mesh
from tests.cost.measured import measure_step
from tests.models import Case, Llama, build
from tests.spmd.oracle import Ranks, plan_ranks
from tests.spmd.test_numerics import FAST, Recipe

STEPS = 3


def _training(name: str, axes: str, recipe: Recipe, checkpoint: str, mode: Mode, steps: int) -> tuple[Split, list[Tensor]]:
    """The program, and all that its ranks compute in some steps of descent."""
    ranks = plan_ranks(build(name), axes, Options(recipe=recipe, checkpoint=checkpoint))
    split = split_program(ranks.planned.graph, mode=mode)
    return split, [value for _ in range(steps) for value in _step(ranks, split)]


def _step(ranks: Ranks, split: Split) -> Iterator[Tensor]:
    for held, values in zip(ranks.held, ranks.run_split(split), strict=True):
        for output, value in zip((*split.outputs, *split.gradients), values, strict=True):
            parameter, buffer = Input(InputRole.PARAMETER, output.name), Input(InputRole.BUFFER, output.name)
            if output.role is OutputRole.GRADIENT and parameter in held and value is not None:
                held[parameter] = held[parameter] - 0.1 * value
            if output.role is OutputRole.BUFFER:
                held[buffer] = value
            if value is not None:
                yield value


def _saved(split: Split) -> int:
    assert split.backward is not None
    nodes = placeholders(split.backward.graph, InputRole.SAVED)
    return sum(node.meta["val"].nbytes for node in nodes)


def _check(name: str, axes: str, recipe: Recipe, mode: Mode, *, steps: int = 1) -> None:
    usual, expected = _training(name, axes, recipe, "none", mode, steps)
    split, got = _training(name, axes, recipe, "block", mode, steps)
    assert split.backward is not None
    assert any(saving_of(node) == "remade" for node in split.backward.graph.nodes)
    assert _saved(split) < _saved(usual)
    assert len(got) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "axes", "recipe"),
    [("gpt_dropout", *FAST[2]), ("llama", *FAST[0]), ("encoder", *FAST[1]), ("gpt_dropout", "dp=2", "zero2")],
)
def test_blocks_that_are_computed_again_give_the_same_to_the_bit(name: str, axes: str, recipe: Recipe) -> None:
    _check(name, axes, recipe, "inductor" if name == "llama" else "eager", steps=STEPS)


def _llama() -> Case:
    tokens = torch.zeros(16, 128, dtype=torch.int64)
    return Case(Llama(layers=3, seq=128).to(torch.float32), (tokens, tokens), {})


MESH, LIMIT = Mesh("dp=2,tp=2", hardware="h100"), 5_000_000
AUTO = Options(recipe="fsdp+megatron", memory_limit=LIMIT)


def test_as_little_is_computed_again_as_makes_a_step_fit() -> None:
    case = _llama()
    usual, block, auto, roomy = (
        plan_ahead(case.model, case.args, {}, MESH, options)
        for options in (
            Options(recipe="fsdp+megatron", memory_limit=LIMIT, checkpoint="none"),
            Options(recipe="fsdp+megatron", memory_limit=LIMIT, checkpoint="block"),
            AUTO,
            Options(recipe="fsdp+megatron"),
        )
    )
    assert roomy.recomputation is None and usual.recomputation is None, "nothing where all fits, or where told so"
    again, fitted = block.recomputation, auto.recomputation
    assert again is not None and fitted is not None
    assert block.cost.peak_memory < auto.cost.peak_memory <= LIMIT < usual.cost.peak_memory
    assert auto.cost.memory.activations < usual.cost.memory.activations - (usual.cost.peak_memory - LIMIT) / 2
    assert again.kept == () != fitted.kept and 0 < fitted.compute < again.compute
    names = {one.id for one in block.collectives if one.recomputed and one.axes == ("tp",)}
    assert names and not any(one.recomputed for one in roomy.collectives if one.axes == ("tp",))
    assert "again" in str(auto) and "each layer in the backward, but for what enters it, layers.*" in str(auto)


def test_a_plan_that_is_followed_computes_the_same_again() -> None:
    case = _llama()
    plan = plan_ahead(case.model, case.args, {}, MESH, AUTO)
    loaded = ShardingPlan.from_json(plan.to_json())
    assert loaded.recomputation == plan.recomputation
    followed, made = (make_plan(case.model, case.args, {}, MESH, AUTO, plan=given) for given in (loaded, None))
    assert followed.plan.recomputation is not None and made.plan.recomputation == plan.recomputation
    assert followed.plan.graph("LOCAL") == made.plan.graph("LOCAL")
    assert " remade = " in made.plan.graph("LOCAL") and " saved = " in made.plan.graph("LOCAL")


@pytest.mark.parametrize("options", [AUTO, Options(recipe="fsdp+megatron", checkpoint="block")], ids=["auto", "block"])
def test_predicted_memory_is_what_an_eager_step_takes(options: Options) -> None:
    case = _llama()
    split = split_program(make_plan(case.model, case.args, {}, MESH, options).graph, mode="eager")
    program = program_of(
        split.forward, split.backward, MESH, outputs=split.outputs, gradients=split.gradients, fused=False
    )
    predicted, measured = simulate(program).peak_memory, measure_step(split, MESH, mode="eager")
    assert abs(predicted / measured - 1) < 0.01


def test_compiled_code_computes_blocks_again() -> None:
    case = build("mlp", dtype=torch.float32)
    got = []
    for checkpoint in ("none", "block"):
        planned = make_plan(case.model, case.args, {}, Mesh("dp=1"), Options(recipe="ddp", checkpoint=checkpoint))
        program = compile_program(planned.graph, mode="inductor")
        ranks = Ranks.of(Call(*case), planned)
        (inputs,) = ranks.given(placeholders(program.split.forward.graph))
        outputs, _, saved = program.forward(list(inputs))
        got.append([*outputs, *program.backward(saved, [torch.ones(())])])
    for one, other in zip(*got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_a_model_without_lists_has_its_children_as_blocks() -> None:
    case = build("structured")
    planned = make_plan(case.model, case.args, case.kwargs, Mesh("dp=2"), Options(recipe="fsdp", checkpoint="block"))
    remade = [node for node in planned.graph.graph.nodes if saving_of(node) == "remade"]
    assert planned.plan.recomputation is not None
    assert {origin_of(node).fqn for node in remade} <= {"linear", "scale"}
