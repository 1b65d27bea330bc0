"""Record where in the user's code each node of a captured graph comes from: module FQN, file, line and text.

A forward node has the stack of the call that made it; a backward node has that of its forward node. If a module of
PyTorch's own is called without a line of the user's (inside `nn.Sequential`, say), the line is where that module's
forward begins. A node without a stack (a sum of two gradients, say) takes the origin of its nearest operand or user.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from passes.ir.graph import Origin, origin_of, set_origin

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_TORCH = str(Path(torch.__file__).parent) + "/"
_HERE = tuple(f"{Path(__file__).parents[2] / package}/" for package in ("autoshard", "passes"))


def set_origins(graph: Graph, fqns: Mapping[int, str]) -> None:
    """Set the origin of every call; `fqns` maps the id of a traced module to its name."""
    calls = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    for node in calls:
        fqn, forward = _module_of(node, fqns)
        frame = user_frame(node.meta.get("stack_trace"))
        set_origin(node, replace(frame if frame.file else forward, fqn=fqn))
    for node in calls:
        _inherit(node, node.all_input_nodes)
    for node in reversed(calls):
        _inherit(node, list(node.users))


def user_frame(stack: str | None) -> Origin:
    """Return the innermost frame of a printed stack that is in the user's code, or else in torch's."""
    frames = [(match["file"], int(match["line"])) for match in _FRAME.finditer(stack or "")]
    frames = [frame for frame in frames if not frame[0].startswith(_HERE)]
    if not frames:
        return Origin()
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    return _line(*(own or frames)[-1])


def _module_of(node: Node, fqns: Mapping[int, str]) -> tuple[str, Origin]:
    """Return the innermost module of the model that made a call, and where its forward begins."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for key, (_, kind) in reversed(stack.items()):
        number = key.partition("@")[0]  # dynamo counts repeated calls of a module: "1234@1"
        if number.isdigit() and int(number) in fqns:
            return fqns[int(number)], _forward_of(kind)
    return "", Origin()


def _forward_of(kind: type[nn.Module]) -> Origin:
    forward = inspect.unwrap(kind.forward)
    if not isinstance(forward, FunctionType):
        return Origin()
    return _line(forward.__code__.co_filename, forward.__code__.co_firstlineno)


def _line(file: str, line: int) -> Origin:
    return Origin(file=file, line=line, source=linecache.getline(file, line).strip())


def _inherit(node: Node, others: list[Node]) -> None:
    if origin_of(node).file:
        return
    for other in others:
        if origin_of(other).file:
            set_origin(node, origin_of(other))
            return


def is_caught(place: Origin) -> bool:
    """Return whether a line is in a `try` that catches errors."""
    try:
        tree = ast.parse("".join(linecache.getlines(place.file)))
    except SyntaxError:  # of a notebook's cell, say
        return False
    tries = (node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers)
    return any(node.body[0].lineno <= place.line <= (node.body[-1].end_lineno or 0) for node in tries)
