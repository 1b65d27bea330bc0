"""What the backward computes again changes no bit of a step, and takes the memory that is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoshard.compile.compiled import Mode, Split, compile_split, split_program
from autoshard.config.options import Options
from autoshard.inspection.sharding_plan import ShardingPlan
from autoshard.planner.make_plan import Planned, make_plan, plan_ahead
from autoshard.planner.request import PlanRequest
from passes.base import PassContext
from passes.cost.build_program import program_of
from passes.cost.simulate import simulate
from passes.ir.graph import Input, InputRole, OutputRole, copy_graph, origin_of, placeholders, saving_of
from passes.ir.mesh import Mesh
from passes.rematerialize import Rematerialize
from tests.cost.measured import measure_step
from tests.models import Case, Llama, build
from tests.spmd.oracle import Ranks, check_step, plan_ranks
from tests.spmd.test_numerics import FAST, Recipe

STEPS = 3


def _with_blocks_again(ranks: Ranks) -> Ranks:
    """Return the same ranks with another program; they go on from where they are."""
    graph = copy_graph(ranks.planned.graph)
    assert Rematerialize(()).run(graph, PassContext(ranks.mesh))
    held = [dict(parts) for parts in ranks.held]
    return replace(ranks, planned=replace(ranks.planned, graph=graph), held=held)


def _step(ranks: Ranks, split: Split) -> Iterator[Tensor]:
    """Return what each rank computes in a step of descent."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "recipe", "mode"),
    [
        ("gpt_dropout", *FAST[2], "eager"),
        ("llama", *FAST[0], "inductor"),
        ("encoder", *FAST[1], "eager"),
        ("llama", "dp=2", "zero2", "eager"),
    ],
)
def test_blocks_that_are_computed_again_give_the_same_to_the_bit(
    name: str, axes: str, recipe: Recipe, mode: Mode
) -> None:
    usual = plan_ranks(build(name), axes, Options(recipe=recipe))
    again = _with_blocks_again(usual)
    splits = [split_program(ranks.planned.graph, mode=mode) for ranks in (usual, again)]
    assert _saved(splits[1]) < _saved(splits[0]) / 2
    for _ in range(STEPS):
        pairs = list(zip(_step(usual, splits[0]), _step(again, splits[1]), strict=True))
        assert pairs and all(torch.equal(*pair) for pair in pairs)


MESH, LIMIT = Mesh("dp=2,tp=2", hardware="h100"), 2_600_000
AUTO = Options(recipe="fsdp+megatron", memory_limit=LIMIT)
BLOCK = Options(recipe="fsdp+megatron", recompute="block")


@cache
def _llama() -> Case:
    tokens = torch.zeros(16, 64, dtype=torch.int64)
    return Case(Llama(layers=2, seq=64).to(torch.float32), (tokens, tokens), {})


@cache
def _plan() -> ShardingPlan:
    return ShardingPlan.of(*plan_ahead(PlanRequest(_llama().model, _llama().args, {}, MESH, AUTO)))


@cache
def _made(options: Options) -> Planned:
    return make_plan(PlanRequest(_llama().model, _llama().args, {}, MESH, options))


@pytest.mark.slow
def test_what_is_computed_again_makes_a_step_fit() -> None:
    auto = _plan()
    block, roomy = auto.replan(recompute="block"), auto.replan(memory_limit=None)
    usual = auto.replan(recompute="none", memory_limit=None)
    assert roomy.recomputation is None and usual.recomputation is None, "nothing where all fits, or where told so"
    again, fitted = block.recomputation, auto.recomputation
    assert again is not None and fitted is not None
    assert auto.cost.peak_memory <= LIMIT < usual.cost.peak_memory
    assert block.cost.memory.activations < auto.cost.memory.activations < usual.cost.memory.activations
    assert again.kept == () != fitted.kept and 0 < fitted.compute < again.compute
    twice = [one for one in block.collectives if one.recomputed and one.axes == ("tp",)]
    assert twice and not any(one.recomputed for one in roomy.collectives if one.axes == ("tp",))
    assert "each layer in the backward, except what enters it, layers.*" in " ".join(str(auto).split())


@pytest.mark.slow
def test_a_plan_that_is_followed_computes_the_same_again() -> None:
    loaded = ShardingPlan.from_json(_plan().to_json())
    assert loaded.recomputation == _plan().recomputation
    followed = make_plan(PlanRequest(_llama().model, _llama().args, {}, MESH, AUTO), plan=loaded)
    assert followed.plan.recomputation == _made(AUTO).plan.recomputation == loaded.recomputation
    assert followed.plan.graph("LOCAL") == _made(AUTO).plan.graph("LOCAL")
    assert " remade = " in followed.plan.graph("LOCAL") and " saved = " in followed.plan.graph("LOCAL")


@pytest.mark.slow
@pytest.mark.parametrize("options", [AUTO, BLOCK], ids=["auto", "block"])
def test_predicted_memory_is_what_an_eager_step_takes(options: Options) -> None:
    split = split_program(_made(options).graph, mode="eager")
    program = program_of(
        split.forward, split.backward, MESH, outputs=split.outputs, gradients=split.gradients, fused=False
    )
    predicted, measured = simulate(program).peak_memory, measure_step(split, MESH, mode="eager")
    assert abs(predicted / measured - 1) < 0.01


def test_compiled_code_computes_blocks_again() -> None:
    case = build("mlp", dtype=torch.float32)
    usual = plan_ranks(case, "dp=1", Options(recipe="ddp"))
    got = []
    for ranks in (usual, _with_blocks_again(usual)):
        program = compile_split(split_program(ranks.planned.graph, mode="inductor"), mode="inductor")
        (inputs,) = ranks.given(placeholders(program.split.forward.graph))
        outputs, _, saved = program.forward(list(inputs))
        got.append([*outputs, *program.backward(saved, [torch.ones(())])])
    for one, other in zip(*got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_a_model_without_lists_has_its_children_as_blocks() -> None:
    case = build("structured")
    planned = make_plan(PlanRequest(case.model, case.args, case.kwargs, Mesh("dp=2"), Options(recipe="fsdp", recompute="block")))
    remade = [node for node in planned.graph.graph.nodes if saving_of(node) == "remade"]
    assert planned.plan.recomputation is not None and planned.plan.recomputation.compute is None
    assert {origin_of(node).fqn for node in remade} <= {"linear", "scale"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Checkpointed(nn.Module):
    """The user's own choice, which leaves one layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.layers[2](x).square().mean()


def test_what_the_model_checkpoints_is_computed_again() -> None:
    case = Case(Checkpointed().double(), (torch.randn(8, 16, dtype=torch.float64),), {})
    ranks = check_step(case, "dp=2,tp=2", Options(recipe="fsdp+megatron", recompute="none"))
    split = split_program(ranks.planned.graph, mode="eager")
    assert split.backward is not None
    remade = [node for node in split.backward.graph.nodes if saving_of(node) == "remade"]
    assert {origin_of(node).fqn.split(".")[1] for node in remade} == {"0", "1"}


@pytest.mark.parametrize("recipe", ["auto", "fsdp"])
def test_a_program_without_a_backward_recomputes_nothing(recipe: str) -> None:
    frozen = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).requires_grad_(requires_grad=False)
    options = Options(recipe=recipe, recompute="block", hardware="h100")
    made, _ = plan_ahead(PlanRequest(frozen, (torch.randn(8, 16),), {}, Mesh("dp=2"), options))
    assert made.cost is not None and made.recomputation is None
