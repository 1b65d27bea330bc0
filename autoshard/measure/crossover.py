"""Solve the cost formulas for the size from which a sharded matrix product is faster than one device.

The product is [T, H] x [H, 4H]: T tokens, hidden size H, the first of a transformer's feed-forward. On k devices it can be
sharded by tokens, by columns of the weight, or by its rows (and x by columns). Each way is priced by the formulas of
`passes/cost`. Bisection brackets the size from which it takes less time than one device. Near that size each maximum and
minimum equals one of its arguments, the rest is a polynomial, and sympy solves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import sympy

from passes.cost import collective_time as wire
from passes.cost import kernel_time as kernel
from passes.errors import UserError
from passes.hardware.hardware import Group, Hardware
from passes.ir.collectives import formulas
from passes.ir.text import DTYPES
from passes.ir.units import format_seconds

T, H = sympy.symbols("T H", positive=True)
k = formulas.k  # devices
SYMBOLS = {T: "tokens: batch x sequence", H: "hidden size", **formulas.SYMBOLS, **kernel.SYMBOLS}
WIDTH = 4  # the weight is [H, 4H]
LARGEST = 1 << 26  # tokens, or hidden size: larger ones are not searched; 67 M is beyond any model in use
MOST = 10**15  # devices, or the size that is given: far beyond any, and their products fit in a float

Unknown = Literal["H", "T"]


@dataclass(frozen=True)
class Transfer:
    """A collective of `elements` (larger side) of the product's dtype."""

    kind: str
    elements: sympy.Expr
    what: str


@dataclass(frozen=True)
class Way:
    """One way to shard the product: (rows, columns, terms) of each multiplication per device, and what is sent."""

    name: str
    products: tuple[tuple[sympy.Expr, sympy.Expr, sympy.Expr], ...]
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class Crossing:
    """The size from which one way to shard is faster than one device."""

    way: Way
    unknown: Unknown
    size: int | None
    """The least size from which (up to `LARGEST`) sharding is faster; None: it never is."""
    exact: float | None
    """The size at which the formulas below are equal, solved by sympy; None: not near `size`, which bisection found."""
    one: sympy.Expr
    """Seconds on one device: of T, H and the symbols of `passes.cost`, as it is near `size`."""
    sharded: sympy.Expr
    """Seconds on k devices."""
    seconds: tuple[float, float]
    """Seconds on one device and on k, at `size`; at `LARGEST` if there is none."""


