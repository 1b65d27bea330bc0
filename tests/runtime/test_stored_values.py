"""Models that keep Python objects up to date while they run: after each training step they hold what one device's holds."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import parametrizations

from autoshard import CaptureError, Options, autoshard
from tests.spawn import run_on_ranks

STEPS = 4
EAGER = Options(recipe="fsdp", compile="eager")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)


class Counts(Base):
    """Adds to a number, and reads it nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.seen = 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.seen = self.seen + x.shape[0]
        return self.linear(x).sum()


class Appends(Base):
    def __init__(self) -> None:
        super().__init__()
        self.means: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.means.append(y.detach().mean())
        return y.sum()


class Shares(Base):
    """Appends to a list that its part holds, too."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.means = Appends(), list[Tensor]()
        self.part.means = self.means

    def forward(self, x: Tensor) -> Tensor:
        self.means.append(x.mean())
        loss: Tensor = self.part(x) * self.linear(x).mean()
        return loss


class Empties(Base):
    """Begins each call with what it held emptied, and computes with what it puts there; `way` says how."""

    def __init__(self, way: Callable[[Any], None], held: Any) -> None:
        super().__init__()
        self.way, self.part, self.held = way, Appends(), held
        self.part.means = held

    def forward(self, x: Tensor) -> Tensor:
        self.way(self.held)
        self.part(x)
        self.held.append(self.linear(x).mean())
        return torch.stack(list(self.held)).square().sum() * len(self.held)


def _clear(held: Any) -> None:
    held.clear()


def _assign_items(held: Any) -> None:
    held[:] = [torch.ones((), dtype=torch.float64)]


def _delete_items(held: Any) -> None:
    del held[:]


class EmptiesAtLast(Base):
    def __init__(self) -> None:
        super().__init__()
        self.means: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.means.append(self.linear(x).mean())
        self.means.append(self.means[0] * 2)
        return self.means.pop() + self.means.pop().square()


class KeepsLast(Base):
    """Keeps as many means as there is room for."""

    def __init__(self) -> None:
        super().__init__()
        self.means: deque[Tensor] = deque(maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.means.extend((y.detach().mean(), y.detach().amax()))
        return y.sum()


class Keeps(Base):
    """Holds a part of the loss, with its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.penalty: Any = None
        self.stats: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.penalty = y.square().mean()
        self.stats["last"], self.stats["rows"] = y.detach(), x.shape[0]
        return y.sum()


class Average(Base):
    """Reads a tensor attribute and a buffer, and assigns both."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(3, dtype=torch.float64)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.total = self.total + y.detach().sum(0)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return (y * (1 + self.total) + self.average).sum()


class Caches(Base):
    """Makes a mask in its first call, and reads it in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or self.mask.shape[0] != x.shape[0]:
            self.mask = torch.ones(x.shape[0], 3).tril()
        return (self.linear(x) * self.mask).sum()


class Clamps(Base):
    """Limits two numbers that it computes with to the size of the input, as Swin of transformers does, and counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.window, self.shift, self.calls = 5, 2, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if x.shape[1] <= self.window:
            self.window, self.shift = x.shape[1], 0
        return (self.linear(x).roll(self.shift, 1)[:, : self.window - 1] * self.window).sum()


class Metric:
    def __init__(self) -> None:
        self.total: Any = 0
        self.count = 0

    def update(self, value: Tensor) -> None:
        self.total = self.total + value.detach()
        self.count += 1


class Measures(Base):
    def __init__(self) -> None:
        super().__init__()
        self.metric = Metric()

    def forward(self, x: Tensor) -> Tensor:
        loss = self.linear(x).sum()
        self.metric.update(loss)
        return loss


class Normed(Base):
    """Has a weight that a hook computes before each call."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.linear = norm(self.linear)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().sum()


def held(model: Any) -> dict[str, Any]:
    """Return what a model's objects hold, but for parameters."""
    named = dict(model.named_buffers())
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") and key not in ("training", "reset_parameters", "way"):
                named[f"{name}.{key}"] = vars(value) if isinstance(value, Metric) else value
    return named


