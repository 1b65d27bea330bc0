"""Context parallelism of attention that is written out as products and a softmax, by a model or by torch for dropout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import Options
from passes.ir.graph import tensor_of
from tests.models import Case
from tests.spmd.decoders import DECODERS
from tests.spmd.oracle import compare, plan_ranks, run_on_one_device
from tests.spmd.oracle import run_on_ranks as run_on_simulated
from tests.spmd.test_context import EXCHANGE, GATHER, RING, TOLERANCE, attend, refusal

HAND = Options(recipe=None)


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * 0.5).tanh() @ k.transpose(-1, -2)).softmax(-1) @ v


def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Before(nn.Module):
    """Attention, and attention that is written out after it."""

    def __init__(self, first: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.attend = nn.Linear(12, 36), nn.Linear(12, 36), first

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        x = self.attend(q, k, v).transpose(1, 2).flatten(2)
        q, k, v = self.second(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        return written(q, k, v).square().mean()


@cache
def case(name: str) -> Case:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 12, dtype=torch.float64)
    made = {
        "dropout": lambda: attend((2, 8, 12), dropout=0.5, causal=True),
        "masked dropout": lambda: attend((2, 8, 12), (2, 6, 12), mask=(2, 1, 8, 6), dropout=0.5),
        "einsum": lambda: DECODERS["einsum"](),
        "relative": lambda: DECODERS["relative"](),
        "both": lambda: Case(Before(kernel).double(), (x,), {}),
        "twice": lambda: Case(Before(written).double(), (x,), {}),
    }
    return made[name]()


@pytest.mark.parametrize(
    ("name", "mesh", "recipe"),
    [
        ("dropout", "cp=2", GATHER),
        ("dropout", "cp=4", "context"),
        ("masked dropout", "cp=2", GATHER),
        ("both", "cp=2", RING),
        ("twice", "cp=4", GATHER),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("masked dropout", "cp=4", GATHER),
                ("einsum", "cp=2", GATHER),
                ("einsum", "cp=4", GATHER),
                ("relative", "cp=4", GATHER),
                ("einsum", "dp=2,cp=2", {"dp": "fsdp", "cp": GATHER}),
                ("einsum", "cp=2,tp=2", {"cp": GATHER, "tp": "megatron"}),
                ("dropout", "a=2,b=2", GATHER),
                ("both", "cp=4", GATHER),
                ("both", "cp=2", EXCHANGE),
            )
        ),
    ],
)
def test_a_step_gives_the_numbers_of_one_device(name: str, mesh: str, recipe: str) -> None:
    """Compare with a mesh of one rank, which draws the numbers of dropout as all meshes do."""
    ranks = plan_ranks(case(name), mesh, Options(recipe=recipe))
    assert not [remark.text for remark in ranks.planned.plan.remarks if "runs whole" in remark.text]
    compare(ranks.run().step, run_on_simulated(case(name), "one=1", HAND), TOLERANCE)


def test_keys_are_gathered_before_they_are_repeated() -> None:
    plan = plan_ranks(case("dropout"), "cp=2", Options(recipe=GATHER)).planned.plan
    part = 2 * 2 * 4 * 6 * 8  # bytes: keys, f64[2, 2, 4, 6]
    assert [one.bytes for one in plan.collectives if one.kind == "all_gather" and not one.backward] == [part, part]
    assert not plan.remarks


def test_a_rank_has_the_weights_and_the_mask_of_its_queries() -> None:
    ranks = plan_ranks(case("masked dropout"), "cp=2", Options(recipe=GATHER))
    assert str(ranks.planned.plan.inputs["mask"].layout.on(0)) == "S(2)"
    weights = [node for node in ranks.planned.graph.graph.nodes if node.target is torch.ops.aten.exp.default]
    assert {tuple(tensor_of(node).shape) for node in weights} == {(2, 4, 4, 6)}


@pytest.mark.parametrize(("recipe", "way"), [(RING, "ring"), (EXCHANGE, "all_to_all")])
def test_alone_it_runs_in_no_other_way(recipe: str, way: str) -> None:
    why = (
        "attention that the model, or torch, writes out as products is neither passed around nor exchanged; use context(gather)"
    )
    assert refusal(case("dropout"), recipe) == (
        f"recipe 'context({way})' on axis 'cp': attention cannot be sharded: {why}"
    )


@pytest.mark.parametrize("is_stacked", [False, True])
def test_torch_s_encoder_is_evaluated_in_parts(is_stacked: bool) -> None:
    """In evaluation without gradients, torch calls one fused kernel for a whole layer."""
    layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2) if is_stacked else layer
    case = Case(encoder.double().eval(), (torch.randn(2, 8, 12, dtype=torch.float64),), {})
    with torch.no_grad():
        got = run_on_simulated(case, "cp=2", Options(recipe="context"), training=False)
        want = case.model(*case.args)
    compare(got, run_on_one_device(case, training=False), TOLERANCE)
    assert torch.allclose(got.outputs["output"], want, rtol=0, atol=1e-12)
