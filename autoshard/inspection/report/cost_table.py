"""Tables of a step's cost and of the candidates."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from autoshard.plans.outcome import Candidate, Cost, Recomputation, Search
from passes.cost.simulate import SLOW_LINKS, Timeline
from passes.hardware.hardware import Hardware
from passes.ir.units import format_bytes, format_seconds

SHOWN = 4  # kinds of kept values that are listed
BUSY = 0.25  # part of a step: of links that are in use for less, a lower rate is not worth a line


def cost_table(
    cost: Cost, search: Search | None, recomputation: Recomputation | None, timeline: Timeline | None
) -> Table:
    """Return rows of step time and its parts, what the prediction rests on and how much slower links would change it, peak
    memory by kind, and the proven gap.
    """
    table = Table.grid(padding=(0, 2))
    limit = f" of {format_bytes(search.memory_limit)}" if search else ""
    table.add_row(
        "[bold]step[/bold]",
        f"{format_seconds(cost.step_time)}: compute {format_seconds(cost.compute)}, exposed communication "
        f"{format_seconds(cost.exposed_comm)}; {format_seconds(cost.hidden_comm)} of communication hidden",
    )
    if timeline is not None:
        if (links := format_links(timeline)) is not None:
            table.add_row("[bold]links[/bold]", links)
        if timeline.program.mesh.hardware is not None:
            table.add_row("[bold]rests[/bold]", escape(format_basis(timeline.program.mesh.hardware)))
    table.add_row("[bold]memory[/bold]", f"{format_bytes(cost.peak_memory)}{limit} at the peak: {cost.memory}")
    if recomputation:
        table.add_row("[bold]again[/bold]", escape(format_recomputation(recomputation)))
    if search:
        table.add_row("[bold]search[/bold]", f"{_proof(search)}; {format_seconds(search.seconds)}")
    return table


def format_links(timeline: Timeline) -> str | None:
    """Return how long links are in use, and by how much the step grows when they give less; None where they hardly are."""
    step = timeline.step_time
    if timeline.communication < BUSY * step:
        return None
    longer = timeline.slowed_step_time / step - 1
    busy = 100 * timeline.communication / step
    return f"in use for {busy:.0f} % of the step; at {100 * SLOW_LINKS:.0f} % of their rate it takes {100 * longer:.1f} % longer"


def format_basis(hardware: Hardware) -> str:
    """Return the figures that a prediction rests on: how many are measured, published and assumed, and which."""
    kinds = {basis: hardware.resting_on(basis) for basis in ("measured", "published", "assumed")}
    parts = [f"{len(names)} {basis}" for basis, names in kinds.items() if names] or ["no source is given"]
    assumed = f" ({', '.join(kinds['assumed'])})" if kinds["assumed"] else ""
    return f"on the figures of {hardware.name}: {', '.join(parts)}{assumed}"


def format_recomputation(recomputation: Recomputation) -> str:
    """Return what the backward recomputes and at what cost."""
    kept = [f"{kind}" for kind in recomputation.kept[:SHOWN]]
    more = len(recomputation.kept) - len(kept)
    but = ", ".join(["what enters it", *kept, *([f"{more} more"] if more else [])])
    text = f"each layer in the backward, except {but}"
    if recomputation.compute is None or recomputation.communication is None:
        return text
    compute, communication = format_seconds(recomputation.compute), format_seconds(recomputation.communication)
    freed = f"; {format_bytes(recomputation.freed)} less memory" if recomputation.freed else ""
    return f"{text}: compute {compute}, communication {communication}{freed}"


def _proof(search: Search) -> str:
    """Return what was chosen, and what is proven of all other plans: by the simulator, and by the solver's model."""
    found = [f"chose {search.chosen} of {len(search.candidates)} candidates{_nearly_equal(search)}"]
    if search.least:  # kernels that are all fused are in no bound
        found.append(f"no plan is simulated faster than {format_seconds(search.least)}, for its kernels alone")
    if search.gap is not None:
        assert search.bound is not None
        below = f"{100 * search.gap:.2f} % below this plan"
        found.append(f"none takes less than {format_seconds(search.bound)} by the solver's model, {below}")
    elif search.bound is not None:
        least = format_seconds(search.bound)
        found.append(f"the solver's model puts every plan at {least} or more, above this one, and so proves nothing")
    return "; ".join(found)


def _nearly_equal(search: Search) -> str:
    """Return which candidate is faster than the chosen one, but by less than a prediction can tell; "" if none is."""
    fitting = [(one.cost.step_time, one.name) for one in search.candidates if one.cost and one.fits]
    fastest, name = min(fitting, default=(0.0, search.chosen))
    if name == search.chosen or search.step_time is None or fastest >= search.step_time:
        return ""
    less = 100 * (1 - fastest / search.step_time)
    return f" ({name} is {less:.2f} % faster, too little to tell: sturdiness, memory and simplicity decide)"


def candidates_table(search: Search) -> Table:
    """Return a row per simulated plan, the fastest that fits first; the chosen one is marked."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("candidate")
    for name in ("step", "compute", "exposed", "hidden", "memory"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("")
    for candidate in sorted((one for one in search.candidates if one.cost), key=_order):
        chosen = candidate.name == search.chosen
        table.add_row(_marked(candidate.name, chosen=chosen), *_figures(candidate), style="bold" if chosen else "")
    return table


def _marked(name: str, *, chosen: bool) -> Table:
    """Return a name behind its mark, so that the lines of a long one begin below each other."""
    cell = Table.grid()
    cell.add_row("* " if chosen else "  ", escape(name))
    return cell


def format_declined(search: Search) -> list[str]:
    """Return a line per reason why candidates were not simulated: `"fsdp, zero2: the batch of 6 does not divide"`."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for candidate in search.candidates:
        if candidate.cost is None:
            alone = candidate.name if ", " in candidate.name else ""  # "solved, not padded" would read as two in a list
            reasons.setdefault((candidate.note, alone), []).append(candidate.name)
    return [f"{', '.join(names)}: {note}" for (note, _), names in reasons.items()]


def _order(candidate: Candidate) -> tuple[bool, float]:
    return not candidate.fits, _cost(candidate).step_time


def _cost(candidate: Candidate) -> Cost:
    assert candidate.cost is not None, "a row is of what was simulated"
    return candidate.cost


def _figures(candidate: Candidate) -> tuple[str, ...]:
    cost = _cost(candidate)
    seconds = (cost.step_time, cost.compute, cost.exposed_comm, cost.hidden_comm)
    fits = "[green]fits[/green]" if candidate.fits else "[red]does not fit[/red]"
    note = f": {escape(candidate.note)}" if candidate.note else ""
    return (*map(format_seconds, seconds), format_bytes(cost.peak_memory), fits + note)
