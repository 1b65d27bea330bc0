"""Context parallelism over longer sequences: steps of training, the memory of activations, and what a ring hides."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Mesh, Options, plan
from autoshard.compile.compiled import split_program
from autoshard.debug.rank_interpreter import run_ranks
from autoshard.debug.simulated_ranks import Call, Ranks, run_on_one_device
from examples.llama import Config, Llama, step_of
from passes.hardware.hardware import hardware_named
from passes.ir.graph import placeholders
from tests.models import Case
from tests.spmd.oracle import Reference, relative_error

RING = Options(recipe="context(ring)")


def small_llama(seq: int, layers: int = 1) -> Case:
    torch.manual_seed(0)
    model = Llama(Config(layers=layers, dim=32, heads=2, kv_heads=1, hidden=64, vocab=32, seq=seq)).double()
    return Case(model, tuple(torch.randint(32, (1, seq)) for _ in range(2)), {})


def descend(model: torch.nn.Module, gradients: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.sub_(0.5 * gradients[name])


@pytest.mark.slow
def test_ten_steps_over_2048_positions_equal_one_device() -> None:
    case = small_llama(2048)
    planned = Reference.of(case).plan("cp=4", RING).planned
    sharded, whole, losses = copy.deepcopy(case.model), copy.deepcopy(case.model), list[float]()
    for _ in range(10):
        got = Ranks.of(Call(sharded, case.args, {}), planned).run().step
        want = run_on_one_device(Call(whole, case.args, {}))
        assert relative_error(got.outputs["output"], want.outputs["output"]) < 1e-12
        descend(sharded, dict(got.gradients))
        descend(whole, dict(want.gradients))
        losses.append(float(want.outputs["output"]))
    assert losses[-1] < losses[0] - 0.01
    for (name, one), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert relative_error(one.detach(), other.detach()) < 1e-12, name


@pytest.mark.slow
def test_a_rank_keeps_its_part_of_the_activations() -> None:
    """A run keeps them, and a plan says so."""
    whole = Reference.of(small_llama(256))
    kept, predicted = dict[int, int](), dict[int, int]()
    for ranks in (1, 2, 4):
        one = whole.plan(Mesh(f"cp={ranks}", hardware="h100"), RING)
        split = split_program(one.planned.graph, mode="eager")
        ends = run_ranks(split.forward, one.mesh, one.given(placeholders(split.forward.graph)))
        held = {tensor.untyped_storage().data_ptr() for tensor in one.held[0].values()}
        kept[ranks] = sum(
            {
                value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
                for value in ends[0][len(split.outputs) :]
                if value.untyped_storage().data_ptr() not in held
            }.values()
        )
        assert one.planned.plan.cost is not None
        predicted[ranks] = one.planned.plan.cost.memory.activations
    for found in (kept, predicted):
        assert found[2] <= 1.01 * found[1] / 2 and found[4] <= 1.01 * found[1] / 4, (kept, predicted)


@pytest.mark.parametrize(
    ("ranks", "bandwidth", "is_hidden"),
    [pytest.param(16, 450e9, True, marks=pytest.mark.slow), (4, 450e9, True), (4, 1e9, False)],
)
def test_a_ring_hides_its_messages_where_a_step_computes_for_longer(ranks: int, bandwidth: float, is_hidden: bool) -> None:
    h100 = hardware_named("h100")
    hardware = replace(h100, inside=replace(h100.inside, bandwidth=bandwidth))
    with torch.device("meta"):
        model, args = step_of(Config(layers=1, dim=1024, heads=8, kv_heads=2, hidden=2048, vocab=1024), 1, 1 << 17)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = Options(recipe="context(ring)", mixed_precision=policy)
    found = plan(model, Mesh(f"cp={ranks}", hardware=hardware), args, options=options)
    sends = [one for one in found.collectives if one.kind == "send"]
    assert {one.backward for one in sends} == {False, True}
    steps = ranks - 1
    assert [one.way.partition(" of ")[0] for one in sends] == [f"in {steps} messages", f"in {2 * steps} messages"]
    assert f", {3 * steps} messages\n" in f"{found}\n"
    exposed, total = sum(one.exposed or 0.0 for one in sends), sum(one.seconds or 0.0 for one in sends)
    assert exposed <= 0.05 * total if is_hidden else exposed > 0.05 * total
    assert [one.behind[0].partition("_for_")[0] for one in sends] == ["_scaled_dot_product_flash_attention"] * 2
    assert ", behind _scaled_dot_product_flash_attention" in " ".join(str(found.explain("layers.0.attention")).split())
