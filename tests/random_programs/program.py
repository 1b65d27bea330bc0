"""A random program as data: the source lines of a model, its tensors, and how it is sharded.

A program is Python source, so that a failing one can be read, cut line by line, and pasted into a test.
"""

from __future__ import annotations

import itertools
import linecache
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

SEED = 5  # of the numbers of a model and its arguments
NAMES: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "math": math, "checkpoint": checkpoint}
ALONE = "alone"
_number = itertools.count()


@dataclass(frozen=True)
class Layer:
    """A layer that the model repeats: it takes `h` and gives a value of the same shape."""

    state: Mapping[str, str] = field(default_factory=dict)  # attribute -> expression
    lines: tuple[str, ...] = ()
    returns: str = "h"
    depth: int = 1

    def source(self) -> str:
        """Return its class."""
        return _class("Layer", {}, self.state, ("h",), (*self.lines, f"return {self.returns}"))


@dataclass(frozen=True)
class Program:
    """A model and the arguments of a call. Each line is a step, maybe of several statements; values are v0, v1, ..."""

    inputs: Mapping[str, str]  # name -> expression
    state: Mapping[str, str] = field(default_factory=dict)  # parameters, buffers and modules: attribute -> expression
    lines: tuple[str, ...] = ()
    returns: str = "v0"
    dtype: str = "float64"
    layer: Layer | None = None

    def source(self) -> str:
        """Return the classes of its model."""
        layers = {} if self.layer is None else {"layers": self.layer.depth}
        model = _class("Model", layers, self.state, (*self.inputs,), (*self.lines, f"return {self.returns}"))
        return model if self.layer is None else f"{self.layer.source()}\n\n{model}"

    def make(self) -> tuple[nn.Module, tuple[Any, ...]]:
        """Return the model and its arguments, always of the same numbers."""
        with torch.random.fork_rng(), default_dtype(self.dtype):
            torch.manual_seed(SEED)
            made = execute(self.source())["Model"]()
            return made, tuple(eval(expression, NAMES) for expression in self.inputs.values())


@dataclass(frozen=True)
class Setting:
    """The mesh, options and mode that a program is run with."""

    mesh: str
    hardware: str | None = "auto"  # a preset, "auto", or None
    recipe: Any = "auto"
    training: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)  # of `Options`, as JSON
    memory: float | None = None  # a limit, as a share of the peak of the plan without one
    ranks: str | None = None  # "eager" or "inductor": run on gloo ranks as well; ALONE: compiled, in this process, instead
    varied: bool = False  # ALONE: a call of another batch size and one in evaluation mode come between the steps


@dataclass(frozen=True)
class Case:
    """A program, a setting, and the names of the productions that it was drawn with."""

    program: Program
    setting: Setting
    productions: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        return asdict(self)

    @staticmethod
    def from_json(given: Mapping[str, Any]) -> Case:
        """Return what `to_json` was given."""
        program, layer = dict(given["program"]), given["program"]["layer"]
        if layer is not None:
            layer = Layer(**{**layer, "lines": tuple(layer["lines"])})
        program = {**program, "lines": tuple(program["lines"]), "layer": layer}
        return Case(Program(**program), Setting(**given["setting"]), tuple(given["productions"]))


@contextmanager
def default_dtype(name: str) -> Iterator[None]:
    """Let floating numbers be of a dtype by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def execute(source: str) -> dict[str, Any]:
    """Return the names that source defines; tracebacks and plans show its lines."""
    name = f"random_program_{next(_number)}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names = dict(NAMES)
    exec(compile(source, name, "exec"), names)
    return names


def _class(
    name: str, layers: Mapping[str, int], state: Mapping[str, str], args: tuple[str, ...], lines: tuple[str, ...]
) -> str:
    made = [f"self.{attribute} = {expression}" for attribute, expression in state.items()]
    made += [f"self.{attribute} = nn.ModuleList(Layer() for _ in range({n}))" for attribute, n in layers.items()]
    text = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    text += [f"        {line}" for line in made]
    text += ["", f"    def forward(self, {', '.join(args)}):"]
    return "\n".join([*text, *(f"        {line}" for step in lines for line in step.splitlines())])
