"""`megatron` shards convolutions on their channels, and recurrent networks on their hidden state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import Mesh, Options, ShardingPlan, check, plan

IMAGES, TOKENS = (torch.randn(8, 3, 8, 8, dtype=torch.float64),), (torch.randint(32, (8, 3)),)
OPTIONS = Options(recipe="ddp+megatron")
MOST = 0.3  # of one device's operations, on each of 2 x 2 ranks


class Residual(nn.Module):
    """A block of ResNet (He et al. 2015), with a projection on its other path."""

    def __init__(self, inner: int, outer: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(inner, outer, 3, 2, 1, bias=False), nn.Conv2d(outer, outer, 3, 1, 1)
        self.norm, self.norm2 = norm(outer), norm(outer)
        self.other = nn.Conv2d(inner, outer, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.two(F.relu(self.norm(self.one(x))))) + self.other(x))


class Network(nn.Module):
    """Convolutions, and a linear layer on the mean of their channels."""

    def __init__(self, *convolutions: nn.Module, channels: int) -> None:
        super().__init__()
        self.convolutions, self.head = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *convolutions), nn.Linear(channels, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.convolutions(x).mean((2, 3)))


class Language(nn.Module):
    """An embedding, a recurrent network and a head."""

    def __init__(self, kind: type[nn.RNNBase], **given: bool | int) -> None:
        super().__init__()
        self.table, self.recurrent = nn.Embedding(32, 16), kind(16, 32, batch_first=True, **given)
        self.head = nn.Linear(64 if given.get("bidirectional") else 32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.recurrent(self.table(tokens))[0]).flatten(0, 1), tokens.flatten())


def residual(norm: Callable[[int], nn.Module]) -> nn.Module:
    return Network(Residual(16, 32, norm), channels=32)


def separable() -> nn.Module:
    """Return a layer as in MobileNet: channels are widened, convolved one by one, and narrowed."""
    depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
    return Network(nn.Conv2d(16, 64, 1), nn.ReLU6(), depthwise, nn.ReLU6(), nn.Conv2d(64, 16, 1), channels=16)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "batch_norm": (lambda: residual(nn.BatchNorm2d), IMAGES),
    "group_norm": (lambda: residual(lambda channels: nn.GroupNorm(4, channels)), IMAGES),
    "depthwise": (separable, IMAGES),
    "lstm": (lambda: Language(nn.LSTM), TOKENS),
    "lstm_of_two_layers": (lambda: Language(nn.LSTM, num_layers=2), TOKENS),
    "lstm_in_both_directions": (lambda: Language(nn.LSTM, bidirectional=True), (torch.randint(32, (2, 3)),)),
    "gru": (lambda: Language(nn.GRU), TOKENS),
    "rnn": (lambda: Language(nn.RNN), TOKENS),
}
QUICK = ("depthwise", "rnn")


def operations(made: ShardingPlan) -> float:
    assert made.timeline is not None
    return sum(task.flops for task in made.timeline.program.tasks)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in MODELS])
def test_a_rank_does_its_part_of_the_operations(name: str) -> None:
    torch.manual_seed(0)
    make, args = MODELS[name]
    model = make().double()
    one, four = (plan(model, Mesh(mesh, hardware="h100"), args, options=OPTIONS) for mesh in ("dp=1,tp=1", "dp=2,tp=2"))
    assert operations(four) <= MOST * operations(one)
    checked = check(model, "dp=2,tp=2", args, options=OPTIONS)
    assert checked, str(checked)


def test_channels_that_an_op_needs_whole_are_gathered() -> None:
    class Sorted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sort(1).values

    model = Network(nn.ReLU(), nn.Conv2d(16, 16, 3), Sorted(), channels=16).double()
    made = plan(model, Mesh("tp=2"), IMAGES, options=Options(recipe="megatron"))
    assert str(made.parameters["convolutions.2.weight"].layout.placements[0]) == "S(1)"  # by rows
    checked = check(model, "tp=2", IMAGES, options=Options(recipe="megatron"))
    assert checked, str(checked)
