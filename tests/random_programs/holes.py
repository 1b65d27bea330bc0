"""Fill the holes of a production with values, sizes and parameters that fit each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.random_programs.program import NAMES

SIZES = (4, 8, 16, 2)  # that axes of 2 and 4 ranks divide
ODD_SIZES = (3, 5, 6, 7, 1, 10)
LARGE_SIZES = (16, 17, 20, 32, 33, 37)  # of compiled programs: Inductor's loops take 16 numbers at a time
LARGEST = 2048  # numbers of a value: a program is there for its shapes
LARGEST_COMPILED = 16 * LARGEST
MAGNITUDE = 1e4  # of a value: beyond it, rounding is what is seen
RECENT = 0.6  # chance that a value is the last one that fits; else the one before, ...


class Unfit(Exception):
    """No value of the program fits a hole."""


@dataclass
class Scope:
    """The values, state and arguments of a function that is being drawn; `takes_inputs` if it may get another argument."""

    random: Random
    sizes: tuple[int, ...]
    values: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    module: nn.Module = field(default_factory=nn.Module)
    takes_inputs: bool = True
    often: Mapping[str, float] = field(default_factory=dict)  # kind -> how often it is drawn, where that is not as usual
    largest: float = LARGEST  # numbers of a value

    def add(self, production: str) -> None:
        """Add a step. Raises Unfit, or what torch raises, where it does not apply; the scope is then as before."""
        holes = Holes(self)
        text = production.format_map(holes)
        line = text if "{new}" in production else f"{holes['new']} = {text}"
        values = {**self.values, **{name: evaluate(expression) for name, expression in holes.inputs.items()}}
        for name, expression in holes.state.items():
            setattr(self.module, name, evaluate(expression))
        names = {**NAMES, **values, "self": self.module}
        exec(line, names)
        made = {name: names[name] for name in re.findall(r"\bv\d+\b", line) if name in names and name not in values}
        if not made or not all(is_fit(value, self.largest) for value in made.values()):
            raise Unfit("no value, or one that is too large")
        self.values = {**values, **made}
        self.state |= holes.state
        self.inputs |= holes.inputs
        self.lines.append(line)


def is_fit(value: Any, largest: float = LARGEST) -> bool:
    """Return whether a value may be that of a program."""
    if not isinstance(value, Tensor) or not 0 < value.numel() <= largest or value.dim() > 5:
        return False
    numbers = value.detach().abs() if value.dtype is not torch.bool else value
    return bool(torch.isfinite(numbers).all()) and float(numbers.max()) < MAGNITUDE


def evaluate(expression: str) -> Any:
    """Return the value of an expression of a program."""
    return eval(expression, NAMES)


@dataclass(frozen=True)
class Value:
    """A value in a production; `size` is that of the hole `dim`."""

    name: str
    tensor: Tensor
    holes: Holes

    def __str__(self) -> str:
        return self.name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def last(self) -> int:
        return self.shape[-1]

    @property
    def before_last(self) -> int:
        return self.shape[-2]

    @property
    def first(self) -> int:
        return self.shape[0]

    @property
    def numel(self) -> int:
        return self.tensor.numel()

    @property
    def size(self) -> int:
        return self.shape[self.holes["dim"]]


@dataclass
class State:
    """A hole for an attribute of the module; `.of` keeps it for the hole without a shape."""

    holes: Holes
    prefix: str
    expression: str  # with a hole for what is given
    kept: str = ""
    keeps: bool = False

    @property
    def of(self) -> State:
        self.keeps = True
        return self

    def __format__(self, given: str) -> str:
        if not given:
            return self.kept
        made = self.holes.make_state(self.prefix, self.expression.format(given))
        if self.keeps:
            self.kept, self.keeps = made, False
        return made


class Holes(dict[str, Any]):
    """The values for the holes of one production, each drawn at its first use."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.scope, self.random = scope, scope.random
        self.state: dict[str, str] = {}
        self.inputs: dict[str, str] = {}
        self.main: Value | None = None

    def __missing__(self, key: str) -> Any:
        if key in VALUES:
            self[key] = self._value(*VALUES[key])
            self.main = self.main or self[key]
        else:
            self[key] = DRAWN[key](self)
        return self[key]

    def make_state(self, prefix: str, expression: str) -> str:
        name = f"{prefix}{len(self.scope.state) + len(self.state)}"
        self.state[name] = expression
        return f"self.{name}"

    def make_input(self, expression: str) -> Value:
        if not self.scope.takes_inputs:
            raise Unfit("takes no further arguments")
        name = f"a{len(self.scope.inputs) + len(self.inputs)}"
        self.inputs[name] = expression
        return Value(name, evaluate(expression), self)

    def pick(self, fits: Callable[[Tensor], bool]) -> Value:
        """Return a value of the program, most likely a late one. Raises Unfit if none fits."""
        names = [name for name, tensor in self.scope.values.items() if fits(tensor)]
        if not names:
            raise Unfit("no value fits")
        while len(names) > 1 and self.random.random() > RECENT:
            names.pop()
        return Value(names[-1], self.scope.values[names[-1]], self)

    def value(self) -> Value:
        """Return the first value of the production."""
        return self.main or self["x"]

    def _value(self, fits: Callable[[Tensor], bool], instead: str) -> Value:
        try:
            return self.pick(fits)
        except Unfit:
            if not instead or self.random.random() < 0.5:
                raise
        shape = instead.format(*(self.random.choice(self.scope.sizes) for _ in range(3)))
        return self.make_input(shape)


