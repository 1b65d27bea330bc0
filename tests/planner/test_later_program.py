"""A later program that is made from a few layers and an earlier program is what the passes make of all layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from autoshard import Mesh, Options
from autoshard.planner.make_plan import Planned, make_plan
from autoshard.planner.request import EarlierProgram, PlanRequest
from passes.base import Observer, Pass, PassContext
from passes.ir.folded_layers import Run
from passes.ir.graph import note_of, set_layouts, set_note, transfer_of
from passes.ir.layout import Layout, Shard
from passes.ir.more_layers import with_all_layers
from passes.ir.text import format_graph
from tests.capture.test_more_layers import Once
from tests.extended import extended
from tests.models import gpt, llama

Args = tuple[torch.Tensor, ...]
MADE = "an earlier program"


def _first(model: nn.Module, args: Args, mesh: Mesh, options: Options) -> Planned:
    return make_plan(PlanRequest(model, args, {}, mesh, options))


def _later(
    model: nn.Module, args: Args, first: Planned, options: Options, *, from_few: bool = True, **how: Any
) -> Planned:
    stored = {name: value.layout for name, value in first.plan.parameters.items()}
    programs = (EarlierProgram(first.captured, first.graph, first.plan),) if from_few else ()
    known = PlanRequest(
        model, args, {}, first.plan.mesh, options, stored=stored, programs=programs, earlier=(first.plan,)
    )
    return make_plan(known, **how)


def _is_made_from_few(planned: Planned) -> bool:
    return any(MADE in remark.text for remark in planned.plan.remarks)


def _check_same(found: Planned, whole: Planned) -> None:
    mesh = whole.plan.mesh
    assert format_graph(found.graph, mesh) == format_graph(whole.graph, mesh)
    for name in ("parameters", "inputs", "outputs", "recipes", "cost", "padded_axes"):
        assert getattr(found.plan, name) == getattr(whole.plan, name)
    assert sorted(map(_sent, found.plan.collectives)) == sorted(map(_sent, whole.plan.collectives))


def _sent(one: Any) -> Any:
    return one.kind, one.axes, one.bytes, one.backward, one.recomputed, str(one.origin), one.reason, one.what


def _cut(args: Args, count: int) -> Args:
    return tuple(one[:count] for one in args)


def _rows(count: int) -> Args:
    torch.manual_seed(0)
    return torch.randn(count, 8), torch.randint(5, (count,))


@pytest.mark.parametrize(
    ("kind", "recipe", "mesh"),
    [
        extended("plain", "fsdp", "dp=2"),
        ("dropout", {"dp": "ddp", "tp": "megatron"}, "dp=2,tp=2"),
        ("alternating", "zero2", "dp=2"),
        extended("buffers", "fsdp", "dp=2"),
    ],
)
def test_same_program(kind: str, recipe: Any, mesh: str) -> None:
    options = Options(recipe=recipe)
    model = Once(kind)
    first = _first(model, _rows(8), Mesh(mesh), options)
    found = _later(model, _rows(12), first, options)
    assert _is_made_from_few(found)
    _check_same(found, _later(model, _rows(12), first, options, from_few=False))


FSDP, BOTH, CONTEXT = "fsdp", {"dp": "fsdp", "tp": "megatron"}, {"dp": "ddp", "cp": "context"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "recipe", "mesh", "recompute"),
    [
        extended(llama, FSDP, "dp=2", "block"),
        (gpt, BOTH, "dp=2,tp=2", "auto"),
        extended(llama, CONTEXT, "dp=2,cp=2", "block"),
    ],
)
def test_decoders(make: Callable[..., Any], recipe: Any, mesh: str, recompute: Any) -> None:
    model, args, _ = make(layers=5)
    model.double()
    options = Options(recipe=recipe, recompute=recompute)
    first = _first(model, args, Mesh(mesh), options)
    found = _later(model, _cut(args, 4), first, options)
    _check_same(found, _later(model, _cut(args, 4), first, options, from_few=False))
    assert _is_made_from_few(found)


@dataclass(frozen=True)
class _Programs:
    """The first program of a model, and a later one that is made from few layers and one that is made from all."""

    model: nn.Module
    options: Options
    first: Planned
    lead: Planned
    whole: Planned


@cache
def _programs(recipe: str) -> _Programs:
    options, model = Options(recipe=recipe), Once("plain")
    first = _first(model, _rows(8), Mesh("dp=2"), options)
    lead, whole = (_later(model, _rows(12), first, options, from_few=few) for few in (True, False))
    return _Programs(model, options, first, lead, whole)


@pytest.mark.slow
def test_solved_layouts_are_taken_over_with_the_program() -> None:
    made = _programs("auto")
    assert made.first.plan.solution is not None
    assert _is_made_from_few(made.lead)
    _check_same(made.lead, made.whole)


class Halves(nn.Module):
    """A residual layer that reads half of its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x[:, 4:])


