"""A sharded module as its user sees it, on a mesh of one rank: names, gradients, modes, and errors."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard import Options, autoshard, check
from autoshard.runtime.parameters import plain_copy
from autoshard.runtime.sharded_module import ShardedModule
from passes.errors import CaptureError, InputError, UserError

EAGER = Options(recipe="fsdp", compile="eager")


class Tied(nn.Module):
    """A tied weight, a frozen parameter, a buffer that counts, and two outputs of which one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.scale = nn.Parameter(torch.ones(6), requires_grad=False)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls.add_(1)
        logits = self.head(self.dropout(self.embedding(tokens) * self.scale))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "best": logits.argmax(-1)}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(12, (2, 4, 5), generator=generator)
    return tokens, labels


def made(mesh: DeviceMesh, *, training: bool = False, now: bool = False) -> tuple[Tied, Any]:
    torch.manual_seed(0)
    model = Tied().train(training)
    return model, autoshard(model, mesh, batch() if now else None, options=EAGER)


def test_it_is_of_the_users_class_and_of_ours(one_rank: DeviceMesh) -> None:
    _, sharded = made(one_rank)
    assert isinstance(sharded, Tied)
    assert isinstance(sharded, ShardedModule)
    assert type(sharded).__name__ == "ShardedTied"