def _is_float(tensor: Tensor, least: int = 1, most: int = 9) -> bool:
    return tensor.dtype is torch.get_default_dtype() and least <= tensor.dim() <= most


def _is_even(tensor: Tensor, dim: int, rank: int = 1) -> bool:
    return _is_float(tensor, rank) and tensor.shape[dim] % 2 == 0


# Hole -> which values fit, and an argument that is made where none does.
VALUES: dict[str, tuple[Callable[[Tensor], bool], str]] = {
    "x": (lambda t: _is_float(t), ""),
    "x2": (lambda t: _is_float(t, 2), "torch.randn({}, {})"),
    "v": (lambda t: _is_float(t, 1, 1), "torch.randn({})"),
    "v2": (lambda t: _is_float(t, 1, 1), "torch.randn({})"),
    "m": (lambda t: _is_float(t, 2, 2), "torch.randn({}, {})"),
    "t3": (lambda t: _is_float(t, 3, 3), "torch.randn({}, {}, {})"),
    "image": (lambda t: _is_float(t, 4, 4), "torch.randn({}, {}, 4, 4)"),
    "image2": (lambda t: _is_float(t, 4, 4) and t.shape[2] % 2 == t.shape[3] % 2 == 0, "torch.randn({}, {}, 4, 4)"),
    "even": (lambda t: _is_even(t, -1), "torch.randn({}, 2 * {})"),
    "even3": (lambda t: _is_even(t, 1, 3) and t.dim() == 3, "torch.randn({}, 2 * {}, {})"),
    "even_last": (lambda t: _is_even(t, -1, 3) and t.dim() == 3, "torch.randn({}, {}, 2 * {})"),
    "i": (lambda t: t.dtype is torch.long and t.dim() > 0 and int(t.min()) >= 0, "torch.randint(9, ({}, {}))"),
    "im": (lambda t: t.dtype is torch.long and t.dim() == 2 and int(t.min()) >= 0, "torch.randint(9, ({}, {}))"),
    "z": (lambda t: t.is_complex() and t.dim() > 0, "torch.randn({}, {}) + 1j"),
}


def _broadcastable(holes: Holes) -> Value:
    shape = holes.value().shape

    def fits(tensor: Tensor) -> bool:
        pairs = zip(reversed(tensor.shape), reversed(shape), strict=False)
        return tensor.dtype is holes.value().tensor.dtype and all(a == b or 1 in (a, b) for a, b in pairs)

    return holes.pick(fits)


def _same(holes: Holes) -> Value:
    main = holes.value()
    return holes.pick(lambda tensor: tensor.dtype is main.tensor.dtype and tuple(tensor.shape) == main.shape)


def _integers_alike(holes: Holes) -> Value:
    one = holes["i"]
    found = [name for name, t in holes.scope.values.items() if t.dtype is torch.long and t.shape == one.tensor.shape]
    return Value(found[-1], holes.scope.values[found[-1]], holes) if found else one


def _dim(holes: Holes) -> int:
    rank = len(holes.value().shape)
    return holes.random.randrange(-rank, rank)


def _other_dim(holes: Holes) -> int:
    rank = len(holes.value().shape)
    return holes.random.choice([dim for dim in range(rank) if dim != holes["dim"] % rank])


