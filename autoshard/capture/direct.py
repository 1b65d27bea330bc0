"""Trace a call that dynamo does not understand by running the model's Python code, as non-strict `torch.export` does.

The program is what one run of the code computes. That is the model for all calls only if each run computes the same, and
changes nothing but tensors; where that is in doubt, the call is refused:

1. Values of tensors are not known: code that asks for them fails.
2. The code runs twice, backward included, on copies of the model, and both runs call the same ops with the same numbers.
3. Neither draws with Python's `random`, seeds a generator, sends to other ranks, or makes a checkpoint, which would draw
   again in the backward.
4. No object that the model or its functions hold is changed, and no variable outside of them is assigned.
5. Nothing keeps a tensor that the run computed: none is alive when the output is gone.
6. Every tensor that is read is the model's or an argument; another would be a constant without a gradient.

What code reads of the model is not known, so that any change of its attributes makes a new program.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.capture.capture_errors import check_function, check_message, format_place
from autoshard.capture.held_objects import held_tensors
from autoshard.capture.origins import user_frame
from autoshard.capture.python_state import Functions, Held
from autoshard.capture.signature import format_tensor, is_constant, same_constant
from passes._torch import (
    TracedModule,
    TreeSpec,
    WatchedOps,
    current_stack,
    flatten_pytree,
    is_fake,
    one_call_graph,
    run_directly,
    unflatten_pytree,
)
from passes.errors import CaptureError

aten = torch.ops.aten

_NEW = (aten.lift_fresh.default, aten.lift_fresh_copy.default)  # of a tensor that `torch.tensor` makes
_OF_TENSORS: Any = Tensor
_SETTERS = (_OF_TENSORS.data.__set__, _OF_TENSORS.grad.__set__, _OF_TENSORS.register_post_accumulate_grad_hook)


def trace_directly(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> TracedModule:
    """Return the trace of a call of `model`, whose tensors are fake ones of `mode`, as are the arguments.

    Raises CaptureError where a run of the code may not be the model for all calls, and whatever the code raises.
    """
    call, functions = _Call.of(model, args, kwargs), Functions()
    with functions.watched():
        ops, first = _rehearse(call, mode, functions, watches_state=False)
    _check_functions(functions)
    again, output = _rehearse(call, mode, functions, watches_state=True)
    _check_same(again == ops and output.is_like(first.leaves, first.spec))

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        pairs, spec = flatten_pytree(call.copied(tensors).output())
        leaves = [leaf for _, leaf in pairs]
        _check_same(output.is_like(leaves, spec))
        return output.tensors_of(leaves)

    return one_call_graph(run, call.tensors, output.examples, lambda values: (output.rebuilt(values), None, []))


@dataclass(frozen=True)
class _Call:
    """A call of a model, and the tensors of both."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        found = {id(one): one for one in (*model.parameters(), *model.buffers())}
        for name, held in held_tensors(model):
            if held.requires_grad and id(held) not in found:
                raise CaptureError(f"it holds {name}, a tensor that needs a gradient and is no parameter")
            found[id(held)] = held
        given = (leaf for _, leaf in flatten_pytree((args, kwargs))[0] if isinstance(leaf, Tensor))
        return _Call(model, args, kwargs, tuple((found | {id(one): one for one in given}).values()))

    def fresh(self, mode: Any) -> tuple[Tensor, ...]:
        """Return tensors like those of the call, that a run may change."""
        with mode:
            empty = [torch.empty_like(one.detach()) for one in self.tensors]
        return tuple(
            nn.Parameter(new, requires_grad=one.requires_grad)
            if isinstance(one, nn.Parameter)
            else new.requires_grad_(one.requires_grad)
            for one, new in zip(self.tensors, empty, strict=True)
        )

    def copied(self, tensors: Sequence[Tensor]) -> _Copy:
        """Return a copy of the call, with other tensors in the place of its own."""
        replaced = {id(own): other for own, other in zip(self.tensors, tensors, strict=True)}
        model, args, kwargs = copy.deepcopy((self.model, self.args, self.kwargs), replaced)
        modules = zip(self.model.named_modules(), model.modules(), strict=True)
        return _Copy(model, args, kwargs, {id(new): (str(id(own)), name) for (name, own), new in modules})


