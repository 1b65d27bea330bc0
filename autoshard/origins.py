"""Where in the user's code each node of a captured graph comes from: module FQN, file, line and text.

A node has the stack of the call that made it; a backward node has that of its forward node. A node without
any (the sum of two gradients, say) takes the origin of its nearest operand or user.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from passes.ir.graph import Origin, origin_of, set_origin

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_TORCH = str(Path(torch.__file__).parent) + "/"
_HERE = str(Path(__file__).parent) + "/"


def set_origins(graph: Graph, fqns: Mapping[int, str]) -> None:
    """Give every call its origin; `fqns` maps the id of a traced module to its name."""
    calls = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    for node in calls:
        set_origin(node, replace(user_frame(node.meta.get("stack_trace")), fqn=_module_of(node, fqns)))
    for node in calls:
        _inherit(node, node.all_input_nodes)
    for node in reversed(calls):
        _inherit(node, list(node.users))


def user_frame(stack: str | None) -> Origin:
    """The innermost frame of a printed stack that is the user's; torch's own where the user wrote none."""
    frames = [(match["file"], int(match["line"])) for match in _FRAME.finditer(stack or "")]
    frames = [frame for frame in frames if not frame[0].startswith(_HERE)]
    if not frames:
        return Origin()
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    file, line = (own or frames)[-1]
    return Origin(file=file, line=line, source=linecache.getline(file, line).strip())


def _module_of(node: Node, fqns: Mapping[int, str]) -> str:
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for key in reversed(stack):
        number = key.partition("@")[0]  # dynamo counts repeated calls of a module: "1234@1"
        if number.isdigit() and int(number) in fqns:
            return fqns[int(number)]
    return ""


def _inherit(node: Node, others: list[Node]) -> None:
    if origin_of(node).file:
        return
    for other in others:
        if origin_of(other).file:
            set_origin(node, origin_of(other))
            return
