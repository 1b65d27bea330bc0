"""Capture models that do more than compute tensors: that print, keep their own objects, or set up hooks in a first call."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch.distributions import Categorical, Distribution, Independent, Normal, kl, kl_divergence
from torch.utils.checkpoint import checkpoint_sequential

from autoshard import Mesh, Options, plan
from autoshard import check as check_on_ranks
from autoshard.capture.capture import capture
from autoshard.capture.flat_call import unreturned
from autoshard.capture.signature import NotReturned, describe_output
from passes.errors import CaptureError, InputError
from passes.ir.graph import region_of
from tests.capture.asserting import Asserts
from tests.capture.comparing import check

LOCK = threading.Lock()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class Prints(Model):
    def forward(self, x: Tensor) -> Tensor:
        print("mean", x.mean().item())
        warnings.warn("only once", stacklevel=1)
        return self.layer(x)


def test_messages_are_left_out_with_a_remark() -> None:
    p = plan(Prints(), Mesh("dp=2"), (torch.ones(2, 4),), options=Options(recipe="fsdp"))
    said = [remark.text for remark in p.remarks if remark.pass_name == "capture"]
    assert said == [
        "print is left out: a program computes tensors and writes no messages",
        "warn is left out: a program computes tensors and writes no messages",
    ]
    assert next(remark.origin.source for remark in p.remarks if remark.pass_name == "capture").startswith("print(")


class Logs(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        logging.getLogger(f"{__name__}.forward").info("mean %s", y.mean())
        if logging.getLogger(name="autoshard").getEffectiveLevel() <= logging.CRITICAL:
            logging.warning("shape %s", y.shape)
        return y


def test_loggers_that_the_forward_looks_up_are_left_out() -> None:
    captured = capture(Logs(), (torch.ones(2, 4),), training=True)
    assert [remark.text for remark in captured.call.remarks] == [
        "Logger.info is left out: a program computes tensors and writes no messages",
        "logging.warning is left out: a program computes tensors and writes no messages",
    ]


@dataclasses.dataclass
class Batch:
    x: Tensor
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Result:
    loss: Tensor
    logits: Tensor | None = None


class TakesDataclass(Model):
    def forward(self, batch: Batch) -> Result:
        y = self.layer(batch.x) * batch.scale
        return Result(y.sum(), y)


def test_dataclasses_are_arguments_and_results() -> None:
    captured = capture(TakesDataclass(), (Batch(torch.ones(2, 4), 2.0),), training=True)
    assert [spec.path for spec in captured.signature.inputs] == ["batch.x"]
    assert captured.signature.constants == (("batch.scale", 2.0),)
    assert captured.signature.outputs == ("loss", "logits")
    assert captured.signature.unflatten([torch.zeros(()), torch.ones(2, 4)]).loss == 0


class Cache:
    def __init__(self, key: Tensor) -> None:
        self.key = key


class ReturnsCache(Model):
    def forward(self, x: Tensor) -> dict[str, object]:
        y = self.layer(x)
        return {"loss": y.sum(), "cache": Cache(y)}


def test_an_object_beside_tensors_is_not_returned_and_says_so_when_it_is_used() -> None:
    captured = capture(ReturnsCache(), (torch.ones(2, 4),), training=True)
    assert captured.signature.outputs == ("loss",)
    assert [remark.text for remark in captured.call.remarks] == [
        "cache, a Cache, is not returned: a program returns tensors in tuples, lists, dicts and dataclasses"
    ]
    output = captured.signature.unflatten([torch.zeros(())])
    with pytest.raises(InputError) as raised:
        _ = output["cache"].key
    assert str(raised.value) == (
        "cache is a Cache, which a sharded model does not return: its programs return tensors in tuples, lists, dicts and "
        "dataclasses; return the tensors that you need from cache.key"
    )


class EncodedCache(Cache):
    """Has a name that takes "an"."""


def test_the_name_of_an_object_that_is_not_returned_has_its_article() -> None:
    cache = NotReturned("cache", "EncodedCache")
    assert unreturned(cache).text.startswith("cache, an EncodedCache, is not returned: ")
    with pytest.raises(InputError, match=r"^cache is an EncodedCache, which a sharded model does not return: "):
        _ = cache.key
    with pytest.raises(CaptureError, match=r"^the model returns an EncodedCache, and tensors inside it would be lost; "):
        describe_output(EncodedCache(torch.zeros(2)))


class SetsUp(Model):
    ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with LOCK:
                self.layer.register_forward_hook(lambda module, given, made: 2 * made)
                self.ready = True
        return self.layer(x)


def test_a_model_that_sets_itself_up_under_a_lock_is_called_once_before_the_trace() -> None:
    model = SetsUp()
    captured = capture(model, (torch.ones(2, 4),), training=False)
    assert any("mul" in node.name for node in captured.graph_module.graph.nodes)
    assert not model.ready


class Scale:
    @functools.cached_property
    def value(self) -> Tensor:
        return torch.arange(4.0, dtype=torch.float64)


class ComputesOnce(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    @functools.cached_property
    def mask(self) -> Tensor:
        return torch.ones(4, 4, dtype=torch.float64).tril()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.mask * self.scale.value + self.mask.sum()


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_cached_property_is_computed(is_warm: bool) -> None:
    """In Python 3.11 it takes a lock."""
    model, x = ComputesOnce().double(), torch.randn(2, 4, dtype=torch.float64)
    if is_warm:
        model(x)
    locks = [vars(one).get("lock") for one in (ComputesOnce.mask, vars(Scale)["value"])]
    assert check_on_ranks(model, "dp=2", (x,), options=Options(recipe="fsdp"))
    assert ("mask" in vars(model), "value" in vars(model.scale)) == (is_warm, is_warm)
    assert [vars(one).get("lock") for one in (ComputesOnce.mask, vars(Scale)["value"])] == locks
    assert type(model(x)) is Tensor


class ChecksValues(Model):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if labels is not None and labels.max() >= 4:
            raise ValueError(f"labels are below 4: {labels}")
        if not (labels >= 0).all():
            raise ValueError("labels are not negative")
        torch._check_tensor_all(labels < 4)
        return self.layer(x).sum() + labels.sum()


def test_checks_of_values_are_left_out_with_a_remark() -> None:
    captured = capture(ChecksValues(), (torch.ones(2, 4), torch.ones(2, dtype=torch.int64)), training=True)
    said = "a check of values is left out: a rank that raised alone would leave the others waiting"
    assert [(remark.text, remark.origin.source) for remark in captured.call.remarks] == [
        (said, "if labels is not None and labels.max() >= 4:"),
        (said, "if not (labels >= 0).all():"),
    ]
    captured = capture(Asserts(), (torch.ones(2, 4), torch.ones(2, dtype=torch.int64)), training=True)
    assert [(remark.text, remark.origin.source) for remark in captured.call.remarks] == [
        (said, 'assert labels.max() < 4, "labels are below 4"'),
    ]


class Chooses(Model):
    def forward(self, x: Tensor) -> Tensor:
        return Categorical(logits=self.layer(x)).entropy().sum()


def test_a_distribution_is_traced_without_the_checks_of_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", True)  # which torch.compile changes, in whatever test ran before
    capture(Chooses(), (torch.ones(2, 4),), training=True)
    trace_rules.clear_lru_cache()  # as a new process group does
    captured = capture(Chooses(), (torch.ones(2, 4),), training=True)
    said = "a check of values is left out: a rank that raised alone would leave the others waiting"
    assert [remark.text for remark in captured.call.remarks] == [said]
    check(Chooses().double(), torch.ones(2, 4, dtype=torch.float64))


class OwnNormal(Normal):
    """A subclass that torch knows no formula of."""


class Codes(Model):
    """Adds up what a variational autoencoder pays."""

    def __init__(self, prior: type[Normal]) -> None:
        super().__init__()
        self.prior = prior

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = self.layer(x).chunk(2, -1)
        code = Independent(Normal(mean, deviation.exp()), 1)
        prior = Independent(self.prior(torch.zeros_like(mean), torch.ones_like(mean)), 1)
        return kl_divergence(code, prior).sum() + F.gaussian_nll_loss(mean, x[:, :2], deviation.exp())


@pytest.mark.parametrize("prior", [Normal, OwnNormal])
def test_divergences_and_likelihoods_of_distributions(prior: type[Normal]) -> None:
    kl._KL_MEMOIZE.clear()  # as in a process that has called none
    check(Codes(prior).double(), torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4))


class AssignsBuffer(Model):
    """Casts a buffer that is not saved, as it is, in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: Tensor = nn.Buffer(torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.positions = self.positions.to(device=x.device, dtype=x.dtype)
        return self.layer(x + self.positions)


def test_a_buffer_that_is_assigned_again() -> None:
    check(AssignsBuffer().double(), torch.ones(2, 4, dtype=torch.float64))


class Queue(Model):
    """Compares with a queue, a buffer that is assigned again: the backward needs the old one."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.queue: Tensor = nn.Buffer(torch.arange(12.0).reshape(3, 4) / 10)
        self.counts: Tensor = nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        loss = self.use(y, self.queue).square().mean()
        self.counts.add_(1)
        self.queue = torch.cat([self.queue[2:], y.detach()])
        return loss


@pytest.mark.parametrize(
    "use",
    [lambda y, queue: y @ queue.t(), lambda y, queue: y * queue[:2], lambda y, queue: torch.cdist(y, queue)],
    ids=["matmul", "mul", "cdist"],
)
def test_a_buffer_that_is_read_and_then_assigned(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    check(Queue(use).double(), torch.ones(2, 4, dtype=torch.float64))


class RequiresGradient(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        x.requires_grad = True
        return self.layer(x.flatten().requires_grad_().view(2, 4))


def test_a_value_that_is_made_a_leaf_changes_no_gradient_of_a_parameter() -> None:
    check(RequiresGradient().double(), torch.ones(2, 4, dtype=torch.float64))


class Penalty(Model):
    """Adds the norm of a gradient to its loss, by one of its inputs, one of its weights, or a value between."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        loss = y.square().sum()
        by = {"x": x, "weight": self.layer.weight, "y": y}[self.of]
        return loss + torch.autograd.grad(loss, by, create_graph=True)[0].square().sum()


@pytest.mark.parametrize("of", ["x", "weight", "y"])
def test_a_gradient_inside_of_the_model(of: str) -> None:
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)
    check(Penalty(of).double(), x.requires_grad_(of == "x"))


