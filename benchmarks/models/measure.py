"""Plan a model of the table with a recipe, run it on simulated ranks, and compare it with one device."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autoshard import AutoshardError, Mesh, Options
from autoshard.debug.checking import Check, Keeper, comparison
from autoshard.debug.simulated_ranks import Call
from autoshard.planner.make_plan import Planned, program_problem
from autoshard.planner.problem import Problem, captured_problem
from autoshard.planner.request import PlanRequest
from benchmarks.models.case import Case
from passes._torch import OpOverload
from passes.cost.kernel_time import kernel_flops
from passes.ir.call import call_of
from passes.ir.graph import origin_of, results_of
from passes.ir.layout import Layout

MESH = Mesh("dp=2,tp=2")
EVEN = 1 / MESH.size
TOLERANCE = 0.01  # of a call's FLOPs: parts of a call may be uneven
SHOWN = 3  # modules whose products ran whole
_LAYER = re.compile(r"(?<=\.)\d+\.|^\d+\.")
RECIPES: dict[str, Options] = {
    "fsdp": Options(recipe="fsdp"),
    "fsdp x megatron": Options(recipe={"dp": "fsdp", "tp": "megatron"}),
    "default": Options(),
}
CALLS = ("training", "evaluation", "second shape")
Recipes = Mapping[str, tuple[str, ...]]  # by recipe, the calls that are compared


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    model: str
    recipe: str
    outcome: str  # "equal", or what went wrong
    calls: tuple[str, ...] = ()  # those compared
    seconds: float = 0.0  # to capture the model and plan its training
    parameters: float = 1.0  # bytes of the largest share of a rank, over those of the model
    flops: float = 1.0  # of products, convolutions and attention on a rank, over those of the model
    whole: str = ""  # ops with FLOPs that every rank runs on whole tensors of an axis

    @property
    def is_equal(self) -> bool:
        """Return whether everything that was compared is one device's."""
        return self.outcome == "equal"


def measured(case: Case, recipes: Recipes) -> tuple[Row, ...]:
    """Return a row for each recipe."""
    try:
        torch.manual_seed(0)
        subject = _Subject(case)
        started = time.perf_counter()
        subject.problem("training").captured.trace()
        seconds = time.perf_counter() - started
    except AutoshardError as error:
        return tuple(Row(case.name, recipe, _first_line(error)) for recipe in recipes)
    return tuple(_row(subject, recipe, seconds, calls) for recipe, calls in recipes.items())


class _Subject:
    """A case with its calls, each captured once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = case.model()
        self.inputs = {
            "training": case.first_call(),
            "evaluation": case.first_call(),
            "second shape": case.second_call(),
        }
        self._problems: dict[str, Problem] = {}

    def problem(self, call: str) -> Problem:
        if call not in self._problems:
            self.set_mode(call)
            training = call != "evaluation"
            request = PlanRequest(self.model, (), self.inputs[call], MESH, Options(), training=training)
            self._problems[call] = captured_problem(request.checked())
        return self._problems[call]

    def set_mode(self, call: str) -> None:
        self.model.train(call != "evaluation")

    def check(self, call: str, options: Options, stored: Mapping[str, Layout]) -> tuple[Planned, Check]:
        """Plan `call` around the layouts of an earlier program, and compare it."""
        keeper = Keeper()
        problem = replace(self.problem(call), options=options, stored=stored)
        planned = program_problem(problem, observers=(keeper,))
        self.set_mode(call)
        with torch.set_grad_enabled(call != "evaluation"):
            return planned, comparison(keeper.graph, planned, Call(self.model, (), self.inputs[call]), options)


def _row(subject: _Subject, recipe: str, seconds: float, calls: tuple[str, ...]) -> Row:
    name, started, stored = subject.case.name, time.perf_counter(), dict[str, Layout]()
    row, problems = Row(name, recipe, "equal", calls), list[str]()
    for call in calls:
        try:
            planned, found = subject.check(call, RECIPES[recipe], stored)
        except AutoshardError as error:
            problems.append(f"{call}: {_first_line(error)}")
            break
        if call == "training":
            stored = {name: value.layout for name, value in planned.plan.parameters.items()}
            spent = sum(planned.seconds.values()) if planned.seconds else time.perf_counter() - started
            row = replace(row, seconds=seconds + spent, **_shares(planned))
        if not found:
            problems.append(f"{call}: {_difference(found)}")
        elif found.not_compared:
            problems.append(f"{call}: {found.not_compared}")
    return replace(row, outcome="; ".join(problems) or "equal")


def _difference(found: Check) -> str:
    if found.first is not None:
        return str(found.first).partition("\n")[0]
    return f"{found.results[0].value} is off by {found.results[0].error:.1e}"


def _shares(planned: Planned) -> dict[str, Any]:
    plan = planned.plan
    parameters = plan.parameters.values()
    whole = sum(math.prod(value.shape) for value in parameters)
    local = sum(math.prod(value.local_shape(plan.mesh)) for value in parameters)
    before, after = _flops(planned.captured.graph_module), _flops(planned.graph)
    flops = sum(after.values()) / max(1, sum(before.values()))
    return {"parameters": local / whole, "flops": flops, "whole": _ran_whole(planned)}


def _flops(gm: GraphModule) -> dict[Node, float]:
    """Return the FLOPs of each call of a program that has any."""
    calls = (node for node in gm.graph.nodes if isinstance(node.target, OpOverload) and results_of(node))
    return {node: flops for node in calls if (flops := kernel_flops(call_of(node)))}


def _ran_whole(planned: Planned) -> str:
    """Name the ops that no rule shards, and then the modules most of whose products ran on more than their share."""
    unknown = Counter(remark.text.partition(" ")[0] for remark in planned.plan.remarks if "runs replicated" in remark.text)
    texts = [f"{op.removeprefix('aten.').removesuffix('.default')} x{count}" for op, count in unknown.items()]
    return ", ".join((*texts, *_uncut(planned)))


def _uncut(planned: Planned) -> Iterator[str]:
    """Yield the calls, by op and module, that a rank computes more than its share of, the largest first."""
    whole = {node.name: flops for node, flops in _flops(planned.captured.graph_module).items()}
    extra: dict[str, float] = {}
    for node, flops in _flops(planned.graph).items():
        if node.name in whole and flops > (EVEN + TOLERANCE) * whole[node.name]:
            op = str(node.target).removeprefix("aten.").partition(".")[0]
            name = f"{op} {_LAYER.sub('', origin_of(node).fqn)}".strip()
            extra[name] = extra.get(name, 0.0) + flops - EVEN * whole[node.name]
    yield from sorted(extra, key=extra.__getitem__, reverse=True)[:SHOWN]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
