"""A captured graph computes what the module computes, and says what each of its ends is."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoshard.capture.capture import Captured, capture
from passes._torch import fake_mode, is_fake
from passes.ir.graph import (
    InputRole,
    Output,
    OutputRole,
    Stage,
    origin_of,
    region_of,
    results_of,
    stage_of,
    value_of,
)
from tests.capture.comparing import check, compare, names_in, names_of, nodes_in, run
from tests.models import MODELS, build

LOG = logging.getLogger(__name__)

MASK = torch.tensor([1.0, 0.0, 2.0, 1.0], dtype=torch.float64)


@functools.cache
def captured_model(name: str) -> Captured:
    """Return the joint graph of one of `MODELS`; captured once for all tests that only look."""
    case = build(name)
    return capture(case.model, case.args, case.kwargs, training=True)


def ops_of(captured: Captured) -> list[str]:
    return [str(node.target) for node in captured.graph_module.graph.nodes if node.op == "call_function"]


def doubles(*shape: int, seed: int = 0, requires_grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_(requires_grad)


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(doubles(*parameter.shape, seed=number) / inputs)
    return layer


# Numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MODELS if "dropout" not in name])
def test_joint_graph_computes_what_the_model_computes(name: str) -> None:
    case = build(name)
    compare(captured_model(name), case.model, case.args, case.kwargs, training=True)


@pytest.mark.parametrize(("name", "training"), [("gpt_dropout", True), ("conv_net", True), ("encoder", False)])
def test_eval_mode_is_captured_as_it_is(name: str, training: bool) -> None:
    case = build(name)
    check(case.model.eval(), *case.args, training=training, **case.kwargs)


@pytest.mark.parametrize("name", ["llama", "conv_net", "structured"])
def test_forward_only_computes_what_the_model_computes(name: str) -> None:
    case = build(name)
    captured = check(case.model, *case.args, training=False, **case.kwargs)
    assert not nodes_in(captured, InputRole.TANGENT)


class HandLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = linear(3 + 4, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = cell = x.new_zeros(x.shape[0], 4)
        for step in x.unbind(1):
            i, f, g, o = self.gates(torch.cat([step, hidden], 1)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        return hidden, cell


class MaskedEinsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = linear(6, 18)
        self.register_buffer("causal", torch.ones(5, 5, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 3)) for part in self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).masked_fill(~self.causal, float("-inf"))
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        HandLSTM(),
        MaskedEinsum(),
        nn.Sequential(linear(6, 4), nn.GELU(), linear(4, 2)),
        nn.LSTM(6, 4, batch_first=True, dtype=torch.float64),
        nn.Transformer(6, 2, 1, 1, 8, dropout=0.0, batch_first=True, dtype=torch.float64).encoder,
    ],
    ids=lambda model: type(model).__name__,
)
def test_unusual_models_compute_what_they_compute(model: nn.Module) -> None:
    x = doubles(2, 5, 3 if isinstance(model, HandLSTM) else 6)
    check(model, x)
    check(copy.deepcopy(model).eval(), x, training=False)


def test_hooks_are_part_of_the_graph() -> None:
    model = nn.Sequential(linear(3, 3), linear(3, 2))
    model[0].register_forward_hook(lambda module, args, result: result * 2)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    check(model, doubles(4, 3))


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x)


def test_autocast_becomes_casts() -> None:
    captured = capture(Autocast(), (torch.ones(2, 4),), training=True)
    (mm,) = (n for n in captured.graph_module.graph.nodes if str(n.target) == "aten.addmm.default")
    assert value_of(mm).dtype is torch.bfloat16
    assert all(
        result.dtype is torch.float32 for n in nodes_in(captured, InputRole.PARAMETER) for result in results_of(n)
    )


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(3, 5), linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.down(self.up(y).relu()), x, use_reentrant=False).sum()


def test_checkpointed_nodes_are_marked_for_recomputation() -> None:
    captured = check(Checkpointed(), doubles(4, 3))
    regions = {node: region_of(node) for node in captured.graph_module.graph.nodes if region_of(node) is not None}
    assert {origin_of(node).fqn for node in regions} >= {"up", "down"} and set(regions.values()) == {0}
    assert not any("recompute" in node.meta for node in captured.graph_module.graph.nodes)


def test_dropout_stays_a_random_op() -> None:
    captured = capture(nn.Sequential(linear(3, 3), nn.Dropout(0.5)), (doubles(4, 3),), training=True)
    assert "aten.rand.default" in ops_of(captured)
    assert not [op for op in ops_of(captured) if "seed" in op or "philox" in op or "inductor" in op]


@pytest.mark.parametrize("name", ["gpt", "llama", "llama_gqa"])
def test_attention_stays_whole(name: str) -> None:
    ops = ops_of(captured_model(name))
    layers = ops.count("aten._scaled_dot_product_flash_attention_for_cpu.default")
    assert layers > 0
    assert ops.count("aten._scaled_dot_product_flash_attention_for_cpu_backward.default") == layers


# Parameters and buffers -----------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, dtype=torch.float64)
        self.middle = linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.middle(self.embed(tokens))), labels)


def test_tied_parameters_are_one_placeholder_with_one_gradient() -> None:
    tokens = torch.arange(5)
    captured = check(Tied(), tokens, tokens)
    assert captured.parameters == ("embed.weight", "middle.weight", "middle.bias")
    assert captured.tied == {"head.weight": "embed.weight"}
    assert names_in(captured, InputRole.PARAMETER) == list(captured.parameters)
    assert names_of(captured, OutputRole.GRADIENT) == list(captured.parameters)


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = linear(3, 3), linear(3, 3)
        self.frozen = linear(3, 3).requires_grad_(requires_grad=False)
        self.register_buffer("idle", torch.ones(2))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.frozen(self.used(x))


def test_unused_parameters_have_gradient_none_and_frozen_ones_have_none_at_all() -> None:
    captured = check(Partly(), doubles(4, 3), doubles(2, 2))
    assert names_in(captured, InputRole.PARAMETER) == [
        "used.weight",
        "used.bias",
        "unused.weight",
        "unused.bias",
        "frozen.weight",
        "frozen.bias",
    ]
    assert names_in(captured, InputRole.BUFFER) == ["idle"]
    assert names_in(captured, InputRole.INPUT) == ["x", "other"]
    assert names_of(captured, OutputRole.GRADIENT) == ["used.weight", "used.bias", "unused.weight", "unused.bias"]


def test_nothing_to_train_gives_the_forward_alone() -> None:
    captured = check(linear(3, 2).requires_grad_(requires_grad=False), doubles(4, 3))
    assert names_of(captured, OutputRole.GRADIENT) == []


class Counting(nn.Module):
    steps: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(3, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        self.average[1:].mul_(0.9).add_(x.detach().mean(0)[1:], alpha=0.1)
        return self.norm(x)


@pytest.mark.parametrize("training", [True, False])
def test_changed_buffers_are_results(training: bool) -> None:
    captured = check(Counting(), doubles(4, 3), training=training)
    assert set(names_of(captured, OutputRole.BUFFER)) == {
        "steps",
        "average",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(4, 4)
        self.scale = doubles(4, seed=3)
        self.table = {"shift": [doubles(4, seed=4)]}

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.scale + self.table["shift"][0] + MASK
        return y * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)


def test_tensors_that_are_no_buffers_are_constants() -> None:
    model = Constants()
    captured = check(model, doubles(2, 4))
    assert names_in(captured, InputRole.BUFFER) == ["scale", "table.shift.0", "MASK", "constant_0"]
    assert captured.constants["scale"] is model.scale
    assert captured.constants["MASK"] is MASK
    assert not is_fake(captured.constants["constant_0"])
    assert not captured.graph_module.graph.find_nodes(op="get_attr")


class Joining(nn.Module):
    """Joins what `values` makes of the input along its rows."""

    def __init__(self, values: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.layer, self.values = linear(4, 4), values

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.values(self.layer(x)), dim=-2).sum(dim=-2)


EMPTY = torch.tensor([], dtype=torch.float64)


def _changed_in_place(h: Tensor) -> list[Tensor]:
    h = h.sin()
    h.mul_(2.0)
    return [torch.tensor([], dtype=h.dtype), h]


@pytest.mark.parametrize(
    ("values", "joined"),
    [
        (lambda h: [torch.tensor([], dtype=h.dtype), h], []),
        (lambda h: [h, torch.tensor([], dtype=h.dtype), h.sin()], [2]),
        (lambda h: [torch.tensor([], dtype=h.dtype), h.transpose(0, 1)], []),  # gets strides of its own
        (lambda h: [torch.zeros(0, 4, dtype=h.dtype), h], [2]),  # has dims
        (lambda h: [torch.tensor([], dtype=h.dtype), h.float()], [2]),  # makes it of another dtype
        (_changed_in_place, []),
        (lambda h: [EMPTY, h], [2]),  # is an input of the graph
    ],
)
def test_tensors_without_values_are_not_joined(values: Callable[[Tensor], list[Tensor]], joined: list[int]) -> None:
    captured = check(Joining(values), doubles(4, 4))
    cats = captured.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert [len(node.args[0]) for node in cats] == joined


def test_a_literal_number_is_a_call() -> None:
    captured = check(Joining(lambda h: [h * torch.tensor(0.1, dtype=torch.float64) + torch.tensor(2)]), doubles(4, 4))
    assert captured.constants == {}
    full = captured.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)
    assert [node.args for node in full] == [([], 0.1), ([], 2)]


# Calls ----------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    tokens: Tensor
    mask: Tensor | None


@dataclasses.dataclass
class Extra:
    left: Tensor
    right: Tensor


torch.export.register_dataclass(Extra)


class Result(dict[str, Any]):
    """A dict that is its own pytree node and names no keys there, as the outputs of Hugging Face's models are."""


