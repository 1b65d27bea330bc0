"""A batch that the data axes do not divide is padded and split, with the numbers of one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import Mesh, Options, check
from autoshard.config.options import Placements
from autoshard.debug.checking import Check, Keeper, comparison
from autoshard.debug.simulated_ranks import Call
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from autoshard.plans.record import PlanRecord
from autoshard.runtime.program_planner import ProgramPlanner
from passes.ir.text import parse_graph
from passes.pad import Pad
from tests.extended import extended
from tests.passes.rewrite import assert_declines, assert_same_values

BATCH, IN, OUT, CLASSES = 7, 6, 8, 5
PADDED = "a batch of 7 is padded to 8, which 2 divides: 14.29% more"
MM = torch.ops.aten.mm.default


class Classifier(nn.Module):
    """A normalization over the batch, and dropout, before a loss."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(IN, OUT), nn.BatchNorm1d(OUT), nn.Linear(OUT, CLASSES)
        self.reduction = reduction

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.down(F.dropout(F.gelu(self.norm(self.up(x))), 0.3, self.training))
        return logits if labels is None else F.cross_entropy(logits, labels, reduction=self.reduction, ignore_index=0)


class Along(nn.Module):
    """Ops that see all of a batch: along dim 0, and between its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(IN, OUT), nn.Linear(IN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        pairs = F.cross_entropy(a @ b.T, torch.arange(len(x)))
        order = a.cumsum(0) * b.flip(0) + a.sort(0).values + a[-1]
        positive = (b > 0).all(0).sum() * b.mean()
        return pairs + (a.softmax(0) * b).sum() + a.std(0).sum() + a.amax(0).mean() + order.mean() + positive


class Attention(nn.Module):
    """Attention with a mask: a padded row of it attends to nothing, which gives NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(IN, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.q(x)
        weights = (q @ q.mT).masked_fill(~mask[:, None], float("-inf")).softmax(-1)
        return self.out(weights @ q).pow(2).mean()


class Cosines(nn.Module):
    """Divides rows by their norms: a padded row of zeros becomes 0 / 0."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(IN, OUT, bias=False), nn.Linear(OUT, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.up(x / x.norm(dim=-1, keepdim=True))
        return F.cross_entropy(self.out(h / h.norm(dim=-1, keepdim=True)), labels)


def checked(
    model: nn.Module, args: tuple[Tensor, ...], mesh: str, recipe: str, axes: tuple[int, ...] = (0,), *, grads: bool = True
) -> tuple[PlanRecord, Check]:
    """Return the plan of a later call, whose batch the caller splits over `axes`, and its comparison with one device."""
    keeper, model = Keeper(), model.double().train(grads)
    with torch.set_grad_enabled(grads):
        on = Mesh(mesh, hardware="cpu")
        options = Options(recipe=recipe)
        request = PlanRequest(model, args, {}, on, options, training=grads, batch_axes=axes, is_later=True)
        planned = make_plan(request, observers=(keeper,))
        return planned.plan, comparison(keeper.graph, planned, Call(model, args, {}), options)


def first_call(model: nn.Module, args: tuple[Tensor, ...], mesh: Mesh, options: Options) -> tuple[PlanRecord, Check]:
    """Return the plan of a first call, whose batch the recipes or names split, and its comparison with one device."""
    keeper = Keeper()
    axes = ProgramPlanner("cpu", mesh, options, None).batch_axes()
    planned = make_plan(PlanRequest(model.double(), args, {}, mesh, options, batch_axes=axes), observers=(keeper,))
    return planned.plan, comparison(keeper.graph, planned, Call(model, args, {}), options)


def batch(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(BATCH, *shape, dtype=torch.float64)


def labels() -> Tensor:
    return torch.randint(CLASSES, (BATCH,))


def test_each_rank_trains_on_its_part_of_a_batch_that_is_padded() -> None:
    plan, found = checked(Classifier(), (batch(IN), labels()), "dp=2", "fsdp")
    assert found and found.tolerance <= 1e-9 and not found.not_compared, str(found)
    products = [node for node in parse_graph(plan.graph("LOCAL"))[0].graph.nodes if node.target is MM]
    rows = {node.args[0].meta["val"].shape[0] for node in products if node.meta["val"].shape[0] not in (IN, OUT, CLASSES)}
    assert rows == {4}
    assert [remark.text for remark in plan.remarks if remark.pass_name == "pad"] == [PADDED]


def test_an_evaluation_batch_is_padded_and_its_outputs_are_not() -> None:
    plan, found = checked(Classifier(), (batch(IN)[:5],), "dp=2,tp=2", "fsdp+megatron", grads=False)
    assert found and not found.not_compared, str(found)
    assert plan.padded_axes == ("dp",) and plan.outputs["output"].shape == (5, CLASSES)
    assert plan.outputs["output"].layout.is_replicated and plan.inputs["x"].layout.is_replicated


@pytest.mark.parametrize(("mesh", "recipe"), [("dp=2,tp=2", "fsdp+megatron"), ("a=2,b=2", "hsdp")])
def test_a_recipe_splits_the_padded_batch_of_a_first_call(mesh: str, recipe: str) -> None:
    plan, found = first_call(Cosines(), (batch(IN), labels()), Mesh(mesh, hardware="cpu"), Options(recipe=recipe))
    assert found and not found.not_compared, str(found)
    assert all(value.layout.is_replicated for value in plan.inputs.values())
    assert plan.padded_axes == (("dp",) if recipe == "fsdp+megatron" else ("a", "b"))


@pytest.mark.parametrize(
    ("inputs", "padded"),
    [
        ({"x": {"b": "R"}}, ("a",)),
        ({"x": {"b": "S(1)"}}, ("a",)),
        ({"labels": {"a": "R"}}, ("a", "b")),
        ({"x": {"a": "R", "b": "R"}}, ()),
    ],
)
def test_a_batch_is_padded_for_the_axes_that_constraints_leave(inputs: Placements, padded: tuple[str, ...]) -> None:
    options = Options(recipe="zero2", inputs=inputs)
    plan, found = first_call(Cosines(), (batch(IN), labels()), Mesh("a=3,b=2", hardware="cpu"), options)
    assert found and plan.padded_axes == padded, str(found)


def test_an_input_is_whole_on_an_axis_that_does_not_divide_what_constraints_leave() -> None:
    options = Options(recipe="ddp", inputs={"x": {"a": "S(0)"}})
    plan, found = first_call(Cosines(), (batch(IN)[:6], labels()[:6]), Mesh("a=2,b=2", hardware="cpu"), options)
    assert found and plan.padded_axes == ()
    assert "on b: labels[6] is not sharded: dim 0 does not divide further" in [remark.text for remark in plan.remarks]


@pytest.mark.parametrize("recipe", ["fsdp", "auto"])
def test_a_first_batch_of_one_is_whole_and_later_batches_are_split(recipe: str) -> None:
    mesh, options = Mesh("dp=2", hardware="cpu"), Options(recipe=recipe)
    plan, found = first_call(Cosines(), (batch(IN)[:1], labels()[:1]), mesh, options)
    assert found and plan.inputs["x"].layout.is_replicated, str(found)
    texts = [remark.text for remark in plan.remarks if remark.pass_name == "seed"]
    assert texts[0] == "a batch of 1 is not split over dp: every rank there computes all of it"
    planner = ProgramPlanner("cpu", mesh, options, None)
    planner.first = plan
    assert planner.splits().whole_shape("x", torch.empty(4, IN), 4) == (8, IN)


@pytest.mark.parametrize("mesh", ["tp=3", extended("dp=2,tp=3")])
def test_a_search_that_pads_for_axes_that_are_not_named_for_the_batch(mesh: str) -> None:
    keeper, model, on, options = Keeper(), Cosines().double(), Mesh(mesh, hardware="h100"), Options()
    args = torch.randn(4096, IN, dtype=torch.float64), torch.randint(CLASSES, (4096,))
    planned = make_plan(PlanRequest(model, args, {}, on, options), observers=(keeper,))
    found = comparison(keeper.graph, planned, Call(model, args, {}), options)
    assert found and found.tolerance <= 1e-9 and not found.not_compared, str(found)
    assert "tp" in planned.plan.padded_axes, str(planned.plan)


@pytest.mark.slow
def test_a_batch_is_padded_for_all_data_axes_together() -> None:
    plan, found = checked(Classifier("sum"), (batch(IN)[:6], labels()[:6]), "a=2,b=2", "fsdp", (0, 1))
    assert found and plan.padded_axes == ("a", "b"), str(found)


@pytest.mark.slow
def test_what_sees_all_of_a_batch_does_not_see_its_padding() -> None:
    plan, found = checked(Along(), (batch(IN).requires_grad_(),), "dp=2", "ddp")
    assert found and not found.not_compared, str(found)
    told = [remark.text for remark in plan.remarks if remark.pass_name == "pad"]
    assert "cumsum takes no padding: 8 parts are cut to 7; ranks that shared them repeat its work" in told


def test_padding_that_is_not_a_number_reaches_no_gradient() -> None:
    mask = torch.ones(BATCH, 3, dtype=torch.bool).tril(1)
    _, found = checked(Attention(), (batch(3, IN), mask), "dp=2", "zero2")
    assert found and not found.not_compared, str(found)


@pytest.mark.parametrize(("mesh", "recipe"), [("dp=2", "fsdp"), ("dp=2,tp=2", "fsdp+megatron")])
def test_a_padded_row_that_is_divided_by_its_norm_reaches_no_gradient(mesh: str, recipe: str) -> None:
    _, found = checked(Cosines(), (batch(IN), labels()), mesh, recipe)
    assert found and not found.not_compared, str(found)


def test_ops_that_raise_for_the_zeros_of_a_padding_get_none() -> None:
    class Solved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            spectrum = torch.linalg.eigvalsh(x / x.norm(dim=(1, 2), keepdim=True))  # NaN of a padded matrix
            return torch.linalg.solve(x, x.sum(-1)).sum() + torch.linalg.slogdet(x)[1].sum() + spectrum.sum()

    diagonal = torch.arange(1.0, 4, dtype=torch.float64).diag()
    matrices = torch.stack([diagonal / number + torch.eye(3) for number in range(1, 8)])
    found = check(Solved().double(), "dp=2", (matrices,), options=Options(recipe="fsdp"))
    assert found, str(found)


def test_inputs_with_another_first_dim_are_left_as_they_are() -> None:
    inputs = '%x: f32[3, 4] = input("x")', '%y: f32[4, 2] = input("y")'
    lines = "mesh dp=2", "stage CAPTURED", *inputs, "%mm: f32[3, 2] = mm(%x, %y)", 'return output("output") %mm'
    text = "\n".join(lines) + "\n"
    assert_same_values(Pad(batch_parts=2), text)
    assert_declines(Pad(batch_parts=3), text)


ALONG_THE_BATCH = (
    "%r: f32[4] = sum.dim_IntList(%cos, [0])",
    "%r: f32[4] = amax(%cos, [0])",
    "%r: f32[4] = prod.dim_int(%cos, 0)",
    "%gt: b8[3, 4] = gt.Scalar(%cos, 0.1)\n%r: i64[] = sum.default(%gt)",
    "%r: f32[3, 4] = _softmax(%cos, 0, False)",
    "%r: f32[3, 4] = cumsum(%cos, 0)",
    "%r: f32[3, 4] = flip(%cos, [0])",
    "%r: i64[4] = argmax(%cos, 0)",
    "%r: f32[12] = view(%cos, [12])",
)


@pytest.mark.parametrize("calls", ALONG_THE_BATCH, ids=lambda calls: calls.split("= ")[-1].split("(")[0])
def test_values_are_the_same_after_an_op_along_the_batch(calls: str) -> None:
    lines = "mesh dp=2", "stage CAPTURED", '%x: f32[3, 4] = input("x")', "%cos: f32[3, 4] = cos(%x)"
    assert_same_values(Pad(batch_parts=2), "\n".join((*lines, *calls.split("\n"), 'return output("output") %r')) + "\n")
