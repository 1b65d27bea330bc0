"""Explain a value's layout: the alternatives and their costs, the constraints on it, and where it came from."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch.fx import Node

from autoshard.inspection.history import History, Touch, lines_of, touches_between
from autoshard.inspection.subject import Subject, subject_of
from autoshard.planner.evaluation import phases_of
from autoshard.planner.state import PlanningState
from autoshard.plans.collectives import Collective
from autoshard.plans.names import fold_names, fold_text
from autoshard.plans.record import PlanRecord
from passes.base import PassContext, Remark
from passes.cost.fused_regions import is_fusible
from passes.errors import UserError
from passes.ir.collectives import SEND
from passes.ir.graph import InputRole, Stage, copy_graph, input_of, is_tensor, origin_of, repeats_of, tensor_of
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.ir.propagation_edges import Edge, chain_of
from passes.ir.text import format_type
from passes.ir.units import format_bytes, format_seconds
from passes.manager import PassManager
from passes.search.alternatives import Alternative, alternatives
from passes.search.model.axis_groups import format_axis_groups

PRICED = 2  # values of a module or line whose alternatives are priced (each takes solves): parameters, then the largest
SHOWN = 12  # values, collectives or passes that are printed
WIDTH = 100  # characters of a line
LISTED = 8  # alternatives of a value that are priced, beside the chosen one; more do not fit on a screen


@dataclass(frozen=True)
class Choice:
    """The layout chosen for one value.

    `forced` are the constraints on it, by axis; `chains` the steps that each axis's placement came from, the last step
    first; `alternatives` are empty if their costs were not computed.
    """

    name: str
    type: str
    place: str
    layout: Layout
    forced: tuple[str, ...]
    chains: tuple[tuple[Edge, ...], ...]
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True)
class Explanation:
    """The answer to `plan.explain(asked)`, about a screen of text when printed."""

    asked: str
    kind: str
    mesh: Mesh
    choices: tuple[Choice, ...]
    collectives: tuple[Collective, ...]
    touches: tuple[Touch, ...]
    remarks: tuple[Remark, ...]
    step: float | None  # simulated, of the plan
    is_searched: bool  # the plan is, for the least cost of the whole step
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(line for text in _lines(self) for line in _wrapped(text))


def explain(plan: PlanRecord, what: str, state: PlanningState | None = None) -> Explanation:
    """Explain `what` by the plan and, if available, the planner's `state`. Raises UserError for an unknown name."""
    if not isinstance(what, str) or not what:
        raise UserError(f"explain takes the name of a parameter, module, value, collective or source line, not {what!r}")
    subject = subject_of(plan, what, None if state is None else state.folded)
    nodes = [node for node in subject.nodes if _layout(plan, node) is not None]
    priced = nodes if len(nodes) == 1 else _largest(nodes)
    forced, solved = _pins(plan), 0 if state is None else state.effort.alternatives
    choices = [_choice(plan, state, node, forced, solved=solved if node in priced else None) for node in nodes]
    return Explanation(
        what,
        subject.kind,
        plan.mesh,
        tuple(choices),
        subject.collectives,
        tuple(_touches(plan, state, subject)),
        tuple(remark for remark in plan.remarks if remark.node in {node.name for node in subject.nodes}),
        plan.cost.step_time if plan.cost else None,
        plan.search is not None or plan.solution is not None,
        tuple(_notes(plan, state, are_priced=any(choice.alternatives for choice in choices))),
    )


def _layout(plan: PlanRecord, node: Node) -> Layout | None:
    if node.op == "placeholder" and input_of(node).role is InputRole.PARAMETER:
        return plan.parameters[input_of(node).name].layout
    return plan.layouts.get(node.name)


def _largest(nodes: list[Node]) -> list[Node]:
    """Return the values whose alternatives are priced: parameters first, then the largest results of unfused calls."""
    own = [node for node in nodes if (node.op == "placeholder" or not is_fusible(node.target)) and is_tensor(node)]
    return sorted(own, key=lambda node: (node.op != "placeholder", -tensor_of(node).numel()))[:PRICED]


def _choice(
    plan: PlanRecord,
    state: PlanningState | None,
    node: Node,
    forced: dict[str, tuple[str, ...]],
    *,
    solved: int | None,
) -> Choice:
    layout = _layout(plan, node)
    assert layout is not None
    priced: tuple[Alternative, ...] = ()
    if solved is not None and state is not None and plan.mesh.hardware is not None:
        searched = state.searched
        own = next((one for one in searched.graph.graph.nodes if one.name == node.name), None)
        if own is not None:
            priced = alternatives(searched, own, asked=layout, most=LISTED, solved=solved)
    return Choice(
        input_of(node).name if node.op == "placeholder" else f"%{node.name}",
        format_type(tensor_of(node)),
        str(origin_of(node)),
        layout,
        forced.get(node.name, ()),
        tuple(tuple(chain_of(plan.edges, node.name, axis)) for axis in plan.mesh.names),
        priced,
    )