def _view(holes: Holes) -> str:
    """Return a shape: some neighbours merged, maybe one taken apart, maybe one left to torch."""
    sizes = list(holes.value().shape)
    for _ in range(holes.random.randint(1, 2)):
        at = holes.random.randrange(len(sizes))
        if at + 1 < len(sizes) and holes.random.random() < 0.6:
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        elif factor := _factor_of(sizes[at], holes.random):
            sizes[at : at + 1] = [factor, sizes[at] // factor]
    if holes.random.random() < 0.3:
        sizes[holes.random.randrange(len(sizes))] = -1
    return ", ".join(map(str, sizes))


def _factor_of(size: int, random: Random) -> int:
    factors = [n for n in range(2, size) if size % n == 0]
    return random.choice(factors) if factors else 0


def _slice(holes: Holes) -> str:
    """Return an index of slices, as `:, 1:3`."""
    texts = []
    for size in holes.value().shape:
        start = holes.random.randrange(size)
        stop = holes.random.randint(start + 1, size)
        texts.append(holes.random.choice([":", f"{start}:{stop}", f"{start}:", f":{stop}"]))
    return ", ".join(texts[: holes.random.randint(1, len(texts))])


def _rows(holes: Holes) -> str:
    size = holes.value().shape[0]
    return f"torch.tensor({sorted(holes.random.sample(range(size), holes.random.randint(1, size)))})"


def _heads(holes: Holes) -> str:
    """Return queries [batch, heads, sequence, 4] of a value [batch, sequence, features]."""
    value = holes["t3"]
    weight = holes.make_state("p", f"nn.Parameter(torch.randn({holes['heads'] * 4}, {value.last}) / 3)")
    return f"F.linear({value}, {weight}).unflatten(-1, ({holes['heads']}, 4)).transpose(1, 2)"


def _grouped(holes: Holes) -> str:
    value, groups = holes["t3"], 2 if holes["heads"] % 2 == 0 else 1
    weight = holes.make_state("p", f"nn.Parameter(torch.randn({groups * 4}, {value.last}) / 3)")
    return f"F.linear({value}, {weight}).unflatten(-1, ({groups}, 4)).transpose(1, 2)"


def _mask(holes: Holes) -> str:
    size = holes["t3"].shape[1]
    return holes.random.choice(
        [f"torch.ones({size}, {size}, dtype=torch.bool).tril()", f"(torch.arange({size}) < {max(1, size - 1)})[None]"]
    )


def _counter(holes: Holes) -> str:
    return holes.make_state("b", "nn.Buffer(torch.tensor(2))")


def _new(holes: Holes) -> str:
    taken = [int(name[1:]) for name in holes.scope.values if name.startswith("v")]
    taken += [int(name[1:]) for name in holes.values() if isinstance(name, str) and re.fullmatch(r"v\d+", name)]
    return f"v{max(taken, default=-1) + 1}"


def _number(holes: Holes) -> float:
    return holes.random.choice([2, -0.5, 0.25, 1.5, -1, 3])


def _one_of(*choices: Any) -> Callable[[Holes], Any]:
    return lambda holes: holes.random.choice(choices)


def _size(holes: Holes) -> int:
    return holes.random.choice(holes.scope.sizes)


DRAWN: dict[str, Callable[[Holes], Any]] = {
    "new": _new,
    "new2": lambda holes: f"v{int(holes['new'][1:]) + 1}",
    "y": _broadcastable,
    "same": _same,
    "i2": _integers_alike,
    "labels": lambda holes: holes.make_input(f"torch.randint({holes['m'].shape[1]}, ({holes['m'].shape[0]},))"),
    "q": _heads,
    "k1": _heads,
    "k2": _heads,
    "grouped": _grouped,
    "grouped2": _grouped,
    "mask": _mask,
    "dim": _dim,
    "odim": _other_dim,
    "view": _view,
    "perm": lambda holes: tuple(holes.random.sample(range(len(holes.value().shape)), len(holes.value().shape))),
    "slice": _slice,
    "rows": _rows,
    "at": lambda holes: holes.random.randrange(holes.value().size),
    "at_last": lambda holes: holes.random.randrange(holes.value().last),
    "start": lambda holes: holes.random.randrange(max(1, len(holes.value().shape) - 1)),
    "k": lambda holes: holes.random.randint(1, holes.value().size),
    "n": _size,
    "n2": _size,
    "vocab": _size,
    "heads": _one_of(2, 4, 3),
    "factor": _one_of(2, 4),
    "pad": _one_of(0, 1, 2),
    "pad2": _one_of(1, 0, 3),
    "c": _number,
    "c2": _number,
    "c3": _one_of(0.5, 1, 2),
    "keep": _one_of(True, False),
    "order": _one_of(1, 2, 3, "float('inf')"),
    "bag": _one_of("sum", "mean", "max"),
    "reduce": _one_of("sum", "mean", "amax", "prod"),
    "loss": _one_of("mean", "sum", "none"),
    "counter": _counter,
    "param": lambda holes: State(holes, "p", "nn.Parameter(torch.randn({}) / 3)"),
    "scalar": lambda holes: holes.make_state("p", "nn.Parameter(torch.tensor(0.7))"),
    "frozen": lambda holes: State(holes, "p", "nn.Parameter(torch.randn({}) / 3, requires_grad=False)"),
    "buffer": lambda holes: State(holes, "b", "nn.Buffer(torch.randn({}))"),
    "module": lambda holes: State(holes, "m", "{}"),
}
