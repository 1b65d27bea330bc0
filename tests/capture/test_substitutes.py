"""Functions that are traced in place of torch's: the CTC loss, counts, covariances, and flex_attention."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cudnn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributions import Distribution
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from autoshard import Mesh, Options, autoshard, plan
from autoshard.debug.checking import check
from passes.errors import CaptureError
from tests.capture.comparing import check as check_capture
from tests.models import Case
from tests.spawn import run_on_ranks
from tests.spmd import oracle

FRAMES, BATCH, CLASSES, LONGEST = 12, 4, 6, 5


class Speech(nn.Module):
    """Scores labels of frames; `form` says how the targets are given."""

    def __init__(self, form: str = "padded", **given: Any) -> None:
        super().__init__()
        self.scores, self.form, self.given = nn.Linear(3, CLASSES), form, given

    def forward(self, frames: Tensor, labels: Tensor) -> Tensor:
        log_probs = self.scores(frames).log_softmax(-1).transpose(0, 1)
        is_label = labels >= 0
        times: Any = torch.full((BATCH,), FRAMES)
        lengths: Any = is_label.sum(-1)
        targets = labels.clamp(min=0)
        if self.form == "in one row":
            targets = labels.masked_select(is_label)
        if self.form == "index":
            targets = labels[is_label]
        if self.form == "function":
            targets = torch.masked_select(labels, is_label)
        if self.form == "numbers":
            times, lengths = (FRAMES,) * BATCH, (2,) * BATCH
        with cudnn.flags(enabled=False):
            return F.ctc_loss(log_probs, targets, times, lengths, **self.given).sum()


def _inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(1, CLASSES, (BATCH, LONGEST))
    for row, length in enumerate((5, 3, 2, 4)):
        labels[row, length:] = -100
    return torch.randn(BATCH, FRAMES, 3, dtype=torch.float64), labels


@pytest.mark.parametrize("form", ["padded", "in one row", "function", "numbers"])
def test_the_ctc_loss_and_its_gradient(form: str) -> None:
    check_capture(Speech(form).double(), *_inputs())


@pytest.mark.parametrize("given", [{"reduction": "sum"}, {"reduction": "none", "blank": 5}, {"zero_infinity": True}])
def test_arguments_of_the_ctc_loss(given: dict[str, Any]) -> None:
    frames, labels = _inputs()
    check_capture(Speech(**given).double(), frames, labels.clamp(max=4))


def test_a_target_that_does_not_fit_gives_no_gradient_where_asked() -> None:
    frames, labels = _inputs()
    labels[:, :] = torch.arange(LONGEST) % 2 + 1
    check_capture(Speech(zero_infinity=True).double(), frames, labels.repeat(1, 3))


def test_a_batch_of_targets_is_sharded() -> None:
    options = Options(recipe="ddp")
    assert check(Speech().double(), Mesh("dp=2"), _inputs(), options=options)
    assert "all_gather" not in str(plan(Speech().double(), Mesh("dp=2"), _inputs(), options=options))


def test_targets_in_one_row_are_read_whole() -> None:
    assert check(Speech("in one row").double(), Mesh("dp=2"), _inputs(), options=Options(recipe="fsdp"))


def test_targets_in_one_row_may_come_by_an_index() -> None:
    check_capture(Speech("index").double(), *_inputs())


@pytest.mark.slow
@pytest.mark.gloo
def test_the_ctc_loss_on_real_ranks() -> None:
    for found, expected in run_on_ranks(_trained, 2):
        assert found == pytest.approx(expected, rel=1e-12)


def _trained(rank: int) -> tuple[list[float], list[float]]:
    """Return loss and gradient, and those of one device."""
    torch.manual_seed(1)
    one, inputs = Speech().double(), _inputs()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(1)
    sharded = autoshard(Speech().double(), mesh, args=inputs, options=Options(recipe="fsdp", compile="eager"))
    found, expected = sharded(*sharded.shard(*inputs)), one(*inputs)
    found.backward()
    expected.backward()
    assert one.scores.weight.grad is not None
    gradient = sharded.scores.weight.grad.full_tensor()
    return [found.item(), *gradient.flatten().tolist()], [expected.item(), *one.scores.weight.grad.flatten().tolist()]


class Statistics(nn.Module):
    """Computes `name` of what a layer returns, or of its observations with weights."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.compute = nn.Linear(3, 4), compute

    def forward(self, x: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        return self.compute(self.layer(x).mT, counts, weights)


STATISTICS: dict[str, Callable[..., Tensor]] = {
    "cov": lambda x, counts, weights: torch.cov(x),
    "cov of one variable": lambda x, counts, weights: x[0].cov(correction=0),
    "cov, counts": lambda x, counts, weights: torch.cov(x, fweights=counts),
    "cov, weights": lambda x, counts, weights: x.cov(aweights=weights),
    "cov, both": lambda x, counts, weights: torch.cov(x, correction=2, fweights=counts, aweights=weights),
    "cov, complex": lambda x, counts, weights: torch.view_as_real(torch.cov(torch.complex(x[:2], x[2:]))),
    "cov of integers": lambda x, counts, weights: x.sum() * torch.cov(torch.stack([counts, counts * counts])),
    "corrcoef": lambda x, counts, weights: torch.corrcoef(x),
    "corrcoef of one variable": lambda x, counts, weights: x[0].corrcoef(),
    "corrcoef, complex": lambda x, counts, weights: torch.view_as_real(torch.complex(x[:2], x[2:]).corrcoef()),
    "bincount": lambda x, counts, weights: x.sum() * torch.bincount(counts, minlength=9),
    "bincount, weights": lambda x, counts, weights: x.sum() * counts.bincount(weights, 9),
    "bincount, integer weights": lambda x, counts, weights: x.sum() * torch.bincount(counts, weights=counts, minlength=9),
    "bincount, small weights": lambda x, counts, weights: x.sum() * torch.bincount(counts, weights=weights.float(), minlength=9),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_counts_and_covariances(name: str) -> None:
    torch.manual_seed(0)
    x, counts, weights = torch.randn(8, 3, dtype=torch.float64), torch.tensor([1, 2, 0, 3, 1, 8, 2, 1]), torch.rand(8).double()
    check_capture(Statistics(STATISTICS[name]).double(), x, counts, weights)


@pytest.mark.parametrize("name", ["cov, both", "corrcoef", "bincount, weights"])
def test_counts_and_covariances_of_a_batch_that_is_sharded(name: str) -> None:
    torch.manual_seed(0)
    x, counts, weights = torch.randn(8, 3, dtype=torch.float64), torch.tensor([1, 2, 0, 3, 1, 8, 2, 1]), torch.rand(8).double()
    assert check(Statistics(STATISTICS[name]).double(), Mesh("dp=2"), (x, counts, weights), options=Options(recipe="fsdp"))


@pytest.mark.parametrize("name", ["fweights", "aweights"])
def test_weights_that_torch_does_not_take_are_refused(name: str) -> None:
    class Weighs(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cov(super().forward(x), **{name: torch.ones(1, dtype=torch.int64 if name == "fweights" else None)})

    with pytest.raises(CaptureError, match="a weight for each observation"):
        plan(Weighs(4, 4), Mesh("dp=2"), (torch.ones(4, 4),))


class Flexible(nn.Module):
    """Documents, which `ids` tell apart, of heads that share keys; `form` says what else flex_attention is asked for."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.qkv, self.form = nn.Linear(12, 64), form

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        def is_seen(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return (ids[batch, row] == ids[batch, column]) & (row >= column) & (ids[batch, row] > 0)

        def biased(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return score - (head + 1) * (row - column) / 8 if self.form == "scores" else score

        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.qkv(x).split([32, 16, 16], -1))
        mask = create_block_mask(is_seen, x.shape[0], None, 16, 16, device="cpu")
        if self.form == "logsumexp":
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return flex_attention(q, k, v, biased, mask, enable_gqa=True)


def _documents() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 16, 12, dtype=torch.float64), torch.tensor([[1] * 5 + [2] * 11, [1] * 9 + [0] * 7])


@pytest.mark.parametrize("form", ["documents", "scores", "logsumexp"])
def test_flex_attention_computes_what_its_own_operator_does(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No training: on a CPU its own operator has no gradient."""
    monkeypatch.setattr(Distribution, "_validate_args", Distribution._validate_args)  # torch.compile, which it calls, changes it
    found = check_capture(Flexible(form).double(), *_documents(), training=False)
    assert ["runs as scaled_dot_product_attention" in one.text for one in found.call.remarks] == [True]


@pytest.mark.parametrize("recipe", ["context(ring)", "context(all_to_all)"])
def test_a_training_step_with_documents_of_flex_attention(recipe: str) -> None:
    case = Case(Flexible("documents").double(), _documents(), {})
    whole = oracle.run_on_ranks(case, "one=1", Options(recipe=None))
    oracle.compare(oracle.run_on_ranks(case, "cp=2", Options(recipe=recipe)), whole, 1e-12)


class Masked(nn.Module):
    """Layers whose attention takes a mask, perhaps beside code that dynamo does not understand."""

    def __init__(self, *, norm_first: bool, is_odd: bool) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.layers = nn.TransformerDecoder(layer, 1)
        self.is_odd = is_odd

    def forward(self, x: Tensor, mask: Tensor, **hints: bool) -> Tensor:
        if self.is_odd:
            x = x * (zlib.crc32(b"layers") % 7)
        hidden: Tensor = self.layers(x, x, tgt_mask=mask, **hints)
        return hidden.square().mean()


@pytest.mark.parametrize(
    ("norm_first", "is_odd", "training"), [(False, False, True), (True, False, False), (True, False, True), (False, True, True)]
)
def test_a_mask_of_attention_is_any_one_unless_the_call_says_more(norm_first: bool, is_odd: bool, training: bool) -> None:
    """Torch reads its values to know whether it is causal, and then uses a faster kernel for the same result."""
    model, x = Masked(norm_first=norm_first, is_odd=is_odd).double(), torch.randn(2, 3, 4, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
    for mask in (causal, torch.randn(3, 3, dtype=torch.float64)):
        found = check_capture(model, x, mask, training=training)
        if not is_odd:
            assert ["is_causal=True (of a decoder, tgt_is_causal=True)" in one.text for one in found.call.remarks] == [True]
    if not is_odd:
        assert not check_capture(model, x, causal, tgt_is_causal=True, training=training).call.remarks
