"""Predict the seconds of a collective: the formula of its kind, compiled, with the machine's figures.

The formulas and their symbols are in `passes/ir/collectives`; `tests/cost/test_collective.py` compares them with
published NCCL figures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import sympy

from passes.hardware.hardware import Group, Hardware
from passes.ir.collectives import KINDS, Fabric, Where
from passes.ir.collectives.formulas import SYMBOLS, A, B, N, S, a, b, c, k, m, n, p, r, s


def collective_seconds(kind: str, nbytes: float, group: Group, hardware: Hardware) -> float:
    """Return the seconds of a collective of `kind` (a name in `passes.ir.collectives.KINDS`) over `group`.

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
        r: min(inside.reduces, inside.bandwidth) or 1.0,
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
    formula = KINDS[kind].seconds
    assert formula is not None, f"{kind} sends nothing"
    return formula(Fabric(where, switch=switch, scatter_sends_all=scatter_sends_all))


def sent_formula(kind: str, where: Where) -> tuple[sympy.Expr, sympy.Expr]:
    """Return the mean bytes that a rank sends for a large message, inside its node and over the network."""
    return KINDS[kind].sent(where)


@cache
def _compiled(kind: str, where: Where, switch: bool, scatter_sends_all: bool) -> Callable[..., Any]:
    formula = collective_formula(kind, where, switch=switch, scatter_sends_all=scatter_sends_all)
    compiled: Callable[..., Any] = sympy.lambdify(tuple(SYMBOLS), formula, "math", cse=True)
    return compiled