def test_names_ties_and_flags_stay(one_rank: DeviceMesh) -> None:
    model, sharded = made(one_rank)
    assert list(sharded.state_dict()) == list(model.state_dict())
    assert [n for n, _ in sharded.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert sharded.head.weight is sharded.embedding.weight
    assert not sharded.scale.requires_grad


def test_parameters_are_dtensors_and_buffers_plain(one_rank: DeviceMesh) -> None:
    _, sharded = made(one_rank, now=True)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    assert type(sharded.calls) is Tensor


def test_the_users_module_is_left_as_it_was(one_rank: DeviceMesh) -> None:
    model, sharded = made(one_rank, training=True)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    sharded(*batch())["loss"].backward()
    optimizer.step()
    assert type(model) is Tied
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_an_optimizer_built_before_the_capture_keeps_working(one_rank: DeviceMesh) -> None:
    model, sharded = made(one_rank)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
    reference = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        for one, of in ((sharded, optimizer), (model, reference)):
            of.zero_grad()
            one(*batch())["loss"].backward()
            of.step()
    torch.testing.assert_close(sharded.embedding.weight.full_tensor(), model.embedding.weight)


@pytest.mark.parametrize("how", ["step", "closure", "with others"])
def test_an_optimizer_of_the_given_model_is_refused(one_rank: DeviceMesh, how: str) -> None:
    model = Tied().eval()
    others = list(nn.Linear(2, 2).parameters()) if how == "with others" else []
    optimizer = torch.optim.SGD([*model.parameters(), *others], lr=1.0)
    sharded: Any = autoshard(model, one_rank, options=EAGER)

    def loss() -> Tensor:
        found = sharded(*batch())["loss"]
        found.backward()
        return found

    optimizer.step()  # nothing has a gradient yet
    if how != "closure":
        loss()
    with pytest.raises(UserError) as caught:
        optimizer.step(loss if how == "closure" else None)
    assert str(caught.value) == (
        "the optimizer holds parameter 'embedding.weight' of the model that was given to autoshard(...), which has no gradient: "
        "the sharded model is a copy, with parameters and gradients of its own, and this step trains nothing of it; build the "
        "optimizer on the sharded model's parameters, after autoshard(...)"
    )


def test_the_given_model_may_be_trained_beside_its_copy(one_rank: DeviceMesh) -> None:
    model, sharded = made(one_rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    others = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.5)
    others.step()
    sharded(*batch())["loss"].backward()
    others.step()  # without a gradient, beside a sharded model that has some
    optimizer.step(lambda: model(*batch())["loss"].backward())  # gets its gradients in the step
    optimizer.zero_grad()
    optimizer.step()  # nothing to do this time
    assert model.head.weight.grad is None
    assert sharded.head.weight.grad is not None


def test_a_part_of_two_sharded_models_is_told(one_rank: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    trunk = nn.Linear(4, 4)
    actor, critic = nn.Sequential(trunk, nn.Linear(4, 2)), nn.Sequential(trunk, nn.Linear(4, 1))
    kept = [autoshard(one, one_rank, options=EAGER) for one in (actor, actor, trunk)]
    assert caplog.messages == []
    kept.append(autoshard(critic, one_rank, options=EAGER))
    assert set(caplog.messages) == {
        "Sequential shares parameter '0.weight' with a model that was sharded before (ShardedSequential), but each sharded model "
        "has a copy of its own, and trains it alone; to train one, shard a module that holds both models, and choose by an "
        "argument"
    }
    trunk.requires_grad_(requires_grad=False)
    caplog.clear()
    kept.append(autoshard(critic, one_rank, options=EAGER))
    assert caplog.messages == []


def test_gradients_accumulate_and_calls_may_overlap(one_rank: DeviceMesh) -> None:
    model, sharded = made(one_rank)
    tokens, labels = batch()
    for one in (sharded, model):
        first, second = one(tokens, labels)["loss"], one(labels, tokens)["loss"]
        second.backward()
        (2 * first).backward()
    torch.testing.assert_close(sharded.embedding.weight.grad.full_tensor(), model.embedding.weight.grad)
    assert sharded.scale.grad is None


class Features(nn.Module):
    """Features, and a loss that is computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.layer(x)
        return features, features.sum()


def test_an_output_that_is_inside_of_the_loss_has_the_gradient_of_what_is_outside(one_rank: DeviceMesh) -> None:
    model = Features()
    sharded: Any = autoshard(model, one_rank, options=EAGER)
    gradients = []
    for one in (model, sharded):
        features, loss = one(torch.ones(4, 3))
        features.retain_grad()
        (loss + 2 * features.sum()).backward()
        gradients.append(features.grad)
    torch.testing.assert_close(sharded.layer.weight.grad.full_tensor(), model.layer.weight.grad)
    assert torch.equal(gradients[0], torch.full((4, 2), 3.0))
    assert torch.equal(gradients[1], torch.full((4, 2), 2.0))  # a limit, which docs/calls.md tells
    features, loss = sharded(torch.ones(4, 3))
    assert torch.autograd.grad(loss, features, allow_unused=True) == (None,)


def test_a_graph_can_be_retained(one_rank: DeviceMesh) -> None:
    _, sharded = made(one_rank)
    loss = sharded(*batch())["loss"]
    loss.backward(retain_graph=True)
    once = sharded.embedding.weight.grad.full_tensor().clone()
    loss.backward()
    torch.testing.assert_close(sharded.embedding.weight.grad.full_tensor(), 2 * once)


def test_an_output_without_gradient_is_plain(one_rank: DeviceMesh) -> None:
    _, sharded = made(one_rank)
    out = sharded(*batch())
    assert out["loss"].requires_grad
    assert not out["best"].requires_grad
    assert type(out["loss"]) is Tensor


def test_without_gradients_there_is_no_backward(one_rank: DeviceMesh) -> None:
    model, sharded = made(one_rank)
    with torch.no_grad():
        out = sharded(*batch())
        torch.testing.assert_close(out["loss"], model(*batch())["loss"])
    assert not out["loss"].requires_grad
    assert sharded(*batch())["loss"].requires_grad


def test_buffers_are_written_in_every_mode(one_rank: DeviceMesh) -> None:
    _, sharded = made(one_rank)
    held = sharded.calls
    sharded(*batch())
    with torch.no_grad():
        sharded(*batch())
    assert held is sharded.calls
    assert int(held) == 2


class Averages(nn.Module):
    """Reads its averages in evaluation, and writes them in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.norm(self.layer(x)).square().mean()
        return loss


def averages(mesh: DeviceMesh) -> tuple[Any, torch.Tensor, Any]:
    """Return a sharded model in evaluation, its input, and the gradient of its weight on one device."""
    torch.manual_seed(0)
    model, x = Averages().eval(), torch.randn(6, 4)
    model(x).backward()
    sharded: Any = autoshard(model, mesh, options=EAGER)
    return sharded, x, model.layer.weight.grad


def test_a_buffer_that_a_call_writes_before_a_backward_that_needs_it(one_rank: DeviceMesh) -> None:
    sharded, x, gradient = averages(one_rank)
    losses = [sharded(x), sharded(x)]
    for loss in losses:
        sharded.train()
        with torch.no_grad():
            sharded(x)
        sharded.eval()
        sharded.zero_grad()
        loss.backward(retain_graph=True)
        torch.testing.assert_close(sharded.layer.weight.grad.full_tensor(), gradient)
        loss.backward()
        torch.testing.assert_close(sharded.layer.weight.grad.full_tensor(), 2 * gradient)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_a_buffer_changed_before_its_backward(one_rank: DeviceMesh) -> None:
    sharded, x, _ = averages(one_rank)
    loss = sharded(x)
    sharded.norm.running_var.mul_(2)
    with pytest.raises(UserError) as error:
        loss.backward()
    assert str(error.value) == (
        "buffer 'norm.running_var' was changed in place between a forward and its backward, which needs it as it was; "
        "change it after the backward"
    )


def test_random_numbers_differ_between_steps_and_repeat_between_runs(one_rank: DeviceMesh) -> None:
    runs = []
    for _ in range(2):
        _, sharded = made(one_rank, training=True)
        runs.append([float(sharded(*batch())["loss"]) for _ in range(3)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3


def test_train_and_eval_are_programs_of_their_own(one_rank: DeviceMesh) -> None:
    model, sharded = made(one_rank, training=True)
    sharded(*batch())
    sharded.eval()
    torch.testing.assert_close(sharded(*batch())["loss"], model.eval()(*batch())["loss"])


def test_freezing_a_parameter_is_seen(one_rank: DeviceMesh) -> None:
    _, sharded = made(one_rank)
    sharded(*batch())
    sharded.scale.requires_grad_(True)
    sharded(*batch())["loss"].backward()
    assert sharded.scale.grad is not None


def test_a_state_dict_of_one_device_loads(one_rank: DeviceMesh) -> None:
    _, sharded = made(one_rank, now=True)
    torch.manual_seed(1)
    other = Tied()
    sharded.load_state_dict(other.state_dict())
    torch.testing.assert_close(sharded.embedding.weight.full_tensor(), other.embedding.weight)
    sharded.head.load_state_dict({"weight": torch.zeros(12, 6)})
    assert float(sharded.embedding.weight.full_tensor().abs().sum()) == 0.0


def test_a_meta_model_is_materialized_sharded(one_rank: DeviceMesh) -> None:
    with torch.device("meta"):
        model = Tied().eval()
    sharded: Any = autoshard(model, one_rank, batch(), options=EAGER)
    assert sharded.embedding.weight.is_meta
    with pytest.raises(UserError) as raised:
        sharded(*batch())
    assert str(raised.value) == (
        "parameter 'scale' has no data, as the model was made on meta; before the first call, "
        "model.to_empty(device=...) makes room, and load_state_dict or an initialization fills it"
    )
    sharded.to_empty(device="cpu")
    values = Tied().state_dict()
    sharded.load_state_dict(values)
    expected = Tied().eval()
    expected.load_state_dict(values)
    torch.testing.assert_close(sharded(*batch())["loss"], expected(*batch())["loss"])


def test_a_parameter_without_data_is_named_as_in_the_model(one_rank: DeviceMesh) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.ReLU(), nn.Linear(4, 2))
    x = torch.ones(2, 4)
    with pytest.raises(UserError, match=r"parameter '1\.(weight|bias)' has no data"):
        autoshard(model, one_rank, (x,), options=EAGER)(x)


def test_arguments_need_not_be_contiguous(one_rank: DeviceMesh) -> None:
    _, sharded = made(one_rank)
    tokens, labels = batch()
    straight = sharded(tokens, labels)["loss"]
    turned = sharded(tokens.t().contiguous().t(), labels.t().contiguous().t())["loss"]
    torch.testing.assert_close(straight, turned)


def test_a_second_derivative(one_rank: DeviceMesh) -> None:
    _, sharded = made(one_rank)
    with pytest.raises(UserError) as error:
        sharded(*batch())["loss"].backward(create_graph=True)
    assert str(error.value) == (
        "a sharded model has no second derivative: backward(create_graph=True) would silently leave it out; "
        "compute what needs it on one device, or inside the model"
    )


def test_a_parameter_changed_before_its_backward(one_rank: DeviceMesh) -> None:
    _, sharded = made(one_rank)
    loss = sharded(*batch())["loss"]
    with torch.no_grad():
        sharded.embedding.weight.mul_(2)
    with pytest.raises(UserError) as error:
        loss.backward()
    assert str(error.value) == (
        "parameter 'embedding.weight' was changed in place between a forward and its backward, which needs it as it "
        "was; call backward before optimizer.step()"
    )


def test_a_batch_is_sharded_before_anything_was_captured(one_rank: DeviceMesh) -> None:
    model, sharded = made(one_rank)
    parts = sharded.shard(*batch())
    assert not sharded.programs and _same(parts, batch())
    torch.testing.assert_close(sharded(*parts)["loss"], model(*batch())["loss"])


@pytest.mark.parametrize("constrained", [{}, {"*": {"dp": "S(0)"}}], ids=("recipes", "constraints"))
def test_samplers_before_anything_was_captured(one_rank: DeviceMesh, constrained: Any) -> None:
    sharded: Any = autoshard(AnyCall(), one_rank, options=replace(EAGER, inputs=constrained))
    if not constrained:
        assert list(sharded.sampler(range(3), shuffle=False)) == [0, 1, 2]
        return
    with pytest.raises(InputError, match="nothing was captured yet"):
        sharded.sampler(range(3))


def test_the_plan_before_anything_was_captured(one_rank: DeviceMesh) -> None:
    _, sharded = made(one_rank)
    with pytest.raises(InputError) as error:
        print(sharded.plan)
    assert str(error.value) == ("nothing was captured yet: give autoshard(..., args=...) or call the model once before")


class AnyCall(nn.Module):
    """Arguments of every kind that a signature can have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, /, scale: float = 1.0, *rest: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        values = [x, *rest, *(value["y"] for value in more.values()), *([] if mask is None else [mask])]
        return torch.stack([(value * self.weight * scale).sum() for value in values]).sum()


X, Y, Z = (torch.full((2, 3), value) for value in (1.0, 2.0, 3.0))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X,), {}),
        ((X, 2.0, Y, Z), {}),
        ((X,), {"mask": Y}),
        ((X, 2.0, Y), {"b": {"y": Y}, "a": {"y": Z}}),
        ((X,), {"a": {"y": Z}, "scale": 3.0}),
    ],
    ids=("one", "rest", "mask", "more", "scale"),
)
def test_what_is_sharded_is_called_as_it_was_given(
    one_rank: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    sharded: Any = autoshard(AnyCall(), one_rank, args, kwargs, options=EAGER)
    found = sharded.shard(*args, **kwargs)
    assert _same(found, (args, kwargs) if kwargs else args)
    positional, named = found if kwargs else (found, {})
    assert torch.equal(sharded(*positional, **named), AnyCall()(*args, **kwargs))


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(_same(found[name], expected[name]) for name in expected)
    if isinstance(expected, tuple):
        return isinstance(found, tuple) and all(map(_same, found, expected))
    return bool(found == expected)


def test_keyword_arguments_are_sharded_to_a_dict(one_rank: DeviceMesh) -> None:
    _, sharded = made(one_rank, now=True)
    tokens, labels = batch()
    given = {"labels": labels, "tokens": tokens}
    assert _same(sharded.shard(**given), given)
    assert torch.equal(sharded(**sharded.shard(**given))["loss"], sharded(tokens, labels)["loss"])


def test_a_batch_of_any_call_that_was_captured_is_sharded(one_rank: DeviceMesh) -> None:
    sharded: Any = autoshard(AnyCall(), one_rank, (X,), options=EAGER)
    sharded.eval()
    sharded(X, mask=Y)
    assert _same(sharded.shard(X), (X,))
    assert _same(sharded.shard(X, mask=Y), ((X,), {"mask": Y}))


def test_a_module_of_torch_jit(one_rank: DeviceMesh) -> None:
    with pytest.raises(CaptureError) as caught:
        autoshard(torch.jit.trace(nn.Linear(4, 4), (torch.ones(2, 4),)), one_rank, options=EAGER)
    assert str(caught.value) == (
        "the model is a ScriptModule, which torch.jit made, and has no Python code to be captured; give the nn.Module that it "
        "was made from"
    )


def test_a_module_that_cannot_be_copied(one_rank: DeviceMesh) -> None:
    model = nn.Linear(2, 2)
    vars(model)["lock"] = threading.Lock()
    with pytest.raises(CaptureError) as error:
        autoshard(model, one_rank, options=EAGER)
    assert str(error.value) == (
        "Linear cannot be copied: cannot pickle '_thread.lock' object; keep what cannot be copied (locks, files, process "
        "groups) out of the module's attributes"
    )


class Encoder(nn.Module):
    """Returns what its backward reads, a tensor twice, and a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = F.normalize(self.layer(x), dim=-1)
        g = self.layer(x)
        return {"unit": h, "last": g, "all": (x, g), "first": g[:, :2]}


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_tensor_that_is_returned_twice_is_one(one_rank: DeviceMesh, compiler: Any) -> None:
    model, x = Encoder(), torch.randn(2, 3)
    sharded: Any = autoshard(copy.deepcopy(model), one_rank, options=replace(EAGER, compile=compiler))
    for one in (sharded, model):
        output = one(x)
        assert output["all"][1] is output["last"]
        (output["all"][1] * 3 + output["last"]).square().sum().backward()
    torch.testing.assert_close(sharded.layer.weight.grad.full_tensor(), model.layer.weight.grad)
    assert check(model, "dp=2", (x,), options=Options(recipe="fsdp"))
    with torch.no_grad():
        output = sharded(x)
    output["last"].zero_()
    assert not output["all"][1].any()


@pytest.mark.parametrize("name", ["last", "first"])
def test_an_output_that_another_is_a_part_of_is_not_changed_in_place(one_rank: DeviceMesh, name: str) -> None:
    sharded: Any = autoshard(Encoder(), one_rank, options=EAGER)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        sharded(torch.randn(2, 3))[name].mul_(2)


@pytest.mark.parametrize("changes", ["output", "input"])
def test_what_the_backward_reads_is_not_changed_in_place(one_rank: DeviceMesh, changes: str) -> None:
    sharded, x = autoshard(Encoder(), one_rank, options=EAGER), torch.randn(2, 3)
    unit = sharded(x)["unit"]
    (unit if changes == "output" else x).div_(2)
    with pytest.raises(UserError) as error:
        unit.exp().sum().backward()
    assert str(error.value) == (
        "output unit or input x was changed in place between a forward and its backward, which needs it as it was; make a new "
        "tensor: y = y / 2, not y /= 2"
    )


def test_a_copy_has_no_gradients(one_rank: DeviceMesh) -> None:
    model = autoshard(nn.Linear(3, 4), one_rank, options=EAGER)
    model(torch.randn(2, 3)).sum().backward()
    copied = copy.deepcopy(model)
    assert model.weight.grad is not None
    assert [parameter.grad for parameter in copied.parameters()] == [None, None]


def test_a_recurrent_layer_of_the_input_is_its_products(one_rank: DeviceMesh) -> None:
    """Train an LSTM in float32 whose input needs no gradient, for which torch would take oneDNN's kernel."""
    model, x = nn.LSTM(3, 4, batch_first=True), torch.randn(2, 5, 3)
    sharded = autoshard(copy.deepcopy(model), one_rank, (x,), options=EAGER)
    for one in (sharded, model):
        one(x)[0].square().sum().backward()
    for got, want in zip(sharded.parameters(), model.parameters(), strict=True):
        assert isinstance(got.grad, DTensor) and want.grad is not None
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)


def test_a_copy_of_a_recurrent_model_has_no_parameters_of_the_model() -> None:
    """An LSTM holds its parameters in a list as well; a later program is captured from the copy."""
    model = nn.LSTM(3, 4)
    copied = plain_copy(model)
    assert all(parameter.is_meta for parameter in copied.parameters())
    assert [id(one) for one in copied._flat_weights] == [id(one) for one in copied.parameters()]


def test_a_module_that_holds_a_sharded_one_is_not_wrapped_either(one_rank: DeviceMesh) -> None:
    holder = nn.Sequential(nn.Sequential(autoshard(nn.Linear(2, 2), one_rank)), nn.Linear(2, 2))
    assert len(list(holder.named_parameters())) == 4
    squares = torch.compile(lambda: sum(one.square().sum() for one in holder[0].parameters()), backend="eager", fullgraph=True)
    assert squares() > 0
    with pytest.raises(UserError) as caught:
        nn.parallel.DistributedDataParallel(holder)
    assert str(caught.value) == (
        "a sharded model must not be wrapped in DistributedDataParallel, by itself or in another module: its gradients are those "
        "of the global batch already; use it as it is (with accelerate, prepare optimizer and data alone; with Lightning, give "
        "Trainer(strategy=ModelParallelStrategy(...)); transformers.Trainer counts on a loss per process: write the loop)"
    )


@pytest.mark.parametrize("now", [False, True])
def test_hooks_of_gradients_run_on_the_copy(one_rank: DeviceMesh, now: bool) -> None:
    torch.manual_seed(0)
    model, seen = Tied().eval(), list[Tensor]()
    model.embedding.weight.register_hook(lambda gradient: gradient * 3)
    model.embedding.weight.register_post_accumulate_grad_hook(seen.append)
    model.scale.requires_grad_(True).register_hook(lambda gradient: gradient * 2)
    model.scale.requires_grad_(False)
    sharded: Any = autoshard(model, one_rank, batch() if now else None, options=EAGER)
    assert not sharded.scale.requires_grad
    for one in (model, sharded):
        one.scale.requires_grad_(True)
        one(*batch())["loss"].backward()
        assert seen.pop() is one.embedding.weight and not seen
    for mine, given in ((sharded.embedding.weight, model.embedding.weight), (sharded.scale, model.scale)):
        torch.testing.assert_close(mine.grad.full_tensor(), given.grad)