torch.utils._pytree.register_pytree_node(
    Result,
    lambda result: (list(result.values()), list(result)),
    lambda values, keys: Result(zip(keys, values, strict=True)),
)


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(3, 3)

    def forward(
        self,
        batch: Batch,
        extra: Extra,
        scale: float = 2.0,
        *more: Any,
        flip: bool = False,
        mode: str = "sum",
        note: str | None = None,
        **named: Any,
    ) -> Any:
        y = self.layer(batch.tokens) * scale + extra.left
        for tensor in more:
            y = y - tensor
        for tensors in named.values():
            y = y + tensors["bias"]
        if flip:
            y = y.flip(0)
        loss = y.sum() if mode == "sum" else y.mean()
        return {"loss": loss, "parts": [y, (None, y.argmax(1))], "scale": scale, "mode": mode}


def call_arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = (Batch(doubles(4, 3), None), Extra(doubles(4, 3, seed=1), doubles(1)), 3.0, doubles(3, seed=2))
    return args, {"flip": True, "other": {"bias": doubles(3, seed=3)}}


def test_every_leaf_of_a_call_has_a_path() -> None:
    args, kwargs = call_arguments()
    captured = check(Calls(), *args, **kwargs)
    assert names_in(captured, InputRole.INPUT) == ["batch.tokens", "extra.left", "extra.right", "more.0", "other.bias"]
    assert captured.signature.constants == (
        ("batch.mask", None),
        ("scale", 3.0),
        ("flip", True),
        ("mode", "sum"),
        ("note", None),
    )
    assert captured.signature.outputs == ("loss", "parts.0", "parts.1.1")
    assert names_in(captured, InputRole.TANGENT) == ["loss", "parts.0"]