def train(model: nn.Module, mesh: DeviceMesh, rank: int = 0, options: Options = EAGER) -> Any:
    """Train the model and its sharded copy side by side, and return the copy."""
    sharded: Any = autoshard(model, mesh, options=options)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, sharded)]
    ways = mesh.size()
    for step in range(STEPS):
        x = torch.randn(2 * ways, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        losses = model(x), sharded(x.chunk(ways)[rank])
        for one, loss, optimizer in zip((model, sharded), losses, optimizers, strict=True):
            (loss + one.penalty if isinstance(one, Keeps) else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[1], losses[0])
        torch.testing.assert_close(held(sharded), held(model))
    return sharded


@pytest.mark.parametrize(
    ("make", "programs"),
    [
        (Counts, 1),
        (Appends, 1),
        (Shares, 1),
        (lambda: Empties(_clear, []), 1),
        (lambda: Empties(_assign_items, [torch.zeros(())]), 1),
        (lambda: Empties(_delete_items, []), 1),
        (lambda: Empties(_clear, deque(maxlen=2)), 1),
        (EmptiesAtLast, 1),
        (KeepsLast, 1),
        (Keeps, 2),  # with the keys of the dict, and without
        (Average, 1),
        (Caches, 2),
        (Clamps, 2),  # before the numbers are limited, and after
        (Measures, 2),  # a number becomes a tensor
        (lambda: Normed(nn.utils.weight_norm), 1),
        (lambda: Normed(nn.utils.spectral_norm), 1),
        (lambda: Normed(parametrizations.spectral_norm), 1),
    ],
    ids=[
        *("counts", "appends", "shares", "clear", "assign", "delete", "clear a deque", "empty at last", "deque"),
        *("keeps", "average", "caches", "clamps", "measures", "weight_norm", "spectral_norm", "parametrized"),
    ],
)
def test_objects_are_as_on_one_device_after_each_step(
    one_rank: DeviceMesh, make: Callable[[], nn.Module], programs: int
) -> None:
    torch.manual_seed(0)
    sharded = train(make().double(), one_rank)
    assert len(sharded.programs) == programs


class All(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        lists = Appends(), Shares(), Empties(_clear, []), EmptiesAtLast(), KeepsLast()
        self.parts = nn.ModuleList([Counts(), *lists, Keeps(), Average(), Measures(), Normed(nn.utils.weight_norm)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts]).sum()


def _train_on_ranks(rank: int) -> int:
    torch.manual_seed(0)
    return len(train(All().double(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), rank).programs)


@pytest.mark.gloo
@pytest.mark.slow
def test_objects_hold_the_values_of_the_whole_batch_on_every_rank() -> None:
    assert run_on_ranks(_train_on_ranks, 2) == [2, 2]


def test_a_value_that_the_user_sets_counts(one_rank: DeviceMesh) -> None:
    model = Average().double()
    sharded = train(model, one_rank)
    for one in (model, sharded):
        one.total = torch.ones(3, dtype=torch.float64)
    x = torch.ones(2, 3, dtype=torch.float64)
    torch.testing.assert_close(sharded(x), model(x))
    assert len(sharded.programs) == 1


def test_evaluation_reads_what_training_stored(one_rank: DeviceMesh) -> None:
    class Remembers(Keeps):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                return super().forward(x)
            return self.linear(x).sum() * self.penalty

    model: Any = Remembers().double()
    sharded: Any = autoshard(model, one_rank, options=EAGER)
    x = torch.ones(2, 3, dtype=torch.float64)
    for scale in (1, 2, 3):
        for one in (model, sharded):
            one.train()(x * scale)
        with torch.no_grad():
            torch.testing.assert_close(sharded.eval()(x), model.eval()(x))


class Anneals(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(x).sum() * min(1.0, self.steps / 100)


class SharesInDict(Shares):
    """Appends to a list by the dict that holds it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name = {"means": self.means}

    def forward(self, x: Tensor) -> Tensor:
        self.by_name["means"].append(x.mean())
        return self.linear(x).sum()


class Wraps(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.metric = Metric()
        return self.linear(x).sum()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Anneals(),
            "the model changes steps and computes with it, but a graph has one value for all calls; keep it in a buffer that "
            "is updated in place, or pass it as an argument\n",
        ),
        (
            SharesInDict(),
            "the model changes by_name['means'] while it runs, but a graph computes tensors and changes nothing else; return the "
            "value, or keep it in a buffer that is updated in place\n",
        ),
        (
            Wraps(),
            "the model stores a Metric in self.metric while it runs, but a graph computes tensors and numbers only; store "
            "those, or make the object in __init__",
        ),
    ],
    ids=["number", "list", "object"],
)
def test_what_no_program_can_store(one_rank: DeviceMesh, model: nn.Module, message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        autoshard(model, one_rank, (torch.ones(2, 3),), options=EAGER)
    assert str(caught.value).startswith(message)


class ReturnsItsOwn(Base):
    """Returns a buffer that it adds to, one that it reads, a tensor attribute, and a parameter."""

    count: Tensor
    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("offset", torch.zeros(3))
        self.constant = torch.zeros(3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.count += 1
        loss = (self.linear(x) + self.offset + self.constant).sum()
        return {"loss": loss, "count": self.count, "offset": self.offset, "constant": self.constant, "bias": self.linear.bias}


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_an_output_that_is_the_models_own_is_a_copy(one_rank: DeviceMesh, compiler: Any) -> None:
    model: Any = autoshard(ReturnsItsOwn(), one_rank, options=replace(EAGER, compile=compiler))
    bias = model.linear.bias.full_tensor().detach().clone()
    output = model(torch.ones(2, 3))
    model(torch.ones(2, 3))
    assert output["count"].tolist() == [1, 1, 1] and model.count.tolist() == [2, 2, 2]
    output = model(torch.ones(2, 3))
    with torch.no_grad():
        for name in ("count", "offset", "constant", "bias"):
            output[name].add_(5)
    assert (model.count.tolist(), model.offset.tolist(), model.constant.tolist()) == ([3, 3, 3], [0, 0, 0], [0, 0, 0])
    torch.testing.assert_close(model.linear.bias.full_tensor(), bias)
