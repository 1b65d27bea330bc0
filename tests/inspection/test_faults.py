"""As a new user would try it: small models with one fault each; the first screen of the plan leads to the line at fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from autoshard import CaptureError, MemoryLimitError, Mesh, Options, ShardingPlan, assert_plan, plan


@torch.library.custom_op("autoshard_test::mixed", mutates_args=())
def mixed(x: Tensor) -> Tensor:
    return x.flip(1).clone()


@mixed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


mixed.register_autograd(lambda ctx, gradient: mixed(gradient))


class Ranked(nn.Module):
    """The vocabulary is cut over tp, and sorted as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(1024, 64)
        self.head = nn.Linear(64, 1024, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(F.gelu(self.tok(tokens)))
        best = logits.sort(dim=-1).values[..., -1]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + best.mean()


class Uneven(nn.Module):
    """A hidden size that four devices cannot share."""

    def __init__(self, hidden: int = 250) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, hidden), nn.Linear(hidden, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), y)


class Unknown(nn.Module):
    """An op of its own, without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(mixed(self.up(x))), y)


class Ragged(nn.Module):
    """A model of as many rows as there are values above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.up(x)
        return found[found > 0]


def planned(kind: type[nn.Module], **options: Any) -> ShardingPlan:
    with torch.device("meta"):
        tokens, x = torch.empty(16, 32, dtype=torch.long), torch.empty(16, 32, 64)
        args = (tokens, tokens) if kind is Ranked else (x, x)
        model = kind()
    given = Options(recipe="fsdp+megatron", **options)
    return plan(model, Mesh("dp=2,tp=4", hardware="h100"), args, options=given)


def remarks(one: ShardingPlan) -> str:
    """Return the remarks of the first screen, which has each with its line, in whatever way it breaks lines."""
    shown = [str(remark) for remark in one.remarks if not remark.routine]
    screen = " ".join(str(one).split())
    places = [str(remark.origin).partition(" ")[0] for remark in one.remarks if not remark.routine]
    assert all(place in screen for place in places), screen
    return "\n".join(dict.fromkeys(shown)).replace(" [%", "\n  [%").replace(": runs", ":\n  runs")


def test_a_gather_of_all_logits_leads_to_the_sort() -> None:
    assert_expected_inline(remarks(planned(Ranked, params={"head.weight": {"tp": "S(0)"}})), """\
seed: on tp: head.weight stays whole: its columns cannot be sharded past sort, test_faults.py:39
  [%mm, test_faults.py:38 head]
propagate: on tp: the fewest bytes move: operands S(2) become R, giving R, R
  [%sort, test_faults.py:39]""")


def test_the_sort_keeps_the_vocabulary_whole() -> None:
    assert_expected_inline(remarks(planned(Ranked)), """\
seed: on tp: head.weight stays whole: its columns cannot be sharded past sort, test_faults.py:39
  [%mm, test_faults.py:38 head]""")


def test_a_dim_that_is_padded_leads_to_its_linear() -> None:
    assert_expected_inline(remarks(planned(Uneven)), """\
pad: up.weight[250, 64]: 250 is padded to 252, which 4 divides: 0.80% more
  [%mm_3, test_faults.py:51 up]
seed: up.bias[250] is not sharded: no dim can be split
  [%up_bias]""")


def test_an_op_without_a_rule_leads_to_its_call() -> None:
    found = planned(Unknown)
    assert_expected_inline(remarks(found), """\
seed: on tp: up.weight stays whole: its columns cannot be sharded past autoshard_test.mixed, test_faults.py:62
  [%mm_3, test_faults.py:62 up]
propagate: autoshard_test.mixed.default has no sharding rule:
  runs replicated on dp; 524288 bytes of operands are gathered
  [%mixed, test_faults.py:62]
propagate: autoshard_test.mixed.default has no sharding rule:
  runs replicated on dp; 524288 bytes of operands are gathered
  [%mixed_1, test_faults.py:62]
propagate: autoshard_test.mixed.default has no sharding rule:
  runs replicated on tp; its operands are whole already
  [%mixed, test_faults.py:62]
propagate: autoshard_test.mixed.default has no sharding rule:
  runs replicated on tp; 524288 bytes of operands are gathered
  [%mixed_1, test_faults.py:62]""")
    with pytest.raises(AssertionError, match=r"fallbacks=1: 2 ops run on whole tensors\n  propagate: autoshard_test.mixed"):
        assert_plan(found, fallbacks=1)


@pytest.mark.slow
def test_a_batch_too_large_leads_to_what_is_made_of_it() -> None:
    with torch.device("meta"):
        x = torch.empty(4_000_000, 32, 64)
        with pytest.raises(MemoryLimitError) as caught:
            plan(Uneven(256), Mesh("dp=2", hardware="h100"), (x, x))
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("no plan fits in 67.1 GiB on a device") and first.endswith("The largest values are made at")
    assert_expected_inline("\n".join(lines), """\
  test_faults.py:51 up: f32[4000000, 32, 256], 61.0 GiB on a device
  test_faults.py:51: f32[4000000, 32, 256], 61.0 GiB on a device""")


def test_a_size_that_depends_on_values_leads_to_its_line() -> None:
    with pytest.raises(CaptureError) as caught:
        planned(Ragged)
    message, _, line = str(caught.value).partition("\n")
    assert message.startswith("the model makes a tensor whose shape depends on values, but the shapes of a graph are fixed")
    assert line.endswith("return found[found > 0]")
