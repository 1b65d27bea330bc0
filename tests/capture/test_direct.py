"""Models that dynamo gives up on are run instead; a run that may not be the model for all calls is refused."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import itertools
import random
import re
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from autoshard import Mesh, Options, autoshard, plan
from autoshard import check as check_on_ranks
from autoshard.capture.capture import capture
from passes.errors import CaptureError
from passes.ir.graph import origin_of
from tests.capture.comparing import check

GAIN = contextvars.ContextVar("GAIN", default=3.0)
SEEN: list[Tensor] = []
STEPS = itertools.count()
CALLS = 0
NUMBERS: list[int] = []
COUNTS = {"calls": 0}
ELSEWHERE = torch.ones(4, dtype=torch.float64)
HEAD = nn.Linear(4, 4).double()


def hidden(x: Tensor) -> Tensor:
    """Return `x`, by way of a function that dynamo does not trace."""
    return x if zlib.crc32(b"hidden") else -x


class Model(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))


class Hashes(Model):
    """Takes a number from a hash, as models that share weights by name do."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (zlib.crc32(b"layer") % 7)


class ReachesItself(Model):
    """Holds a tensor in a cycle of objects, which ends with the call, but only when garbage is collected."""

    def forward(self, x: Tensor) -> Tensor:
        made: dict[str, Any] = {"value": self.layer(hidden(x))}
        made["made"] = made
        value: Tensor = made["value"]
        return value * 2


class Inspects(Model):
    def forward(self, x: Tensor) -> Tensor:
        frame = inspect.currentframe()
        assert frame is not None
        return self.layer(x) * len(frame.f_code.co_name)


class EntersContext(Model):
    """Reads a setting of its context, as libraries keep them."""

    def forward(self, x: Tensor) -> Tensor:
        token = GAIN.set(GAIN.get() + 1)
        y: Tensor = hidden(self.layer(x)) * GAIN.get()
        GAIN.reset(token)
        return y


