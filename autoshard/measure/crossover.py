"""From which size on is a sharded product faster than one device? The cost's formulas, solved.

The product is [T, H] x [H, 4H]: T tokens, hidden size H, the first of a transformer's feed-forward. On k devices it
can be sharded by tokens, by columns of the weight, or by its rows (and x by columns). Each way is priced by the
formulas of `passes/cost`. The size from which on its time is less than that of one device is bracketed on them; there
each maximum and minimum is one of its arguments, what is left is a polynomial, and sympy solves it.
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
from passes.ir.text import DTYPES
from passes.ir.units import format_seconds

T, H = sympy.symbols("T H", positive=True)
k = wire.k  # devices
SYMBOLS = {T: "tokens: batch x sequence", H: "hidden size", **wire.SYMBOLS, **kernel.SYMBOLS}
WIDTH = 4  # the weight is [H, 4H]
LARGEST = 1 << 26  # sizes beyond are not looked at

Unknown = Literal["H", "T"]


@dataclass(frozen=True)
class Transfer:
    """A collective of `elements` (of the larger side) of the product's dtype."""

    kind: str
    elements: sympy.Expr
    what: str


@dataclass(frozen=True)
class Way:
    """One way to shard the product: per-device (rows, columns, terms) of each multiplication, and what is sent."""

    name: str
    products: tuple[tuple[sympy.Expr, sympy.Expr, sympy.Expr], ...]
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class Crossing:
    """Where a way overtakes one device."""

    way: Way
    unknown: Unknown
    size: int | None
    """The least size from which on (up to `LARGEST`) sharding is faster; None: at none."""
    exact: float | None
    """Where the formulas below are equal, as sympy solves them; None: nowhere near, `size` was found by bisection."""
    one: sympy.Expr
    """Seconds on one device: of T, H and the symbols of `passes.cost`, as it is near `size`."""
    sharded: sympy.Expr
    """Seconds on k devices."""
    seconds: tuple[float, float]
    """Both, at `size`; at `LARGEST` where there is none."""


@dataclass(frozen=True)
class Question:
    """What is asked: `tokens` or `hidden` is given, the other is the unknown."""

    devices: int
    hardware: Hardware
    tokens: int | None = None
    hidden: int | None = None
    dtype: str = "bf16"
    link: str | None = None
    """"inside": all devices on a node; "across": one on each; None: nodes are filled."""
    is_training: bool = False
    """The step with both gradients, or the product with its result whole on every device."""

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.hidden is None):
            raise UserError("a crossover has one unknown: give the tokens or the hidden size, not both or neither")
        if self.devices < 2:
            raise UserError(f"a crossover between one device and {self.devices}: give 2 devices or more")
        if self.dtype not in DTYPES:
            raise UserError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        for name, value in (("tokens", self.tokens), ("hidden", self.hidden)):
            if value is not None and value < 1:
                raise UserError(f"{name}={value}: give 1 or more")
        if self.link not in (None, "inside", "across"):
            raise UserError(f"link={self.link!r}: choose inside or across")
        if self.link == "inside" and self.devices > self.hardware.node_size:
            raise UserError(
                f"{self.devices} devices are not inside a node of {self.hardware.name}, "
                f"which has {self.hardware.node_size}; give fewer, or leave the link to be filled"
            )

    @property
    def unknown(self) -> Unknown:
        return "H" if self.hidden is None else "T"

    @property
    def group(self) -> Group:
        nodes = {"inside": 1, "across": self.devices, None: -(-self.devices // self.hardware.node_size)}[self.link]
        return Group(self.devices, nodes)


def crossovers(question: Question) -> tuple[Crossing, ...]:
    """For each way to shard, from which size on it is faster than one device."""
    one = _one(question)
    ways = _training(one) if question.is_training else _forward()
    return tuple(_crossing(question, one, way) for way in ways)


def _one(question: Question) -> Way:
    forward = (T, WIDTH * H, H)
    backward = ((T, H, WIDTH * H), (H, WIDTH * H, T))  # of x, of the weight
    return Way("one device", (forward, *(backward if question.is_training else ())), ())


def _forward() -> tuple[Way, ...]:
    """x and the weight are on every device, the result is wanted there too."""
    result = Transfer("all_gather", WIDTH * T * H, "the result")
    return (
        Way("tokens", ((T / k, WIDTH * H, H),), (result,)),
        Way("columns", ((T, WIDTH * H / k, H),), (result,)),
        Way("rows", ((T, WIDTH * H, H / k),), (Transfer("all_reduce", WIDTH * T * H, "the result"),)),
    )


def _training(one: Way) -> tuple[Way, ...]:
    """Everything stays as the way has it: what is partial is reduced, nothing else is sent."""

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
    """A formula of `passes.cost` with some of its symbols standing for expressions of T, H and k."""

    formula: sympy.Expr
    stands_for: Mapping[sympy.Symbol, sympy.Expr]

    def at(self, values: Mapping[sympy.Symbol, float]) -> float:
        filled = {symbol: _evaluate(expression, values) for symbol, expression in self.stands_for.items()}
        return _evaluate(self.formula, {**values, **filled})

    def branch(self, values: Mapping[sympy.Symbol, float]) -> sympy.Expr:
        """The formula, written out, as it is near `values`: each maximum and minimum is one of its arguments."""
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
        terms.append(_Term(formula, {wire.N: itemsize * transfer.elements}))
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
    """What the symbols of `passes.cost` are on this hardware and group, and what is given of T and H."""
    hardware = question.hardware
    figures = wire.values_of(0, question.group, hardware)
    del figures[wire.N]
    figures |= {} if question.tokens is None else {T: question.tokens}
    figures |= {} if question.hidden is None else {H: question.hidden}
    return {
        **figures,
        kernel.f: hardware.rate(question.dtype),
        kernel.e: hardware.efficiency,
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
    """The least size with a gain there and at all larger sizes of a fine grid up to LARGEST."""
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
    """The root of the polynomial just below `size`; None where a kink of the formulas lies between."""
    polynomial = sympy.Poly(difference.xreplace(dict(figures)).together().as_numer_denom()[0], unknown)
    roots = [float(sympy.re(root)) for root in polynomial.nroots(n=20, maxsteps=200) if abs(sympy.im(root)) < 1e-9]
    return next((root for root in roots if size - 1 <= root <= size), None)


# Text -------------------------------------------------------------------------------------------------------------


def format_crossovers(question: Question, found: tuple[Crossing, ...]) -> str:
    """The answer as a table, and the formulas behind it."""
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
