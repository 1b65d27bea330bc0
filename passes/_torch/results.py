"""Results of the functions of `deferred`, as dataclasses that need no import of dynamo or Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule


def names_read(code: CodeType) -> frozenset[str]:
    """Return the names that a function reads, and its strings, which may be names for `getattr`."""
    return frozenset((*code.co_names, *(value for value in code.co_consts if isinstance(value, str))))


@dataclass(frozen=True)
class SideEffect:
    """A Python object that a traced call changed, its source, and the stack of a change.

    `names` are the attributes that it was given (none: items of a container changed), `constants` those whose new values
    are constants, and `read` those whose old values the call depends on. `keys` are those of a dict that have new values.
    """

    source: str
    stack: str
    changed: Any = field(compare=False)
    names: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict, compare=False)
    read: frozenset[str] = frozenset()
    keys: tuple[Any, ...] = ()


@dataclass(frozen=True)
class LeftOut:
    """A call that writes a message (`print`, `warn`, `Logger.info`) or a check of values (`raise`) that is not in the
    graph, and its stack."""

    function: str
    stack: str


OUTSIDE_GONE = (AttributeError, LookupError, TypeError, ValueError)  # the last of a variable that is not bound


@dataclass(frozen=True)
class OutsideRead:
    """A value that traced code reads from outside of its module and arguments, such as a global.

    `steps` lead to it from `root`, a Python module, a class or the cell of a variable: each is a function of a value, such as
    `getattr`, `operator.getitem`, `hasattr` or `operator.contains`, and its second argument.
    """

    name: str  # "train.ALPHA", "train.CONFIG has 'scale'"
    root: Any = field(repr=False)
    steps: tuple[tuple[Callable[[Any, Any], Any], Any], ...]

    def value(self) -> Any:
        """Return the value that it has now. Raises one of `OUTSIDE_GONE` where it is gone."""
        return followed(self.root, self.steps)


def followed(value: Any, steps: Iterable[tuple[Callable[[Any, Any], Any], Any]]) -> Any:
    """Return where the steps of an `OutsideRead` lead from a value."""
    for step, key in steps:
        value = step(value, key)
    return value


@dataclass(frozen=True)
class Keys:
    """The keys of a dict in their order."""

    keys: tuple[Any, ...]

    def __repr__(self) -> str:
        shown = [repr(key) for key in self.keys[:3] if isinstance(key, str | int)]  # others may have an address
        return ", ".join([f"{len(self.keys)} keys", *shown, *["..."][: len(self.keys) - len(shown)]])


@dataclass(frozen=True)
class TracedModule:
    """A module's call as a flat graph: no Python, no structure, every tensor that it reads is a placeholder.

    `inputs` are the tensors of the placeholders (the very objects of module and arguments), `sources` say where they
    came from; `rebuild` turns values of the graph's outputs into what the module returns.
    `names` are those that the traced code reads: variables, attributes, and strings (None: not known); `outside` are the
    values that it reads from elsewhere. `draws` are the stacks of its calls of Python's `random`, whose numbers are among
    `inputs`.
    """

    graph_module: GraphModule
    inputs: tuple[Any, ...]
    sources: tuple[str, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    side_effects: tuple[SideEffect, ...]
    left_out: tuple[LeftOut, ...] = ()
    names: frozenset[str] | None = None
    outside: tuple[OutsideRead, ...] = ()
    draws: tuple[str, ...] = ()


@dataclass(frozen=True)
class TraceFailure:
    """The reason why a trace failed: torch's name for it, its message, and the stack of the user's code."""

    kind: str
    detail: str
    stack: str


@dataclass(frozen=True)
class JointGraph:
    """A functional ATen graph of forward and backward, with a description of its inputs and outputs.

    Each is (kind, index). Inputs: `("input", i)`, then `("tangent", i)` of output i, or `("mutation", i)` for the
    tangent of input i's new value. Outputs: `("mutation", i)`, `("output", i)`, `("gradient", i)` of input i, in the
    order of the graph; None for an input without gradient.
    """

    graph_module: GraphModule
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int] | None, ...]


@dataclass(frozen=True)
class InductorCode:
    """A compiled graph, a function from a list of tensors, which it empties, to a sequence of tensors."""

    run: Callable[[list[torch.Tensor]], Sequence[Any]]
    output_strides: tuple[tuple[int, ...] | None, ...]  # as the code returns them; None or () where as in the graph
