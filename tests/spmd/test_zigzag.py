"""A mirrored sequence: what works position by position keeps it, and what depends on their order does not go wrong."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autoshard import ConstraintError, Options, ShardingPlan, autoshard
from tests.models import Case
from tests.spawn import run_on_ranks
from tests.spmd.oracle import Reference, compare, plan_ranks, relative_error
from tests.spmd.oracle import run_on_ranks as run_on_simulated
from tests.spmd.test_context import GATHER, RING, TOLERANCE, attend

SEQ = 16
MIRRORED = {"cp": "S(1~)"}


class Layers(nn.Module):
    """Causal attention, then attention inside of documents, on a stream that some function of it goes before."""

    def __init__(self, before: str = "nothing") -> None:
        super().__init__()
        self.first, self.second, self.before = nn.Linear(12, 72), nn.Linear(24, 72), before
        self.place = nn.Embedding(SEQ, 12)
        self.conv = nn.Conv1d(12, 12, 3, padding=1)

    def forward(self, x: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.ordered(x + self.place(torch.arange(SEQ)))
        q, k, v = self.first(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        q, k, v = self.second(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        same = ids[:, None, :, None] == ids[:, None, None, :]
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=same).transpose(1, 2).flatten(2)
        return F.cross_entropy(x.flatten(0, 1), labels.flatten()), x

    def ordered(self, x: Tensor) -> Tensor:
        match self.before:
            case "cumsum":
                return x.cumsum(1)
            case "shift":
                return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1) + x.roll(1, 1)
            case "flip":
                return x.flip(1) * torch.arange(SEQ)[:, None]
            case "convolution":
                y: Tensor = self.conv(x.transpose(1, 2)).transpose(1, 2)
                return y
            case "pairs":
                return x.unflatten(1, (SEQ // 2, 2)).sum(2, keepdim=True).expand(-1, -1, 2, -1).flatten(1, 2)
            case "halves":
                return x.unflatten(1, (2, SEQ // 2)).mean(1).repeat(1, 2, 1)
            case "dropout":
                return F.dropout(x, 0.5)
            case "sort":
                return x.sort(1).values + x.argmax(1, keepdim=True)
            case _:
                return x


def case(before: str = "nothing") -> Case:
    torch.manual_seed(0)
    ids = torch.tensor([[0] * 3 + [1] * 9 + [2] * 4, [0] * 10 + [1] * 6])
    x = torch.randn(2, SEQ, 12, dtype=torch.float64)
    return Case(Layers(before).double(), (x, ids, torch.randint(24, (2, SEQ))), {})


@cache
def reference(before: str) -> Reference:
    return Reference.of(case(before))


@pytest.mark.parametrize("way", [GATHER, RING])
@pytest.mark.parametrize("mesh", ["cp=2", pytest.param("cp=4", marks=pytest.mark.slow)])
def test_causal_attention_and_documents_in_one_model(way: str, mesh: str) -> None:
    whole = reference("nothing")
    ranks = whole.plan(mesh, Options(recipe=way))
    assert {str(one.layout.on(0)) for one in ranks.planned.plan.inputs.values()} == {"S(1~)"}
    assert {str(one.layout.on(0)) for one in ranks.planned.plan.outputs.values()} == {"R", "S(1~)"}
    compare(ranks.run().step, whole.step, TOLERANCE)


@pytest.mark.parametrize("way", [GATHER, RING])
def test_a_length_that_two_n_does_not_divide_stays_in_one_part(way: str) -> None:
    whole = Reference.of(attend((2, 6, 12), causal=True))
    ranks = whole.plan("cp=2", Options(recipe=way))
    assert str(ranks.planned.plan.inputs["x"].layout.on(0)) == "S(1)"
    compare(ranks.run().step, whole.step, TOLERANCE)


@pytest.mark.parametrize(
    "before",
    [
        "cumsum",
        "shift",
        "pairs",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("flip", "convolution", "halves", "dropout", "sort")),
    ],
)
def test_what_depends_on_the_order_of_positions_is_right(before: str) -> None:
    parts = plan_ranks(case(before), "cp=2", Options(recipe=GATHER)).run().step
    compare(parts, run_on_simulated(case(before), "one=1", Options(recipe=None)), TOLERANCE)  # which draws dropout alike


def test_inputs_are_mirrored_by_hand_and_a_plan_file_holds_it() -> None:
    inputs = {name: MIRRORED for name in ("x", "ids", "labels")}
    ranks = reference("nothing").plan("cp=4", Options(recipe=None, inputs=inputs))
    plan = ShardingPlan.from_json(ShardingPlan.of(ranks.planned.plan).to_json())
    assert [str(plan.inputs[name].layout.on(0)) for name in inputs] == ["S(1~)"] * 3
    compare(ranks.run().step, reference("nothing").step, TOLERANCE)


def test_an_output_is_whole_and_in_order_where_that_is_asked() -> None:
    whole = reference("nothing")
    ranks = whole.plan("cp=2", Options(recipe=RING, outputs={"1": {"cp": "R"}}))
    assert str(ranks.planned.plan.outputs["1"].layout.on(0)) == "R"
    compare(ranks.run().step, whole.step, TOLERANCE)


def test_a_parameter_is_never_mirrored() -> None:
    with pytest.raises(ConstraintError) as caught:
        plan_ranks(case(), "cp=2", Options(recipe=None, params={"place.weight": {"cp": "S(0~)"}}))
    assert str(caught.value) == (
        "Options(params=...): 'place.weight' cannot be S(0~): no DTensor is stored so; use Shard(0), as only inputs and outputs "
        "can be mirrored"
    )


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_real_ranks_take_plain_parts_and_dtensors(compiler: str) -> None:
    found = run_on_ranks(_train, 2, compiler, timeout=300)
    errors, texts = zip(*found, strict=True)
    assert max(errors) < 1e-10
    assert len(set(texts)) == 1


def _train(rank: int, compiler: str) -> tuple[float, str]:
    """Return the relative error of the worst value after a step with plain parts and one with DTensors, and the program."""
    given, mesh = case(), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    options = Options(recipe=RING, compile=compiler)
    model = autoshard(given.model, mesh, given.args, options=options)
    x, *others = given.args
    x.requires_grad_()
    want, logits = given.model(*given.args)
    want.backward()
    placed = [distribute_tensor(one.detach(), mesh, [Shard(1)]) for one in given.args]
    placed[0].requires_grad_()
    errors = []
    for args in (model.shard(x.detach(), *others), placed):
        model.zero_grad()
        loss, part = model(*args)
        loss.backward()
        chunks = logits.detach().chunk(4, 1)
        errors.append(relative_error(part.detach(), torch.cat([chunks[rank], chunks[3 - rank]], 1)))
        errors.append(relative_error(loss.detach(), want.detach()))
        grads = {name: one.grad for name, one in given.model.named_parameters() if one.grad is not None}
        errors += [relative_error(model.get_parameter(name).grad.full_tensor(), grad) for name, grad in grads.items()]
    assert x.grad is not None and isinstance(placed[0].grad, DTensor)
    return max(*errors, relative_error(placed[0].grad.full_tensor(), x.grad)), model.plan.graph("LOCAL")
