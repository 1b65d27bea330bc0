"""`masked_scatter` as a lookup: torch's values, and what is around it stays cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard import Options, check, plan
from passes._torch.operators.decompositions import masked_scatter, masked_scatter_backward

SHAPES = {"a row for each token": (3, 5, 4), "one dim": (6,), "wide rows": (2, 3, 4, 5)}


@pytest.mark.parametrize("more", [0, 1, 5], ids="{} elements over".format)
@pytest.mark.parametrize("repeats", [False, True], ids=["", "repeated"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_lookup_gives_torchs_values(shape: tuple[int, ...], repeats: bool, more: int) -> None:
    torch.manual_seed(0)
    x, gradient = torch.randn(2, *shape, dtype=torch.float64)
    mask = (torch.rand(shape[:-1]) > 0.5).unsqueeze(-1).expand(shape) if repeats else torch.rand(shape) > 0.5
    source = torch.randn(x.numel() + more, dtype=torch.float64, requires_grad=True)
    expected = x.masked_scatter(mask, source)
    assert torch.equal(masked_scatter(x, mask, source), expected)
    (of_source,) = torch.autograd.grad(expected, source, gradient)
    assert torch.equal(masked_scatter_backward(gradient, mask, source.shape), of_source)


def test_shapes_are_broadcast() -> None:
    x, mask, source = torch.zeros(3), torch.tensor([[True], [False]]), torch.arange(6.0)
    assert torch.equal(masked_scatter(x, mask, source), x.masked_scatter(mask, source))
    assert masked_scatter(x, mask, source[:0]) is NotImplemented


class Seeing(nn.Module):
    """Puts features of patches in place of the tokens that stand for them, as LLaVA does."""

    def __init__(self, *, by_row: bool) -> None:
        super().__init__()
        self.tokens, self.patches, self.by_row = nn.Embedding(8, 16), nn.Linear(6, 16), by_row
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids: Tensor, patches: Tensor) -> Tensor:
        text, seen = self.tokens(ids), self.patches(patches)
        mask = (ids == 0).unsqueeze(-1).expand_as(text)
        x = text.masked_scatter(mask if self.by_row else mask.clone(), seen)
        loss: Tensor = self.down(self.up(x).relu()).square().mean()
        return loss


def example() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(1, 8, (4, 6))
    ids[0, 1:3], ids[2, 0], ids[3, 3:] = 0, 0, 0  # unlike numbers of patches on the ranks of dp
    return ids, torch.randn(4, 2, 6, dtype=torch.float64)


@pytest.mark.parametrize("by_row", [True, False])
def test_a_model_with_patches_equals_one_device(by_row: bool) -> None:
    torch.manual_seed(1)
    model = Seeing(by_row=by_row).double()
    found = check(model, "dp=2,tp=2", example(), options=Options(recipe="fsdp+megatron"))
    assert found and not found.not_compared, str(found)


def test_what_is_around_it_stays_cut() -> None:
    found = plan(Seeing(by_row=True).double(), "dp=4", example(), options=Options(recipe="fsdp"))
    assert not [remark for remark in found.remarks if "runs replicated" in remark.text]
    layouts = {name: found.layouts[name].format(found.mesh) for name in ("patches", "where", "relu")}
    assert layouts == dict.fromkeys(layouts, "{dp:S(0)}")