class Doubles(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is F.linear else result


class Overrides(Model):
    def forward(self, x: Tensor) -> Tensor:
        with Doubles():
            return self.layer(hidden(x))


class Evaluates(Model):
    """Computes a formula from its configuration."""

    formula = "self.layer(x).relu() * 2 + x"

    def forward(self, x: Tensor) -> Any:
        return eval(self.formula)


class Awaits(Model):
    async def run(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return asyncio.run(self.run(x))


class Norms(Model):
    """Has new buffers, dropout that is off, frozen and tied parameters, tensors in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tied = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.tied.weight = self.layer.weight
        self.tied.bias.requires_grad_(False)
        self.scales = [torch.tensor(2.0, dtype=torch.float64), {"two": torch.arange(4.0, dtype=torch.float64)}]

    def forward(self, x: Tensor, *, times: int = 2, options: dict[str, Tensor] | None = None) -> dict[str, Any]:
        y = F.dropout(self.norm(hidden(self.layer(x))), 0.0)
        self.mean.mul_(0.5).add_(y.detach().mean(0))
        for _ in range(times):
            y = self.tied(y) * self.scales[0] + self.scales[1]["two"]  # type: ignore[index]
        return {"y": y, "given": x, "options": options, "times": times}


class Steep(torch.autograd.Function):
    """A step with the gradient of something else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (3 - x.tanh() ** 2)


class HasItsOwnGradient(Model):
    def forward(self, x: Tensor) -> Any:
        y = Steep.apply(hidden(self.layer(x)))
        y.register_hook(lambda gradient: gradient * 2)
        return y, torch.autograd.grad(self.layer(x).square().sum(), self.layer.weight, create_graph=True)[0]


class MakesFunctions(Model):
    """Calls a function that it makes, which holds tensors of the call, as masks and caches of language models do."""

    def forward(self, x: Tensor) -> Tensor:
        y, cache = self.layer(x), list[Tensor]()

        def attend(value: Tensor) -> Tensor:
            cache.append(hidden(y))
            return value * cache[-1]

        return attend(y)


class KeepsProperty(Model):
    @functools.cached_property
    def factor(self) -> float:
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        return hidden(self.layer(x)) * self.factor


RUN = (
    *(Hashes, ReachesItself, Inspects, EntersContext, Overrides, Evaluates, Awaits, Norms, HasItsOwnGradient, MakesFunctions),
    KeepsProperty,
)


@pytest.mark.parametrize("kind", RUN, ids=lambda kind: kind.__name__)
def test_what_dynamo_gives_up_on_is_run(kind: type[Model]) -> None:
    torch.manual_seed(0)
    captured = check(kind().double(), torch.randn(3, 4, dtype=torch.float64))
    assert captured.names is None  # any attribute may have been read
    (remark,) = captured.call.remarks
    assert remark.text.startswith("dynamo, torch's tracer, does not understand the model's code (")
    assert not remark.routine and remark.origin.line
    if kind is not HasItsOwnGradient:  # which fails under no_grad, as on one device
        check(kind().double(), torch.randn(3, 4, dtype=torch.float64), training=False)


def test_a_tensor_that_is_returned_twice_is_one_output() -> None:
    class Twice(Model):
        def forward(self, x: Tensor) -> list[Tensor]:
            y = hidden(self.layer(x))
            return [y, x, y]

    captured = check(Twice().double(), torch.randn(3, 4, dtype=torch.float64))
    assert captured.signature.outputs == ("0", "1")


def test_arguments_are_those_of_each_call() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    check(Norms().double(), x, times=3, options={"a": torch.ones(2), "b": x})
    check(Norms().double().eval(), x.requires_grad_(), times=1)


def test_nodes_know_their_modules_and_lines() -> None:
    graph = capture(Norms().double(), (torch.randn(3, 4, dtype=torch.float64),), training=True).graph_module.graph
    products = [node for node in graph.nodes if node.target is torch.ops.aten.mm.default]
    assert {origin_of(node).fqn for node in products} == {"layer", "tied"}  # of the backward, too
    assert all(origin_of(node).file == __file__ and "self." in origin_of(node).source for node in products)


@pytest.mark.parametrize("recipe", ["fsdp", "fsdp+megatron"])
def test_ranks_compute_what_one_device_does(recipe: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Norms(), Last()).double()
    found = check_on_ranks(model, "dp=2,tp=2", (torch.randn(8, 4, dtype=torch.float64),), options=Options(recipe=recipe))
    assert found and not found.not_compared, str(found)


@dataclass
class Score:
    loss: Tensor


class Scored(nn.Sequential):
    """Returns a loss by that name, to which AdaLoRA adds one of its own."""

    def forward(self, x: Tensor) -> Score:
        return Score(super().forward(x).square().mean())


@pytest.mark.parametrize("name", ["DoRA", "AdaLoRA"])
def test_adapters_of_peft(name: str) -> None:
    peft = pytest.importorskip("peft", reason="the extra [models] has it")
    torch.manual_seed(0)
    kinds = {"DoRA": peft.LoraConfig(r=4, use_dora=True, target_modules=["0", "2"])}
    kinds["AdaLoRA"] = peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["0", "2"])
    model = peft.get_peft_model(Scored(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), kinds[name]).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)  # adapters start at zero
    x = torch.randn(8, 8, dtype=torch.float64)
    check(model, x)
    found = check_on_ranks(model, "dp=2,tp=2", (x,), options=Options(recipe="fsdp+megatron"))
    assert found and not found.not_compared, str(found)


class Last(nn.Module):
    def forward(self, output: dict[str, Any]) -> Tensor:
        loss: Tensor = output["y"].square().mean()
        return loss


def test_dropout_is_drawn_by_the_program() -> None:
    model = nn.Sequential(Hashes(), nn.Dropout(0.5))
    captured = capture(model, (torch.ones(3, 4),), training=True)
    assert "rand" in str(captured.graph_module.graph)


