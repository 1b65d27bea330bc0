"""Each rank computes a loss of its own outside of the model: gradients of outputs that all ranks share are joined, those of
parameters beside the model are compared."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Options, autoshard
from autoshard.runtime.output_gradients import OutputGradients
from passes.ir.layout import Layout, R, Shard
from passes.ir.mesh import Mesh
from tests.spawn import Failure, reports_of_ranks, run_on_ranks

MESH = Mesh("dp=2,tp=3")
PART, WHOLE = Layout((Shard(0), R)), Layout((R, R))


def gradients(*, sums: bool = False) -> OutputGradients:
    return OutputGradients.of(MESH, (WHOLE, PART), (PART, WHOLE, WHOLE), sums=sums)


def test_a_part_is_scaled_to_a_mean_but_not_to_a_sum() -> None:
    assert [gradients().scale(number) for number in range(3)] == [0.5, 1.0, 1.0]
    assert [gradients(sums=True).scale(number) for number in range(3)] == [1.0, 1.0, 1.0]


def test_whole_outputs_are_joined_over_the_axes_of_the_batch_where_ranks_differ() -> None:
    number, vector = torch.ones(()), torch.ones(4)
    assert gradients().axes_to_join({0: vector, 1: number}) == {1: (0,)}
    assert gradients().axes_to_join({1: vector, 2: number}) == {1: (0,), 2: (0,)}
    assert gradients().axes_to_join({1: number, 2: number}) == {}  # losses of the whole batch
    assert gradients().axes_to_join({0: vector}) == {}


def test_whole_outputs_are_summed_beside_parts_alone() -> None:
    vector = torch.ones(4)
    assert gradients(sums=True).axes_to_join({0: vector, 1: vector}) == {1: (0,)}
    assert gradients(sums=True).axes_to_join({1: vector, 2: vector}) == {}


def test_an_axis_that_splits_an_output_alone_counts_too() -> None:
    vocabulary = OutputGradients.of(MESH, (WHOLE,), (Layout((R, Shard(1))), WHOLE), sums=False)
    assert vocabulary.axes_to_join({0: torch.ones(4, 6), 1: torch.ones(())}) == {1: (1,)}


def test_nothing_is_joined_where_every_rank_has_the_whole_batch() -> None:
    whole = OutputGradients.of(MESH, (WHOLE,), (WHOLE, WHOLE), sums=False)
    assert whole.axes_to_join({0: torch.ones(4), 1: torch.ones(())}) == {}


class Scaled(nn.Module):
    """Features of a batch and weights of its rows, a scale that a loss outside multiplies them by, a table that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.scale = nn.Linear(6, 7), nn.Parameter(torch.tensor(0.5))
        self.table = nn.Parameter(torch.linspace(-1, 1, 7))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.lin(x), self.scale.exp(), self.table.sin(), 1 + torch.arange(x.shape[0])


def _loss(outputs: tuple[Tensor, ...], labels: Tensor, reduction: str) -> Tensor:
    features, scale, table, weights = outputs
    found = F.cross_entropy(features * scale + table, labels, reduction="none") * weights
    return found.mean() if reduction == "mean" else found.sum()


def _table_alone(outputs: tuple[Tensor, ...], labels: Tensor, reduction: str) -> Tensor:
    picked = outputs[2][labels] * labels
    return picked.mean() if reduction == "mean" else picked.sum()


def _train(rank: int, recipe: Any, loss: str) -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    one = Scaled().double()
    model = autoshard(copy.deepcopy(one), mesh, options=Options(recipe=recipe, compile="eager", loss=loss))
    x, labels = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 7, (8,))
    worst = 0.0
    for compute in (_loss, _table_alone) if loss == "mean" else (_loss,):
        compute(model(x.chunk(2)[rank]), labels.chunk(2)[rank], loss).backward()
        compute(one(x), labels, loss).backward()
        for mine, want in zip(model.parameters(), one.parameters(), strict=True):
            if want.grad is not None:
                assert mine.grad is not None
                worst = max(worst, float((mine.grad.full_tensor() - want.grad).abs().max()))  # type: ignore[attr-defined]
    return worst


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "loss"), [("ddp", "mean"), ("fsdp", "sum"), ("auto", "mean")])
def test_gradients_are_those_of_one_device(recipe: Any, loss: str) -> None:
    assert max(run_on_ranks(_train, 2, recipe, loss)) < 1e-14


