"""Resolve what a user names in a question about a plan: a parameter, module, value, collective or source line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from autoshard.planner.evaluation import Folded
from autoshard.plans.collectives import Collective
from autoshard.plans.record import PlanRecord
from passes.errors import UserError
from passes.ir.folded_layers import Repeats, moved_to
from passes.ir.graph import Input, InputRole, input_of, is_tensor, origin_of, outputs_of, placeholders, returned
from passes.ir.text import parse_graph


@dataclass(frozen=True)
class Subject:
    """The nodes and collectives that a name stands for.

    `nodes` are of the captured graph without its repeated layers; `asked` is the text that the user wrote.
    """

    asked: str
    kind: str  # "parameter", "input", "output", "value", "collective", "line" or "module"
    nodes: tuple[Node, ...]
    collectives: tuple[Collective, ...]


def subject_of(plan: PlanRecord, what: str, folded: Folded | None) -> Subject:
    """Find what `what` names in the `folded` graph, or without one, in the text of the plan.

    Raises UserError, with similar names, if it names nothing.
    """
    named = what.strip().removeprefix("%")
    gm = parse_graph(plan.graph("CAPTURED"))[0] if folded is None else folded.graph
    kept = _kept(named, Repeats(plan.repeats) if folded is None else folded.repeats)
    for graph in _graphs(plan, gm):
        for found in _readings(plan, graph, named, kept):
            if found.nodes or found.collectives:
                return found
    raise UserError(_unknown(plan, gm, what))


def _graphs(plan: PlanRecord, gm: GraphModule) -> Iterator[GraphModule]:
    """Yield the captured graph, and then the placed one, if that has all layers: it is of a program that runs."""
    yield gm
    if not plan.repeats and "PLACED" in plan.graphs:
        yield parse_graph(plan.graph("PLACED"))[0]


def _readings(plan: PlanRecord, gm: GraphModule, what: str, kept: str) -> Iterator[Subject]:
    """Yield each possible meaning of `what`; `kept` is its name in the layer that represents it."""
    inputs = {input_of(node): node for node in placeholders(gm.graph)}
    keys = (Input(InputRole.PARAMETER, kept), Input(InputRole.INPUT, kept), Input(InputRole.INPUT, what.removeprefix("input:")))
    for node in (inputs[key] for key in keys if key in inputs):
        yield Subject(what, input_of(node).role.value, (node,), tuple(_moving(plan, gm, (node,))))
    outputs = {o.name: v for v, o in zip(returned(gm.graph), outputs_of(gm.graph), strict=True) if isinstance(v, Node)}
    if what in plan.outputs and what in outputs:
        yield Subject(what, "output", (outputs[what],), tuple(_moving(plan, gm, (outputs[what],))))
    nodes = tuple(node for node in gm.graph.nodes if node.name == kept)
    yield Subject(what, "value", nodes, tuple(_moving(plan, gm, nodes)))
    collectives = tuple(one for one in plan.collectives if what in (one.id, one.bucket))
    yield Subject(what, "collective", tuple(_captured(plan, gm, (one.id for one in collectives))), collectives)
    nodes = tuple(_captured(plan, gm, (kept,)))  # the captured values that a pass-made value comes from
    yield Subject(what, "value", nodes, tuple(_moving(plan, gm, nodes)))
    nodes = tuple(node for node in gm.graph.nodes if what == _line(node))
    yield Subject(what, "line", nodes, tuple(one for one in plan.collectives if what == _place(one)))
    nodes = tuple(node for node in gm.graph.nodes if _is_inside(_fqn(node), kept))
    yield Subject(what, "module", nodes, tuple(one for one in plan.collectives if _is_inside(one.origin.fqn, what)))


def _kept(name: str, repeats: Repeats) -> str:
    """Return the name in the kept layer that represents a removed one."""
    if (kept := repeats.parameters.get(name) or repeats.nodes.get(name)) is not None:
        return kept
    for run in repeats.runs:
        match = re.match(rf"{re.escape(run.prefix)}\.(\d+)(?=\.|$)", name)
        if match and int(match[1]) in run.removed:
            below = run.below[run.removed.index(int(match[1])) % run.period]
            return moved_to(run.prefix, below, name)
    return name


def _moving(plan: PlanRecord, gm: GraphModule, nodes: tuple[Node, ...]) -> Iterator[Collective]:
    """Yield the collectives of the modules and lines that these values belong to."""
    places = {str(origin_of(user)) for node in nodes for user in (node, *node.users) if str(origin_of(user))}
    own = {input_of(node).name.rpartition(".")[0] for node in nodes if node.op == "placeholder"} - {""}
    for one in plan.collectives:
        if (one.origin.fqn in own) if own else (str(one.origin) in places):
            yield one


def _captured(plan: PlanRecord, gm: GraphModule, names: Iterable[str]) -> Iterator[Node]:
    """Yield the captured values that values of the program with collectives are made from."""
    lines = (re.match(r"%(\w+): .* = \w+(?:\.\w+)?\(%(\w+)", line) for line in plan.graphs.get("COLLECTIVE", "").splitlines())
    made_of = {match[1]: match[2] for match in lines if match}
    nodes = {node.name: node for node in gm.graph.nodes}
    for name in dict.fromkeys(name.partition("@")[0] for name in names):
        while name not in nodes and name in made_of:
            name = made_of[name]
        if name in nodes:
            yield nodes[name]


def _line(node: Node) -> str:
    return str(origin_of(node)).partition(" ")[0] if origin_of(node).file else ""


def _place(one: Collective) -> str:
    return str(one.origin).partition(" ")[0] if one.origin.file else ""


def _fqn(node: Node) -> str:
    """Return the module of a call, or the name of a parameter."""
    if node.op == "placeholder":
        return input_of(node).name if input_of(node).role is InputRole.PARAMETER else ""
    return origin_of(node).fqn


def _is_inside(fqn: str, module: str) -> bool:
    return bool(module) and (fqn == module or fqn.startswith(f"{module}."))


def _unknown(plan: PlanRecord, gm: GraphModule, what: str) -> str:
    named = what.strip().removeprefix("%")
    lines = dict.fromkeys(filter(None, (_line(node) for node in gm.graph.nodes)))
    if re.fullmatch(r".+:\d+", named):
        return f"nothing of the plan is from line {what}; lines near it are {_listed(_near_lines(named, lines))}"
    modules = {".".join(parts[:n]) for name in plan.parameters for parts in [name.split(".")] for n in range(1, len(parts))}
    names = (
        *plan.parameters,
        *sorted(modules),
        *plan.inputs,
        *plan.outputs,
        *(node.name for node in gm.graph.nodes if is_tensor(node)),
        *(one.id for one in plan.collectives),
    )
    near = difflib.get_close_matches(named, dict.fromkeys(names), n=3, cutoff=0.5) or [*plan.parameters][:3]
    return (
        f"the plan has no {what!r}: it is no parameter, module, input, output, value, collective or source line; names near "
        f"it are {_listed(near)}"
    )


def _near_lines(what: str, lines: Iterable[str]) -> list[str]:
    file, _, number = what.rpartition(":")
    file = file.rsplit("/", 1)[-1]
    known = sorted((line.rpartition(":") for line in lines), key=lambda one: abs(int(one[2]) - int(number)))
    own = [f"{name}:{at}" for name, _, at in known if name == file]
    return own[:3] or [f"{name}:{at}" for name, _, at in known][:3]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
