"""A plan as one HTML page that opens from a file and needs no network.

The template, style and scripts lie next to this module. `page_data` makes the plan's JSON, which is compressed: a plan of
a model that runs has all 80 layers in its program.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from torch.fx import Graph, Node

from autoshard.inspection.report.cost_table import format_declined
from autoshard.inspection.report.dims import Letters
from autoshard.inspection.report.modules import module_table, notation_legend, read_placed
from autoshard.inspection.report.timeline import KINDS, WORKSPACE, is_timed
from autoshard.plans.collectives import Collective
from autoshard.plans.names import fold_names, pattern_of
from autoshard.plans.outcome import Cost
from autoshard.plans.plan_values import Value
from autoshard.plans.record import PlanRecord
from passes.cost.collective_time import link_of
from passes.cost.program import STREAMS
from passes.cost.simulate import Timeline
from passes.ir.graph import has_layout, input_of, is_tensor, layout_of, note_of, origin_of, placeholders, tensor_of
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.ir.text import DTYPE_NAMES, format_target

STYLE, SCRIPTS = "page.css", ("format.js", "timeline.js", "drawings.js", "about.js", "views.js", "page.js")
MICROSECONDS = 1e6


def format_page(plan: PlanRecord) -> str:
    """Return the page's text."""
    folder = files("autoshard.inspection.report")
    page = folder.joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(page_data(plan), separators=(",", ":"), ensure_ascii=False)
    parts = {
        "TITLE": _escaped(f"{plan.mesh} {plan.mesh.hardware.name if plan.mesh.hardware else ''}".strip()),
        "STYLE": folder.joinpath(STYLE).read_text(encoding="utf-8"),
        "DATA": base64.b64encode(zlib.compress(data.encode())).decode(),
        "SCRIPT": "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page)


def page_data(plan: PlanRecord) -> dict[str, Any]:
    """Return everything that the page shows as JSON values; times are in microseconds."""
    graph, letters = read_placed(plan)
    table = module_table(plan, graph, letters)
    values = list(_values(plan, graph, letters))
    return {
        "mesh": _mesh(plan.mesh),
        "recipes": plan.recipes,
        "fingerprint": plan.fingerprint,
        "cost": None if plan.cost is None else _cost(plan.cost),
        "search": None if plan.search is None else _search(plan),
        "letters": table.sizes,
        "legend": notation_legend(table, plan.mesh.names[-1]) if table.sizes else "",
        "inputs": table.inputs,
        "outputs": table.outputs,
        "modules": [{"name": r.name, "fqns": r.fqns, "notation": r.notation, **asdict(r.figures)} for r in table.rows],
        "parameters": _parameters(plan, values),
        "values": values,
        "collectives": [_collective(one) for one in plan.collectives],
        "remarks": [asdict(remark) for remark in plan.remarks],
        "graphs": dict(plan.graphs),
        "timed": is_timed(plan),
        "step": None if plan.timeline is None else _step(plan.timeline),
    }


def _mesh(mesh: Mesh) -> dict[str, Any]:
    found: dict[str, Any] = {"names": mesh.names, "sizes": mesh.sizes, "hardware": None}
    if mesh.hardware is not None:
        hardware = asdict(mesh.hardware)
        links = [link_of(mesh.group_shape((name,))) for name in mesh.names]
        found |= {"hardware": {**hardware, "flops": dict(hardware["flops"]), "sources": None}, "links": links}
    return found


def _cost(cost: Cost) -> dict[str, Any]:
    return {**asdict(cost), "hidden_comm": cost.hidden_comm, "peak_memory": cost.peak_memory}


def _search(plan: PlanRecord) -> dict[str, Any]:
    assert plan.search is not None
    simulated = [
        {"name": one.name, "fits": one.fits, "note": one.note, **_cost(one.cost)} for one in plan.search.candidates if one.cost
    ]
    return {
        "chosen": plan.search.chosen,
        "memory_limit": plan.search.memory_limit,
        "gap": plan.search.gap,
        "seconds": plan.search.seconds,
        "candidates": sorted(simulated, key=lambda one: (not one["fits"], one["step_time"])),
        "declined": format_declined(plan.search),
    }


def _values(plan: PlanRecord, graph: Graph, letters: Letters) -> Iterator[dict[str, Any]]:
    """Yield parameters, inputs and outputs, then intermediate values."""
    named = {(input_of(node).role.value, input_of(node).name): node for node in placeholders(graph)}
    sections = (("parameter", plan.parameters), ("input", plan.inputs), ("output", plan.outputs))
    for role, values in sections:
        for name, value in values.items():
            node = named.get((role, name))
            notation = _notation(letters, node, value.layout, plan.mesh)
            yield _value(name, role, value, notation, plan.mesh) | {"node": node.name if node is not None else ""}
    for node in graph.nodes:
        if node.op == "call_function" and is_tensor(node) and has_layout(node):
            tensor, origin = tensor_of(node), origin_of(node)
            value = Value(node.name, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], layout_of(node))
            yield _value(node.name, "value", value, _notation(letters, node, value.layout, plan.mesh), plan.mesh) | {
                "node": node.name,
                "fqn": origin.fqn,
                "line": f"{origin.file}:{origin.line}" if origin.file else "",
                "op": format_target(node.target),
                "note": note_of(node),
            }


