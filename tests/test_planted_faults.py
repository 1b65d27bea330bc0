"""A fault that a pass plants is found: by `check` with the value that it spoils, by `bisect` with the pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from autoshard import Options, check
from autoshard.debug.bisection import bisect
from autoshard.phases import OverlapPasses, Passes, Phases, default_passes, inserted, replaced
from passes._torch import SEND as SEND_OP
from passes.base import Pass, PassContext
from passes.ir.graph import (
    InputRole,
    OutputRole,
    Stage,
    input_of,
    output_node,
    outputs_of,
    placeholders,
    set_value,
    value_of,
)
from passes.seed import Seed

aten = torch.ops.aten

Edit = Callable[[Graph], None]


class Model(nn.Module):
    """Attention, dropout, biases, a mean and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(12, 8)
        self.qkv, self.proj, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        x = self.tok(tokens)
        q, k, v = (one.unflatten(-1, (4, 2)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return (self.norm((x + F.dropout(self.proj(mixed), 0.25)).flatten(0, 1)) * weights).mean()


def case() -> tuple[Model, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Model().double(), (torch.randint(12, (4, 6)), torch.randn(24, 8, dtype=torch.float64))


@dataclass(frozen=True)
class Plant(Pass):
    """Edit the program of one device."""

    edit: Edit
    name: ClassVar[str] = "plant"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.CAPTURED

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        self.edit(gm.graph)
        return True


@dataclass(frozen=True)
class PlantLocal(Plant):
    """Edit the program of a rank."""

    name: ClassVar[str] = "plant_local"
    takes: ClassVar[Stage] = Stage.LOCAL
    gives: ClassVar[Stage] = Stage.LOCAL


def planted(edit: Edit, *, local: bool) -> Options:
    passes = Phases(Seed(("fsdp", "megatron"))).passes
    fault = PlantLocal(edit) if local else Plant(edit)
    return Options(passes=inserted(passes, fault, before="decompose" if local else "seed"))


# --- faults


def attention_is_doubled(graph: Graph) -> None:
    scale_argument(first(graph, aten._scaled_dot_product_flash_attention_for_cpu.default), 2, 2.0)


def a_bias_gradient_is_dropped(graph: Graph) -> None:
    """Drop the gradient of the projection's bias."""
    results = list(output_node(graph).args[0])
    at = next(i for i, output in enumerate(outputs_of(graph)) if output.name == "proj.bias")
    scale_argument(source(results[at], aten.sum.dim_IntList), 0, 0.0)


def a_division_is_missing(graph: Graph) -> None:
    """Leave out the division of the mean."""
    result = output_node(graph).args[0][0]  # type: ignore[index]
    div = source(result, aten.div.Tensor)
    div.args = (div.args[0], 1)


def a_buffer_is_stale(graph: Graph) -> None:
    results = list(output_node(graph).args[0])
    old = {input_of(node).name: node for node in placeholders(graph, InputRole.BUFFER)}
    for at, output in enumerate(outputs_of(graph)):
        if output.role is OutputRole.BUFFER and output.name == "norm.running_var":
            results[at] = old[output.name]
    output_node(graph).args = (tuple(results),)


def dropout_is_scaled_wrongly(graph: Graph) -> None:
    """Scale as if a value were kept with 0.8, not 0.75; in the forward."""
    mul = next(node for node in graph.nodes if node.target is aten.mul.Tensor and node.args[1] == 1 / 0.75)
    mul.args = (mul.args[0], 1 / 0.8)


FAULTS = [
    (attention_is_doubled, "output output", "_scaled_dot_product_flash_attention_for_cpu"),
    (a_bias_gradient_is_dropped, "gradient proj.bias", "sum"),
    (a_division_is_missing, "output output", "div.Tensor"),
    (dropout_is_scaled_wrongly, "gradient tok.weight", "mul.Tensor"),
]


def scale_argument(node: Node, position: int, factor: float) -> None:
    """Multiply an argument of a call."""
    argument = node.args[position]
    assert isinstance(argument, Node)
    with node.graph.inserting_before(node):
        scaled = node.graph.call_function(aten.mul.Tensor, (argument, factor))
    set_value(scaled, value_of(argument))
    node.update_arg(position, scaled)


def first(graph: Graph, target: Any) -> Node:
    return next(node for node in graph.nodes if node.target is target)


def source(node: Node, target: Any) -> Node:
    """Return the first call of `target` that a value is made of, by first operands."""
    while node.target is not target:
        node = node.all_input_nodes[0]
    return node


# --- what finds them


def test_without_a_fault_it_is_equal() -> None:
    model, args = case()
    options = Options(passes=Phases(Seed(("fsdp", "megatron"))).passes)
    assert_expected_inline(
        str(check(model, "dp=2,tp=2", args, options=options)),
        """\
equal on 4 simulated ranks (dp=2,tp=2)
137 values are within 1e-09 of one device's, as are 11 results of the model
results stay the same after the partition and the passes of overlap
values not compared: 1 drawn at random""",
    )
    assert bisect(model, "dp=2,tp=2", args, options=options)


@pytest.mark.parametrize(("edit", "result", "op"), FAULTS)
def test_a_wrong_program_is_found(edit: Edit, result: str, op: str) -> None:
    model, args = case()
    options = planted(edit, local=False)
    found = bisect(model, "dp=2,tp=2", args, options=options)
    assert found.first is not None and found.first.pass_name == "plant"
    assert result in {one.value for one in found.first.differs}
    assert found.check is not None and found.check.first is None
    assert result in {one.value for one in found.check.results}


@pytest.mark.slow
@pytest.mark.parametrize(("edit", "result", "op"), FAULTS)
def test_a_wrong_program_of_a_rank_is_found(edit: Edit, result: str, op: str) -> None:
    model, args = case()
    options = planted(edit, local=True)
    found = bisect(model, "dp=2,tp=2", args, options=options)
    assert found.first is not None and found.first.pass_name == "plant_local"
    assert result in {one.value for one in found.first.differs}
    assert found.check is not None and found.check.first is not None
    assert found.check.first.op.startswith(op), str(found.check)


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_a_stale_buffer_is_found(local: bool) -> None:
    model, args = case()
    options = planted(a_buffer_is_stale, local=local)
    assert [one.value for one in check(model, "dp=2,tp=2", args, options=options).results] == [
        "buffer norm.running_var"
    ]
    found = bisect(model, "dp=2,tp=2", args, options=options)
    assert found.first is not None and found.first.pass_name == ("plant_local" if local else "plant")


def a_slice_is_off_by_one(graph: Graph) -> None:
    """Shift the slice of the vocabulary: its part of 6 begins one row too early."""
    mul = next(
        n for n in graph.nodes if n.target is aten.mul.Tensor and "coordinate_tp" in str(n.args[0]) and n.args[1] == 6
    )
    mul.args = (mul.args[0], 5)


def ranks_are_off_by_their_place(graph: Graph) -> None:
    """Change what all ranks hold a copy of: it is right on those that are first on `tp`, and on no others."""
    place = next(n for n in placeholders(graph, InputRole.COORDINATE) if input_of(n).name == "tp")
    rsqrt = first(graph, aten.rsqrt.default)
    argument = rsqrt.args[0]
    assert isinstance(argument, Node)
    with graph.inserting_before(rsqrt):
        moved = graph.call_function(aten.add.Tensor, (argument, place))
    set_value(moved, value_of(argument))
    rsqrt.args = (moved,)


def a_collective_is_missing(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target is torch.ops._c10d_functional.all_reduce.default:
            wait = next(iter(node.users))
            wait.args = (node.args[0],)
            graph.erase_node(node)
            return


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "op"),
    [
        (a_slice_is_off_by_one, "embedding"),
        (ranks_are_off_by_their_place, "rsqrt"),
        (a_collective_is_missing, "all_reduce"),
    ],
)
def test_a_fault_between_ranks_is_found(edit: Edit, op: str) -> None:
    model, args = case()
    options = planted(edit, local=True)
    found = bisect(model, "dp=2,tp=2", args, options=options)
    assert found.first is not None and found.first.pass_name == "plant_local"
    assert found.check is not None and found.check.first is not None
    assert found.check.first.op.startswith(op), str(found.check)


# --- a fault of each kind of collective


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x * 2.0))