class Depends(Model):
    """Reads attributes in ways that no tracer sees."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.config = 1.0, {"nested": [1.0]}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * eval("self.alpha") * eval("self.config['nested'][0]")


def test_any_change_of_the_model_is_captured_again(one_rank: DeviceMesh) -> None:
    model = Depends()
    sharded: Any = autoshard(model, one_rank, options=Options(recipe="fsdp", compile="eager"))
    x = torch.ones(2, 4)
    before = sharded(x)
    torch.testing.assert_close(sharded(x), before)
    sharded.alpha = 2.0
    torch.testing.assert_close(sharded(x), before * 2)
    sharded.config["nested"][0] = 3.0
    torch.testing.assert_close(sharded(x), before * 6)
    sharded.unread = 1
    torch.testing.assert_close(sharded(x), before * 6)
    assert len(sharded.programs) == 4
    del sharded.unread
    sharded.alpha, sharded.config["nested"][0] = 1.0, 1.0
    torch.testing.assert_close(sharded(x), before)
    assert len(sharded.programs) == 4


def counted(x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return x


def counter() -> Callable[[Tensor], Tensor]:
    calls = 0

    def count(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x

    return count


COUNT = counter()


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.arange(float(size), dtype=torch.float64)


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Holds(Model):
    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.log, self.slotted, self.counter = 0, list[float](), Slotted(), itertools.count()


def _sets(model: Any, x: Tensor) -> None:
    model.layer.weight.data = x


def _assigns(name: str) -> Callable[[Any, Tensor], None]:
    def assign(model: Any, x: Tensor) -> None:
        setattr(model, name, 1)

    return assign


def _freezes(model: Any, x: Tensor) -> None:
    model.layer.weight.requires_grad_(False)


def _draws_again(model: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.rand(4)


def _hooks(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model.layer(x)
    y.register_hook(lambda gradient: SEEN.append(gradient * 2))
    return y


class _Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        NUMBERS.append(1)
        return gradient * 2


def _counts(model: Any, x: Tensor) -> Any:
    return _Counting.apply(model.layer(x))


def _raises(model: Any, x: Tensor) -> None:
    raise KeyError("nothing here")


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "an attribute": (_assigns("steps"), "it changes steps while it runs"),
    "a new attribute": (_assigns("more"), "it changes more while it runs"),
    "a list": (lambda model, x: model.log.append(1.0), "it changes log.0 while it runs"),
    "a slot": (lambda model, x: setattr(model.slotted, "value", 1), "it changes slotted.value while it runs"),
    "an iterator": (lambda model, x: next(model.counter), "it changes counter while it runs"),
    "a class": (lambda model, x: setattr(Holds, "total", Holds.total + 1), "it changes Holds.total while it runs"),
    "a dict of the module": (
        lambda model, x: COUNTS.update(calls=COUNTS["calls"] + 1),
        "it changes COUNTS.calls while it runs",
    ),
    "a global number": (lambda model, x: counted(x), "it assigns CALLS, a variable outside of its function"),
    "an outer number": (lambda model, x: COUNT(x), "it assigns calls, a variable outside of its function"),
    "a tensor in a list": (lambda model, x: SEEN.append(x * 2), "it keeps a tensor that it computes outside of itself"),
    "a number in a list": (lambda model, x: NUMBERS.append(1), "it changes NUMBERS.1 while it runs"),
    "a gradient in a list": (_hooks, "it keeps a tensor that it computes outside of itself"),
    "a gradient's number": (_counts, "it changes NUMBERS."),
    "a tensor in a cache": (
        lambda model, x: table(4),
        "it keeps a tensor that it computes outside of itself, where no program updates it",
    ),
    "a global iterator": (lambda model, x: x * next(STEPS), "it changes STEPS while it runs"),
    "the time": (lambda model, x: x * time.time(), "it does not compute the same in each call: something besides its tensors"),
    "the time as a result": (
        lambda model, x: time.time(),
        "it does not compute the same in each call: something besides its tensors changes",
    ),
    "a generator": (
        lambda model, x: torch.rand(4, generator=torch.Generator()),
        "it draws with a torch.Generator, whose numbers a program does not have",
    ),
    "random": (lambda model, x: x * random.random(), "it draws numbers outside of tensors, or seeds them (random)"),
    "its own random": (
        lambda model, x: x * random.Random(0).random(),
        "it draws numbers outside of tensors, or seeds them",
    ),
    "a seed": (_draws_again, "it draws numbers outside of tensors, or seeds them (manual_seed)"),
    "a branch": (lambda model, x: 1 if x.sum() > 0 else 2, "the model reads a number out of a tensor"),
    "a number": (lambda model, x: x.sum().item(), "the model reads a number out of a tensor"),
    "a selection": (lambda model, x: x[x > 0], "the model makes a tensor whose shape depends on values"),
    "another tensor": (
        lambda model, x: x * ELSEWHERE,
        "it reads a float64[4] that is neither its own nor an argument; register it with register_buffer or nn.Parameter",
    ),
    "another tensor as a result": (
        lambda model, x: ELSEWHERE,
        "it returns at 1 a tensor that it neither computes nor is given",
    ),
    "another parameter": (lambda model, x: HEAD(x), "it reads a float64[4, 4] that is neither its own nor an argument"),
    "a hook of a gradient": (
        lambda model, x: model.layer.weight.register_post_accumulate_grad_hook(print),
        "it assigns the data or the gradient of a tensor, or hooks what does",
    ),
    "data": (_sets, "it assigns the data or the gradient of a tensor"),
    "requires_grad": (_freezes, "it changes the shape, the gradient or requires_grad of a tensor that it is given"),
    "backward": (lambda model, x: model.layer(x).sum().backward(), "it changes the shape, the gradient or"),
    "a checkpoint": (
        lambda model, x: checkpoint(model.layer, x, use_reentrant=False),
        "it has a checkpoint, whose random numbers would be others in the backward",
    ),
    "a sparse gradient": (
        lambda model, x: F.embedding(x.long(), model.layer.weight, sparse=True),
        "the model asks for the sparse gradient of an embedding",
    ),
    "its own error": (_raises, "the model cannot be captured as one graph: KeyError: 'nothing here'"),
}


class Does(Holds):
    """Calls a function that dynamo cannot trace, and then another."""

    def __init__(self, other: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor) -> Any:
        y = hidden(self.layer(x))
        return y, self.other(self, x)


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_may_not_be_the_model_is_refused(name: str) -> None:
    other, reason = REFUSED[name]
    with pytest.raises(CaptureError) as raised:
        capture(Does(other).double(), (torch.ones(3, 4, dtype=torch.float64),), training=True)
    first, direct = str(raised.value).split("\nwithout dynamo, torch's tracer, it cannot be captured either: ")
    assert first.startswith("the model calls zlib.crc32 while it runs, but a graph has tensor operations only")
    assert re.sub(r"\s+", " ", direct).startswith(reason), direct


def test_a_variable_of_the_context_is_as_before() -> None:
    held = contextvars.ContextVar[Tensor | None]("held", default=None)
    with pytest.raises(CaptureError, match="it keeps a tensor that it computes outside of itself"):
        capture(Does(lambda model, x: held.set(x * 2)), (torch.ones(3, 4),), training=True)
    assert held.get() is None


def test_tensors_that_the_call_changes_are_refused_when_it_is_differentiated() -> None:
    def changes(model: Any, x: Tensor) -> None:
        with torch.no_grad():
            model.layer.weight.mul_(2)

    with pytest.raises(CaptureError, match=r"the model changes its parameter layer.weight in the forward"):
        capture(Does(changes), (torch.ones(3, 4),), training=True)


def test_recurrent_dropout_is_refused() -> None:
    class Tagger(Model):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5)

        def forward(self, x: Tensor) -> Any:
            return self.lstm(hidden(x))[0]

    with pytest.raises(CaptureError, match="torch loses the dropout between the layers of lstm"):
        capture(Tagger(), (torch.ones(3, 4),), training=True)


def test_the_plan_says_that_the_code_was_run() -> None:
    p = plan(Hashes(), Mesh("dp=2"), (torch.ones(4, 4),), options=Options(recipe="fsdp"))
    (remark,) = (remark for remark in p.remarks if remark.pass_name == "capture")
    assert "(it calls zlib.crc32), so the code was run on tensors without data" in remark.text
