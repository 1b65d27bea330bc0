"""Rows that a model selects by a mask: loss and gradients are those of one device, or the selection is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from autoshard import Mesh, Options, autoshard, plan
from autoshard.debug.checking import check
from passes.errors import CaptureError
from tests.capture.comparing import check as check_capture
from tests.spawn import run_on_ranks

BATCH, SEQUENCE, WIDTH, CLASSES = 4, 6, 3, 5
Compute = Callable[[Any, Tensor, Tensor], Tensor]
FORMS: dict[str, Compute] = {}
REFUSED: dict[str, Compute] = {}


def form(compute: Compute) -> Compute:
    FORMS[compute.__name__] = compute
    return compute


def refused(compute: Compute) -> Compute:
    REFUSED[compute.__name__] = compute
    return compute


class Selects(nn.Module):
    """Computes scores; where `hides` is set, those that are not selected are NaN."""

    def __init__(self, compute: Compute, *, hides: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scores, self.head = nn.Linear(WIDTH, CLASSES), nn.Linear(CLASSES, CLASSES)
        self.norm, self.table = nn.LayerNorm(CLASSES), nn.Embedding(CLASSES, CLASSES)
        self.factor = nn.Parameter(torch.rand(CLASSES) + 0.5)
        self.compute, self.hides = compute, hides

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.scores(x)
        return self.compute(self, scores.masked_fill((y == -100)[..., None], torch.nan) if self.hides else scores, y)


def batch(selected: str) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, which are -100 where a row is not selected."""
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, SEQUENCE, WIDTH, dtype=torch.float64), torch.randint(0, CLASSES, (BATCH, SEQUENCE))
    chosen = {"some": torch.rand(BATCH, SEQUENCE) < 0.5, "none": torch.zeros(()), "all": torch.ones(())}
    return x, y.where(chosen[selected].bool(), -100)


