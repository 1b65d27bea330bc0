"""Convolutions over a sharded sequence: neighbours exchange the positions that the kernel reaches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Options, autoshard
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from passes.ir.mesh import Mesh
from tests.models import Case
from tests.spawn import run_on_ranks
from tests.spmd.oracle import Reference, compare, relative_error

TOLERANCE = 1e-12  # relative, float64


class Speech(nn.Module):
    """Two convolutions around an activation, between linears; the second one may be of another kind."""

    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.into, self.first, self.second = nn.Linear(6, 8), nn.Conv1d(8, 8, 3, padding=2, dilation=2), second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(self.into(x).transpose(1, 2)))).square().mean()


class Causal(nn.Module):
    """A convolution with zeros before the sequence alone: padded, or longer and cut."""

    def __init__(self, kernel: int, *, cut: int = 0, before: int = 0, **how: int) -> None:
        super().__init__()
        self.conv, self.cut, self.before = nn.Conv1d(8, 8, kernel, **how), cut, before

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            return self.conv(F.pad(x, (self.before, 0)))
        return self.conv(x)[..., : -self.cut]


class StateSpace(nn.Module):
    """Tokens, a causal convolution and a gated recurrence, step by step, as Mamba has them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(17, 8), nn.Linear(8, 17)
        self.conv, self.gate = Causal(4, cut=3, padding=3, groups=8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = F.silu(self.conv(self.table(tokens).transpose(1, 2)).transpose(1, 2))
        gates, state, states = torch.sigmoid(self.gate(h)), torch.zeros_like(h[:, 0]), []
        for i in range(h.shape[1]):
            state = gates[:, i] * state + h[:, i]
            states.append(state)
        return F.cross_entropy(self.out(torch.stack(states, 1)).flatten(0, 1), labels.flatten())


def line(second: Callable[[], nn.Module]) -> Case:
    torch.manual_seed(0)
    return Case(Speech(second()).double(), (torch.randn(2, 24, 6, dtype=torch.float64),), {})


def image() -> Case:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, (5, 3), stride=2, padding=(2, 1)))
    return Case(layers.double(), (torch.randn(2, 3, 24, 24, dtype=torch.float64),), {})


CASES: dict[str, Callable[[], Case]] = {
    "symmetric": lambda: line(lambda: nn.Conv1d(8, 4, 5, padding=2)),
    "depthwise": lambda: line(lambda: nn.Conv1d(8, 8, 7, padding=3, groups=8)),
    "strided": lambda: line(lambda: nn.Conv1d(8, 4, 3, padding=1, stride=2)),
    "patches": lambda: line(lambda: nn.Conv1d(8, 4, 3, stride=3, bias=False)),
    "padded": lambda: line(lambda: Causal(4, before=3)),
    "cut": lambda: line(lambda: Causal(4, cut=3, padding=3, groups=8)),  # as Mamba has it
    "even": lambda: line(lambda: Causal(4, cut=1, padding=2)),  # as wav2vec 2.0 has it
    "dilated": lambda: line(lambda: Causal(3, cut=4, padding=4, dilation=2, bias=False)),
    "strided_causal": lambda: line(lambda: Causal(4, before=2, stride=2)),
    "image": image,
}


@cache
def reference(name: str) -> Reference:
    return Reference.of(CASES[name]())


def by_hand(name: str, hardware: str = "auto") -> Options:
    """Shard the positions of the input."""
    model = reference(name).case.model
    placed = {"input": {"cp": "S(2)"}} if isinstance(model, nn.Sequential) else {"x": {"cp": "S(1)"}}
    return Options(recipe=None, inputs=placed, hardware=hardware)