class Head(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


@pytest.mark.parametrize(
    ("layer", "runs"),
    [
        (lambda: nn.Linear(8, 8), Run("layers", (0,), (1, 2, 3, 4, 5), (), is_wide=True)),
        (Halves, Run("layers", (0,), (1, 2, 3, 4), (5,), is_wide=True)),  # the backward of the last makes zeros for all
    ],
)
def test_the_first_or_both_ends_stand_for_all(layer: Callable[[], nn.Module], runs: Run) -> None:
    layers = nn.Sequential(*(layer() for _ in range(6)))
    model = nn.Sequential(OrderedDict(embedding=nn.Embedding(5, 8), layers=layers, head=Head()))
    first = _first(model, (torch.zeros(4, dtype=torch.long),), Mesh("dp=2"), Options(recipe="fsdp"))
    later = torch.zeros(6, dtype=torch.long)
    found = _later(model, (later,), first, Options(recipe="fsdp"))
    assert found.plan.repeats == (runs,)
    _check_same(found, _later(model, (later,), first, Options(recipe="fsdp"), from_few=False))


@pytest.fixture(name="joined")
def _joined(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Return what the graph of a later program is joined from: the graph of one layer, the runs, and the earlier graph."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    model = nn.Sequential(OrderedDict(embedding=nn.Embedding(5, 8), layers=layers, head=Head()))
    first = _first(model, (torch.zeros(4, dtype=torch.long),), Mesh("dp=2"), Options(recipe="fsdp"))
    called = Mock(wraps=with_all_layers)
    monkeypatch.setattr("autoshard.planner.later_program.with_all_layers", called)
    _later(model, (torch.zeros(6, dtype=torch.long),), first, Options(recipe="fsdp"))
    assert with_all_layers(*called.call_args.args) is not None
    return tuple(called.call_args.args)


def test_one_layer_does_not_stand_for_those_that_read_other_parts(joined: tuple[Any, ...]) -> None:
    [embedding] = joined[0].graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    set_layouts(embedding, Layout((Shard(0, 2),)))  # of each half of the rows, a half
    assert with_all_layers(*joined) is None


def test_reasons_are_those_of_the_new_sizes(joined: tuple[Any, ...]) -> None:
    for node in filter(transfer_of, joined[0].graph.nodes):
        set_note(node, f"in new sizes, {note_of(node)}")
    found = with_all_layers(*joined)
    assert found is not None
    notes = [note_of(node) for node in found.graph.graph.nodes if transfer_of(node)]
    assert len(notes) > 12 and all(note.startswith("in new sizes, ") for note in notes)


@pytest.mark.parametrize("recipe", ["fsdp", "auto"])
def test_followers_make_the_program_of_the_first_rank(recipe: str) -> None:
    made, asked, phases = _programs(recipe), list[int](), list[str]()

    def decided() -> Any:
        asked.append(len(phases))
        return made.lead.plan

    found = _later(made.model, _rows(12), made.first, made.options, plan=decided, progress=phases.append)
    assert asked == [len(phases)] and phases[-1] == "passes"  # no rank waits for the first before its passes ran
    _check_same(found, made.lead)
    whole = made.whole  # a first rank without an earlier program
    followed = _later(made.model, _rows(12), made.first, made.options, plan=whole.plan)
    assert format_graph(followed.graph, whole.plan.mesh) == format_graph(whole.graph, whole.plan.mesh)


@dataclass(frozen=True)
class _Events(Observer):
    """Notes the passes as they end."""

    seen: list[str] = field(default_factory=list)

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        """Do nothing."""

    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        self.seen.append(pass_.name)


def test_ranks_wait_for_a_plan_after_they_made_a_program_that_the_options_say_all_about() -> None:
    options, model, events = Options(recipe="fsdp"), Once("plain"), _Events()
    lead = _first(model, _rows(8), Mesh("dp=2"), options)

    def decided() -> Any:
        events.seen.append("asked")
        return lead.plan

    found = make_plan(PlanRequest(model, _rows(8), {}, Mesh("dp=2"), options), plan=decided, observers=(events,))
    assert events.seen.index("rematerialize") < events.seen.index("asked") == len(events.seen) - 1
    _check_same(found, lead)
    events.seen.clear()
    other = _first(model, _rows(8), Mesh("dp=2"), Options(recipe="ddp"))  # as if the first rank had decided otherwise
    followed = make_plan(PlanRequest(model, _rows(8), {}, Mesh("dp=2"), options), plan=lambda: _as(other, lead))
    assert followed.plan.recipes == ("ddp",)
    _check_same(followed, other)


def _as(made: Planned, asked: Planned) -> Any:
    return replace(made.plan, settings=asked.plan.settings)


def test_other_sizes_that_shard_otherwise_are_planned_whole() -> None:
    """A batch of 9 is padded for two ranks, which that of the earlier program was not."""
    options, model = Options(recipe="fsdp"), Once("plain")
    first = _first(model, _rows(8), Mesh("dp=2"), options)
    found = _later(model, _rows(9), first, options)
    assert not _is_made_from_few(found)
    _check_same(found, _later(model, _rows(9), first, options, from_few=False))
