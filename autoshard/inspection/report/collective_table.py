"""The table of a plan's collectives: what they move and which line needs them, the most exposed time first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.table import Table
from rich.text import Text

from autoshard.plans.collectives import Collective
from passes.ir.collectives import SEND
from passes.ir.units import format_bytes, format_seconds

SHOWN = 12  # groups; the rest is one row
LEAST = 12  # characters of what needs a collective; if fewer are left beside how it is sent, that stands below


@dataclass(frozen=True)
class Group:
    """Collectives of one kind over the same axes, needed by one line for one reason."""

    members: tuple[Collective, ...]

    @property
    def forward(self) -> int:
        return sum(not one.backward for one in self.members)

    @property
    def backward(self) -> int:
        return sum(one.backward + one.recomputed for one in self.members)

    @property
    def received(self) -> int:
        return sum(one.bytes * (2 if one.recomputed else 1) for one in self.members)

    @property
    def exposed(self) -> float:
        return sum(one.exposed or 0.0 for one in self.members)


def collectives_table(collectives: Iterable[Collective], *, is_timed: bool, columns: int) -> Table:
    """Return a table with one line per group, sorted by exposed time, then bytes."""
    headers = ("collective", "over", "fwd", "bwd", "received", *(("exposed",) if is_timed else ()), "for")
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for number, name in enumerate(headers):
        table.add_column(name, no_wrap=True, justify="right" if 1 < number < len(headers) - 1 else "left")
    groups = grouped(collectives)
    rows = [_row(group, is_timed=is_timed) for group in groups[:SHOWN]]
    if rest := [one for group in groups[SHOWN:] for one in group.members]:
        figures = _figures(Group(tuple(rest)), is_timed=is_timed)
        rows.append((f"{len(groups) - SHOWN} more", "", *figures, "less each"))
    taken = sum(2 + max(map(len, cells)) for cells in list(zip(headers, *rows, strict=True))[:-1])
    room = max(columns - taken, 20)
    for row, group in zip_longest(rows, groups[:SHOWN]):
        ways = [] if group is None else list(_ways(group))
        beside = "".join(f", {way}" for way in ways)
        fits = len(beside) + LEAST <= room
        table.add_row(*row[:-1], Text(_cut(row[-1], room - len(beside)) + beside if fits else _cut(row[-1], room)))
        for way in () if fits else ways:
            table.add_row(*[""] * len(row[:-1]), Text(_cut(way, room)))
    return table


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _row(group: Group, *, is_timed: bool) -> tuple[str, ...]:
    first = group.members[0]
    return (first.kind, ".".join(first.axes), *_figures(group, is_timed=is_timed), cause_of(first))


def _ways(group: Group) -> Iterator[str]:
    """Yield how members are sent, with a count where that is not all: `in 4 chunks`, `3 in a bucket`. Of sends, yield how
    many messages they are."""
    if group.members[0].kind == SEND.name:
        yield f"{sum(one.chunks for one in group.members)} messages"
        return
    ways = Counter(one.way.partition(" (")[0] for one in group.members if one.way)
    for way, count in ways.items():
        yield way if count == len(group.members) else f"{count} {way}"


def grouped(collectives: Iterable[Collective]) -> list[Group]:
    """Return groups by exposed time, then bytes; of equal ones the first in the program."""
    groups: dict[tuple[str, tuple[str, ...], str], list[Collective]] = {}
    for one in collectives:
        groups.setdefault((one.kind, one.axes, cause_of(one)), []).append(one)
    return sorted((Group(tuple(members)) for members in groups.values()), key=lambda g: (-g.exposed, -g.received))


def cause_of(collective: Collective) -> str:
    """Return the line and why it needs the collective: `"model.py:42 gathered for use"`."""
    origin = collective.origin
    place = f"{origin.file.rsplit('/', 1)[-1]}:{origin.line} " if origin.file else ""
    return place + short_reason(collective.reason)


def short_reason(reason: str) -> str:
    """Return the reason without its pass and the needed layout."""
    return re.sub(r" needs \{.*\}$", "", re.sub(r"^\w+: ", "", reason))


def _figures(group: Group, *, is_timed: bool) -> Sequence[str]:
    counts = (str(group.forward or "-"), str(group.backward or "-"), format_bytes(group.received))
    return (*counts, format_seconds(group.exposed)) if is_timed else counts
