"""Cut a failing case down to a few lines that fail in the same way."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.random_programs.draw import runs
from tests.random_programs.program import ALONE, Case, Layer, Program, Setting

NAME = re.compile(r"\b(?:v\d+|h)\b")


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return the smallest case that still fails: no single cut of it does."""
    while True:
        for smaller in cuts(case):
            if runs(smaller.program, largest=math.inf) and fails(smaller):
                case = smaller
                break
        else:
            return case


def cuts(case: Case) -> Iterator[Case]:
    """Yield cases that are smaller by one thing, the largest things first."""
    for setting in _settings(case.setting):
        yield replace(case, setting=setting)
    for program in _programs(case.program):
        if program != case.program:
            yield replace(case, program=program, setting=_fitting(case.setting, program))


def _settings(setting: Setting) -> Iterator[Setting]:
    axes = setting.mesh.split(",")
    for gone in axes if len(axes) > 1 else ():
        yield _without_axis(setting, gone.partition("=")[0])
    for at, axis in enumerate(axes):
        if int(axis.partition("=")[2]) > 2:
            smaller = f"{axis.partition('=')[0]}=2"
            yield replace(setting, mesh=",".join([*axes[:at], smaller, *axes[at + 1 :]]))
    for name in setting.options:
        yield replace(setting, options={key: value for key, value in setting.options.items() if key != name})
        value = setting.options[name]
        for key in value if name in ("params", "inputs", "outputs") and len(value) > 1 else ():
            yield replace(setting, options={**setting.options, name: {k: v for k, v in value.items() if k != key}})
    for axis, recipe in setting.recipe.items() if isinstance(setting.recipe, dict) else ():
        if recipe is not None:
            yield replace(setting, recipe={**setting.recipe, axis: None})
    if setting.ranks == ALONE:
        if setting.varied:
            yield replace(setting, varied=False)
        return
    for change in ({"memory": None}, {"training": False}, {"ranks": None}, {"hardware": "auto"}, {"hardware": "h100"}):
        if replace(setting, **change) != setting and (change.get("hardware") != "h100" or setting.hardware != "auto"):
            yield replace(setting, **change)


def _without_axis(setting: Setting, gone: str) -> Setting:
    mesh = ",".join(axis for axis in setting.mesh.split(",") if axis.partition("=")[0] != gone)
    recipe = setting.recipe
    if isinstance(recipe, dict):
        recipe = {axis: one for axis, one in recipe.items() if axis != gone}
    options = dict(setting.options)
    for name in {"params", "inputs", "outputs"} & options.keys():
        kept = {key: {a: p for a, p in value.items() if a != gone} for key, value in options[name].items()}
        options[name] = {key: value for key, value in kept.items() if value}
    return replace(setting, mesh=mesh, recipe=recipe, options=options)


def _programs(program: Program) -> Iterator[Program]:
    for layer in _layers(program.layer):
        yield _pruned(replace(program, layer=layer))
    for at in reversed(range(len(program.lines))):
        for lines, returns in _without_line(program.lines, program.returns, at, [*program.inputs]):
            yield _pruned(replace(program, lines=lines, returns=returns))
    for name in dict.fromkeys(NAME.findall("\n".join(program.lines))):
        for returns in (f"{name}.sum()", name):
            if len(returns) < len(program.returns):
                yield _pruned(replace(program, returns=returns))
    if " + " in program.returns:
        for term in program.returns.split(" + "):
            yield _pruned(replace(program, returns=term))
    for name, expression in program.inputs.items():
        if "requires_grad" in expression:
            yield replace(program, inputs={**program.inputs, name: expression.replace(".requires_grad_()", "")})
    if program.dtype != "float64":
        yield replace(program, dtype="float64")


def _layers(layer: Layer | None) -> Iterator[Layer]:
    if layer is None:
        return
    for depth in range(1, layer.depth):
        yield replace(layer, depth=depth)
    for at in reversed(range(len(layer.lines))):
        for lines, returns in _without_line(layer.lines, layer.returns, at, ["h"]):
            yield replace(layer, lines=lines, returns=returns)
    if layer.returns.startswith("h + "):
        yield replace(layer, returns=layer.returns.removeprefix("h + "))


def _without_line(
    lines: tuple[str, ...], returns: str, at: int, inputs: list[str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the rest of a function; an earlier value stands for each that the line made. Parts of a line go as well."""
    before, step, after = lines[:at], lines[at], lines[at + 1 :]
    known = [*reversed(inputs), *dict.fromkeys(NAME.findall("\n".join(before)))]
    made = [name for name in dict.fromkeys(NAME.findall(step)) if name not in known]
    rest = "\0".join((*after, returns))
    is_read = any(re.search(rf"\b{name}\b", rest) for name in made)
    for other in reversed(known) if is_read else known[:1]:
        text = rest
        for name in made:
            text = re.sub(rf"\b{name}\b", other, text)
        *later, ends = text.split("\0")
        yield (*before, *later), ends
    parts = step.splitlines()
    for gone in range(1, len(parts)):
        kept = "\n".join(parts[:gone] + parts[gone + 1 :])
        yield (*before, kept, *after), returns


def _pruned(program: Program) -> Program:
    """Return a program without arguments, attributes and layers that nothing reads; one argument is kept."""
    text = "\n".join((*program.lines, program.returns))
    inputs = {name: one for name, one in program.inputs.items() if re.search(rf"\b{name}\b", text)}
    layer = program.layer if "self.layers" in text else None
    if layer is not None:
        inner = "\n".join((*layer.lines, layer.returns))
        layer = replace(layer, state=_read(layer.state, inner))
    first = [*program.inputs.items()][:1]
    return replace(program, inputs=inputs or dict(first), state=_read(program.state, text), layer=layer)


def _read(state: dict[str, str], text: str) -> dict[str, str]:
    return {name: one for name, one in state.items() if re.search(rf"\bself\.{name}\b", text)}


def _fitting(setting: Setting, program: Program) -> Setting:
    """Return a setting without placements of what a program no longer has."""
    names = {
        "params": {name for name, _ in program.make()[0].named_parameters()} if runs(program) else set(),
        "inputs": {*program.inputs},
    }
    options = {
        key: {name: one for name, one in value.items() if name in names[key]} if key in names else value
        for key, value in setting.options.items()
    }
    return replace(setting, options={key: value for key, value in options.items() if value != {}})