def _train_a_small_layer(rank: int) -> tuple[tuple[int, ...], float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    one, x = nn.Linear(6, 6).double(), torch.randn(4, 6, dtype=torch.float64)
    model = autoshard(copy.deepcopy(one), mesh, options=Options(hardware="h100", compile="eager"))
    found = model(x.chunk(2)[rank])
    found.square().mean().backward()
    one(x).square().mean().backward()
    gradients = zip(model.parameters(), one.parameters(), strict=True)
    worst = max(float((mine.grad.full_tensor() - want.grad).abs().max()) for mine, want in gradients)
    return tuple(found.shape), worst


@pytest.mark.gloo
@pytest.mark.slow
def test_a_small_layer_returns_this_rank_s_rows() -> None:
    """On paper, its columns on each rank take less time than its rows."""
    for shape, worst in run_on_ranks(_train_a_small_layer, 2):
        assert shape == (2, 6) and worst < 1e-14


class Flattening(nn.Module):
    """Returns logits as a loss takes them, with the batch and the sequence merged."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lin = nn.Embedding(7, 6), nn.Linear(6, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lin(self.table(tokens)).view(-1, 7)


def _train_on_flat_labels(rank: int, batches: tuple[int, ...]) -> tuple[list[int], float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    one = Flattening().double()
    model: Any = autoshard(copy.deepcopy(one), mesh, options=Options(hardware="h100", compile="eager"))
    rows, worst = [], 0.0
    for batch in batches:
        tokens, labels = torch.randint(7, (batch, 4)), torch.randint(7, (batch, 4))
        mine, my_labels = model.shard(tokens, labels)
        F.cross_entropy(model(mine), my_labels.flatten()).backward()
        F.cross_entropy(one(tokens), labels.flatten()).backward()
        pairs = zip(model.parameters(), one.parameters(), strict=True)
        worst = max(worst, *(float((got.grad.full_tensor() - want.grad).abs().max()) for got, want in pairs))
        with torch.no_grad():
            evaluated = model(mine)
        rows.append(len(evaluated))
        part = one(tokens) if batch % 2 else one(tokens).chunk(2)[rank]
        worst = max(worst, float((evaluated - part).detach().abs().max()))
    return rows, worst


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(("batches", "rows"), [((8, 4), [16, 8]), ((8, 3), [16, 12])])
def test_an_output_that_merges_the_batch_fits_the_labels_of_this_rank(batches: tuple[int, ...], rows: list[int]) -> None:
    """A batch that the axes do not divide is whole on every rank, and so is such an output."""
    for found, worst in run_on_ranks(_train_on_flat_labels, 2, batches):
        assert found == rows and worst < 1e-14


def _disagree(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = autoshard(Scaled(), mesh, options=Options(recipe="ddp", compile="eager"))
    features, scale, *_ = model(torch.ones(4, 6))
    (features * scale if rank else features).sum().backward()


@pytest.mark.gloo
@pytest.mark.slow
def test_a_loss_that_uses_a_whole_output_on_some_ranks_alone_is_an_error() -> None:
    for report in reports_of_ranks(_disagree, 2):
        assert isinstance(report, Failure)
        assert report.message == (
            "ranks make different calls: rank 0 makes backward call 1 of Scaled, rank 1 makes backward call 1 of Scaled (whose "
            "loss uses what all ranks share: output 1); make the same calls in the same order, with the same options, on every "
            "rank"
        )


def _train_beside(rank: int) -> dict[str, list[str]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autoshard.programs").addHandler(handler)
    found = {}
    for how in ("local", "averaged", "unused on one rank", "alone"):
        torch.manual_seed(0)
        model: Any = autoshard(torch.nn.Linear(4, 4), mesh, options=Options(recipe="fsdp", compile="eager"))
        head, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        held = [*head.parameters()] if how == "alone" else [*model.parameters(), *head.parameters(), *other.parameters()]
        optimizer = torch.optim.SGD(held, lr=0.1)
        for _ in range(2):
            (x,) = model.shard(torch.randn(8, 4))
            (head if rank or how != "unused on one rank" else other)(model(x)).square().mean().backward()
            for parameter in head.parameters():
                if how == "averaged":
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        found[how] = list(told)
        told.clear()
    return found


def test_a_parameter_beside_the_model_whose_gradients_differ_is_told_once() -> None:
    first, second = run_on_ranks(_train_beside, 2)
    said = (
        "an optimizer holds float32[3, 4], a parameter that is not of the sharded model, and ranks 0 and 1 have different "
        "gradients of it: each has that of its part of the batch, so that ranks train it apart. Make it a part of the model, "
        "such as a module that holds model and loss, or average its gradient over the ranks before each step"
    )
    assert first == {"local": [said], "averaged": [], "unused on one rank": [said], "alone": []}
    assert not any(second.values())