@pytest.mark.parametrize("mesh", ["cp=2", "cp=4"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_gives_the_numbers_of_one_device(name: str, mesh: str) -> None:
    ranks = reference(name).plan(mesh, by_hand(name))
    plan = ranks.planned.plan
    assert (plan.count("all_gather"), plan.count("all_to_all")) == (0, 0)
    compare(ranks.run().step, reference(name).step, TOLERANCE)


@pytest.mark.parametrize(("mesh", "recipe"), [("dp=2", "fsdp"), ("tp=2", "megatron"), ("dp=1", None)])
def test_a_causal_convolution_of_the_whole_sequence(mesh: str, recipe: str | None) -> None:
    whole = reference("even")
    ranks = whole.plan(mesh, Options(recipe=recipe))
    assert ranks.planned.plan.count("send") == 0
    compare(ranks.run().step, whole.step, TOLERANCE)


def test_the_recipe_shards_a_state_space_model() -> None:
    torch.manual_seed(0)
    whole = Reference.of(Case(StateSpace().double(), (torch.randint(17, (2, 8)), torch.randint(17, (2, 8))), {}))
    ranks = whole.plan("cp=2", Options(recipe="context"))
    plan = ranks.planned.plan
    assert [str(plan.inputs[name].layout.on(0)) for name in ("tokens", "labels")] == ["S(1)", "S(1)"]
    assert plan.count("send") > 0
    compare(ranks.run().step, whole.step, TOLERANCE)


def test_height_and_width_are_sharded_over_two_axes() -> None:
    options = Options(recipe=None, inputs={"input": {"a": "S(2)", "b": "S(3)"}})
    ranks = reference("image").plan("a=2,b=2", options)
    assert {frozenset(one.axes) for one in ranks.planned.plan.collectives if one.kind == "send"} == {frozenset("ab")}
    compare(ranks.run().step, reference("image").step, TOLERANCE)


def test_the_plan_says_what_is_sent() -> None:
    plan = reference("symmetric").plan("cp=4", by_hand("symmetric", "h100")).planned.plan
    position = 2 * 8 * 8  # bytes: f64[2, 8, 1]
    sent = [(one.what, one.bytes, one.way) for one in plan.collectives if one.kind == "send"]
    forward = ("boundary positions", 4 * position, "in 2 messages of 256 B on average")
    backward = ("gradients of boundary positions", 4 * position, "in 2 messages of 256 B on average")
    assert sent == [forward, forward, backward, backward]
    assert all(one.seconds for one in plan.collectives if one.kind == "send")


def test_a_kernel_that_reaches_beyond_the_neighbours_is_run_whole() -> None:
    torch.manual_seed(0)
    whole = Reference.of(line(lambda: nn.Conv1d(8, 4, 15, padding=7)))
    ranks = whole.plan("cp=4", Options(recipe=None, inputs={"x": {"cp": "S(1)"}}))
    assert ranks.planned.plan.count("all_gather") > 0
    compare(ranks.run().step, whole.step, TOLERANCE)


def test_blocks_of_a_sequence_are_resharded_first() -> None:
    """Neighbours in the order of the ranks are none in the sequence."""
    whole = reference("symmetric")
    ranks = whole.plan("cp=2", Options(recipe=None, inputs={"x": {"cp": "S(1/4)"}}))
    compare(ranks.run().step, whole.step, TOLERANCE)


def test_a_search_shards_the_positions_on_an_axis_for_sequences() -> None:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Conv1d(64, 64, 31, padding=15), nn.GELU()) for _ in range(3)]
        case = Case(nn.Sequential(*layers), (torch.randn(1, 64, 1 << 20),), {})
    plan = make_plan(PlanRequest(*case, Mesh("cp=4", hardware="h100"), Options(), training=True)).plan
    assert str(plan.inputs["input"].layout.on(0)) == "S(2)"
    assert plan.count("send") > 0


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_real_ranks_give_the_gradients_of_one_device(compiler: str) -> None:
    assert max(run_on_ranks(_train, 2, compiler, timeout=200)) < TOLERANCE


def _train(rank: int, compiler: Literal["eager", "inductor"]) -> float:
    """Return the relative error of the worst gradient after one step."""
    case = CASES["cut"]()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    options = Options(recipe=None, inputs={"x": {"cp": "S(1)"}}, compile=compiler)
    model = autoshard(case.model, mesh, case.args, options=options)
    model(*model.shard(*case.args)).backward()
    case.model(*case.args).backward()
    grads = {name: one.grad for name, one in case.model.named_parameters()}
    return max(relative_error(one.grad.full_tensor(), grads[name]) for name, one in model.named_parameters())
