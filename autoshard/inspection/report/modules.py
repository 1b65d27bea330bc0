"""The table of a plan's modules in the notation of the scaling literature; equal layers are one row.

    layers.0-31.feed_forward.w{1,3}    In[B_dp, S_tp, D] . W[D_dp, F_tp] -> [B_dp, S, F_tp]

Operands are shown as made or stored, so that gathers show as a difference between the two sides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from autoshard.inspection.report.dims import Letters, letters_of
from autoshard.plans.names import fold_names, pattern_of
from autoshard.plans.record import PlanRecord
from passes.cost.fused_regions import is_alias, is_fusible
from passes.cost.program import OPTIMIZER
from passes.ir.folded_layers import Run, index_in, moved_to
from passes.ir.graph import (
    InputRole,
    OutputRole,
    input_of,
    is_reshard,
    is_tensor,
    item_of,
    layout_of,
    operands,
    origin_of,
    outputs_of,
    placeholders,
    returned,
    tensor_of,
)
from passes.ir.layout import Layout
from passes.ir.text import parse_graph

INSIDE = 1  # inputs, and outputs, shown of a module without parameters
OPTIMIZER_ROW, OTHER_ROW, MODEL_ROW = "(optimizer)", "(other)", "(model)"


@dataclass(frozen=True)
class Figures:
    """Sums over the modules of a row, per device and step. Seconds and bytes."""

    compute: float = 0.0
    received: int = 0
    exposed: float = 0.0

    def __add__(self, other: Figures) -> Figures:
        return Figures(self.compute + other.compute, self.received + other.received, self.exposed + other.exposed)


@dataclass(frozen=True)
class ModuleRow:
    """Modules that compute the same."""

    name: str  # folded: "layers.0-31.attention.wq"
    fqns: tuple[str, ...]
    notation: str
    figures: Figures = field(default=Figures())


@dataclass(frozen=True)
class ModuleTable:
    """All modules of a plan in the order of the program; sizes of the letters that they use."""

    rows: tuple[ModuleRow, ...]
    inputs: tuple[tuple[str, str], ...]  # name and notation
    outputs: tuple[tuple[str, str], ...]
    sizes: dict[str, int]


def notation_legend(modules: ModuleTable, axis: str) -> str:
    """Return what the marks of a notation mean; rare ones only where they are."""
    letter = list(modules.sizes)[-1]
    shown = [f"{letter}_{axis}: {letter} sharded over {axis}", f"{{U_{axis}}}: partial sum over {axis}"]
    text = " ".join((*(row.notation for row in modules.rows), *(notation for _, notation in modules.inputs)))
    if (mirrored := re.search(r"([A-Z]\d*)_(\w+~)", text)) is not None:
        shown.append(f"{mirrored[0]}: a rank has a chunk of each half of {mirrored[1]}, the second counted from its end")
    if (blocks := re.search(r"(\w+)/(\d+)", text)) is not None:
        shown.append(f"{blocks[0]}: each of {blocks[2]} parts is sharded over {blocks[1]}")
    return "; ".join(shown)


def read_placed(plan: PlanRecord) -> tuple[Graph, Letters]:
    """Return the plan's graph at PLACED, with global shapes, and the letters of its dims."""
    gm, _ = parse_graph(plan.graphs["PLACED"])
    return gm.graph, letters_of(gm.graph)


def module_table(plan: PlanRecord, graph: Graph, letters: Letters) -> ModuleTable:
    """Return the modules of the forward with their cost in forward and backward; `read_placed` gives the graph."""
    writer = _Writer(graph, letters, plan)
    figures = _figures(plan)
    rows = []
    for module, fqns in _alike(writer.modules(), plan.repeats).items():
        found = sum((figures.pop(fqn, Figures()) for fqn in fqns), Figures())
        if module.is_work or found != Figures():
            rows.append(ModuleRow(fold_names(fqns) or MODEL_ROW, tuple(fqns), module.notation, found))
    for name in (OTHER_ROW, OPTIMIZER_ROW):
        left = figures.pop(name, Figures()) if name == OPTIMIZER_ROW else _rest(figures)
        if left != Figures():
            rows.append(ModuleRow(name, (), "", left))
    inputs, outputs = writer.inputs(), writer.outputs()
    shown = " ".join([row.notation for row in rows] + [text for _, text in (*inputs, *outputs)])
    used = set(re.findall(r"[A-Z]\d*(?=[_,\]])", shown))
    sizes = {letter: size for letter, size in letters.sizes.items() if letter in used}
    return ModuleTable(tuple(rows), inputs, outputs, sizes)


def _rest(figures: dict[str, Figures]) -> Figures:
    return sum((one for name, one in figures.items() if name != OPTIMIZER_ROW), Figures())


def _figures(plan: PlanRecord) -> dict[str, Figures]:
    """Return figures by FQN of the module; the optimizer's update has a row of its own."""
    found: dict[str, Figures] = {}

    def add(fqn: str, figures: Figures) -> None:
        found[fqn] = found.get(fqn, Figures()) + figures

    if plan.timeline is not None:
        for task, seconds in zip(plan.timeline.program.tasks, plan.timeline.compute_by_task, strict=True):
            if not task.is_collective:
                add(OPTIMIZER_ROW if task.kind == OPTIMIZER else task.fqn, Figures(compute=seconds))
    for one in plan.collectives:
        times = 2 if one.recomputed and plan.timeline is None else 1
        add(one.origin.fqn, Figures(received=times * one.bytes, exposed=one.exposed or 0.0))
    return found


