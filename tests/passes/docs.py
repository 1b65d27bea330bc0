"""The Before and After graphs in the docstrings of passes: found, read and run.

A pass's docstring ends in indented blocks:

    Before:

        mesh tp=2
        stage CAPTURED
        ...

    After:

        ...

    Context: Seed(recipes=("fsdp",)), unknown_ops="error"

`Context:` is there where the pass or the context takes more than its defaults: first the pass, then the fields of
PassContext; either may be left out.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from dataclasses import dataclass, fields, replace
from typing import Any

import passes
from passes.base import Pass, PassContext
from passes.ir.graph import set_stage, stage_of
from passes.ir.mesh import Mesh
from passes.ir.text import format_graph, parse_graph
from passes.verify import verify

_SECTION = re.compile(r"^(Before|After|Context):(.*(?:\n(?:[ ]+.*|\s*)$)*)", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """The claim of a pass's docstring; `before` and `after` are empty where it has no such block."""

    kind: type[Pass]
    before: str
    after: str
    context: str


def pass_classes() -> list[type[Pass]]:
    """Return every pass that a module of `passes/` defines, in the order of the files."""
    found = []
    for module in pkgutil.iter_modules(passes.__path__):
        members = vars(importlib.import_module(f"passes.{module.name}")).values()
        found += [m for m in members if inspect.isclass(m) and issubclass(m, Pass) and m is not Pass]
    return list(dict.fromkeys(found))


def example_of(kind: type[Pass]) -> Example:
    doc = inspect.cleandoc(kind.__doc__ or "")
    sections = {match[1]: inspect.cleandoc("\n" + match[2]) for match in _SECTION.finditer(doc)}
    texts = {name: f"{text}\n" if text else "" for name, text in sections.items()}
    return Example(kind, texts.get("Before", ""), texts.get("After", ""), sections.get("Context", ""))


def run_example(example: Example) -> str:
    """Return the graph that the pass makes of Before, as text. Both are verified at their stages."""
    gm, mesh = parse_graph(example.before)
    pass_, ctx = _context(example, PassContext(mesh))
    assert stage_of(gm) is pass_.takes, f"Before is {stage_of(gm).name}, the pass takes {pass_.takes.name}"
    verify(gm, mesh)
    assert pass_.run(gm, ctx), "run says that it changed nothing"
    set_stage(gm, pass_.gives)
    verify(gm, mesh)
    return format_graph(gm, mesh)


def _context(example: Example, ctx: PassContext) -> tuple[Pass, PassContext]:
    module = vars(importlib.import_module(example.kind.__module__))
    names = {field.name for field in fields(PassContext)}
    call = ast.parse(f"_({example.context})", mode="eval").body
    assert isinstance(call, ast.Call)
    made = [_evaluate(argument, module) for argument in call.args]
    given = {keyword.arg: _evaluate(keyword.value, module) for keyword in call.keywords if keyword.arg in names}
    return (made[0] if made else example.kind()), replace(ctx, **given)


def _evaluate(expression: ast.expr, module: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(expression), "<Context>", "eval"), {"Mesh": Mesh, **module})
