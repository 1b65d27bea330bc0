"""Dynamo: a module's call traced to a graph, or the reason why that failed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.exc import TorchRuntimeError, Unsupported
from torch._dynamo.exc import UserError as DynamoUserError
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._dynamo.variables.misc import IgnoredFunctionVariable, LoggingLoggerVariable
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from passes._torch.patches import replaced
from passes._torch.results import LeftOut, TracedModule, TraceFailure
from passes._torch.side_effects import source_name, watch_side_effects

_IGNORE, _LOG = IgnoredFunctionVariable.call_function, LoggingLoggerVariable.call_method


def trace_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedModule:
    """Trace a call with dynamo: static shapes, numbers as constants. Raises exceptions that `trace_failure`
    describes."""
    config = torch._dynamo.config.patch(
        allow_rnn=True,
        assume_static_by_default=True,
        automatic_dynamic_shapes=False,
        specialize_float=True,
        specialize_int=True,
        ignore_logging_functions=_logging_functions() | {print, warnings.warn},
    )
    with config, watch_side_effects() as effects, _watch_messages() as left_out:
        traced: Any = dynamo_graph_capture_for_export(module)(*args, **kwargs)
    given = (*args, *kwargs.values())
    inputs = tuple(traced._dynamo_bytecode_flatten(*given))
    output = traced._dynamo_bytecode_flatten.out.graph_capture_output
    captured = output.output_graph.export_metadata
    sources = tuple(source_name(captured.graph_input_idx_to_local_source[number]) for number in range(len(inputs)))
    return TracedModule(
        traced,
        inputs,
        sources,
        lambda outputs: traced._dynamo_bytecode_unflatten(outputs, given),
        tuple(effects),
        tuple(dict.fromkeys(left_out)),
        frozenset().union(*map(_names, output.traced_code)),
    )


def _names(code: Any) -> frozenset[str]:
    """Return the names that a function reads, and its strings, which may be names for `getattr`."""
    return frozenset((*code.co_names, *(value for value in code.co_consts if isinstance(value, str))))


@contextmanager
def _watch_messages() -> Iterator[list[LeftOut]]:
    """Collect the calls that write a message, which dynamo leaves out of the graph."""
    found: list[LeftOut] = []

    def ignored(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        found.append(LeftOut(variable.value.__qualname__, _stack()))
        return _IGNORE(variable, tx, args, kwargs)

    def logged(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        found.append(LeftOut(f"Logger.{name}", _stack()))
        return _LOG(variable, tx, name, args, kwargs)

    with (
        replaced(IgnoredFunctionVariable, "call_function", ignored),
        replaced(LoggingLoggerVariable, "call_method", logged),
    ):
        yield found


def _stack() -> str:
    return "".join(TracingContext.extract_stack().format())


def _logging_functions() -> set[Callable[..., Any]]:
    """Return the methods of all loggers, including those that libraries add: dynamo leaves their calls out of the
    graph."""
    loggers = (logging.getLogger(), *(logging.getLogger(name) for name in sorted(logging.root.manager.loggerDict)))
    kinds = dict.fromkeys(kind for logger in loggers for kind in type(logger).__mro__[:-1])
    methods = (value for kind in kinds for name, value in vars(kind).items() if not name.startswith("_"))
    return {method for method in methods if callable(method)}


def trace_failure(error: Exception) -> TraceFailure:
    """Return why `trace_module` or `trace_joint` raised `error`."""
    detail = str(error)
    if isinstance(error, Unsupported | TorchRuntimeError | DynamoUserError):
        kind = error.gb_type if isinstance(error, Unsupported) else type(error).__name__
        return TraceFailure(kind or "", detail, "".join(error.real_stack.format()))
    kind = type(error).__name__
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        detail = str(error.func).rpartition(".")[0]
    return TraceFailure(kind, detail, str(error))
