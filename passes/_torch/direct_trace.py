"""A module's Python code run on fake tensors, without dynamo: what it calls is seen, and where it is called is noted.

Torch differentiates what such a run computes, as it does on one device. The origins that dynamo would note, modules and
lines, are put where torch's tracers look for them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.compiler import _compile_session_context
from torch.fx import Graph, GraphModule
from torch.fx import traceback as origins
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from passes._torch.patches import replaced
from passes._torch.results import TracedModule

Called = Callable[[Any, Sequence[Any], Mapping[str, Any]], None]  # function or op, args, kwargs
_MODULE_CALL = nn.Module.__call__


@contextmanager
def run_directly(modules: Mapping[int, tuple[str, str]], file: str, called: Called | None = None) -> Iterator[None]:
    """Let modules run as while they are traced: `is_compiling()` is true, ops get the origins of their calls, and masks of
    attention are not compared with a causal one.

    `modules` holds, by the id of a module, its key in origins and its name. `file` is the caller's, where the model's
    lines begin. `called` is told of each function of torch that is called.
    """

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        meta = origins.get_current_meta()
        before = meta.get("nn_module_stack", {})
        if id(module) in modules:
            key, name = modules[id(module)]
            meta["nn_module_stack"] = {**before, key: (name, type(module))}
        try:
            return _MODULE_CALL(module, *args, **kwargs)
        finally:
            meta["nn_module_stack"] = before

    as_traced = origins.preserve_node_meta(), _compile_session_context(), replaced(nn.Module, "__call__", call)
    any_mask = replaced(transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: is_causal is True)
    with as_traced[0], as_traced[1], as_traced[2], any_mask, _Lines(file, called):
        yield


def current_stack() -> str:
    """Return the lines that called the function of torch that runs now."""
    return str(origins.get_current_meta().get("stack_trace", ""))


class _Lines(TorchFunctionMode):
    """Notes the lines that call functions of torch."""

    def __init__(self, file: str, called: Called | None) -> None:
        super().__init__()
        self.file, self.called = file, called

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        origins.get_current_meta()["stack_trace"] = self._stack()
        if self.called is not None:
            self.called(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def _stack(self) -> str:
        lines, frame = list[str](), cast(FrameType | None, sys._getframe(2))
        while frame is not None and frame.f_code.co_filename != self.file:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}\n')
            frame = frame.f_back
        return "".join(reversed(lines))


class WatchedOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of each op that runs: `before` of the op and its operands, `after` of its results."""

    def __init__(self, before: Called, after: Callable[[Sequence[Any]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before, self.after = before, after

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.before(op, args, kwargs or {})
        results = op(*args, **(kwargs or {}))
        self.after(tree_leaves(results))
        return results


def one_call_graph(
    run: Callable[..., tuple[torch.Tensor, ...]],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    rebuild: Callable[[Sequence[Any]], Any],
) -> TracedModule:
    """Return a trace that is one call of `run`, which is traced when forward and backward are."""
    graph = Graph()
    given = [graph.placeholder(f"given_{number}") for number in range(len(inputs))]
    call = graph.call_function(run, tuple(given))
    results = [graph.call_function(operator.getitem, (call, number)) for number in range(len(outputs))]
    for node, tensor in zip([*given, *results], [*inputs, *outputs], strict=True):
        node.meta["example_value"] = tensor
    graph.output(tuple(results))
    return TracedModule(GraphModule(nn.Module(), graph), tuple(inputs), ("",) * len(inputs), rebuild, ())
