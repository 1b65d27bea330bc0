"""Explain to the author of a model why it cannot be captured as a graph.

A message says what the model does, why a graph cannot express it, what to change, and ends with the user's line.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.fx import Graph, GraphModule, Node

from autoshard.capture.origins import is_caught, user_frame
from passes._torch import SideEffect, TracedModule, TraceFailure, trace_failure
from passes.base import Remark
from passes.errors import CaptureError, with_article
from passes.ir.graph import Origin

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class _Cause:
    """A kind of failure: a pattern of torch's name for it, and our message; `{0}` stands for the group of `detail`."""

    kind: str
    message: str
    detail: str = ""
    for_arguments: bool = False

    def fits(self, failure: TraceFailure) -> re.Match[str] | None:
        """Return where `detail` is in a failure of this kind."""
        return re.search(self.detail, failure.detail, re.MULTILINE) if re.search(self.kind, failure.kind) else None


_COUNTS = (
    "the length of what torch.bincount returns depends on values, but the shapes of a graph are fixed; say with minlength=... "
    "how many values there are at most"
)
_UNKNOWN_SHAPE = (
    "the model makes a tensor whose shape depends on values, but the shapes of a graph are fixed; keep all elements and blank "
    "out with torch.where, a product with the mask, or masked_fill"
)

_SIZE_DECIDES = (
    "the model decides by the size of a tensor whose shape depends on values (such as x[mask], nonzero() or unique()), but the "
    "shapes of a graph are fixed; where it is made, keep all elements and blank out with torch.where, a product with the mask, "
    "or masked_fill"
)
_READS = (
    "the model reads a number out of a tensor (item(), tolist(), int(), float()), but a graph is built before any number is "
    "known; keep it a tensor"
)

AS_ON_ONE_DEVICE = ", as it would on one device"  # so far as the parameters are those of one device
_FAILS = f"the model fails for these arguments{AS_ON_ONE_DEVICE}: "

_BACKWARD = (
    "the model calls backward() in its forward, but the backward is derived from the forward's graph; move it into the "
    "training step, or use torch.autograd.grad"
)


DENSE_ONLY = (
    "but a program computes on dense tensors; make it dense with .to_dense(), or keep its indices and values, and multiply by "
    "index_select and index_add"
)


def _sends(call: str) -> str:
    """Return the message for a model that calls a collective itself."""
    return (
        f"the model sends values between ranks ({call}), but it computes as on one device: each value is that of all ranks "
        "together, and messages are autoshard's to place; remove the call (a sum or mean over the batch is one over all of it)"
    )
_DRAWS = (
    "the model draws a number with Python's random module, but a graph would have the same number in every call; draw it "
    "with torch.rand(()) or torch.randint"
)
_PACKS = (
    "the model packs sequences (pack_padded_sequence), but the shapes of a graph are fixed; give the layer the padded batch, and "
    "take each sequence's result at its length"
)
_CALLS = "^Failed to trace builtin operator|^Attempted to call function marked as skipped|^Attempted to inline function"