class Attend(nn.Module):
    """Positions attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q(x), x, x)


FUNCTIONAL = torch.ops._c10d_functional
GATHERED = Options(recipe=None, inputs={"x": {"tp": "S(0)"}}, outputs={"output": {"tp": "R"}})
EXCHANGED = Options(recipe=None, inputs={"x": {"tp": "S(0)"}}, outputs={"output": {"tp": "S(1)"}})
SUMMED = Options(recipe=None, inputs={"x": {"tp": "S(1)"}}, outputs={"output": {"tp": "R"}})
SCATTERED = Options(recipe=None, inputs={"x": {"tp": "S(1)"}}, outputs={"output": {"tp": "S(0)"}})


@pytest.mark.parametrize(
    ("target", "options"),
    [
        (FUNCTIONAL.all_gather_into_tensor.default, GATHERED),
        (FUNCTIONAL.all_to_all_single.default, EXCHANGED),
        (FUNCTIONAL.all_reduce.default, SUMMED),
        (FUNCTIONAL.reduce_scatter_tensor.default, SCATTERED),
    ],
)
def test_a_collective_of_wrong_values_is_found(target: Any, options: Options) -> None:
    torch.manual_seed(0)
    _find_doubled(Mixed().double(), (torch.randn(4, 8, dtype=torch.float64),), target, options)


def test_a_send_of_wrong_values_is_found() -> None:
    torch.manual_seed(0)
    args = (torch.randn(1, 1, 8, 4, dtype=torch.float64, requires_grad=True),)
    _find_doubled(Attend().double(), args, SEND_OP, Options(recipe={"tp": "context(ring)"}))


def _find_doubled(model: nn.Module, args: tuple[Tensor], target: Any, options: Options) -> None:
    """Double what a collective is given."""
    fault = PlantLocal(lambda graph: scale_argument(first(graph, target), 0, 2.0))
    passes = inserted(default_passes(), fault, before="decompose")
    found = bisect(model, "tp=2", args, options=replace(options, passes=passes))
    assert found.first is not None and found.first.pass_name == "plant_local"
    assert found.check is not None and found.check.first is not None and not found.check


# --- a fault of each pass


@dataclass(frozen=True)
class Broken(Pass):
    """Run a pass, then plant a fault in the graphs that `where` holds for."""

    inner: Pass
    edit: Edit
    where: Callable[[Graph], bool] = lambda graph: True
    name: ClassVar[str] = "broken"

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        changed = self.inner.run(gm, ctx)
        if self.where(gm.graph):
            self.edit(gm.graph)
        return changed or self.where(gm.graph)


def broken(inner: Pass, edit: Edit, where: Callable[[Graph], bool] = lambda graph: True) -> Pass:
    """Return a pass of the same name and stages with a fault."""
    stands_for = {"name": inner.name, "takes": inner.takes, "gives": inner.gives}
    made: Pass = type("Broken", (Broken,), stands_for)(inner, edit, where)
    return made


def a_constant_is_changed(graph: Graph) -> None:
    node = next(node for node in graph.nodes if node.target is aten.mul.Tensor and node.args[1] == 2.0)
    node.update_arg(1, 3.0)


PASSES = Phases(Seed(("megatron",))).passes


@pytest.mark.parametrize("name", [one.name for one in PASSES])
def test_a_fault_of_a_pass_is_found_in_that_pass(name: str) -> None:
    torch.manual_seed(0)
    model, args = Mixed().double(), (torch.randn(4, 8, dtype=torch.float64),)
    fault = broken(next(one for one in PASSES if one.name == name), a_constant_is_changed)
    found = bisect(model, "tp=2", args, options=Options(passes=replaced(PASSES, name, fault)))
    assert found.first is not None and found.first.pass_name == name
    assert found.check is not None and not found.check


def is_backward(graph: Graph) -> bool:
    return bool(placeholders(graph, InputRole.TANGENT))


def is_forward(graph: Graph) -> bool:
    return not is_backward(graph)


@pytest.mark.parametrize("name", [one.name for one in OverlapPasses(None).passes])
@pytest.mark.parametrize("half", [is_forward, is_backward])
def test_a_fault_of_a_pass_that_overlaps_is_found_in_that_pass(
    name: str, half: Callable[[Graph], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def a_product_is_doubled(graph: Graph) -> None:
        scale_argument(first(graph, aten.mm.default), 0, 2.0)

    def passes(self: OverlapPasses) -> Passes:
        usual = (*self.chunk, *self.schedule)
        return replaced(usual, name, broken(next(one for one in usual if one.name == name), a_product_is_doubled, half))

    monkeypatch.setattr(OverlapPasses, "passes", property(passes))
    torch.manual_seed(0)
    model, args = Mixed().double(), (torch.randn(4, 8, dtype=torch.float64),)
    found = bisect(model, "tp=2", args, options=Options(recipe="megatron", compile="eager"))
    graph = "forward" if half is is_forward else "backward"
    assert found.first is not None and found.first.pass_name == f"{name} ({graph})"
    result = "output output" if half is is_forward else "gradient up.weight"
    assert result in {one.value for one in found.first.differs}
    assert found.check is not None and found.check.first is None and not found.check.results
    assert result in {one.value for one in found.check.overlapped}
    said = "results change after the partition and the passes of overlap; `python -m autoshard bisect` names the pass"
    assert f"{said}\nresult {result} is off by" in str(found.check)


def test_a_fault_after_the_partition_is_found_where_draws_cannot_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Double a gradient of a model that draws otherwise than its program: rounding cannot be measured there."""

    def a_gradient_is_doubled(graph: Graph) -> None:
        last = output_node(graph)
        results = list(last.args[0])
        with graph.inserting_before(last):
            doubled = graph.call_function(aten.mul.Tensor, (results[0], 2.0))
        set_value(doubled, value_of(results[0]))
        last.args = ((doubled, *results[1:]),)

    usual = OverlapPasses(None).passes
    fault = broken(usual[-1], a_gradient_is_doubled, is_backward)
    monkeypatch.setattr(OverlapPasses, "passes", property(lambda self: (fault,)))
    torch.manual_seed(0)
    model, args = nn.Sequential(nn.Linear(8, 8), nn.RReLU()).double(), (torch.randn(8, 8, dtype=torch.float64),)
    found = check(model, "dp=2", args, options=Options(recipe="fsdp", compile="eager"))
    assert found.not_compared and not found and [one.value for one in found.overlapped] == ["gradient 0.weight"]
