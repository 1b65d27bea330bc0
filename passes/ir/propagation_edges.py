"""Record how placements travelled: for each value and axis, what it took its placement from, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Edge:
    """`value` has `placement` on `axis` because `source` has what it has; `source` is "" where it was a constraint."""

    value: str  # name of a node
    axis: str
    placement: str
    source: str  # name of a node
    why: str


def chain_of(edges: Sequence[Edge], value: str, axis: str) -> Iterator[Edge]:
    """Return the edges that brought `value` its placement on `axis`, the last one first."""
    known = {edge.value: edge for edge in edges if edge.axis == axis}
    seen: set[str] = set()
    while value in known and value not in seen:
        seen.add(value)
        yield known[value]
        value = known[value].source
