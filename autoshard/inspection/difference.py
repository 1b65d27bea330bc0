"""Compare two plans: settings, time and memory, layouts, collectives, remarks; equal layers share a line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from autoshard.plans.collectives import Collective
from autoshard.plans.names import fold_names
from autoshard.plans.plan_values import Value
from autoshard.plans.record import PlanRecord
from passes.base import Remark
from passes.ir.mesh import Mesh
from passes.ir.text import GAP
from passes.ir.units import format_bytes, format_seconds

NOTHING = "-"
NOISE = 5e-9  # seconds, of sums of times: less prints as zero
SHOWN = 12  # lines of a section that are printed; `changes` has all


@dataclass(frozen=True)
class Change:
    """One thing that changed: its values before and after, and by how much if that can be expressed."""

    section: str  # "settings", "step", "memory", "parameters", "inputs", "outputs", "values", "collectives", "remarks"
    what: str
    before: str
    after: str
    by: str = ""


@dataclass(frozen=True)
class PlanDiff:
    """The changes from one plan to another, in the order in which they are printed."""

    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        """Return whether anything is different."""
        return bool(self.changes)

    def __str__(self) -> str:
        if not self.changes:
            return "no difference"
        lines = []
        for section in dict.fromkeys(change.section for change in self.changes):
            lines.append(section)
            changes = [change for change in self.changes if change.section == section]
            lines += _aligned(changes[:SHOWN])
            lines += [f"  and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
        return "\n".join(lines)


def difference(before: PlanRecord, after: PlanRecord) -> PlanDiff:
    """Return the changes from `before` to `after`."""
    return PlanDiff(
        (
            *_settings(before, after),
            *_time(before, after),
            *_memory(before, after),
            *_values("parameters", before, after, before.parameters, after.parameters),
            *_values("inputs", before, after, before.inputs, after.inputs),
            *_values("outputs", before, after, before.outputs, after.outputs),
            *_layouts(before, after),
            *_collectives(before, after),
            *_remarks(before, after),
        )
    )


def _settings(before: PlanRecord, after: PlanRecord) -> Iterator[Change]:
    if before.mesh != after.mesh:
        yield Change("settings", "mesh", _mesh(before.mesh), _mesh(after.mesh))
    chosen = [one.search.chosen if one.search else ", ".join(r or NOTHING for r in one.recipes) for one in (before, after)]
    if chosen[0] != chosen[1]:
        yield Change("settings", "plan", *chosen)
    for name, value in before.settings.options.items():
        other = after.settings.options.get(name)
        if value != other:
            yield Change("settings", name, _short(value), _short(other))
    if before.settings.training != after.settings.training:
        modes = {True: "forward and backward", False: "forward alone"}
        yield Change("settings", "mode", modes[before.settings.training], modes[after.settings.training])
    limits = [one.search.memory_limit if one.search else None for one in (before, after)]
    if None not in limits and limits[0] != limits[1]:
        yield _numbers("settings", "memory limit", limits[0] or 0, limits[1] or 0, format_bytes)


def _mesh(mesh: Mesh) -> str:
    return f"{mesh} on {mesh.hardware.name}" if mesh.hardware else str(mesh)


def _short(value: object) -> str:
    text = NOTHING if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."


def _time(before: PlanRecord, after: PlanRecord) -> Iterator[Change]:
    if before.cost is None or after.cost is None:
        return
    for what in ("step_time", "compute", "exposed_comm", "hidden_comm"):
        pair = getattr(before.cost, what), getattr(after.cost, what)
        if pair[0] != pair[1]:
            yield _numbers("step", what.replace("_", " "), *pair, format_seconds)


def _memory(before: PlanRecord, after: PlanRecord) -> Iterator[Change]:
    if before.cost is None or after.cost is None:
        return
    kinds = {"peak": (before.cost.peak_memory, after.cost.peak_memory)}
    others = asdict(after.cost.memory)
    kinds |= {name: (size, others[name]) for name, size in asdict(before.cost.memory).items()}
    for name, pair in kinds.items():
        if pair[0] != pair[1]:
            yield _numbers("memory", name, *pair, format_bytes)


def _numbers(section: str, what: str, before: float, after: float, form: Callable[[float], str]) -> Change:
    sign = "+" if after > before else "-"
    part = f" ({100 * (after - before) / before:+.1f} %)" if before else ""
    return Change(section, what, form(before), form(after), f"{sign}{form(abs(after - before))}{part}")


def _exposed(more: float) -> str:
    return f"exposed {'+' if more > 0 else '-'}{format_seconds(abs(more))}" if abs(more) > NOISE else "exposed as before"


def _values(
    section: str,
    before: PlanRecord,
    after: PlanRecord,
    values: Mapping[str, Value],
    others: Mapping[str, Value],
) -> Iterator[Change]:
    texts = {name: _value(value, before.mesh) for name, value in values.items()}
    other_texts = {name: _value(value, after.mesh) for name, value in others.items()}
    yield from _folded(section, texts, other_texts)


def _value(value: Value, mesh: Mesh) -> str:
    return f"{value.dtype}{list(value.shape)} {value.layout.format(mesh)}"


def _folded(section: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    """Join the changes of names that differ in numbers only and change alike."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in {**before, **after}:
        old, new = before.get(name, NOTHING), after.get(name, NOTHING)
        if old != new:
            groups.setdefault((re.sub(r"\d+", "#", name), old, new), []).append(name)
    for (_, old, new), names in groups.items():
        if NOTHING not in (old, new):
            old, new = _different(old, new)
        yield Change(section, fold_names(names), old, new)