class Sequence(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)


def test_all_segments_but_the_last_are_checkpointed() -> None:
    captured = check(Sequence().double(), torch.ones(2, 4, dtype=torch.float64))
    regions = {region_of(node) for node in captured.graph_module.graph.nodes} - {None}
    assert len(regions) == 1


@pytest.mark.parametrize(
    "view",
    [lambda y: y.mT, lambda y: y.mH, lambda y: y.data, lambda y: y.data.mT, lambda y: y[0].T, lambda y: y.real],
    ids=["mT", "mH", "data", "data.mT", "T", "real"],
)
def test_attributes_of_tensors_that_are_returned(view: Callable[[Tensor], Tensor]) -> None:
    """They are values of the graph, whether the tensor is an argument, a parameter, a buffer or an attribute."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4).double()
            self.weight = nn.Parameter(torch.ones(2, 3, 4).double())
            self.register_buffer("offset", torch.ones(2, 3, 4).double())
            self.scale = torch.ones(2, 3, 4).double()

        def forward(self, x: Tensor, y: Tensor) -> Any:
            held = [view(one) for one in (self.weight, self.offset, self.scale)]
            return self.linear(x).sum(), {"y": view(y)}, held

    check(Views(), torch.randn(2, 5, 3).double(), torch.randn(2, 3, 4).double())
