"""Dynamo: a module's call traced to a graph, or the reason why that failed."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import TorchRuntimeError, Unsupported
from torch._dynamo.exc import UserError as DynamoUserError
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._dynamo.variables import ConstantVariable, TensorVariable, UserFunctionVariable, misc, user_defined
from torch._dynamo.variables.builtin import SetAttrBuiltinVariable
from torch._dynamo.variables.misc import IgnoredFunctionVariable, LoggingLoggerVariable
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from passes._torch.dynamo.absences import guard_absences
from passes._torch.dynamo.clamping_branches import takes_branch
from passes._torch.dynamo.equal_masks import equal_masks
from passes._torch.dynamo.numpy_numbers import READ_ATTRIBUTE, numpy_numbers
from passes._torch.dynamo.outside_reads import level_read, outside_reads, readable_name
from passes._torch.dynamo.side_effects import watch_side_effects
from passes._torch.dynamo.substitutes import (
    METHODS,
    flex_attention_replaced,
    mask_not_compared,
    teach_dynamo,
)
from passes._torch.patches import replaced
from passes._torch.results import LeftOut, OutsideRead, TracedModule, TraceFailure, names_read

_IGNORE, _LOG = IgnoredFunctionVariable.call_function, LoggingLoggerVariable.call_method
_SETATTR, _METHOD = SetAttrBuiltinVariable._call_setattr, TensorVariable.call_method
_GETATTR: Any = getattr(TensorVariable, READ_ATTRIBUTE)
_DRAW = user_defined.call_random_fn
_OF_LOGGING = (logging.debug, logging.info, logging.warning, logging.error, logging.critical, logging.exception, logging.log)
_OF_LEVELS = ("getEffectiveLevel", "isEnabledFor")
_LEFT_OUT = {print, warnings.warn, logging.getLogger, *_OF_LOGGING, flex_attention_replaced, mask_not_compared}
_ASSERT = symbolic_convert._detect_and_normalize_assert_statement


def trace_module(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, marks_leaves: bool = True
) -> TracedModule:
    """Trace a call with dynamo: static shapes, numbers as constants. Raises exceptions that `trace_failure`
    describes.

    Without `marks_leaves`, `requires_grad_()` has no effect on a value that is no parameter: its gradient goes nowhere.
    """
    config = torch._dynamo.config.patch(
        allow_rnn=True,
        trace_autograd_ops=True,
        assume_static_by_default=True,
        automatic_dynamic_shapes=False,
        specialize_float=True,
        specialize_int=True,
        ignore_logging_functions=_logging_functions() | _LEFT_OUT,
    )
    teach_dynamo()
    with config, watch_side_effects() as effects, _watch_draws() as draws, ExitStack() as stack:
        left_out, levels = stack.enter_context(_watch_messages())
        if not marks_leaves:
            stack.enter_context(replaced(SetAttrBuiltinVariable, "_call_setattr", _set_attribute))
        methods = partial(_call_method, marks_leaves=marks_leaves)
        stack.enter_context(replaced(TensorVariable, "call_method", methods))
        stack.enter_context(replaced(TensorVariable, READ_ATTRIBUTE, _get_attribute))
        stack.enter_context(numpy_numbers())
        stack.enter_context(equal_masks())
        stack.enter_context(guard_absences())
        traced: Any = dynamo_graph_capture_for_export(module)(*args, **kwargs)
    given = (*args, *kwargs.values())
    inputs = tuple(traced._dynamo_bytecode_flatten(*given))
    output = traced._dynamo_bytecode_flatten.out.graph_capture_output
    captured = output.output_graph.export_metadata
    found = (captured.graph_input_idx_to_local_source[number] for number in range(len(inputs)))
    sources = tuple(readable_name(source, module, output.output_graph.import_sources) for source in found)
    return TracedModule(
        traced,
        inputs,
        sources,
        lambda outputs: traced._dynamo_bytecode_unflatten(outputs, given),
        tuple(effects),
        tuple(dict.fromkeys(left_out)),
        frozenset().union(*map(names_read, output.traced_code)),
        (*outside_reads(output.output_graph.guards, module, output.import_sources), *dict.fromkeys(levels)),
        tuple(draws),
    )


def _set_attribute(variable: Any, tx: Any, value: Any, name: Any, new: Any) -> Any:
    if name.is_python_constant() and name.as_python_constant() == "requires_grad" and _is_plain(value, new):
        return ConstantVariable.create(None)
    return _SETATTR(variable, tx, value, name, new)


def _get_attribute(value: Any, tx: Any, name: str) -> Any:
    """Read an attribute of a tensor; one that is computed, such as `mT`, is a value of the graph also where it is returned."""
    result = _GETATTR(value, tx, name)
    if isinstance(result, TensorVariable) and result.as_proxy().node.op != "placeholder":
        result.source = None
    return result


def _call_method(value: Any, tx: Any, name: str, args: Any, kwargs: Any, *, marks_leaves: bool) -> Any:
    if name in METHODS:
        function: Any = METHODS[name]
        return UserFunctionVariable(function).call_function(tx, [value, *args], kwargs)
    if not marks_leaves and name == "requires_grad_" and _is_plain(value, next(iter((*args, *kwargs.values())), True)):
        return value
    return _METHOD(value, tx, name, args, kwargs)


def _is_plain(value: Any, requires_grad: Any) -> bool:
    """Return whether `requires_grad` makes a leaf of a tensor that is neither a parameter nor has a gradient."""
    wanted = requires_grad is True or (requires_grad.is_python_constant() and requires_grad.as_python_constant() is True)
    if not wanted or not value.is_tensor():
        return False
    example = value.as_proxy().node.meta["example_value"]
    return not example.requires_grad and not isinstance(example, torch.nn.Parameter)


@contextmanager
def _watch_messages() -> Iterator[tuple[list[LeftOut], list[OutsideRead]]]:
    """Leave out calls that write a message, and checks of values that only raise; collect what was left out, and the levels of
    loggers that are asked for."""
    found: list[LeftOut] = []
    levels: list[OutsideRead] = []

    def ignored(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if variable.value is logging.getLogger:
            given = {name: value.as_python_constant() for name, value in kwargs.items()}
            return LoggingLoggerVariable(logging.getLogger(*(one.as_python_constant() for one in args), **given))
        name = variable.value.__qualname__
        found.append(LeftOut(f"logging.{name}" if variable.value in _OF_LOGGING else name, _stack()))
        return _IGNORE(variable, tx, args, kwargs)

    def logged(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in _OF_LEVELS:
            given = tuple(value.as_python_constant() for value in (*args, *kwargs.values()))
            read = level_read(variable.value, name, given)
            levels.append(read)
            return ConstantVariable.create(read.value())
        found.append(LeftOut(f"Logger.{name}", _stack()))
        return _LOG(variable, tx, name, args, kwargs)

    def asserted(tx: Any, truth: Any, push: Any) -> bool:
        if _ASSERT(tx, truth, push):
            if _of_jump("value").is_tensor():
                found.append(LeftOut("raise", _stack()))
            return True
        if push or not (condition := _of_jump("value")).is_tensor():
            return False
        if takes_branch(tx, truth, _of_jump("inst"), condition.as_proxy().node):
            tx.push(ConstantVariable.create(""))
            return True
        if not _only_raises(tx):
            return False
        found.append(LeftOut("raise", _stack()))
        tx.push(ConstantVariable.create(""))  # dynamo takes it for an assert, which capture erases, and goes on after it
        return True

    with (
        replaced(IgnoredFunctionVariable, "call_function", ignored),
        replaced(LoggingLoggerVariable, "call_method", logged),
        replaced(symbolic_convert, "_detect_and_normalize_assert_statement", asserted),
    ):
        yield found, levels


@contextmanager
def _watch_draws() -> Iterator[list[str]]:
    """Collect the stacks of calls that draw a number with Python's `random`, which the graph then reads from an input."""
    found: list[str] = []

    def drawn(*args: Any) -> Any:
        found.append(_stack())
        return _DRAW(*args)

    with replaced(user_defined, "call_random_fn", drawn), replaced(misc, "call_random_fn", drawn):
        yield found


def _of_jump(name: str) -> Any:
    """Return a local of dynamo's function for jumps: the `value` that decides, which is no longer on the stack of the traced
    code, or `inst`, the instruction."""
    frame = sys._getframe()
    while frame.f_code.co_filename != symbolic_convert.__file__:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_locals[name]


def _only_raises(tx: Any) -> bool:
    """Return whether the code that follows a jump, if it is not taken, does nothing but raise."""
    for instruction in tx.instructions[tx.instruction_pointer :]:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in instruction.opname or instruction.opname.startswith(("RETURN", "STORE", "FOR_", "YIELD")):
            return False
    return False


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