def _pins(plan: PlanRecord) -> dict[str, tuple[str, ...]]:
    """Return by node name who constrained a placement of a value, or of the reshards between it and its users."""
    found: dict[str, list[str]] = {}
    for line in plan.graphs.get("PLACED", "").splitlines():
        match = re.match(r"%(\w+): .*? pinned\((.*)\)(?: recompute)? = (?:reshard\(%(\w+)\))?", line)
        if match is None:
            continue
        where = " before its users" if match[3] else ""
        for axis, placement, reason in re.findall(r'(\w+):(\S+) ("(?:[^"\\]|\\.)*")', match[2]):
            found.setdefault(match[3] or match[1], []).append(f"{axis}:{placement}{where}: {json.loads(reason)}")
    return {name: tuple(dict.fromkeys(texts)) for name, texts in found.items()}


def _touches(plan: PlanRecord, state: PlanningState | None, subject: Subject) -> Iterator[Touch]:
    """Yield the changes that passes made to the subject's values and their reshards; by stage for a plan from a file.
    """
    names = {node.name for node in subject.nodes} | {one.id.partition("@")[0] for one in subject.collectives}
    for touch in _touches_of_stages(plan) if state is None else _touches_of_passes(plan, state):
        source = re.search(r"= \w+\(%(\w+)", touch.line)
        if touch.node in names or (touch.what == "added" and source is not None and source[1] in names):
            yield touch


def _touches_of_stages(plan: PlanRecord) -> Iterator[Touch]:
    """Yield the changes between the stored texts of the program, up to the stage where shapes become local."""
    texts = [(stage, plan.graphs[stage.name]) for stage in Stage if stage <= Stage.COLLECTIVE and stage.name in plan.graphs]
    for (_, old), (stage, new) in pairwise(texts):
        yield from touches_between(f"until {stage.name}", lines_of(old), lines_of(new))


def _touches_of_passes(plan: PlanRecord, state: PlanningState) -> Iterator[Touch]:
    problem, gm = state.problem, copy_graph(state.folded.graph)
    phases, history = phases_of(problem, gm, plan.recipes, plan.solution), History()
    passes = (*phases.place, *phases.make_explicit, *phases.make_collectives)
    PassManager(passes, (history,)).run(gm, PassContext(problem.mesh, unknown_ops=problem.options.unknown_ops))
    yield from history.touches


def _notes(plan: PlanRecord, state: PlanningState | None, *, are_priced: bool) -> Iterator[str]:
    if state is None:
        yield (
            "a plan from a file does not hold its model: it knows stages, not the passes between them, and not what other "
            "layouts would cost; for these make it again with autoshard.plan(...), or ask "
            "`python -m autoshard explain file.py:function ...`"
        )
    elif plan.mesh.hardware is None:
        yield "alternatives have no price where the figures of the device are not known: give Options(hardware='h100')"
    else:
        if are_priced and state.searched.budget is None:
            yield "the search's model finds no plan that fits in memory: alternatives are priced as if there was enough of it"
        if axes := format_axis_groups(state.axis_groups, plan.mesh):
            why = "so that they are found in seconds" if state.prepared is None else "as this one was found"
            yield f"alternatives are of plans that use {axes} alike, {why}"
        runs = repeats_of(state.folded.graph).runs
        for run in runs:
            yield f"{run}: equal layers take equal choices"


# --- text


def _wrapped(text: str) -> list[str]:
    """Wrap a line of text to the column; continuation lines are indented."""
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _lines(one: Explanation) -> Iterator[str]:
    yield f"{one.kind} {one.asked}"
    for choice in _unlike(one.choices)[:SHOWN]:
        yield from _choice_lines(choice, one)
    if len(_unlike(one.choices)) > SHOWN:
        yield f"and {len(_unlike(one.choices)) - SHOWN} more values"
    if one.collectives:
        yield "collectives"
        yield from _some(folded_collectives(one.collectives), 2 * SHOWN)
    if one.touches:
        yield "passes"
        yield from _touch_lines(one.touches)
    if one.remarks:
        yield "remarks"
        yield from _some(f"  {text}" for text in fold_text(map(str, one.remarks)))
    for note in one.notes:
        yield f"note: {note}"


def _unlike(choices: tuple[Choice, ...]) -> list[Choice]:
    """Return one of each set of choices that print alike."""
    return list({(c.type, c.place, c.layout, c.alternatives == ()): c for c in reversed(choices)}.values())[::-1]


def _choice_lines(choice: Choice, one: Explanation) -> Iterator[str]:
    place = f"      # {choice.place}" if choice.place else ""
    yield f"{choice.name}: {choice.type} {choice.layout.format(one.mesh)}{place}"
    yield from (f"  constraint: {text}" for text in choice.forced)
    if not choice.alternatives and len(one.choices) > 1:
        return
    for axis, chain in zip(one.mesh.names, choice.chains, strict=True):
        if len(chain) > 1 or (chain and not choice.forced):
            yield f"  on {axis}: {_joined(chain)}"
    if not any(choice.chains) and not choice.forced and choice.alternatives:
        yield f"  no constraint; {_unconstrained(choice, one)}"
    if choice.alternatives:
        yield from _alternative_lines(choice, one)