_CAUSES = (
    _Cause(
        "^Data-dependent branching",
        "the model branches on the value of a tensor, but a graph takes one path for all values; compute both sides "
        "and choose with torch.where(condition, a, b)",
    ),
    _Cause("^UserError$", _SIZE_DECIDES, r"data-dependent expression[^\n]*Size-like symbols: (?!none)"),
    _Cause(
        "^UserError$",
        "the model decides by the value of a tensor, but a graph takes one path for all values; compute both sides "
        "and choose with torch.where(condition, a, b)",
        "data-dependent expression",
    ),
    _Cause(
        "^Data dependent operator",
        "a function of torch reads a value out of a tensor here ({0}), but a graph is built before any value is known; write it "
        "with functions that return tensors",
        r"aten\.(?!item|_local_scalar_dense)(\w+)",
    ),
    _Cause(r"^DataDependentOutputException$|^Tensor\.tolist|^Unsupported Tensor\.item|^Data dependent operator", _READS),
    _Cause("^DynamicOutputShapeException$|^Dynamic shape operator", _COUNTS, r"aten\.bincount"),
    _Cause(
        "^DynamicOutputShapeException$|^Dynamic shape operator",
        _UNKNOWN_SHAPE,
    ),
    _Cause(
        "^Observed exception|^TypeError from user code",
        "the model raises {0} for these arguments; call it with arguments that it accepts",
        r"raised exception (.*)",
        for_arguments=True,
    ),
    _Cause(
        "^TorchRuntimeError$",
        "the model differentiates by a value that needs no gradient, or that requires_grad_() marks inside of the model, which a "
        "graph leaves out; use torch.func.grad, or differentiate by an argument that is given with requires_grad=True",
        "differentiated Tensors does not require grad",
    ),
    _Cause(
        "^TorchRuntimeError$",
        _FAILS + "{0}",
        r"got \w+\([\"'](.*)[\"']\)$",
        for_arguments=True,
    ),
    _Cause(
        "^TorchRuntimeError$",
        _FAILS + "{0}",
        "Explanation: (.*)",
        for_arguments=True,
    ),
    _Cause(
        "^An opaque object was created",
        "the model makes a torch.Generator while it runs, but a program draws all numbers from one; leave out generator=..., or "
        "give the numbers as an argument or a buffer",
        "Generator",
    ),
    _Cause(
        "^AssertionError$",
        "the model assigns to the .data of a parameter or buffer in its forward; change parameters outside of it, in the "
        "optimizer or after the step, and a buffer in place: self.buffer.copy_(...)",
        "Encountered a set_ on a graph input",
    ),
    _Cause(
        "^ModuleNotFoundError$",
        "dynamo, torch's tracer, imports the module {0} to read the model's code, but Python cannot find it; if its file was "
        "loaded with importlib, add the module first: sys.modules[{0}] = module",
        r"No module named ('[^']*')",
    ),
    _Cause(_CALLS, _PACKS, r"\bpack_padded_sequence\b"),
    _Cause(_CALLS, _DRAWS, r"\bRandom\.\w+"),
    _Cause(
        _CALLS,
        "the model calls {0} while it runs, but a graph has tensor operations only; remove the call, or make it only "
        "where torch.compiler.is_compiling() is False",
        r"(?:builtin operator `([^`]+)`|the function `([^`]+)`|the builtin `(?:<unknown module>\.)?([^`]+?)\.?`)",
    ),
    _Cause("^P2P compilation|^async_op=True for distributed", _sends("{0}"), r"(isend|irecv)|<function (\w+)"),
    _Cause(
        "backwards? hooks",
        "a module of the model has a backward hook, but the backward is part of the graph; remove the hook and "
        "write what it does as a torch.autograd.Function",
    ),
    _Cause(r"backward\(\)|autograd\.grad", _BACKWARD),
)


@dataclass(frozen=True)
class _Setting:
    """A setting of a library that avoids a failure: patterns of its files, of the lines on the stack, and of the failure."""

    folder: str
    lines: str
    text: str
    kind: str = ""


_GUARDS = "GuardOnDataDependentSymNode"
_DROPS = "layerdrop=0 (encoder_layerdrop=0, decoder_layerdrop=0) in the model's config"
_SETTINGS = (
    _Setting(r"/transformers/", r"layerdrop|skip_the_layer", _DROPS),
    _Setting(
        r"/transformers/", r"_mask_hidden_states|_compute_mask_indices", "apply_spec_augment=False in the model's config"
    ),
    _Setting(r"/transformers/", r"\blabel_index\b", 'problem_type="single_label_classification" in the model\'s config'),
    _Setting(r"/transformers/", r"/cache_utils\.py", "use_cache=False in the model's config"),
    _Setting(
        r"/transformers/integrations/moe\.py",  # the class of the experts takes the setting
        r"expert_hit|hit_experts|expert_mask",
        'experts_implementation="grouped_mm" in the model\'s config',
    ),
    _Setting(r"/transformers/", r"flex_attention_mask", 'attn_implementation="sdpa" in the model\'s config'),
    _Setting(r"/torch/distributions/", r"/constraints\.py", "validate_args=False where the distribution is made"),
    _Setting(r"/nn/modules/batchnorm\.py", r"F\.batch_norm\(", "momentum to a number, such as 0.1, in BatchNorm", "^UserError$"),
)


def capture_error(error: Exception) -> CaptureError:
    """Return the CaptureError to raise for `error`, an exception of a trace."""
    failure, place = trace_failure(error), user_frame(trace_failure(error).stack)
    cause = next((one for one in _CAUSES if one.fits(failure)), None)
    text = _message(failure)
    if text.startswith(_FAILS) and is_caught(place):
        reason = text.removeprefix(_FAILS).rstrip(".")
        return CaptureError(
            f"the model catches an error of torch here ({reason}), but a graph has tensor operations only; decide by the shapes "
            f"and dtypes of tensors instead, before the call{format_place(place)}"
        )
    text += _setting(failure) + format_place(place)
    return CaptureError(text, for_arguments=cause is not None and cause.for_arguments)


