"""The record of propagation: for each value and axis, the source of its placement, and the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Edge:
    """A step of propagation: `value` takes `placement` on `axis` from `source`, which is "" for a constraint."""

    value: str  # name of a node
    axis: str
    placement: str
    source: str  # name of a node
    why: str


def chain_of(edges: Sequence[Edge], value: str, axis: str) -> Iterator[Edge]:
    """Return the edges that led to the placement of `value` on `axis`, the last one first."""
    known = {edge.value: edge for edge in edges if edge.axis == axis}
    seen: set[str] = set()
    while value in known and value not in seen:
        seen.add(value)
        yield known[value]
        value = known[value].source
