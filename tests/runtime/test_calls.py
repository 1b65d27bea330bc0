"""One model, many calls: a program per kind of call, over one set of parameters, on a mesh of one rank."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard import Bucket, InputError, Options, ShardedModule, UserError, autoshard
from autoshard.capture.signature import InputSpec
from autoshard.runtime.call_inputs import LocalInput
from autoshard.runtime.parameters import place_of
from passes.ir.layout import replicated

EAGER = Options(recipe="fsdp", compile="eager")


class Classifier(nn.Module):
    """Logits, or a loss if there are labels; `scale` is a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> Tensor:
        logits = self.head(self.dropout(self.embedding(tokens))) * scale
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def sharded_of(mesh: DeviceMesh, options: Options = EAGER) -> tuple[Classifier, Any]:
    torch.manual_seed(0)
    model = Classifier().eval()
    return model, autoshard(model, mesh, options=options)


def tokens(batch: int, length: int) -> Tensor:
    return torch.arange(batch * length).reshape(batch, length) % 11


@pytest.mark.slow
def test_every_kind_of_call_has_a_program_of_its_own(one_rank: DeviceMesh) -> None:
    model, sharded = sharded_of(one_rank)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((tokens(4, 5), tokens(4, 5)), {}),
        ((tokens(3, 5), tokens(3, 5)), {}),  # a smaller last batch
        ((tokens(4, 7), tokens(4, 7)), {}),  # a longer sequence
        ((tokens(4, 5),), {}),  # no labels
        ((tokens(4, 5),), {"scale": 2.0}),  # another number
        ((tokens(4, 5).int(),), {}),  # another dtype
    ]
    for args, kwargs in calls * 2:
        torch.testing.assert_close(sharded(*args, **kwargs), model(*args, **kwargs))
    assert len(sharded.programs) == len(calls)
    with torch.no_grad():
        torch.testing.assert_close(sharded(tokens(4, 5)), model(tokens(4, 5)))
    assert sharded.programs[-1].call == "evaluation without gradients, tokens: int64[4, 5]"


def test_gradients_of_several_programs_add_up(one_rank: DeviceMesh) -> None:
    model, sharded = sharded_of(one_rank)
    for batch in (4, 3):
        for one in (sharded, model):
            one(tokens(batch, 5), labels=tokens(batch, 5)).backward()
    torch.testing.assert_close(sharded.head.weight.grad.full_tensor(), model.head.weight.grad)


def test_a_call_by_position_and_one_by_name_are_of_one_kind(one_rank: DeviceMesh) -> None:
    _, sharded = sharded_of(one_rank)
    sharded(tokens(4, 5), tokens(4, 5))
    sharded(labels=tokens(4, 5), tokens=tokens(4, 5))
    sharded(tokens(4, 5), tokens(4, 5), 1.0)
    assert len(sharded.programs) == 1


def test_a_program_made_ahead_serves_the_first_call(one_rank: DeviceMesh) -> None:
    model = Classifier().eval()
    sharded: Any = autoshard(model, one_rank, (tokens(4, 5),), options=EAGER)
    torch.testing.assert_close(sharded(tokens(4, 5)), model(tokens(4, 5)))
    assert [program.call for program in sharded.programs] == ["evaluation, global tokens: int64[4, 5]"]