def may_run_directly(error: Exception) -> bool:
    """Return whether dynamo gave up on Python code that may be run instead; other failures are the model's own."""
    failure = trace_failure(error)
    return all(cause.kind == _CALLS and cause.message not in (_DRAWS, _PACKS) for cause in _CAUSES if cause.fits(failure))


def without_dynamo(error: Exception) -> Remark:
    """Return what to say of a model whose Python code is run because dynamo cannot trace it."""
    failure = trace_failure(error)
    calls = next((found for cause in _CAUSES if cause.kind == _CALLS and (found := cause.fits(failure))), None)
    reason = f"it calls {_first(calls)}" if calls is not None else failure.kind
    text = (
        f"dynamo, torch's tracer, does not understand the model's code ({reason}), so the code was run on tensors without "
        "data; what it does besides computing tensors is done then, not in each call, and a change of any attribute of the "
        "model makes a new program"
    )
    return Remark("capture", text, user_frame(failure.stack), "output")


def not_directly(error: Exception, direct: Exception) -> CaptureError:
    """Return the CaptureError for a model that dynamo cannot trace, and that fails when it is run instead."""
    reason = str(direct)
    if not isinstance(direct, CaptureError):
        stack = "".join(traceback.format_tb(direct.__traceback__))
        place = format_place(user_frame(stack))
        if isinstance(direct, TypeError) and trace_failure(error).kind.startswith("TypeError"):
            return CaptureError(_FAILS + str(direct) + place, for_arguments=True)
        failure = trace_failure(direct)
        reason = _message(failure) + _setting(replace(failure, stack=stack)) + place
        if trace_failure(error).kind == _GUARDS:  # torch's name for the same, without a line of the model
            return CaptureError(reason)
    if DENSE_ONLY in reason:  # which dynamo says in its own words
        return CaptureError(reason)
    return CaptureError(f"{capture_error(error)}\nwithout dynamo, torch's tracer, it cannot be captured either: {reason}")


def _setting(failure: TraceFailure) -> str:
    """Return which setting of the library avoids what failed, if one is known; its sources say where."""
    for one in _SETTINGS:
        found = re.search(one.folder, failure.stack) and re.search(one.lines, failure.stack)
        if found and re.search(one.kind, failure.kind):
            return f"; here, set {one.text}"
    return ""


def takes_lock(error: Exception) -> bool:
    """Return whether a trace failed at `with lock:`."""
    failure = trace_failure(error)
    return failure.kind == "Unsupported context manager" and "`lock`" in failure.detail


def fails_error(error: Exception) -> CaptureError:
    """Return the CaptureError for a model whose code raised `error` when it was called on tensors without data."""
    place = format_place(user_frame("".join(traceback.format_tb(error.__traceback__))))
    return CaptureError(f"{_FAILS}{type(error).__name__}: {error}{place}", for_arguments=True)


def kept_under_lock_error(name: str) -> CaptureError:
    """Return the CaptureError for a tensor that a model computes and keeps while it holds a lock."""
    return CaptureError(
        f"the model computes {name} in its first call, under a lock, and keeps it, but a graph is built on tensors without data; "
        "compute it in __init__, and keep it in a buffer (register_buffer)"
    )


def marks_leaf(error: Exception) -> bool:
    """Return whether a trace failed at `requires_grad_()`."""
    return "requires_grad" in trace_failure(error).kind


def check_shapes(graph: Graph) -> None:
    """Raise CaptureError for a value whose shape is known only when the model runs."""
    for node in graph.nodes:
        check_shape(node)


