"""A ShardingPlan as text: one screen, colour on a terminal, plain in a pipe."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autoshard.report.cost import candidates_table, cost_table
from passes.ir.layout import Partial, Shard
from passes.ir.plan import Collective, Value
from passes.ir.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autoshard.plan import ShardingPlan

_BYTES = {"float64": 8, "float32": 4, "int64": 8, "int32": 4, "bfloat16": 2, "float16": 2, "bool": 1}


def format_plan(plan: ShardingPlan, *, width: int | None = None, colour: bool | None = None) -> str:
    """Cost, candidates, values (repeated layers folded), collectives and remarks of a plan, on one screen."""
    colour = sys.stdout.isatty() if colour is None else colour
    columns = width or min(shutil.get_terminal_size((100, 40)).columns, 140)
    console = Console(file=io.StringIO(), width=columns, force_terminal=colour, color_system="auto" if colour else None)
    recipes = ", ".join(
        f"{n}={s} {r or '-'}" for n, s, r in zip(plan.mesh.names, plan.mesh.sizes, plan.recipes, strict=True)
    )
    hardware = f" of {plan.mesh.hardware.name}" if plan.mesh.hardware else ""
    console.print(f"[bold]plan[/bold] on {plan.mesh.size} ranks{hardware}: {recipes}", highlight=False)
    if plan.cost:
        console.print(cost_table(plan.cost, plan.search))
    if plan.search:
        console.print(candidates_table(plan.search))
    console.print(_values_table(plan))
    console.print(_collectives_table(plan))
    if not plan.cost:
        console.print(_memory_line(plan), highlight=False)
    for remark in fold_text(str(remark) for remark in plan.remarks if not remark.routine):
        console.print(f"[yellow]remark[/yellow] {escape(remark)}", highlight=False, soft_wrap=False)
    return _text(console)


def _text(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def _values_table(plan: ShardingPlan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("value", "global shape", *plan.mesh.names, "per rank"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for values in (plan.inputs, plan.parameters, plan.outputs):
        for name, value in fold_values(values):
            placements = [_placement(p) for p in value.layout.placements]
            local = "x".join(map(str, value.local_shape(plan.mesh))) or "scalar"
            table.add_row(name, f"{value.dtype}[{', '.join(map(str, value.shape))}]", *placements, local)
        table.add_section()
    return table


def _placement(placement: object) -> str:
    if isinstance(placement, Shard):
        return f"[green]{placement}[/green]"
    return f"[red]{placement}[/red]" if isinstance(placement, Partial) else f"[dim]{placement}[/dim]"


def fold_values(values: Mapping[str, Value]) -> list[tuple[str, Value]]:
    """Values that differ in one number of their name only are one row: `layers.0-3.w`."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, value in values.items():
        key = (re.sub(r"\d+", "#", name), value.shape, value.dtype, value.layout)
        groups.setdefault(key, []).append(name)
    return [(fold_names(names), values[names[0]]) for names in groups.values()]


def fold_names(names: Iterable[str]) -> str:
    """`["layers.0.w", "layers.1.w"]` -> `"layers.0-1.w"`."""
    split = [re.split(r"(\d+)", name) for name in names]
    columns = [list(dict.fromkeys(parts)) for parts in zip(*split, strict=True)]
    return "".join(column[0] if len(column) == 1 else _range(column) for column in columns)


def _range(numbers: list[str]) -> str:
    values = sorted(int(n) for n in numbers)
    if values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}-{values[-1]}"
    return "{" + ",".join(map(str, values)) + "}"


def _collectives_table(plan: ShardingPlan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    timed = ("exposed",) if plan.cost else ()
    for name in ("collective", "over", "forward", "backward", "received per rank", *timed, "for"):
        table.add_column(name, no_wrap=name != "for", overflow="ellipsis")
    groups: dict[tuple[str, str, str], list[Collective]] = {}
    for collective in plan.collectives:
        reason = re.sub(r"^\w+: ", "", collective.reason)
        groups.setdefault((collective.kind, ".".join(collective.axes), _short(reason)), []).append(collective)
    for (kind, axes, reason), members in groups.items():
        forward = sum(not c.backward for c in members)
        backward = len(members) - forward + sum(c.recomputed for c in members)
        total = sum(c.bytes * (2 if c.recomputed else 1) for c in members)
        exposed = (format_seconds(sum(c.exposed or 0.0 for c in members)),) if timed else ()
        table.add_row(kind, axes, str(forward or "-"), str(backward or "-"), format_bytes(total), *exposed, reason)
    return table


def _short(reason: str) -> str:
    return re.sub(r" needs \{.*\}$", "", reason)


def _memory_line(plan: ShardingPlan) -> str:
    stored = sum(_size(v, v.local_shape(plan.mesh)) for v in plan.parameters.values())
    whole = sum(_size(v, v.shape) for v in plan.parameters.values())
    return f"parameters per rank: {format_bytes(stored)} of {format_bytes(whole)}, gradients the same"


def _size(value: Value, shape: tuple[int, ...]) -> int:
    size = _BYTES.get(value.dtype, 4)
    for length in shape:
        size *= length
    return size


def fold_text(lines: Iterable[str]) -> list[str]:
    """Lines that differ in numbers only are one, with how often they occur."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(re.sub(r"\d+", "#", line), []).append(line)
    return [same[0] if len(same) == 1 else f"{same[0]} (and {len(same) - 1} alike)" for same in groups.values()]