def _notation(letters: Letters, node: Node | None, layout: Layout, mesh: Mesh) -> str:
    return "" if node is None or not is_tensor(node) else letters.format(node, layout, mesh)


def _value(name: str, role: str, value: Value, notation: str, mesh: Mesh) -> dict[str, Any]:
    return {
        "name": name,
        "role": role,
        "dtype": value.dtype,
        "shape": value.shape,
        "local": value.local_shape(mesh),
        "placements": [str(placement) for placement in value.layout.placements],
        "notation": notation,
        "fqn": name.rpartition(".")[0] if role == "parameter" else "",
    }


def _parameters(plan: PlanRecord, values: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return equal parameters of equal layers together: their folded name, and all their names."""
    notations = {str(value["name"]): value["notation"] for value in values if value["role"] == "parameter"}
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, value in plan.parameters.items():
        groups.setdefault((pattern_of(name), value.shape, value.dtype, value.layout), []).append(name)
    return [
        {"name": fold_names(names), "names": names, "notation": next((notations[n] for n in names if notations[n]), "")}
        for names in groups.values()
    ]


def _collective(one: Collective) -> dict[str, Any]:
    origin = one.origin
    line = f"{origin.file.rsplit('/', 1)[-1]}:{origin.line}" if origin.file else ""
    facts = asdict(one)
    del facts["origin"]
    return facts | {"way": one.way, "fqn": origin.fqn, "line": line, "file": origin.file, "source": origin.source}


def _step(timeline: Timeline) -> dict[str, Any]:
    """Return tasks and buffers as columns: a model of many layers has tens of thousands."""
    program = timeline.program
    firsts = [first for first, _ in timeline.lives]
    lasts = [last for _, last in timeline.lives]
    kinds = (*KINDS, WORKSPACE)
    index = program.index
    return {
        "streams": STREAMS,
        "kinds": kinds,
        "tasks": {
            "name": [task.name for task in program.tasks],
            "kind": [task.kind for task in program.tasks],
            "stream": index.streams,
            "start": _times(timeline.starts),
            "end": _times(timeline.ends),
            "turn": _times(timeline.turns),
            "bytes": [task.nbytes for task in program.tasks],
            "flops": [task.flops for task in program.tasks],
            "workspace": [task.workspace for task in program.tasks],
            "fqn": [task.fqn for task in program.tasks],
            "nodes": [" ".join(task.nodes) for task in program.tasks],
            "steps": [" ".join(task.steps) for task in program.tasks],
            "backward": [int(task.backward) for task in program.tasks],
            "inputs": index.inputs,
            "outputs": index.outputs,
        },
        "exposed": [[number, *_times(span)] for number, *span in timeline.exposed_spans],
        "buffers": {
            "name": [buffer.name for buffer in program.buffers],
            "bytes": [buffer.nbytes for buffer in program.buffers],
            "kind": [kinds.index(buffer.kind) for buffer in program.buffers],
            "fqn": [buffer.fqn for buffer in program.buffers],
            "node": [buffer.node for buffer in program.buffers],
            "first": firsts,
            "last": lasts,
        },
    }


def _times(seconds: Iterable[float]) -> list[float]:
    return [round(one * MICROSECONDS, 3) for one in seconds]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