def _unconstrained(choice: Choice, one: Explanation) -> str:
    """Return why a value that no constraint or recipe reaches has its layout."""
    if one.is_searched:
        return "chosen by what the whole step costs"
    return "nothing was searched" + (", and nothing shards it" if choice.layout.is_replicated else "")


def _joined(chain: tuple[Edge, ...]) -> str:
    """Join the steps of a chain, without those whose reason is that of the next step."""
    steps = []
    for i, edge in enumerate(chain):
        if i in (0, len(chain) - 1) or edge.why != chain[i + 1].why:
            steps.append(f"%{edge.value} {edge.placement}: {edge.why}")
    return " <- ".join(steps)


def _alternative_lines(choice: Choice, one: Explanation) -> Iterator[str]:
    least = next((other.step for other in choice.alternatives if other.is_chosen), None)
    if least is None:
        least = min((other.step for other in choice.alternatives if other.step is not None), default=None)
    step = f"; this plan is simulated at {format_seconds(one.step)}" if one.step is not None else ""
    yield f"  the most promising alternatives: the whole step, all else chosen for each, by the search's model{step}"
    rows: list[tuple[str, ...]] = [("  layout", "step", "change", "at least", "compute", "communication", "memory", "")]
    for other in choice.alternatives:
        mark = "* " if other.layout == choice.layout else "  "
        if other.step is None:
            rows.append((f"{mark}{other.layout.format(one.mesh)}", "-", "", "", "", "", "", "nothing goes together with it"))
            continue
        change = f"{100 * (other.step / least - 1):+z.1f} %" if least and not other.is_chosen else ""
        at_least = f"{100 * (other.bound / least - 1):+z.1f} %" if least and not other.is_chosen else ""
        times = (format_seconds(seconds) for seconds in (other.compute, other.communication))
        fits = "" if other.fits else "does not fit"
        row = (f"{mark}{other.layout.format(one.mesh)}", format_seconds(other.step), change, at_least, *times)
        rows.append((*row, format_bytes(other.memory), fits))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True))]
        yield f"  {'  '.join((*cells, row[-1]))}".rstrip()


def folded_collectives(collectives: Iterable[Collective]) -> Iterator[str]:
    """Return one line for the same collective of all equal layers."""
    groups: dict[tuple[object, ...], list[Collective]] = {}
    for one in collectives:
        where = re.sub(r"\d+", "#", one.origin.fqn), one.origin.line
        key = one.kind, one.axes, one.bytes, one.backward, *where, one.reason, one.way
        groups.setdefault(key, []).append(one)
    for same in groups.values():
        first = same[0]
        exposed = sum(one.exposed or 0.0 for one in same)
        seconds = sum(one.seconds or 0.0 for one in same)
        time = f", exposed {format_seconds(exposed)} of {format_seconds(seconds)}" if first.exposed is not None else ""
        behind = f", behind {', '.join(first.behind)}" if first.behind else ""
        count = f"{len(same)} x " if len(same) > 1 else ""
        names = fold_names(dict.fromkeys(one.origin.fqn for one in same)) if first.origin.fqn else ""
        place = f"{str(first.origin).partition(' ')[0]} {names}".strip()
        way = "backward" if first.backward else "forward and again in the backward" if first.recomputed else "forward"
        how = ", ".join((format_bytes(first.bytes), way, *([first.way] if first.way else [])))
        kind = f"{first.kind} of {first.what}" if first.kind == SEND.name else first.kind
        yield f"  {count}%{first.id}: {kind} over {', '.join(first.axes)}, {how}{time}{behind}"
        yield f"    {first.reason}      # {place}"


def _some(lines: Iterable[str], most: int = SHOWN) -> Iterator[str]:
    lines = list(lines)
    yield from lines[:most]
    if len(lines) > most:
        yield f"  and {len(lines) - most} more lines"


def _touch_lines(touches: tuple[Touch, ...]) -> Iterator[str]:
    """Return a line per change, or for many changes the count per pass."""
    if len(touches) <= SHOWN:
        yield from dict.fromkeys(f"  {touch.pass_name} {touch.what} {_brief(touch.line)}" for touch in touches)
        return
    counts: dict[str, dict[str, int]] = {}
    for touch in touches:
        own = counts.setdefault(touch.pass_name, {})
        own[touch.what] = own.get(touch.what, 0) + 1
    for name, own in counts.items():
        yield f"  {name} {', '.join(f'{what} {count} nodes' for what, count in own.items())}"


def _brief(line: str) -> str:
    return line if len(line) <= 76 else f"{line[:72]} ..."