def test_inputs_say_global_shape_and_dtype() -> None:
    args, kwargs = call_arguments()
    captured = capture(Calls(), args, kwargs, training=True)
    spec = captured.signature.inputs[0]
    assert (spec.path, spec.shape, spec.dtype) == ("batch.tokens", (4, 3), torch.float64)
    assert str(spec) == "batch.tokens: float64[4, 3]"


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: dict[str, Tensor], scale: float = 2.0) -> Result:
        return Result(z=x * y["a"] - y["b"] * scale, none=None)


def test_a_call_may_be_written_in_other_ways() -> None:
    x, a, b = doubles(2), doubles(2), doubles(2)
    captured = check(TwoInputs(), x, {"a": a, "b": b})
    for args, kwargs in (
        ((x, {"b": b, "a": a}), {}),
        ((), {"y": {"a": a, "b": b}, "x": x}),
        ((x, {"a": a, "b": b}, 2.0), {}),
        ((x,), {"scale": 2.0, "y": {"a": a, "b": b}}),
    ):
        assert all(
            given is flat for given, flat in zip((x, a, b), captured.signature.flatten(args, kwargs), strict=True)
        )
    assert captured.signature.outputs == ("z",)
    assert captured.signature.unflatten([x]) == {"z": x, "none": None}
    assert type(captured.signature.unflatten([x])) is Result


def test_the_same_tensor_twice_is_two_inputs() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * y

    x = doubles(3)
    captured = capture(Product(), (x, x), training=True)
    (product,) = run(captured, Product(), (x, x + 1), {}, {}).values()
    torch.testing.assert_close(product, x * (x + 1))