@dataclass(frozen=True)
class Question:
    """The product and devices to find a crossover for: `tokens` or `hidden` is given, the other is the unknown."""

    devices: int
    hardware: Hardware
    tokens: int | None = None
    hidden: int | None = None
    dtype: str = "bf16"
    link: str | None = None
    """"inside": all devices on one node; "across": one device per node; None: nodes are filled."""
    is_training: bool = False
    """True: a training step with both gradients. False: the product alone, its result whole on every device."""

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.hidden is None):
            raise UserError("a crossover has one unknown: give the tokens or the hidden size, not both or neither")
        if not 2 <= self.devices <= MOST:
            raise UserError(f"a crossover between one device and {self.devices}: give 2 devices or more, at most {MOST:.0e}")
        if self.dtype not in DTYPES:
            raise UserError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        for name, value in (("tokens", self.tokens), ("hidden", self.hidden)):
            if value is not None and not 1 <= value <= MOST:
                raise UserError(f"{name}={value}: give 1 or more, at most {MOST:.0e}")
        if self.link not in (None, "inside", "across"):
            raise UserError(f"link={self.link!r}: choose inside or across")
        if self.link == "inside" and self.devices > self.hardware.node_size:
            raise UserError(
                f"{self.devices} devices are not inside a node of {self.hardware.name}, "
                f"which has {self.hardware.node_size}; give fewer, or leave the link to be filled"
            )

    @property
    def unknown(self) -> Unknown:
        """Return which size is not given."""
        return "H" if self.hidden is None else "T"

    @property
    def group(self) -> Group:
        """Return the devices of the collectives."""
        nodes = {"inside": 1, "across": self.devices, None: -(-self.devices // self.hardware.node_size)}[self.link]
        return Group(self.devices, nodes)


def crossovers(question: Question) -> tuple[Crossing, ...]:
    """Return, for each way to shard, the size from which it is faster than one device."""
    one = _one(question)
    ways = _training(one) if question.is_training else _forward()
    return tuple(_crossing(question, one, way) for way in ways)


def _one(question: Question) -> Way:
    forward = (T, WIDTH * H, H)
    backward = ((T, H, WIDTH * H), (H, WIDTH * H, T))  # of x, of the weight
    return Way("one device", (forward, *(backward if question.is_training else ())), ())


def _forward() -> tuple[Way, ...]:
    """Return the ways for the product alone: x and the weight are on every device, and so is the result."""
    result = Transfer("all_gather", WIDTH * T * H, "the result")
    return (
        Way("tokens", ((T / k, WIDTH * H, H),), (result,)),
        Way("columns", ((T, WIDTH * H / k, H),), (result,)),
        Way("rows", ((T, WIDTH * H, H / k),), (Transfer("all_reduce", WIDTH * T * H, "the result"),)),
    )


def _training(one: Way) -> tuple[Way, ...]:
    """Return the ways for a training step: values stay sharded as the way has them, only partial sums are reduced."""

    def divided(dim: sympy.Expr) -> tuple[tuple[sympy.Expr, ...], ...]:
        return tuple(tuple(length / k if length == dim else length for length in product) for product in one.products)

    return (
        Way("tokens", _checked(divided(T)), (Transfer("all_reduce", WIDTH * H * H, "the weight's gradient"),)),
        Way("columns", _checked(divided(WIDTH * H)), (Transfer("all_reduce", T * H, "the gradient of x"),)),
        Way("rows", _checked(divided(H)), (Transfer("all_reduce", WIDTH * T * H, "the result"),)),
    )


def _checked(products: tuple[tuple[sympy.Expr, ...], ...]) -> tuple[tuple[sympy.Expr, sympy.Expr, sympy.Expr], ...]:
    return tuple((rows, columns, terms) for rows, columns, terms in products)


# Formulas ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Term:
    """A formula of `passes.cost` in which some symbols stand for expressions of T, H and k."""

    formula: sympy.Expr
    stands_for: Mapping[sympy.Symbol, sympy.Expr]

    def at(self, values: Mapping[sympy.Symbol, float]) -> float:
        """Return the seconds for these values of the symbols."""
        filled = {symbol: _evaluate(expression, values) for symbol, expression in self.stands_for.items()}
        return _evaluate(self.formula, {**values, **filled})

    def branch(self, values: Mapping[sympy.Symbol, float]) -> sympy.Expr:
        """Return the formula as it is near `values`: each maximum and minimum replaced by the argument that it equals."""
        filled = {symbol: _evaluate(expression, values) for symbol, expression in self.stands_for.items()}
        return _branch(self.formula, {**values, **filled}).xreplace(dict(self.stands_for))


def _terms(way: Way, question: Question) -> tuple[_Term, ...]:
    itemsize = DTYPES[question.dtype].itemsize
    terms = []
    for rows, columns, summed in way.products:
        nbytes = itemsize * (rows * columns + columns * summed + rows * summed)
        shape = {kernel.G: sympy.Integer(1), kernel.M: rows, kernel.N: columns, kernel.K: summed, kernel.D: nbytes}
        terms.append(_Term(kernel.PRODUCT, shape))
    for transfer in way.transfers:
        formula = wire.formula_for(transfer.kind, question.group, question.hardware)
        terms.append(_Term(formula, {formulas.N: itemsize * transfer.elements}))
    return tuple(terms)


def _evaluate(formula: sympy.Expr, values: Mapping[sympy.Symbol, float]) -> float:
    symbols, compiled = _compiled(formula)
    return float(compiled(*(values[symbol] for symbol in symbols)))


@cache
def _compiled(formula: sympy.Expr) -> tuple[tuple[sympy.Symbol, ...], Callable[..., Any]]:
    symbols = tuple(sorted(formula.free_symbols, key=str))
    return symbols, sympy.lambdify(symbols, formula, "math")


def _branch(formula: sympy.Expr, values: Mapping[sympy.Symbol, float]) -> sympy.Expr:
    if not formula.has(sympy.Max, sympy.Min):
        return formula
    if isinstance(formula, sympy.Max | sympy.Min):
        choose = max if isinstance(formula, sympy.Max) else min
        return _branch(choose(formula.args, key=lambda argument: _evaluate(argument, values)), values)
    return formula.func(*(_branch(argument, values) for argument in formula.args))


def _figures(question: Question) -> dict[sympy.Symbol, float]:
    """Return the values of the symbols of `passes.cost` for this hardware and group, and the given one of T and H."""
    hardware = question.hardware
    figures = wire.values_of(0, question.group, hardware)
    del figures[formulas.N]
    figures |= {} if question.tokens is None else {T: question.tokens}
    figures |= {} if question.hidden is None else {H: question.hidden}
    return {
        **figures,
        kernel.f: hardware.rate(question.dtype),
        kernel.e: hardware.efficiency / (1 + hardware.spread),
        kernel.t: hardware.tile,
        kernel.u: hardware.units,
        kernel.launch: hardware.launch,
    }


# Solving ----------------------------------------------------------------------------------------------------------


def _crossing(question: Question, one: Way, way: Way) -> Crossing:
    unknown = H if question.unknown == "H" else T
    figures = _figures(question)
    alone, sharded = _terms(one, question), _terms(way, question)

    def seconds(terms: tuple[_Term, ...], size: float) -> float:
        return sum(term.at({**figures, unknown: size}) for term in terms)

    def gain(size: float) -> float:
        return seconds(alone, size) - seconds(sharded, size)

    size = _least(gain)
    near = {**figures, unknown: float(size or LARGEST)}
    formulas = [sympy.Add(*(term.branch(near) for term in terms)) for terms in (alone, sharded)]
    both = seconds(alone, near[unknown]), seconds(sharded, near[unknown])
    exact = None if size is None or size == 1 else _solved(formulas[0] - formulas[1], figures, unknown, size)
    return Crossing(way, question.unknown, size, exact, formulas[0], formulas[1], both)


def _least(gain: Callable[[float], float]) -> int | None:
    """Return the least size with a gain there and at all larger sizes of a grid up to LARGEST: 8 sizes per doubling."""
    grid = [2 ** (i / 8) for i in range(8 * int(math.log2(LARGEST)) + 1)]
    last = next((i for i in reversed(range(len(grid))) if gain(grid[i]) <= 0), None)
    if last is None:
        return 1
    if last == len(grid) - 1:
        return None
    low, high = math.floor(grid[last]), math.ceil(grid[last + 1])
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    return high


def _solved(
    difference: sympy.Expr, figures: Mapping[sympy.Symbol, float], unknown: sympy.Symbol, size: int
) -> float | None:
    """Return the root of the polynomial just below `size`; None if the formulas have a kink in between."""
    polynomial = sympy.Poly(difference.xreplace(dict(figures)).together().as_numer_denom()[0], unknown)
    roots = [float(sympy.re(root)) for root in polynomial.nroots(n=20, maxsteps=200) if abs(sympy.im(root)) < 1e-9]
    return next((root for root in roots if size - 1 <= root <= size), None)


# Text -------------------------------------------------------------------------------------------------------------


def format_crossovers(question: Question, found: tuple[Crossing, ...]) -> str:
    """Return the answer as a table, followed by its formulas."""
    group, hardware = question.group, question.hardware
    given = f"H = {question.hidden}" if question.tokens is None else f"T = {question.tokens}"
    where = f"{question.devices} {hardware.name} on {group.nodes} node{'s' * (group.nodes > 1)}"
    what = "a training step of" if question.is_training else "the product"
    lines = [f"From which {question.unknown} on are {where} faster than one?", ""]
    lines += [f"{what} [T, H] x [H, {WIDTH}H], {question.dtype}, {given}", ""]
    rows = [("sharded by", "each device multiplies", "and sends", f"faster from {question.unknown} =")]
    rows += [(c.way.name, _first_product(c.way), _sent(c.way), _from(c)) for c in found]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for crossing in found:
        lines += ["", *_format_formulas(question, crossing)]
    used = set().union(*(formula.free_symbols for c in found for formula in (c.one, c.sharded)))
    figures = _figures(question)
    lines += ["", *(_format_symbol(symbol, figures) for symbol in SYMBOLS if symbol in used)]
    return "\n".join(lines)


def _format_symbol(symbol: sympy.Symbol, figures: Mapping[sympy.Symbol, float]) -> str:
    value = f" = {figures[symbol]:.4g}" if symbol in figures else ""
    return f"  {symbol}{value}: {SYMBOLS[symbol]}"


def _format_formulas(question: Question, crossing: Crossing) -> list[str]:
    one, sharded = (format_seconds(seconds) for seconds in crossing.seconds)
    size = crossing.size or LARGEST
    return [
        f"{crossing.way.name}, at {crossing.unknown} = {size}: one device {one}, {question.devices} devices {sharded}",
        f"  one device: {crossing.one}",
        f"  {question.devices} devices: {crossing.sharded}",
    ]


def _first_product(way: Way) -> str:
    rows, columns, terms = (str(length).replace("*", "") for length in way.products[0])
    return f"[{rows}, {terms}] x [{terms}, {columns}]"


def _sent(way: Way) -> str:
    return ", ".join(f"{transfer.kind} of {transfer.what} ({transfer.elements})" for transfer in way.transfers)


def _from(crossing: Crossing) -> str:
    return f"never (to {LARGEST})" if crossing.size is None else str(crossing.size)