def test_autocast_is_a_mode(one_rank: DeviceMesh) -> None:
    model, sharded = sharded_of(one_rank)
    sharded(tokens(4, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sharded(tokens(4, 5)).dtype is model(tokens(4, 5)).dtype is torch.bfloat16
    assert sharded(tokens(4, 5)).dtype is torch.float32


class Guarded(nn.Module):
    """Leaves autocast for its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16, bias=False), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        with torch.autocast("cpu", enabled=False):
            out: Tensor = self.last(h.float())
        return out


def test_a_part_that_leaves_autocast_is_not_cast_again(one_rank: DeviceMesh) -> None:
    model = Guarded()
    sharded: Any = autoshard(model, one_rank, options=EAGER)
    x = torch.randn(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = sharded(x), model(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for each in (found, expected):
        each.square().sum().backward()
    torch.testing.assert_close(sharded.last.weight.grad.full_tensor(), model.last.weight.grad, rtol=0, atol=1e-5)


def test_a_backward_under_autocast_is_not_cast(one_rank: DeviceMesh) -> None:
    model = nn.Linear(8, 4)
    sharded: Any = autoshard(model, one_rank, options=EAGER)
    x = torch.randn(8, 8, requires_grad=True)
    sharded(x).square().sum().backward()
    found, x.grad = x.grad, None
    loss = sharded(x).square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    torch.testing.assert_close(x.grad, found, rtol=0, atol=0)


class Scaled(TorchFunctionMode):
    """Scales what a tanh gives, of the model or of a graph."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * self.factor if "tanh" in str(function) else result


class Squashed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


def test_a_function_mode_is_a_mode_and_is_asked_once(one_rank: DeviceMesh) -> None:
    model, x = Squashed(8, 4), torch.randn(8, 8)
    sharded: Any = autoshard(model, one_rank, options=EAGER)
    for factor in (2.0, 3.0, 2.0):
        with Scaled(factor):
            torch.testing.assert_close(sharded(x), model(x))
        torch.testing.assert_close(sharded(x), model(x))
    assert len(sharded.programs) == 3


def test_the_default_device_is_no_mode(one_rank: DeviceMesh) -> None:
    _, sharded = sharded_of(one_rank)
    sharded(tokens(4, 5))
    with torch.device("cpu"):
        sharded(tokens(4, 5))
    assert len(sharded.programs) == 1


class Doubled(TorchDispatchMode):
    """Doubles what a tanh gives, and counts products."""

    products = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += op is torch.ops.aten.mm.default or op is torch.ops.aten.addmm.default
        result = op(*args, **(kwargs or {}))
        return result * 2 if op is torch.ops.aten.tanh.default else result


@pytest.mark.parametrize("args", [(), (torch.ones(8, 8),)])
def test_a_dispatch_mode_sees_the_run_of_a_program_alone(one_rank: DeviceMesh, args: Any) -> None:
    model, x = Squashed(8, 4), torch.randn(8, 8)
    with Doubled() as mode:
        sharded: Any = autoshard(model, one_rank, args or None, options=EAGER)
        torch.testing.assert_close(sharded(x), model(x))
    assert mode.products == 2
    torch.testing.assert_close(sharded(x), model(x))


def test_a_model_is_sharded_in_inference_mode(one_rank: DeviceMesh) -> None:
    model, x = Squashed(8, 4), torch.randn(8, 8)
    with torch.inference_mode():
        sharded: Any = autoshard(model, one_rank, (torch.ones(8, 8),), options=EAGER)
    for each in (sharded, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(x).sum().backward()
            optimizer.step()
    torch.testing.assert_close(sharded.weight.grad.full_tensor(), model.weight.grad)


@pytest.mark.parametrize("convert", [nn.Module.bfloat16, nn.Module.double, nn.Module.float])
def test_a_model_is_converted_after_an_optimizer_stepped(one_rank: DeviceMesh, convert: Any) -> None:
    model = nn.Linear(8, 4)
    sharded: Any = autoshard(model, one_rank, options=EAGER)
    x = torch.randn(8, 8)
    for each in (model, sharded):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        convert(each)
        each(x.to(each.weight.dtype)).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(sharded.weight.full_tensor(), model.weight)


class Programmed(nn.Linear):
    """Has a method by a name that a sharded model has."""

    def programs(self) -> int:
        return 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.programs()


def test_a_method_that_the_sharded_model_hides_is_warned_of(one_rank: DeviceMesh) -> None:
    model, x = Programmed(4, 4), torch.ones(2, 4)
    text = (
        "Programmed.programs is hidden by what the sharded model has under that name; rename it to use it outside of the "
        "model's forward"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        sharded = autoshard(model, one_rank, options=EAGER)
    torch.testing.assert_close(sharded(x), model(x))


def test_what_torch_compile_sets_is_no_change(one_rank: DeviceMesh) -> None:
    sharded, x = autoshard(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), one_rank, options=EAGER), torch.ones(2, 4)
    expected = sharded(x)
    torch.testing.assert_close(torch.compile(sharded, backend="eager")(x), expected)
    sharded.compile(backend="eager")
    torch.testing.assert_close(sharded(x), expected)
    assert len(sharded.programs) == 1


def test_the_seconds_of_a_program_are_told(one_rank: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    _, sharded = sharded_of(one_rank)
    with caplog.at_level(logging.INFO, "autoshard.programs"):
        sharded(tokens(4, 5))
    assert [record.getMessage() for record in caplog.records if record.name == "autoshard.programs"] == [
        f"program 1: {sharded.programs[0]}"
    ]
    assert sharded.programs[0].seconds > 0


def test_the_number_of_programs_is_limited(one_rank: DeviceMesh) -> None:
    _, sharded = sharded_of(one_rank, Options(recipe="fsdp", compile="eager", max_programs=2))
    sharded(tokens(4, 5))
    sharded(tokens(4, 6))
    with pytest.raises(UserError) as caught:
        sharded(tokens(4, 7))
    made = "".join(f"\n  {program}" for program in sharded.programs)
    assert str(caught.value) == (
        "the call (evaluation, tokens: int64[4, 7]) needs a program of its own, and the model "
        "has 2, as many as Options(max_programs=2) allows; pad inputs to few sizes with Options(buckets=...), pass "
        f"numbers that change as tensors, or allow more. The last programs:{made}"
    )
    assert sharded(tokens(4, 5)).shape == (4, 5, 11)


def test_buckets_make_one_program_of_many_sizes(one_rank: DeviceMesh) -> None:
    buckets = {"*": Bucket(1, (8, 16), fill=0), "labels": Bucket(-1, (16, 8), fill=-100)}
    model, sharded = sharded_of(one_rank, Options(recipe="fsdp", compile="eager", buckets=buckets))
    for length in (5, 7, 8):
        args = tokens(4, length), tokens(4, length)
        torch.testing.assert_close(sharded(*args), model(*args))
    assert len(sharded.programs) == 1
    assert sharded(tokens(2, 20)).shape == (2, 20, 11)
    assert sharded(tokens(2, 9)).shape == (2, 16, 11)


def test_a_bucket_for_a_dim_that_is_not_there(one_rank: DeviceMesh) -> None:
    _, sharded = sharded_of(one_rank, Options(recipe="fsdp", compile="eager", buckets={"tokens": Bucket(2, (8,), fill=0)}))
    with pytest.raises(InputError) as caught:
        sharded(tokens(4, 5))
    assert str(caught.value) == (
        "Options(buckets=...) pads dim 2 of tokens, which is int64[4, 5]; give one of its dims"
    )


@pytest.mark.parametrize("fill", [1.5, float("nan"), 2**70])
def test_a_bucket_whose_fill_is_no_such_integer(one_rank: DeviceMesh, fill: float) -> None:
    _, sharded = sharded_of(one_rank, Options(recipe="fsdp", compile="eager", buckets={"tokens": Bucket(1, (8,), fill=fill)}))
    with pytest.raises(InputError) as caught:
        sharded(tokens(4, 5))
    assert str(caught.value) == (
        f"Options(buckets=...) fills tokens with {fill}, which int64[4, 5] cannot hold; give a whole number from "
        "-9223372036854775808 to 9223372036854775807"
    )


@pytest.mark.parametrize("unknown", ["tokenz", "other*", "token.0"])
def test_a_bucket_for_an_argument_that_is_not_there(one_rank: DeviceMesh, unknown: str) -> None:
    fine = {name: Bucket(1, (8,), fill=0) for name in ("tok*", "*.inside", "labels.0", "?abels")}
    sharded_of(one_rank, Options(recipe="fsdp", compile="eager", buckets=fine))
    with pytest.raises(InputError) as caught:
        sharded_of(one_rank, Options(recipe="fsdp", compile="eager", buckets={unknown: Bucket(1, (8,), fill=0)}))
    names = "'tokens', 'labels', 'scale'" if unknown == "other*" else "'tokens'"
    assert str(caught.value) == (
        f"Options(buckets=...): {unknown!r} matches no argument of Classifier.forward; names look like {names}"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: Bucket(1, (), fill=0), "Bucket(sizes=()): give sizes above 0 in a tuple, such as (128, 256)"),
        (lambda: Bucket("1", (8,), fill=0), "Bucket(dim='1'): give a dim, such as 1"),
        (lambda: Bucket(True, (8,), fill=0), "Bucket(dim=True): give a dim, such as 1"),
        (lambda: Bucket(1, (True,), fill=0), "Bucket(sizes=(True,)): give sizes above 0 in a tuple, such as (128, 256)"),
        (lambda: Bucket(1, (8,), fill=None), "Bucket(fill=None): give the number that padding has, such as -100"),
        (
            lambda: Options(buckets={"tokens": (64, 128)}),  # type: ignore[dict-item]
            "Options(buckets={'tokens': (64, 128)}): give autoshard.Bucket(dim, sizes, fill) by the input's path: "
            "{'tokens': Bucket(1, (128, 256), fill=0)}",
        ),
        (lambda: Options(max_programs=-1), "Options(max_programs=-1): give programs, a whole number of 1 or more"),
        (lambda: Options(max_programs=0), "Options(max_programs=0): give programs, a whole number of 1 or more"),
    ],
)
def test_options_that_cannot_be(options: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        options()
    assert str(caught.value) == message


def test_arguments_that_forward_does_not_take(one_rank: DeviceMesh) -> None:
    _, sharded = sharded_of(one_rank)
    with pytest.raises(InputError) as caught:
        sharded(tokens(4, 5), target=1)
    assert str(caught.value) == (
        "Classifier.forward(tokens: 'Tensor', labels: 'Tensor | None' = None, scale: 'float' = 1.0) -> 'Tensor' cannot be "
        "called like this: got an unexpected keyword argument 'target'"
    )


def test_a_part_of_another_shape_or_device(one_rank: DeviceMesh) -> None:
    place = place_of(one_rank)
    given = LocalInput(InputSpec("x", (4, 3), torch.float32, False), replicated(place.mesh))
    with pytest.raises(InputError) as caught:
        given.check(torch.empty(2, 3), place)
    assert str(caught.value) == (
        "input 'x' is float32[2, 3], but of float32[4, 3], {dp:R} leaves this rank float32[4, 3]; give what "
        "model.shard(...) returns"
    )
    with pytest.raises(InputError) as caught:
        given.check(torch.empty(4, 3, device="meta"), place)
    assert str(caught.value) == "input 'x' is on meta, but the mesh is on cpu; move it: .to('cpu')"


class Arguments(nn.Module):
    """A model whose result depends on how its arguments are held, and on signs of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Any, more: Any = None, scale: complex = 1.0, steps: range = range(1), **named: Tensor) -> Tensor:
        h = torch.cat([*(x.values() if isinstance(x, dict) else x), *named.values()], -1)
        kind = 3 if isinstance(more, list) else 5 if isinstance(more, dict) else 7
        h = self.head(h) * (2 if isinstance(x, tuple) else 1) * kind * steps.stop
        return h * math.copysign(1.0, scale.real)


def test_containers_the_order_of_keys_and_signs_of_zeros_tell_calls_apart(one_rank: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Arguments()
    sharded = autoshard(model, one_rank, options=EAGER)
    a, b = torch.randn(4, 2), torch.randn(4, 4)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (({"a": a, "b": b},), {}),
        (({"b": b, "a": a},), {}),
        (([a, b],), {}),
        (((a, b),), {}),
        (([a, b], []), {}),
        (([a, b], {}), {}),
        (([],), {"a": a, "b": b}),
        (([],), {"b": b, "a": a}),
        (([a, b], None, 0.0), {}),
        (([a, b], None, -0.0), {}),
        (([a, b], None, complex(-0.0)), {}),
        (([a, b], None, float("nan")), {}),
        (([a, b], None, 1.0, range(0, 3, 2)), {}),
        (([a, b], None, 1.0, range(0, 4, 2)), {}),
    ]
    for args, kwargs in calls * 2:
        torch.testing.assert_close(sharded(*args, **kwargs), model(*args, **kwargs), equal_nan=True)
    assert [program.call.removeprefix("training, ") for program in sharded.programs[3:8]] == [
        "x.0: float32[4, 2], x.1: float32[4, 4], x: tuple",
        "x.0: float32[4, 2], x.1: float32[4, 4], more: list without items",
        "x.0: float32[4, 2], x.1: float32[4, 4], more: dict without items",
        "a: float32[4, 2], b: float32[4, 4], x: list without items",
        "b: float32[4, 4], a: float32[4, 2], x: list without items",
    ]
    assert len(sharded.programs) == len(calls)


class Asks(nn.Linear):
    """A model that asks for more of its arguments than a program is told."""

    def forward(self, x: Tensor, y: Any = None) -> Tensor:
        facts = x is y, x.is_contiguous(), x.is_leaf, hasattr(x, "tag")
        return super().forward(x) * sum(2**number for number, fact in enumerate(facts) if fact)


def test_an_argument_is_a_tensor_of_its_own_contiguous_and_a_leaf(one_rank: DeviceMesh) -> None:
    model = Asks(6, 6)
    sharded = autoshard(model, one_rank, options=EAGER)
    told = F.linear(x := torch.randn(6, 6), model.weight, model.bias) * (2 + 4)
    tagged: Any = x.clone()
    tagged.tag = 1
    for args in ((x,), (x, x), (x, x.clone()), (x.t().contiguous().t(),), (tagged,)):
        torch.testing.assert_close(sharded(*args), told)
    torch.testing.assert_close(sharded(x.clone().requires_grad_() * 1), told)


class TakesAny(nn.Module):
    """A model whose `**more` may be given a name that a parameter of its forward has."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor, /, *rest: Tensor, **more: Any) -> Tensor:
        return self.head(x) + 2 * sum(rest) + 3 * more["x"] + 4 * more["rest"] * more["more"]["x"]


def test_a_named_argument_may_have_the_name_of_one_that_python_takes_by_position_only(one_rank: DeviceMesh) -> None:
    model = TakesAny()
    sharded = autoshard(model, one_rank, options=EAGER)
    x, y, named, rest, inner = torch.randn(5, 4, 6)
    more: dict[str, Any] = {"x": named, "rest": rest, "more": {"x": inner}}
    positional, shared = sharded.shard(x, y, **more)
    torch.testing.assert_close(sharded(*positional, **shared), model(x, y, **more))
    assert [*sharded.plan.inputs] == ["x", "rest.0", "more.x", "more.rest", "more.more.x"]


class NamesItsOwn(nn.Module):
    """Holds parts whose names a sharded model has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler, self.plan = nn.Sequential(Counting(6, 6)), 0
        self.programs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.plan += 1
        self.programs = [*self.programs, x.sum().detach()]
        return self.sampler(x)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_name_that_a_model_has_itself_is_its_own(one_rank: DeviceMesh) -> None:
    model = NamesItsOwn()
    sharded: Any = autoshard(model, one_rank, options=EAGER)
    for x in torch.ones(2, 6, 6):
        torch.testing.assert_close(sharded(*sharded.shard(x)), model(x))
    assert (sharded.plan, sharded.sampler[0].calls, sharded.get_submodule("sampler")) == (2, 2, sharded.sampler)
    torch.testing.assert_close(sharded.programs, model.programs)
    assert len(ShardedModule.sampler(sharded, range(4))) == 4
