"""Formulas for the seconds and bytes of a message, from which the kinds of collectives build theirs.

A group has k ranks on n nodes, p on each. There are three algorithms, and NCCL uses the fastest (gloo has rings alone):

- a ring: k - 1 steps, n - 1 of them between nodes. Every rank passes on (k - 1) / k of the bytes, and p rings use
  the p network links of a node side by side;
- a tree: log2 steps in the node and between nodes, up and down; every rank passes on all bytes both ways;
- the switch, if it reduces: a tree whose part in the node is one pass through the switch.

Inside a node every rank also reads and writes all bytes in its own memory once. With the constants of
`passes/hardware/presets` the formulas fit published NCCL figures: `tests/cost/test_collective.py` checks each one.
"""

from __future__ import annotations

from typing import Literal

import sympy

Where = Literal["inside", "across"]  # the link that a group's messages take: in a node, or between nodes

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


def ring_formula(where: Where, *, sweeps: int) -> sympy.Expr:
    """Return the seconds of a ring: one sweep gathers, or reduces and scatters; two sweeps do both."""
    if where == "inside":
        return s + sweeps * (k - 1) * a + sweeps * _in_node(k) + 2 * N / c
    steps = (k - n) * a + (n - 1) * A
    # The time inside the node is that of k ranks in one node, so that spreading a group over nodes never makes it faster.
    in_node = sweeps * _in_node(least(k, m)) + 2 * N / c
    return S + sweeps * steps + _most(in_node, sweeps * (k - 1) / k * N / (p * B))


def _in_node(ranks: sympy.Expr) -> sympy.Expr:
    return (ranks - 1) / ranks * N / b


def tree_formula(where: Where) -> sympy.Expr:
    if where == "inside":
        return s + 2 * _log2(k) * a + 2 * N / b + 2 * N / c
    return S + _tree_steps() + _most(2 * N / b + 2 * N / c, _tree_network())


def switch_formula(where: Where) -> sympy.Expr:
    if where == "inside":
        return s + 2 * _log2(k) * a + N / r
    return S + _tree_steps() + _most(N / r, _tree_network())


def _tree_steps() -> sympy.Expr:
    return 2 * _log2(k / n) * a + 2 * _log2(n) * A


def _tree_network() -> sympy.Expr:
    """Return the seconds on the network: two nodes exchange their sums; of more nodes, each passes on all bytes both
    ways."""
    return least(n - 1, 2) * N / (p * B)


def least(*terms: sympy.Expr) -> sympy.Expr:
    return sympy.Min(*terms, evaluate=False)  # unevaluated: sympy would spend seconds looking for terms that are never the least


def _most(*terms: sympy.Expr) -> sympy.Expr:
    return sympy.Max(*terms, evaluate=False)


def _log2(x: sympy.Expr) -> sympy.Expr:
    return sympy.log(x) / sympy.log(2)


def exchange_formula(where: Where) -> sympy.Expr:
    """Return the seconds of an all-to-all: a send and a receive per other rank, each rank over its own links."""
    if where == "inside":
        return s + 2 * (k - 1) * a + _in_node(k) + 2 * N / c
    steps = 2 * (k - n) * a + 2 * (n - 1) * A
    return S + steps + _most(_in_node(least(k, m)) + 2 * N / c, (k - p) / k * N / B)


def spread_formula(where: Where, *, sweeps: int) -> tuple[sympy.Expr, sympy.Expr]:
    """Return the mean bytes that a rank of a ring sends inside its node and between nodes."""
    sent = sweeps * (k - 1) / k * N
    if where == "inside":
        return sent, sympy.Integer(0)
    return sympy.simplify(sent - sent / p), sent / p  # of p rings, each crosses between two nodes at one of the p ranks