@form
def cross_entropy(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    return F.cross_entropy(scores[mask], y[mask])


@form
def cross_entropy_by_equal_masks(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores[y != -100], y[y != -100], label_smoothing=0.1)


@form
def cross_entropy_with_weights(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask, weights = y.view(-1) >= 0, model.factor.detach()
    return F.cross_entropy(scores.view(-1, CLASSES)[mask], y.view(-1)[mask], weights, ignore_index=2)


@form
def cross_entropy_of_probabilities(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    return F.cross_entropy(scores[mask], scores.tanh()[mask].softmax(-1), reduction="sum")


@form
def cross_entropy_of_each(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    return F.cross_entropy(scores[mask], y[mask], reduction="none").square().mean()


@form
def nll_loss(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    return F.nll_loss(scores[mask].log_softmax(-1), y[mask])


@form
def losses_of_pairs(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    left, right = scores[mask], scores.sin()[mask]
    sums = F.l1_loss(left, right, reduction="sum") + F.smooth_l1_loss(left, right) + F.huber_loss(left, right)
    return F.mse_loss(left, right * model.factor) + sums


@form
def binary_losses(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    is_large = (y[mask] > 2).to(scores.dtype)
    return F.binary_cross_entropy(scores[mask][:, 0].sigmoid(), is_large) + F.binary_cross_entropy_with_logits(
        scores[mask][..., 1], is_large
    )


@form
def divergence(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    return F.kl_div(scores[mask].log_softmax(-1), scores.sin()[mask].softmax(-1), reduction="batchmean")


@form
def sums_and_means(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    rows = scores[y != -100]
    by_column = rows.mean(0).square().sum() + (rows.sum(dim=0, keepdim=True) * model.factor).sum()
    return rows.sum() + rows.mean() + by_column + rows.square().sum(-1).mean()


@form
def masked_select(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = (y != -100).unsqueeze(-1)
    return (torch.masked_select(scores, mask) - scores.masked_select(mask).tanh()).abs().mean()


@form
def masked_select_as_index(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = (y != -100).unsqueeze(-1).expand_as(scores)
    return F.mse_loss(scores.masked_select(mask), scores.cos()[mask])


@form
def layers(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    return F.cross_entropy(model.head(F.gelu(model.norm(scores[mask]))), y[mask])


@form
def infinite_in_other_rows(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    rows = scores[y != -100].exp()
    return (rows.sub(rows.detach() - 1).log() * model.factor).mean() + (model.factor / rows).sum()


@form
def lookups(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    rows, classes = scores[mask], y[mask]
    looked_up = (model.table(classes) * F.one_hot(classes, CLASSES) * rows).sum(-1).mean()
    return looked_up - rows.log_softmax(-1).gather(1, classes.unsqueeze(1)).squeeze(1).mean()


@form
def accuracy(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    hits = (scores[mask].argmax(-1) == y[mask]).double().mean()
    return scores.nan_to_num().sum() * hits.detach().nan_to_num()


@form
def number_of_rows(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    rows = scores[y != -100]
    return rows.sum() / len(rows) + rows.square().sum() / rows.shape[0]


@form
def a_later_dim(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = torch.arange(SEQUENCE) % 2 == 0
    return scores.nan_to_num()[:, mask].square().mean() + scores.nan_to_num()[:, mask, :].sum(1).mean()


@form
def parts(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    left, right = scores[y != -100].split([2, 3], -1)
    return (left.sum(-1) * right.max(-1)[0]).mean() + torch.cat([left, right, left], -1).square().mean()


@form
def a_part_without_gradients(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    rows = scores[y != -100]
    with torch.no_grad():
        mean = rows.sum(0)
    return (rows - mean).square().sum()


@form
def shapes(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    rows = scores[y != -100]
    turned = rows.view(rows.shape[0], CLASSES, 1).transpose(1, 2).reshape(-1, CLASSES)
    return turned.mean() + (turned @ model.head.weight).sum() + (rows.unsqueeze(1) @ rows.unsqueeze(2)).mean()


@form
def a_mask_that_changes_later(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    before = scores.detach()[mask]
    mask[0] = False
    return before.mean() + scores[mask].sum()


@form
def in_a_checkpoint(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    def loss(scores: Tensor) -> Tensor:
        mask = y != -100
        return F.cross_entropy(model.head(scores[mask]).tanh(), y[mask])

    return checkpoint(loss, scores, use_reentrant=False)


@form
def last_of_equal_groups(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    """Take the last of two marked positions of each sample, as classifiers of transformers do."""
    marked = torch.zeros_like(y, dtype=torch.bool)
    marked[:, 1] = True
    marked[torch.arange(BATCH), torch.tensor([0, 3, 4, 5])] = True
    torch._check(torch.unique_consecutive(marked.sum(1)).numel() == 1)
    rows = scores.nan_to_num()[marked, :]
    return (model.head(rows.view(scores.size(0), -1, CLASSES)[:, -1, :]) * torch.arange(1, 5).unsqueeze(1)).sum()


def last_of_groups(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    return model.head(scores[y > 2].view(BATCH, -1, CLASSES)[:, -1])


def last_of_checked_groups(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    torch._check(torch.unique_consecutive((y > 2).sum(1)).numel() == 1)
    return last_of_groups(model, scores, y)


@pytest.mark.parametrize("name", FORMS)
def test_a_selection_has_one_devices_gradients_whatever_is_not_selected(name: str) -> None:
    check_capture(Selects(FORMS[name], hides=True).double(), *batch("some"))


@pytest.mark.parametrize("name", FORMS)
def test_a_selection_of_nothing(name: str) -> None:
    check_capture(Selects(FORMS[name]).double(), *batch("none"))


@refused
def returned(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    return scores[y != -100]


@refused
def rows_that_are_compared(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    return scores[y != -100].softmax(0).square().sum()


@refused
def one_row(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    return scores[y != -100][0].sum()


@refused
def number_of_elements(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    rows = scores[y != -100]
    return rows.sum() / rows.numel()


@refused
def written_to(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    rows = scores[y != -100]
    rows[:, 0] = 0
    return rows.sum()


@refused
def changed_in_place(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    rows = scores[y != -100]
    F.relu(rows, inplace=True)
    return rows.sum()


@refused
def products_of_columns(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    rows = scores[y != -100]
    return (rows.T @ rows).sum()


@refused
def dropout(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    return F.dropout(scores[y != -100], 0.5).sum()


@refused
def other_rows(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    return (scores[y != -100] + scores.view(-1, CLASSES)).sum()


@refused
def two_masks(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    return (scores[y > 2] - scores[y < 2]).sum()


@refused
def a_mask_that_changed(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    labels = y.clone()
    before = scores[labels != -100]
    labels[0] = -100
    return (before - scores[labels != -100]).sum()


@refused
def rows_in_other_order(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    return scores[y != -100].T.reshape(-1, CLASSES).softmax(-1).square().sum()


@refused
def deviation(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    return scores[y != -100].std()


@refused
def of_all_sizes(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    return scores[y != -100].view(7, -1).tanh().sum()


@refused
def every_pair_of_rows(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    rows = scores[y != -100]
    return (rows.view(-1, 1, CLASSES) * rows).sum()


@refused
def a_selection_of_a_selection(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    return scores[mask][y[mask] > 1].sum()


@refused
def an_index_beside_the_mask(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    return scores[mask, y[mask]].sum()


@refused
def first_of_groups(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    return scores[y != -100].view(BATCH, -1, CLASSES)[:, 0].sum()


@refused
def rows_through_a_checkpoint(model: Any, scores: Tensor, y: Tensor) -> Tensor:
    return checkpoint(torch.tanh, scores[y != -100], use_reentrant=False).sum()


@pytest.mark.parametrize("name", REFUSED)
def test_a_selection_whose_length_matters_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="but the shapes of a graph are fixed; keep all"):
        check_capture(Selects(REFUSED[name]).double(), *batch("some"))


class SelectsAndFinds(Selects):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = sums_and_means(self, self.scores(x), y)
        return found + y.nonzero().sum()


def test_the_error_names_the_line_that_no_rule_knows() -> None:
    with pytest.raises(CaptureError, match="makes a tensor whose shape depends on values") as caught:
        check_capture(SelectsAndFinds(sums_and_means).double(), *batch("some"))
    assert str(caught.value).endswith("return found + y.nonzero().sum()")


def test_a_selection_in_evaluation() -> None:
    check_capture(Selects(layers).double(), *batch("some"), training=False)


def test_a_remark_says_that_all_rows_are_kept() -> None:
    remarks = plan(Selects(cross_entropy).double(), Mesh("dp=2"), batch("some"), options=Options(recipe="ddp")).remarks
    assert [(one.text, one.origin.line > 0) for one in remarks if "mask" in one.text] == [
        ("rows that a mask selects are computed with all others, as shapes are fixed; sums and means leave the others out", True)
    ]


def test_a_selection_is_sharded_along_batch_and_sequence() -> None:
    by_hand: Any = {name: {"dp": Shard(0), "cp": Shard(1)} for name in ("x", "y")}
    model = Selects(layers, hides=True).double()
    assert check(model, Mesh("dp=2,cp=2"), batch("some"), options=Options(inputs=by_hand))


@pytest.mark.parametrize("name", ["layers", "sums_and_means", "number_of_rows", "last_of_equal_groups"])
def test_a_batch_that_ranks_do_not_divide(name: str) -> None:
    x, y = batch("some")
    assert check(Selects(FORMS[name]).double(), Mesh("dp=3"), (x, y), options=Options(recipe="fsdp"))


@pytest.mark.parametrize("check_sizes", [False, True])
def test_rows_that_make_no_equal_groups_are_nan(check_sizes: bool, one_rank: DeviceMesh) -> None:
    x, _ = batch("some")
    counts = {(2, 2, 2, 2): False, (3, 3, 3, 3): False, (1, 2, 1, 1): True, (0, 0, 0, 0): True, (1, 3, 2, 2): check_sizes}
    few, *others = (torch.stack([torch.arange(SEQUENCE) < count for count in row]).long() * 3 for row in counts)
    model = Selects(last_of_checked_groups if check_sizes else last_of_groups).double()
    options = Options(recipe="ddp", compile="eager")
    sharded = autoshard(model, one_rank, args=(x, few), options=options)
    for y, fails in zip((few, *others), counts.values(), strict=True):
        found = sharded(x, y)
        assert found.isnan().all() if fails else torch.allclose(found, last_of_groups(model, model.scores(x), y))


def test_a_check_that_allows_groups_of_two_sizes_is_refused() -> None:
    def last(model: Any, scores: Tensor, y: Tensor) -> Tensor:
        torch._check(torch.unique_consecutive((y > 2).sum(1)).numel() <= 2)
        return last_of_groups(model, scores, y)

    rows = torch.arange(SEQUENCE).expand(BATCH, -1)
    with pytest.raises(CaptureError, match="makes a tensor whose shape depends on values"):
        check_capture(Selects(last).double(), batch("some")[0], (rows < 2).long() * 3)


def test_groups_of_integers_are_refused() -> None:
    def last(model: Any, scores: Tensor, y: Tensor) -> Tensor:
        return scores.sum() * y.unsqueeze(-1)[y > 2].view(BATCH, -1, 1)[:, -1].sum()

    with pytest.raises(CaptureError, match="but the shapes of a graph are fixed; keep all"):
        check_capture(Selects(last).double(), *batch("some"))


def test_the_loss_of_a_selection_is_not_gathered() -> None:
    text = str(plan(Selects(layers).double(), Mesh("dp=2"), batch("some"), options=Options(recipe="ddp")))
    assert "all_gather" not in text


@pytest.mark.slow
@pytest.mark.gloo
def test_masks_that_differ_between_calls_on_real_ranks() -> None:
    for found, expected in run_on_ranks(_trained, 2):
        assert found == pytest.approx(expected, rel=1e-9, nan_ok=True)


def _trained(rank: int) -> tuple[list[float], list[float]]:
    """Return losses and gradients of calls with other masks and sizes, and those of one device."""
    one, mesh = Selects(layers).double(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    sharded = autoshard(Selects(layers).double(), mesh, args=batch("some"), options=Options(recipe="fsdp", compile="eager"))
    found, expected = list[float](), list[float]()
    some, none, every = map(batch, ("some", "none", "all"))
    unlike = (torch.cat([some[0], every[0]])[:6], torch.cat([some[1], every[1]])[:6])
    for x, y in (some, every, (some[0], every[1].where(some[1] < 0, -100)), unlike, none):
        losses = sharded(*sharded.shard(x, y)), one(x, y)
        for loss, values in zip(losses, (found, expected), strict=True):
            loss.backward()
            values.append(loss.item())
        found += sharded.head.weight.grad.full_tensor().flatten().tolist()
        assert one.head.weight.grad is not None
        expected += one.head.weight.grad.flatten().tolist()
    return found, expected
