"""A PlanRecord as text: one screen, colour on a terminal, plain in a pipe."""

from __future__ import annotations

import io
import math
import re
import shutil
import sys
from collections.abc import Iterator

import torch
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from autoshard.inspection.report.collective_table import collectives_table
from autoshard.inspection.report.cost_table import candidates_table, cost_table, format_declined, format_recomputation
from autoshard.inspection.report.modules import ModuleRow, ModuleTable, module_table, notation_legend, read_placed
from autoshard.inspection.report.timeline import is_timed
from autoshard.plans.names import fold_text
from autoshard.plans.plan_values import Value
from autoshard.plans.record import PlanRecord
from passes.errors import GraphTextError
from passes.ir.units import format_bytes, format_seconds

WIDTH, WIDEST = 100, 140  # columns where the terminal does not say, and at most
NOTHING = 5e-9  # seconds
FIGURES = 11  # columns of one figure and what stands around it
_GRADIENT = re.compile(r'\bgradient\("([^"]*)"\) %')  # a result of a program's text, which is a value, not None


def format_plan(plan: PlanRecord, *, width: int | None = None, colour: bool | None = None) -> str:
    """Return cost, candidates, modules (equal layers folded), collectives and remarks of a plan as one screen of text."""
    colour = sys.stdout.isatty() if colour is None else colour
    columns = width or min(shutil.get_terminal_size((WIDTH, 40)).columns, WIDEST)
    file = io.StringIO()
    console = Console(file=file, width=columns, force_terminal=colour, color_system="auto" if colour else None)
    _print(plan, console)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def format_html(plan: PlanRecord) -> str:
    """Return the same as an HTML fragment, for a notebook."""
    console = Console(file=io.StringIO(), width=WIDTH, record=True, force_jupyter=False)
    _print(plan, console)
    style = "font-family:ui-monospace,Menlo,Consolas,monospace;line-height:1.3;white-space:pre;overflow-x:auto"
    return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')


def _print(plan: PlanRecord, console: Console) -> None:
    recipes = ", ".join(
        f"{n}={s} {r or '-'}" for n, s, r in zip(plan.mesh.names, plan.mesh.sizes, plan.recipes, strict=True)
    )
    hardware = f" of {plan.mesh.hardware.name}" if plan.mesh.hardware else ""
    ranks = "1 rank" if plan.mesh.size == 1 else f"{plan.mesh.size} ranks"
    console.print(f"[bold]plan[/bold] on {ranks}{hardware}: {recipes}", highlight=False)
    if plan.cost:
        console.print(cost_table(plan.cost, plan.search, plan.recomputation, plan.timeline))
    else:
        console.print(_memory_line(plan), highlight=False)
        if plan.recomputation:
            console.print(f"computed again: {escape(format_recomputation(plan.recomputation))}", highlight=False)
    if plan.search:
        console.print(candidates_table(plan.search))
        for declined in format_declined(plan.search):
            console.print(f"[dim]  {escape(declined)}[/dim]", highlight=False)
    try:
        _print_modules(plan, module_table(plan, *read_placed(plan)), console)
    except GraphTextError as error:
        console.print(f"[yellow]modules[/yellow] cannot be read here: {escape(str(error))}", highlight=False)
    if plan.collectives:
        console.print(collectives_table(plan.collectives, is_timed=is_timed(plan), columns=console.width))
    for remark in fold_text(str(remark) for remark in plan.remarks if not remark.routine):
        console.print(f"[yellow]remark[/yellow] {escape(remark)}", highlight=False, soft_wrap=False)


def _print_modules(plan: PlanRecord, modules: ModuleTable, console: Console) -> None:
    console.print(_borders(modules))
    console.print(_modules_table(modules, timed=is_timed(plan), columns=console.width))
    if modules.sizes:
        console.print(_legend(modules, plan.mesh.names[-1]), highlight=False)


def _modules_table(modules: ModuleTable, *, timed: bool, columns: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", expand=True)
    table.add_column("module", overflow="fold", max_width=columns // 3)
    table.add_column("values and weights, as stored -> as made", overflow="fold", ratio=1)
    for name in ("compute", "exposed") if timed else ("received",):
        table.add_column(name, no_wrap=True, justify="right")
    for name, row in _indented(modules.rows, columns - FIGURES * (2 if timed else 1)):
        table.add_row(Text(name), *_cells(row, timed=timed))
    return table


def _cells(row: ModuleRow | None, *, timed: bool) -> tuple[RenderableType, ...]:
    return () if row is None else (styled(row.notation), *_figures(row, timed=timed))


def _borders(modules: ModuleTable) -> Text:
    """Return inputs and outputs on one line."""
    sides = (("in  ", modules.inputs), ("out ", modules.outputs))
    text = Text()
    for name, values in sides:
        text.append(f"{'   ' if text else ''}{name}", "bold")
        for number, (label, notation) in enumerate(values):
            text.append(f"{', ' if number else ''}{label}").append_text(styled(notation))
    return text


def _indented(rows: tuple[ModuleRow, ...], columns: int) -> Iterator[tuple[str, ModuleRow | None]]:
    """Yield rows with the modules of one list of layers under its name; a single one only where its line would be too long."""
    groups: dict[str, list[ModuleRow]] = {}
    for row in rows:
        groups.setdefault(_layer_of(row.name) or row.name, []).append(row)
    widest = max((len(row.notation) for row in rows), default=0)
    for layer, members in groups.items():
        own = next((row for row in members if row.name == layer), None)
        if len(members) == 1 and (own or len(members[0].name) <= columns - widest):
            yield members[0].name, members[0]
            continue
        yield layer, own
        yield from ((f"  {row.name.removeprefix(layer + '.')}", row) for row in members if row is not own)


def _layer_of(name: str) -> str:
    """Return `"layers.0-31"` of `"layers.0-31.attention.wq"`; empty for a module in no list of layers."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part[:1].isdigit() or part.startswith("{")), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _figures(row: ModuleRow, *, timed: bool) -> tuple[str, ...]:
    figures = row.figures
    if not timed:
        return (format_bytes(figures.received) if figures.received else "-",)
    return tuple(format_seconds(one) if one > NOTHING else "-" for one in (figures.compute, figures.exposed))


def styled(notation: str) -> Text:
    """Colour the axes that shard a dim, and partial sums."""
    text = Text(notation)
    text.highlight_regex(r"(?<=[A-Z0-9])_[\w./]+", "green")
    text.highlight_regex(r"\{[^}]*\}", "red")
    return text


def _legend(modules: ModuleTable, axis: str) -> str:
    sizes = " ".join(f"{letter}={size}" for letter, size in modules.sizes.items())
    return f"[dim]{sizes}; {notation_legend(modules, axis)}[/dim]"


def _memory_line(plan: PlanRecord) -> str:
    stored = {name: _nbytes(one, one.local_shape(plan.mesh)) for name, one in plan.parameters.items()}
    whole = sum(_nbytes(one, one.shape) for one in plan.parameters.values())
    trained = set(_GRADIENT.findall(plan.graphs.get("CAPTURED", ""))).intersection(stored)
    shown = f"gradients {format_bytes(sum(stored[name] for name in trained))}" if trained else "no gradients"
    if trained == set(stored):
        shown = "gradients the same"
    return f"parameters per rank: {format_bytes(sum(stored.values()))} of {format_bytes(whole)}, {shown}"


def _nbytes(value: Value, shape: tuple[int, ...]) -> int:
    dtype: torch.dtype = getattr(torch, value.dtype)
    return math.prod(shape) * dtype.itemsize