def _different(old: str, new: str) -> tuple[str, str]:
    """Return both values, without their type if that is the same."""
    types = [text.partition("] ")[0] for text in (old, new)]
    return (old, new) if types[0] != types[1] else (old.partition("] ")[2] or old, new.partition("] ")[2] or new)


def _layouts(before: PlanRecord, after: PlanRecord) -> Iterator[Change]:
    """Compare the layouts of computed values, by module: how many changed, and how most of them did."""
    one, other = _placed(before), _placed(after)
    total: dict[str, int] = {}
    changed: dict[str, list[tuple[str, str]]] = {}
    for (module, op), layouts in one.items():
        found = other.get((module, op), [])
        if len(layouts) == len(found):
            total[module] = total.get(module, 0) + len(layouts)
            changed.setdefault(module, []).extend(pair for pair in zip(layouts, found, strict=True) if pair[0] != pair[1])
    groups: dict[tuple[str, str, tuple[str, str]], list[str]] = {}
    for module, pairs in changed.items():
        if pairs:
            most = max(dict.fromkeys(pairs), key=pairs.count)
            alike = "" if pairs.count(most) == len(pairs) else ", most like this"
            key = re.sub(r"\d+", "#", module), f"{len(pairs)} of {total[module]}{alike}", most
            groups.setdefault(key, []).append(module)
    for (_, count, (old, new)), modules in groups.items():
        yield Change("values", fold_names(modules) or "outside of modules", old, new, count)


def _placed(plan: PlanRecord) -> dict[tuple[str, str], list[str]]:
    """Return the layouts of values by the module and the op that compute them, in order: their names are others where
    equal layers are left out.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for line in plan.graphs.get("PLACED", "").splitlines():
        head, _, comment = line.partition(f"{GAP}# ")
        match = re.match(r"%\w+: [^{=]*(\{[^}]*\}).*? = ([\w.]+)\(", head)
        if match and comment and match[2] != "reshard":
            module = comment.partition(" | ")[0].partition(" ")[2]
            found.setdefault((module, match[2]), []).append(match[1])
    return found


def _collectives(before: PlanRecord, after: PlanRecord) -> Iterator[Change]:
    """Compare collectives, those first whose exposed time changes most, or else their bytes."""
    one, other = _grouped(before.collectives), _grouped(after.collectives)
    found = []
    for key in {**one, **other}:
        old, new = one.get(key, ()), other.get(key, ())
        texts = _several(old), _several(new)
        if texts[0] != texts[1]:
            exposed = sum(c.exposed or 0.0 for c in new) - sum(c.exposed or 0.0 for c in old)
            nbytes = sum(c.bytes for c in new) - sum(c.bytes for c in old)
            timed = before.cost is not None and after.cost is not None
            by = _exposed(exposed) if timed else ""
            found.append(((-abs(exposed), -abs(nbytes)), Change("collectives", _where(key, (*old, *new)), *texts, by)))
    yield from (change for _, change in sorted(found, key=lambda pair: pair[0]))


def _grouped(collectives: Iterable[Collective]) -> dict[tuple[str, str, str], list[Collective]]:
    """Group collectives by kind, axes and module, with equal layers together."""
    groups: dict[tuple[str, str, str], list[Collective]] = {}
    for one in collectives:
        where = re.sub(r"\d+", "#", one.origin.fqn) or re.sub(r"^\w+: | needs \{.*\}$", "", one.reason)
        groups.setdefault((one.kind, ".".join(one.axes), where), []).append(one)
    return groups


def _where(key: tuple[str, str, str], collectives: Iterable[Collective]) -> str:
    modules = dict.fromkeys(one.origin.fqn for one in collectives if one.origin.fqn)
    return f"{key[0]} {key[1]} {fold_names(modules) if modules else key[2]}"


def _several(collectives: Iterable[Collective]) -> str:
    runs = [one for one in collectives for _ in range(1 + one.recomputed)]
    return f"{len(runs)} x, {format_bytes(sum(one.bytes for one in runs))}" if runs else NOTHING


def _remarks(before: PlanRecord, after: PlanRecord) -> Iterator[Change]:
    texts = [dict.fromkeys(_remark(r) for r in one.remarks if not r.routine) for one in (before, after)]
    for text in texts[0]:
        if text not in texts[1]:
            yield Change("remarks", text, "said", NOTHING)
    for text in texts[1]:
        if text not in texts[0]:
            yield Change("remarks", text, NOTHING, "said")


def _remark(one: Remark) -> str:
    """Return a remark with its place: the source line, or for a value that has none its name, which may differ between plans."""
    return f"{one.pass_name}: {one.text} [{str(one.origin) or f'%{one.node}'}]"


def _aligned(changes: list[Change]) -> Iterator[str]:
    rows = [(change.what, change.before, change.after, change.by) for change in changes]
    widths = [min(44, max(len(row[i]) for row in rows)) for i in range(3)]
    for what, before, after, by in rows:
        line = f"  {what:{widths[0]}}  {before:{widths[1]}} -> {after:{widths[2]}}  {by}"
        yield line.rstrip()