@dataclass(frozen=True)
class _Copy:
    """A copy of a call to be run once, with the keys and names of its modules by their ids."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modules: Mapping[int, tuple[str, str]]

    def output(self, called: Any = None) -> Any:
        with run_directly(self.modules, __file__, called):
            return self.model(*self.args, **self.kwargs)


@dataclass(frozen=True)
class _Output:
    """The values that a call returns: its leaves, an example of each tensor among them, and their structure."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @staticmethod
    def of(result: Any, mode: Any) -> _Output:
        pairs, spec = flatten_pytree(result)
        with mode:
            examples = {id(leaf): _example(path, leaf) for path, leaf in reversed(pairs)}
        return _Output(tuple(examples[id(leaf)] for _, leaf in pairs), spec)

    @property
    def examples(self) -> tuple[Tensor, ...]:
        return self.tensors_of(self.leaves)

    def tensors_of(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the tensors among the leaves of another run, each once where this one returned it twice."""
        pairs = zip(self.leaves, leaves, strict=True)
        return tuple({id(own): leaf for own, leaf in pairs if isinstance(own, Tensor)}.values())

    def rebuilt(self, values: Sequence[Any]) -> Any:
        """Return the output with other tensors."""
        new = dict(zip(map(id, self.examples), values, strict=True))
        return unflatten_pytree([new[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.spec)

    def is_like(self, leaves: Sequence[Any], spec: TreeSpec) -> bool:
        """Return whether another run returned the same, but for the values of tensors."""
        return spec == self.spec and all(map(_is_alike, self.leaves, leaves))


def _example(path: str, leaf: Any) -> Any:
    """Return a leaf of an output without its tensors."""
    if isinstance(leaf, Tensor):
        if not is_fake(leaf):
            raise CaptureError(f"it returns at {path or 'output'} a tensor that it neither computes nor is given")
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return leaf if is_constant(leaf) else type(type(leaf).__name__, (), {})()


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and one.dtype is other.dtype
    if is_constant(one):
        return is_constant(other) and same_constant(one, other)
    return type(one).__name__ == type(other).__name__


def _rehearse(call: _Call, mode: Any, functions: Functions, *, watches_state: bool) -> tuple[list[Any], _Output]:
    """Run a call on tensors without data; return the ops that it calls, and its output.

    With `watches_state`, raises CaptureError if something is changed that the model holds, or the `functions` that it runs.
    """
    inputs = call.fresh(mode)
    copied = call.copied(inputs)
    held = Held.by(copied.model, (copied.args, copied.kwargs), functions) if watches_state else None
    watch = _Watch(inputs)
    with mode, WatchedOps(watch.before, watch.after):
        result = copied.output(watch.called)
        _differentiate(result, inputs)
    changed = held.changed() if held is not None else ""
    if changed:
        raise CaptureError(f"it changes {changed} while it runs")
    output = _Output.of(result, mode)
    for own, one in zip(call.tensors, inputs, strict=True):
        if one.grad is not None or one.requires_grad != own.requires_grad or one.shape != own.shape:
            raise CaptureError("it changes the shape, the gradient or requires_grad of a tensor that it is given")
    del held, result, copied, inputs
    functions.forget_dead()
    if watch.keeps():  # collection takes as long as a small model's run
        gc.collect()
        functions.forget_dead()
    watch.check_kept()
    return watch.ops, output


def _differentiate(result: Any, inputs: Sequence[Tensor]) -> None:
    """Run the backward as well: hooks and gradients of the model's own are code of the user, too."""
    tensors = [leaf for _, leaf in flatten_pytree(result)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    by = [one for one in inputs if one.requires_grad and one.is_leaf]
    if tensors and by:
        torch.autograd.grad(tensors, by, [torch.ones_like(one) for one in tensors], allow_unused=True)


class _Watch:
    """Sees what a run calls, and refuses what a program cannot do."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.ops: list[Any] = []
        self._inputs = frozenset(map(id, inputs))
        self._made: list[tuple[weakref.ref[Tensor], str]] = []

    def called(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if any(function == setter for setter in _SETTERS):
            raise CaptureError("it assigns the data or the gradient of a tensor, or hooks what does" + _place())
        check_function(getattr(function, "__name__", ""), args, kwargs, current_stack())

    def before(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        check_message(op, current_stack())
        described = [str(op)]
        for _, leaf in flatten_pytree((args, dict(kwargs)))[0]:
            if isinstance(leaf, torch.Generator):
                raise CaptureError("it draws with a torch.Generator, whose numbers a program does not have" + _place())
            if isinstance(leaf, Tensor) and not is_fake(leaf) and op not in _NEW:
                raise CaptureError(
                    f"it reads a {format_tensor(leaf.shape, leaf.dtype)} that is neither its own nor an argument; register "
                    "it with register_buffer or nn.Parameter" + _place()
                )
            described.append(format_tensor(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf))
        self.ops.append(described)

    def after(self, results: Sequence[Any]) -> None:
        for one in results:
            if isinstance(one, Tensor) and id(one) not in self._inputs:
                self._made.append((weakref.ref(one), current_stack()))

    def keeps(self) -> bool:
        """Return whether a tensor that was made is alive."""
        return any(one() is not None for one, _ in self._made)

    def check_kept(self) -> None:
        """Raise CaptureError if a tensor that was made is alive: it would be another in each call."""
        for one, stack in self._made:
            if one() is not None:
                place = format_place(user_frame(stack))
                raise CaptureError("it keeps a tensor that it computes outside of itself, where no program updates it" + place)


def _place() -> str:
    return format_place(user_frame(current_stack()))


def _check_same(is_same: bool) -> None:
    if not is_same:
        raise CaptureError("it does not compute the same in each call: something besides its tensors changes")


def _check_functions(functions: Functions) -> None:
    if functions.checkpoints:
        raise CaptureError("it has a checkpoint, whose random numbers would be others in the backward")
    if functions.draws:
        raise CaptureError(f"it draws numbers outside of tensors, or seeds them ({functions.draws})")
    if functions.stored():
        raise CaptureError(f"it assigns {functions.stored()}, a variable outside of its function")
