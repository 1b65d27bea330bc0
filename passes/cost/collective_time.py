"""Predict the seconds of a collective: steps times latency plus bytes over bandwidth, on a hierarchy of links.

A group has k ranks on n nodes, p on each. There are three algorithms, and the library takes the fastest:

- a ring: k - 1 steps, n - 1 of them between nodes. Every rank passes on (k - 1) / k of the bytes, and p rings use
  the p network links of a node side by side;
- a tree: log2 steps in the node and between nodes, up and down; every rank passes on all bytes both ways;
- the switch, if it reduces: a tree whose part in the node is one pass through the switch.

Inside a node every rank also reads and writes all bytes in its own memory once. With the constants of
`passes/hardware/presets` the formulas fit published NCCL figures: `tests/cost/test_collective.py` checks each one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Literal

import sympy

from passes.hardware.hardware import Group, Hardware

Where = Literal["inside", "across"]

N, k, n, p, m = sympy.symbols("N k n p m", positive=True)
a, b, s, A, B, S, c, r = sympy.symbols("a b s A B S c r", positive=True)

SYMBOLS = {
    N: "bytes of the larger side of a rank: what a gather makes, what a reduction takes",
    k: "ranks",
    n: "nodes that they are on",
    p: "ranks on a node",
    m: "ranks that fit on a node",
    a: "seconds of a step inside a node",
    b: "bytes/s of a rank's link inside the node",
    s: "seconds of setup inside a node",
    A: "seconds of a step between nodes",
    B: "bytes/s of a rank's network link",
    S: "seconds of setup between nodes",
    c: "bytes/s of a rank's memory, read and written together",
    r: "bytes/s at which the switch all-reduces",
}


def collective_seconds(kind: str, nbytes: float, group: Group, hardware: Hardware) -> float:
    """Return the seconds of a collective of `kind` ("all_gather", "reduce_scatter", "all_reduce", "all_to_all").

    `nbytes` is the larger side of a rank: the whole tensor that a gather returns or a reduction takes, what a rank holds
    before an all-to-all. A group of one rank takes no time.
    """
    return _seconds(kind, nbytes, group, hardware)


@lru_cache(maxsize=1 << 16)
def _seconds(kind: str, nbytes: float, group: Group, hardware: Hardware) -> float:
    if group.ranks == 1:
        return 0.0
    formula = _compiled(kind, link_of(group), hardware.inside.reduces > 0, hardware.scatter_sends_all)
    return float(formula(*values_of(nbytes, group, hardware).values()))


def link_of(group: Group) -> Where:
    """Return the link that a collective over `group` occupies."""
    return "inside" if group.nodes == 1 else "across"


def values_of(nbytes: float, group: Group, hardware: Hardware) -> dict[sympy.Symbol, float]:
    """Return the value of each of `SYMBOLS`."""
    inside, across = hardware.inside, hardware.across
    return {
        N: nbytes,
        k: group.ranks,
        n: group.nodes,
        p: group.per_node,
        m: hardware.node_size,
        a: inside.latency,
        b: inside.bandwidth,
        s: inside.setup,
        A: across.latency,
        B: across.bandwidth,
        S: across.setup,
        c: hardware.memory_bandwidth,
        r: inside.reduces or 1.0,
    }


def formula_for(kind: str, group: Group, hardware: Hardware) -> sympy.Expr:
    """Return the formula that `collective_seconds` evaluates for that group and hardware."""
    return collective_formula(
        kind, link_of(group), switch=hardware.inside.reduces > 0, scatter_sends_all=hardware.scatter_sends_all
    )


def collective_formula(
    kind: str, where: Where = "inside", *, switch: bool = False, scatter_sends_all: bool = False
) -> sympy.Expr:
    """Return the seconds of a collective in a node, or across nodes, as a formula of `SYMBOLS`.

    `switch`: the switch of a node reduces. `scatter_sends_all`: as in gloo, whose reduce-scatter is an all-reduce.
    """
    if kind == "all_to_all":
        return _exchange(where)
    others = [_tree(where), *([_switch(where)] if switch else [])]
    if kind == "all_reduce" or (kind == "reduce_scatter" and scatter_sends_all):
        return _least(ring_formula(where, sweeps=2), *others)
    assert kind in ("all_gather", "reduce_scatter"), kind
    return _least(ring_formula(where, sweeps=1), *others)


def ring_formula(where: Where, *, sweeps: int) -> sympy.Expr:
    """Return the seconds of a ring: one sweep gathers, or reduces and scatters; two sweeps do both."""
    if where == "inside":
        return s + sweeps * (k - 1) * a + sweeps * _in_node(k) + 2 * N / c
    steps = (k - n) * a + (n - 1) * A
    # The part in the node is that of k ranks in one node, so that spreading a group over nodes never makes it faster.
    in_node = sweeps * _in_node(_least(k, m)) + 2 * N / c
    return S + sweeps * steps + _most(in_node, sweeps * (k - 1) / k * N / (p * B))


def _in_node(ranks: sympy.Expr) -> sympy.Expr:
    return (ranks - 1) / ranks * N / b


def _tree(where: Where) -> sympy.Expr:
    if where == "inside":
        return s + 2 * _log2(k) * a + 2 * N / b + 2 * N / c
    return S + _tree_steps() + _most(2 * N / b + 2 * N / c, _tree_network())


def _switch(where: Where) -> sympy.Expr:
    if where == "inside":
        return s + 2 * _log2(k) * a + N / r
    return S + _tree_steps() + _most(N / r, _tree_network())


def _tree_steps() -> sympy.Expr:
    return 2 * _log2(k / n) * a + 2 * _log2(n) * A


def _tree_network() -> sympy.Expr:
    """Return the seconds on the network: two nodes swap their sums; of more, each passes on all bytes both ways."""
    return _least(n - 1, 2) * N / (p * B)


def _least(*terms: sympy.Expr) -> sympy.Expr:
    return sympy.Min(*terms, evaluate=False)  # evaluating takes sympy seconds: it looks for terms that are never least


def _most(*terms: sympy.Expr) -> sympy.Expr:
    return sympy.Max(*terms, evaluate=False)


def _log2(x: sympy.Expr) -> sympy.Expr:
    return sympy.log(x) / sympy.log(2)


def _exchange(where: Where) -> sympy.Expr:
    """Return the seconds of an all-to-all: a send and a receive for each other rank, each rank over its own links."""
    if where == "inside":
        return s + 2 * (k - 1) * a + _in_node(k) + 2 * N / c
    steps = 2 * (k - n) * a + 2 * (n - 1) * A
    return S + steps + _most(_in_node(_least(k, m)) + 2 * N / c, (k - p) / k * N / B)


def sent_formula(kind: str, where: Where) -> tuple[sympy.Expr, sympy.Expr]:
    """Return the mean bytes that a rank sends for a large message, inside its node and over the network."""
    sweeps = 2 if kind == "all_reduce" else 1
    sent = sweeps * (k - 1) / k * N
    if where == "inside":
        return sent, sympy.Integer(0)
    # Of p rings, each crosses between two nodes at one of the p ranks; all to all, all but p ranks are elsewhere.
    network = (k - p) / k * N if kind == "all_to_all" else sent / p
    return sympy.simplify(sent - network), network


@cache
def _compiled(kind: str, where: Where, switch: bool, scatter_sends_all: bool) -> Callable[..., Any]:
    formula = collective_formula(kind, where, switch=switch, scatter_sends_all=scatter_sends_all)
    compiled: Callable[..., Any] = sympy.lambdify(tuple(SYMBOLS), formula, "math", cse=True)
    return compiled