def check_shape(node: Node) -> None:
    """Raise CaptureError if the shape of a value is known only when the model runs."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
        place = format_place(user_frame(node.meta.get("stack_trace")))
        raise CaptureError((_COUNTS if node.target is torch.ops.aten.bincount.default else _UNKNOWN_SHAPE) + place)


def check_numbers(graph: Graph) -> None:
    """Raise CaptureError for a number that is known only when the model runs, if it is an output or a tensor is computed from it:
    dynamo lets such a number pass inside of `torch.func.grad`."""
    returned = [node for node in graph.output_node().args[0] if isinstance(node, Node)]  # type: ignore[union-attr]
    made = [node for node in graph.nodes if isinstance(node.meta.get("example_value"), torch.Tensor)]
    for read in (*returned, *(value for node in made for value in node.all_input_nodes)):
        if isinstance(read.meta.get("example_value"), _NUMBERS):
            raise CaptureError(_READS + format_place(user_frame(read.meta.get("stack_trace"))))


_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)


def check_module(module: nn.Module) -> None:
    """Raise CaptureError for a module that torch.jit made, which has no Python code, or that is distributed already."""
    for name, one in module.named_modules():
        if isinstance(one, _WRAPPERS):
            where = "model.module" if one is module else f"{name}.module in place of {name}"
            raise CaptureError(
                f"{name or 'the model'} is wrapped in {type(one).__name__}, which joins gradients, as the sharded model does "
                f"itself; give {where}"
            )
        if isinstance(one, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name or 'the model'} is a ScriptModule, which torch.jit made, and has no Python code to be captured; give the "
                "nn.Module that it was made from"
            )


def check_functions(graph: Graph) -> None:
    """Raise CaptureError for a call that `check_function` refuses."""
    for node in graph.nodes:
        if node.op == "call_function":
            name = getattr(node.target, "__name__", "")
            check_function(name, node.args, node.kwargs, node.meta.get("stack_trace"))


def check_function(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], stack: str | None) -> None:
    """Raise CaptureError for a function of torch that a program cannot stand for.

    One is a recurrent layer that drops values between its layers: torch's decomposition of `gru`, `lstm` and `rnn_*` forgets
    this dropout (2.13: `_rnn_helper` in `torch/_decomp/decompositions.py`), so that the model would train without it.
    Another is an embedding that asks for a sparse gradient: that of a DTensor is dense. So is a loss whose decomposition in torch
    2.13 (`multilabel_margin_loss_forward`) gives other values for targets that end at -1. A sparse tensor has no layout.
    """
    if name.startswith(("sparse_", "to_sparse")):
        raise CaptureError(f"{name} makes a sparse tensor, {DENSE_ONLY}{format_place(user_frame(stack))}")
    if name == "multilabel_margin_loss":
        raise CaptureError(
            "torch computes another loss when it traces multilabel_margin_loss with targets that end at -1; write it with "
            f"gather and a mask, or use multilabel_soft_margin_loss{format_place(user_frame(stack))}"
        )
    if name in ("gru", "lstm", "rnn_tanh", "rnn_relu"):
        weights = max(i for i, given in enumerate(args) if isinstance(given, list | tuple))
        _, layers, dropout, training = args[weights + 1 : weights + 5]
        if training and dropout and layers > 1:
            raise CaptureError(
                f"torch loses the dropout between the layers of {name} (dropout={dropout}) when it traces a model; set "
                f"dropout=0, or use one-layer modules with nn.Dropout between them{format_place(user_frame(stack))}"
            )
    place = {"embedding": 6, "embedding_bag": 7}.get(name)
    if place is not None and torch.is_grad_enabled() and (kwargs.get("sparse") or True in args[place : place + 1]):
        raise CaptureError(
            "the model asks for the sparse gradient of an embedding, but gradients of a sharded model are dense; make it "
            "with sparse=False, and train it with the optimizer of the other parameters" + format_place(user_frame(stack))
        )


def check_draws(traced: TracedModule) -> None:
    """Raise CaptureError for a model that draws numbers with Python's `random`: a graph would keep the first ones."""
    for stack in traced.draws:
        raise CaptureError(_DRAWS + format_place(user_frame(stack)))


def check_messages(gm: GraphModule) -> None:
    """Raise CaptureError if the model calls collectives itself, such as `all_reduce` over a group of its own."""
    for part in gm.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            if node.op == "call_function":
                check_message(node.target, node.meta.get("stack_trace"))


def check_message(op: object, stack: str | None) -> None:
    """Raise CaptureError for an op that sends values.

    Other ranks may not be in its group, or may not run this program, and the collective would wait for them forever.
    """
    namespace, _, name = str(op).partition(".")
    if namespace in _SENDING and not name.startswith("wait_tensor"):
        raise CaptureError(_sends(name.partition(".")[0]) + format_place(user_frame(stack)))


# Namespaces of torch's communication ops: functional, in place, of DTensor and of symmetric memory.
_SENDING = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem")


def _message(failure: TraceFailure) -> str:
    for cause in _CAUSES:
        found = cause.fits(failure)
        if found is not None:
            return cause.message.format(_first(found))
    explanation = re.search(r"Explanation: (.*)", failure.detail)
    reason = explanation[1] if explanation else failure.detail.partition("\n")[0]
    return f"the model cannot be captured as one graph: {failure.kind}: {reason}"