def test_inputs_get_gradients_on_request() -> None:
    x, w = doubles(2, 3, requires_grad=True), doubles(3, 3)
    captured = check(linear(3, 3), x)
    assert names_of(captured, OutputRole.GRADIENT) == ["weight", "bias", "input:input"]
    tangent = doubles(2, 3, seed=5)
    model = linear(3, 3)
    results = run(captured, model, (x,), {}, {"output": tangent})
    torch.testing.assert_close(results[Output(OutputRole.GRADIENT, "input:input")], tangent @ model.weight)
    assert capture(linear(3, 3), (w,), training=True).signature.inputs[0].requires_grad is False


class Aliases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.layer(x)
        return {"x": x, "xt": x.t(), "weight": self.layer.weight, "y": y, "again": y, "row": y[0], "ids": y.argmax(1)}


def test_outputs_may_be_inputs_parameters_views_or_twice_the_same() -> None:
    captured = check(Aliases(), doubles(2, 3))
    assert names_in(captured, InputRole.TANGENT) == ["weight", "y", "row"]  # "again" is "y"
    results = captured.graph_module.graph.output_node().args[0]
    assert len(set(results)) == len(results), "autograd needs a result per output"


def test_a_plain_output_is_not_copied() -> None:
    captured = capture(linear(3, 2), (doubles(4, 3),), training=True)
    assert "aten.clone.default" not in ops_of(captured)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_computes_nothing_is_captured(training: bool) -> None:
    check(nn.Identity(), doubles(2, 3), training=training)


# Tracing --------------------------------------------------------------------------------------------------------


def test_model_arguments_and_torch_are_left_as_they_were() -> None:
    case = build("conv_net")
    parameters = {name: (id(p), p.detach().clone()) for name, p in case.model.named_parameters()}
    buffers = {name: (id(b), b.clone()) for name, b in case.model.named_buffers()}
    modules = [(id(module), module.training) for module in case.model.modules()]
    rng, dtype = torch.get_rng_state(), torch.get_default_dtype()
    with torch.no_grad():
        captured = capture(case.model, case.args, case.kwargs, training=True)
        assert not torch.is_grad_enabled()
    assert names_of(captured, OutputRole.GRADIENT), "training does not depend on the caller's grad mode"
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.get_default_dtype() is dtype
    assert [(id(module), module.training) for module in case.model.modules()] == modules
    for name, tensor in (*case.model.named_parameters(), *case.model.named_buffers()):
        number, value = (parameters | buffers)[name]
        assert id(tensor) == number
        assert torch.equal(tensor, value)
    assert all(p.grad is None for p in case.model.parameters())
    assert not is_fake(torch.ones(2)), "a fake mode was left open"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "structured"])
def test_meta_fake_and_real_modules_give_the_same_graph(name: str) -> None:
    graphs = []
    for place in (torch.device("cpu"), torch.device("meta"), fake_mode()):
        with place:
            case = MODELS[name]()
        captured = capture(case.model, case.args, case.kwargs, training=True)
        assert captured.tied == captured_model(name).tied
        graphs.append(captured.graph_module.code)
    assert graphs[0] == graphs[1] == graphs[2]


def test_values_are_fake_with_static_shapes() -> None:
    captured = captured_model("gpt")
    assert stage_of(captured.graph_module) is Stage.CAPTURED
    for node in captured.graph_module.graph.nodes:
        if node.op != "output":
            assert all(is_fake(result) for result in results_of(node))
            assert all(type(size) is int for result in results_of(node) for size in result.shape)


def test_another_shape_gives_another_static_graph() -> None:
    model = linear(3, 2)
    first, second, third = (capture(model, (doubles(size, 3),), training=True) for size in (4, 5, 4))
    assert first.graph_module.code == third.graph_module.code
    (shape,) = {tuple(result.shape) for n in nodes_in(second, InputRole.INPUT) for result in results_of(n)}
    assert shape == (5, 3)


def test_many_captures_of_one_model_work() -> None:
    model = linear(3, 2)
    for size in range(2, 14):
        assert capture(model, (doubles(size, 3),), training=True).signature.inputs[0].shape == (size, 3)


def test_a_captured_graph_is_the_same_every_time() -> None:
    case = build("structured")
    again = capture(case.model, case.args, case.kwargs, training=True)
    assert again.graph_module.code == captured_model("structured").graph_module.code


def issued(group: dist.ProcessGroup) -> int:
    return group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # torch has no stub of it


def test_capture_in_a_process_group_issues_no_collective() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # not in an __all__
    try:
        group = dist.group.WORLD
        assert group is not None
        dist.barrier()
        before = issued(group)
        capture(linear(3, 2), (doubles(4, 3),), training=True)
        assert issued(group) == before
        dist.barrier()
        assert issued(group) == before + 1, "a collective would have been counted"
    finally:
        dist.destroy_process_group()