@dataclass(frozen=True)
class _Module:
    """Return what modules of one row share: the name without numbers, and what they compute."""

    pattern: str
    notation: str
    is_work: bool  # it has parameters, or a kernel that no other fuses with


def _alike(modules: Iterable[tuple[str, _Module]], repeats: Sequence[Run]) -> dict[_Module, list[str]]:
    found: dict[_Module, list[str]] = {}
    for fqn, module in modules:
        found.setdefault(module, []).extend((fqn, *removed_like(fqn, repeats)))
    return found


def removed_like(fqn: str, repeats: Sequence[Run]) -> tuple[str, ...]:
    """Return the modules that the folded graph leaves out and that `fqn` stands for."""
    for run in repeats:
        index = index_in(run.prefix, fqn)
        if index in run.below:
            place = run.below.index(index)
            return tuple(moved_to(run.prefix, removed, fqn) for removed in run.removed[place :: run.period])
    return ()


@dataclass(frozen=True)
class _Writer:
    """Writer of the modules of a PLACED graph."""

    graph: Graph
    letters: Letters
    plan: PlanRecord

    def inputs(self) -> tuple[tuple[str, str], ...]:
        named = [(input_of(node).name, node) for node in placeholders(self.graph, InputRole.INPUT)]
        return tuple((name, self._laid_out(node, self.plan.inputs[name].layout)) for name, node in named)

    def outputs(self) -> tuple[tuple[str, str], ...]:
        pairs = zip(outputs_of(self.graph), returned(self.graph), strict=True)
        return tuple(
            (output.name, self._laid_out(value, self.plan.outputs[output.name].layout))
            for output, value in pairs
            if output.role is OutputRole.OUTPUT and isinstance(value, Node) and is_tensor(value)
        )

    def modules(self) -> Iterator[tuple[str, _Module]]:
        """Yield each FQN with the work that the module itself does in the forward."""
        backward = backward_nodes(self.graph)
        sources = _sources(self.graph)
        groups: dict[str, list[Node]] = {}
        for node in self.graph.nodes:
            if node.op == "call_function" and node not in backward and node not in sources:
                groups.setdefault(origin_of(node).fqn, []).append(node)
        for fqn, nodes in groups.items():
            yield fqn, self._module(fqn, nodes, backward, sources)

    def _module(self, fqn: str, nodes: list[Node], backward: set[Node], sources: dict[Node, Node]) -> _Module:
        inside = set(nodes)
        read = [operand for node in nodes for operand in operands(node) if operand not in inside]
        found = dict.fromkeys(sources[one] for one in read if one in sources)
        held = [one for one in found if input_of(one).role is InputRole.PARAMETER]
        given = dict.fromkeys(_unmoved(one) for one in read if one not in sources)
        made = [
            node
            for node in nodes
            if is_tensor(node)
            and _unmoved(node) in inside
            and any(user not in inside and user not in backward for user in node.users)
        ]
        left = list(dict.fromkeys(self._given(one) for one in given if is_tensor(one) and tensor_of(one).dim()))
        right = list(dict.fromkeys(self._value(one) for one in made))
        if not held:
            left, right = _first(left), _first(right)
        weights = ", ".join(self._weight(one, given, made) for one in held)
        product = " . ".join(part for part in (", ".join(left), weights) if part)
        is_work = bool(held) or any(not is_alias(n) and not is_fusible(n.target) and not is_reshard(n) for n in nodes)
        return _Module(pattern_of(fqn), f"{product} -> {', '.join(right)}" if right else product, is_work)

    def _value(self, node: Node) -> str:
        return self._laid_out(node, layout_of(node))

    def _laid_out(self, node: Node, layout: Layout) -> str:
        return self.letters.format(node, layout, self.plan.mesh)

    def _given(self, node: Node) -> str:
        return f"{_short(input_of(node).name) if node.op == 'placeholder' else 'In'}{self._value(node)}"

    def _weight(self, node: Node, given: Iterable[Node], made: Iterable[Node]) -> str:
        """Return a parameter, dims that are summed over first: `W[D_dp, F_tp]`."""
        dims = self.letters.dims[node][0]
        read, written = (
            {f for one in nodes for results in self.letters.dims[one] for dim in results for f in dim}
            for nodes in (given, made)
        )
        order = sorted(range(len(dims)), key=lambda i: not any(f in read and f not in written for f in dims[i]))
        name = _short(input_of(node).name)
        return f"{'W' if name == 'weight' else name}{self.letters.format_dims(dims, layout_of(node), self.plan.mesh, order)}"


def backward_nodes(graph: Graph) -> set[Node]:
    """Return the nodes of the backward: those that depend on a tangent."""
    backward = set(placeholders(graph, InputRole.TANGENT))
    for node in graph.nodes:
        if node.op != "output" and any(value in backward for value in node.all_input_nodes):
            backward.add(node)
    return backward


def _sources(graph: Graph) -> dict[Node, Node]:
    """Map each node that is a parameter or buffer, or made of one alone, to that parameter or buffer."""
    found = {node: node for role in (InputRole.PARAMETER, InputRole.BUFFER) for node in placeholders(graph, role)}
    for node in graph.nodes:
        read = operands(node) if node.op == "call_function" else ()
        if len(read) == 1 and read[0] in found:
            found[node] = found[read[0]]
    return found


def _unmoved(node: Node) -> Node:
    """Return what `node` is a view or a reshard of."""
    while is_reshard(node) or (is_alias(node) and item_of(node) is None):
        node = operands(node)[0]
    return node


def _first(texts: list[str]) -> list[str]:
    return texts if len(texts) <= INSIDE else [*texts[:INSIDE], "..."]


def _short(name: str) -> str:
    return name.rpartition(".")[2]