def _first(found: re.Match[str]) -> str:
    return next((group for group in found.groups() if group), "")


def side_effect_error(effect: SideEffect, model: nn.Module) -> CaptureError:
    """Return the CaptureError for a Python object that `model` changes."""
    if isinstance(effect.changed, torch.Tensor) and effect.names == ("grad",):
        return CaptureError(_BACKWARD + format_place(user_frame(effect.stack)))
    name = user_name(effect.source)
    if effect.source.endswith(("_buffers", "['_buffers']")):
        return CaptureError(
            "the model gives a buffer another shape or dtype while it runs, but a graph has the same for all calls; register it "
            "with the shape and dtype that it gets" + format_place(user_frame(effect.stack))
        )
    outside = _OUTSIDE.fullmatch(effect.source)
    if outside is not None:
        who, thing = _changing(outside, effect, model)
        return CaptureError(
            f"{who} changes {thing}, which is outside of the model, but a graph computes tensors and changes nothing else; keep "
            "the value on the module: module.kept = value" + format_place(user_frame(effect.stack))
        )
    if effect.source.startswith(("L['args']", "L['kwargs']")):
        what, change = "changes an argument", "make a new one and return it"
    else:
        thing = f"{name}" if name else "its own attributes"
        what, change = f"changes {thing}", "return the value, or keep it in a buffer that is updated in place"
    return CaptureError(
        f"the model {what} while it runs, but a graph computes tensors and changes nothing else; {change}"
        + format_place(user_frame(effect.stack))
    )


# What a hook of a module, or a function that is an attribute of one, holds.
_OUTSIDE = re.compile(
    r"L\['self'\]\._modules\['autoshard_module'\](?P<path>(?:\._modules\['[^']*'\])*)"
    r"(?:\._forward_(?P<pre>pre_)?hooks\[list\(dict\.keys\(.*?_hooks\)\)\[(?P<number>\d+)\]\]|\.(?P<name>\w+)(?=\.__closure__))"
    r"(?P<held>.*)"
)


def _changing(outside: re.Match[str], effect: SideEffect, model: nn.Module) -> tuple[str, str]:
    """Return the hook or function that changes an object, and the object, as the user names them."""
    path = ".".join(re.findall(r"'([^']*)'", outside["path"]))
    module = model.get_submodule(path)
    if outside["name"]:
        who, function = f"{path}.{outside['name']}".removeprefix("."), getattr(module, outside["name"])
    else:
        hooks = module._forward_pre_hooks if outside["pre"] else module._forward_hooks
        who = f"the forward {'pre-' if outside['pre'] else ''}hook of {path or 'the model'}"
        function = list(hooks.values())[int(outside["number"])]
    variable = re.fullmatch(r"\.__closure__\[(\d+)\](?:\.cell_contents)?(.*)", outside["held"])
    if variable is not None and isinstance(function, FunctionType):
        return who, function.__code__.co_freevars[int(variable[1])] + variable[2]
    return who, with_article(type(effect.changed).__name__)


def read_and_changed_error(path: str, effect: SideEffect, *, is_list: bool) -> CaptureError:
    """Return the CaptureError for a number, or a list, that the model adds to and reads."""
    if is_list:
        return CaptureError(
            f"the model changes the list {path} and computes with it, but a graph has one value for all calls; begin each call "
            f"with an empty one (self.{path}.clear()), or keep the values in a buffer that is updated in place"
            + format_place(user_frame(effect.stack))
        )
    return CaptureError(
        f"the model changes {path} and computes with it, but a graph has one value for all calls; keep it in a buffer that is "
        "updated in place, or pass it as an argument" + format_place(user_frame(effect.stack))
    )


_OF_CLASS = r"^dict\(type\(L\['self'\]\.autoshard_module(.*?)\)(?:\.__mro__\[\d+\])?\.__dict__\)\['([^']*)'\]"


def user_name(source: str) -> str:
    """Return dynamo's name for the source of a value as the user writes it: `layers[0].weight`, `MASK`, `type(self).cache`."""
    name = re.sub(
        r"^L\['self'\]\._modules\['autoshard_module'\]\.?|^G\['__import_[^']*'\]\.|^G\['([^']*)'\]", r"\1", source
    )
    name = re.sub(r"\.?_(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", name)
    name = re.sub(_OF_CLASS, r"type(self\1).\2", name)
    return name.removeprefix(".")


def format_place(origin: Origin) -> str:
    """Return the user's line as the end of a message."""
    return f"\n  {origin.file}:{origin.line}: {origin.source}" if origin.file else ""