# Origins --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_node_knows_its_source_line(name: str) -> None:
    graph = captured_model(name).graph_module.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert {origin_of(node).file.rpartition("/")[2] for node in calls} == {"models.py"}
    assert all(origin_of(node).line > 0 and origin_of(node).source for node in calls)


def test_origins_name_modules_as_the_user_does() -> None:
    captured = capture(Checkpointed(), (doubles(4, 3),), training=True)
    found = {
        (origin_of(node).fqn, origin_of(node).source)
        for node in captured.graph_module.graph.nodes
        if str(node.target) in ("aten.addmm.default", "aten.mm.default")
    }
    line = "return checkpoint(lambda y: self.down(self.up(y).relu()), x, use_reentrant=False).sum()"
    assert found == {("up", line), ("down", line)}


def test_modules_in_lists_and_repeated_calls_keep_their_names() -> None:
    block = linear(3, 3)
    captured = capture(
        nn.ModuleDict({"a": nn.Sequential(block, nn.Tanh(), block)})["a"], (doubles(2, 3),), training=True
    )
    fqns = [origin_of(n).fqn for n in captured.graph_module.graph.nodes if str(n.target) == "aten.addmm.default"]
    assert fqns == ["0", "0"]


def test_strides_of_the_examples_are_no_part_of_a_capture() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(-1) * 2

    x = doubles(4, 6)
    graphs = [capture(Flat(), (example,), training=True).graph_module.code for example in (x[:, :3], x[:, :3].clone())]
    assert graphs[0] == graphs[1]


def test_a_compute_dtype_is_the_graphs_and_not_the_callers() -> None:
    captured = capture(linear(3, 2), (doubles(4, 3),), training=True, compute_dtype=torch.bfloat16)
    assert captured.signature.inputs[0].dtype is torch.float64
    for node in nodes_in(captured):
        assert value_of(node).dtype is torch.bfloat16


class Flag:
    def __init__(self) -> None:
        self.active: bool | None = None


class Flagged(nn.Module):
    """Sets a flag while it runs, as libraries do to collect outputs, and resets it."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Flag()
        self.linear = linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.state.active = True
        y = self.linear(x)
        self.state.active = None
        return y.sum()


def test_a_flag_that_is_reset_is_no_change() -> None:
    assert capture(Flagged(), (doubles(4, 3),), training=True).signature.outputs == ("output",)


class Inner(nn.Module):
    """Calls a module with other values of its parameters, which torch swaps for the time of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, 1))
        self.rate = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scaled = {name: value * self.rate for name, value in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, scaled, (x,)).sum()


class CachedWeight(nn.Module):
    """Computes a parametrized weight once, in a cache of torch's that is dropped afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        with nn.utils.parametrize.cached():
            return self.layer(self.layer(x)).sum()


@pytest.mark.parametrize("model", [Inner(), CachedWeight()], ids=lambda model: type(model).__name__)
def test_what_torch_swaps_and_puts_back_is_no_change(model: nn.Module) -> None:
    check(model, doubles(4, 3))


# Python beside the tensors -----------------------------------------------------------------------------------------


class Config:
    problem: str | None = None
    calls: int = 0


class Configured(nn.Module):
    """Writes to a log, and sets what its config leaves open, as models of public libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.config = nn.Linear(3, 2, dtype=torch.float64), Config()

    def forward(self, x: Tensor) -> Tensor:
        if self.config.problem is None:
            self.config.problem = "regression"
        LOG.warning("called with %s", x.shape)
        with torch.no_grad():
            scale = x.abs().amax()
        return self.layer(x / scale)


class CountsInConfig(Configured):
    def forward(self, x: Tensor) -> Tensor:
        self.config.calls += 1
        return self.layer(x)


def test_a_flag_that_the_first_call_sets_is_no_obstacle() -> None:
    model = Configured()
    captured = capture(model, (doubles(4, 3),), training=True)
    assert captured.signature.outputs == ("output",)
    assert vars(model.config) == {}, "the user's module is left as it was"


def test_a_config_that_every_call_changes_is_left_alone() -> None:
    model = CountsInConfig()
    captured = capture(model, (doubles(4, 3),), training=True)
    assert [change.added_paths for change in captured.call.new_values.changes] == [(("calls", "config.calls"),)]
    assert vars(model.config) == {}
