"""Functions that are traced in place of torch's: the CTC loss, and a selection by a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cudnn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Mesh, Options, autoshard, plan
from autoshard.debug.checking import check
from passes.errors import CaptureError
from tests.capture.comparing import check as check_capture
from tests.spawn import run_on_ranks

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


class Selects(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.masked_select(x > 0).sum()


def test_a_selection_whose_length_matters_is_refused() -> None:
    with pytest.raises(CaptureError, match="a tensor whose shape depends on values") as caught:
        plan(Selects(), Mesh("dp=2"), (torch.ones(4, requires_grad=True),))
    assert "x.masked_select(x > 0).sum()" in str(caught.value)


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
    sharded = autoshard(Speech().double(), mesh, args=inputs, options=Options(recipe="fsdp"))
    found, expected = sharded(*sharded.shard(*inputs)), one(*inputs)
    found.backward()
    expected.backward()
    assert one.scores.weight.grad is not None
    gradient = sharded.scores.weight.grad.full_tensor()
    return [found.item(), *gradient.flatten().tolist()], [expected.item(), *one.scores.weight.grad.flatten().tolist()]
