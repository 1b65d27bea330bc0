"""Convert a call of the user's model to the flat tensors of a graph, and the flat results to the model's output.

The leaves of a call are identified by their paths (`tokens`, `batch.labels`, `args.0`), not by how it was written: an
argument may be given by position or by name. Tensors are inputs of the graph; numbers, strings and None are constants of
the capture, and so are the classes of containers and the order of a dict's keys, which a model may go through.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from passes._torch import TreeSpec, flatten_pytree, unflatten_pytree
from passes.errors import CaptureError, InputError, with_article

_CONSTANT_TYPES = (
    type(None),
    type(...),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    np.number,
    np.bool_,
)


@dataclass(frozen=True)
class InputSpec:
    """A tensor argument as it was captured, with its global shape."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"{self.path}: {format_tensor(self.shape, self.dtype)}"


@dataclass(frozen=True)
class Call:
    """Arguments of one call: every leaf by its path, and how to pass them to `forward` again."""

    bound: inspect.BoundArguments
    leaves: dict[str, Any]
    spec: TreeSpec

    def with_leaves(self, leaves: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `args` and `kwargs` of the same call with other leaves, by position if possible; defaults are left
        out.
        """
        other = inspect.BoundArguments(self.bound.signature, self._arguments(leaves))
        return other.args, other.kwargs

    def as_written(
        self, leaves: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `args` and `kwargs` with other leaves; arguments that were given by name are again given by name."""
        arguments = self._arguments(leaves)
        by_name = dict(arguments)
        for name, parameter in self.bound.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                by_name.update(by_name.pop(name, {}))
        positional = inspect.BoundArguments(self.bound.signature, arguments).args[: len(args)]
        return positional, {name: by_name[name] for name in kwargs}

    def _arguments(self, leaves: dict[str, Any]) -> dict[str, Any]:
        named = unflatten_pytree([leaves[path] for path in self.leaves], self.spec)
        arguments = dict(self.bound.arguments)
        for name in arguments:
            if self.bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                arguments[name] = {key: named[_name_beyond(self.bound.signature, name, key)] for key in arguments[name]}
            else:
                arguments[name] = named[name]
        return arguments


def bind_call(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Bind the arguments of a call and return its leaves. Raises TypeError where `forward` would."""
    bound = signature.bind(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given = bound.arguments.get(name, {})
            named |= {_name_beyond(signature, name, key): value for key, value in given.items()}
        elif name in bound.arguments:
            named[name] = bound.arguments[name]
        elif isinstance(parameter.default, _CONSTANT_TYPES):
            named[name] = parameter.default
    pairs, spec = flatten_pytree(named)
    leaves = dict(pairs)
    if len(leaves) != len(pairs):
        paths = [path for path, _ in pairs]
        double = next(path for path in paths if paths.count(path) > 1)
        raise InputError(f"two arguments are both called {double!r}; rename a key, without a dot in it")
    return Call(bound, leaves, spec)


def _name_beyond(signature: inspect.Signature, name: str, key: str) -> str:
    """Return the name of an argument that `**name` of a function takes: its key, or `name.key` where a parameter is called so.

    Python takes both arguments of `forward(self, x, /, **more)` in a call `model(a, x=b)`.
    """
    return f"{name}.{key}" if key in signature.parameters else key


def check_leaves(call: Call) -> None:
    """Raise CaptureError for an argument that is neither a tensor nor a constant, nor made of them."""
    for path, leaf in call.leaves.items():
        if not isinstance(leaf, torch.Tensor) and not is_constant(leaf):
            raise CaptureError(_refused_argument(path, type(leaf).__name__))


def _refused_argument(path: str, name: str) -> str:
    text = f"argument {path} is {with_article(name)}, which is neither a tensor nor a constant; "
    if name == "ndarray":
        return text + "give torch.from_numpy(...) of it"
    if name.endswith("Cache"):  # a cache grows with each call of `generate`, and so would the programs
        return text + "call the model, or its generate(), with use_cache=False"
    return (
        text + "pass tensors in tuples, lists, dicts or dataclasses, or register the class with "
        "torch.utils._pytree.register_pytree_node"
    )


def is_constant(value: object) -> bool:
    """Return whether a leaf can be a constant of a capture."""
    return isinstance(value, _CONSTANT_TYPES)


def same_constant(left: object, right: object) -> bool:
    """Compare constants as a trace does: 1, 1.0 and True are different, and so are 0.0 and -0.0; nan equals nan."""
    return type(left) is type(right) and bool(identity_of(left) == identity_of(right))


def identity_of(value: Any) -> Any:
    """Return what tells a constant from others of its class, in a form that has a hash; another value as it is.

    -0.0 equals 0.0, and nan not even itself; a slice has no hash, and range(0, 3, 2) equals range(0, 4, 2).
    """
    return repr(value) if isinstance(value, float | complex | slice | range | np.inexact) else value


def format_tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return a tensor's type as text: `float32[4, 16]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def format_leaf(value: object) -> str:
    """Return a leaf of a call as messages show it."""
    return format_tensor(value.shape, value.dtype) if isinstance(value, torch.Tensor) else repr(value)


@dataclass(frozen=True)
class Signature:
    """The mapping between the user's calls and the inputs and outputs of the graph.

    `inputs` are in the order of the INPUT placeholders, `outputs` are the paths of the OUTPUT results in order.
    `constants` are the non-tensor arguments, by path; `results` holds, for each leaf of the model's output, the number
    of an OUTPUT or, if the leaf is not a tensor, its value. A tensor that is returned twice is one OUTPUT, under its first path.
    `views` are the numbers of the OUTPUTs that share memory with another one, or with an input, in the model.
    `in_spec` and `out_spec` are the structures of the arguments and of the output.
    """

    forward: inspect.Signature
    inputs: tuple[InputSpec, ...]
    constants: tuple[tuple[str, Any], ...]
    in_spec: TreeSpec
    outputs: tuple[str, ...]
    results: tuple[tuple[int | None, Any], ...]
    out_spec: TreeSpec
    views: frozenset[int] = frozenset()

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a call in the order of `inputs`; the caller has to check their shapes.

        Raises InputError for a call of another structure or with other constants than captured.
        """
        try:
            leaves = dict(bind_call(self.forward, args, kwargs or {}).leaves)
        except TypeError as error:
            raise InputError(f"forward{self.forward} cannot be called like this: {error}") from error
        tensors = tuple(_tensor(leaves, spec) for spec in self.inputs)
        for path, value in self.constants:
            _check_constant(leaves, path, value)
        if leaves:
            path, value = next(iter(leaves.items()))
            raise InputError(
                f"the call has {path} = {format_leaf(value)}, which the captured call had not; "
                f"leave it out, or capture the model with it"
            )
        return tensors

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """Return what the model returns, from the values of the OUTPUT results."""
        assert len(outputs) == len(self.outputs), f"{len(outputs)} values for {len(self.outputs)} outputs"
        leaves = [value if number is None else outputs[number] for number, value in self.results]
        return unflatten_pytree(leaves, self.out_spec)


def _tensor(leaves: dict[str, Any], spec: InputSpec) -> torch.Tensor:
    if spec.path not in leaves:
        raise InputError(f"the call lacks {spec}, which the captured call had; give it, or capture the model without")
    value = leaves.pop(spec.path)
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"{spec.path} is {value!r}, but the model was captured with {format_tensor(spec.shape, spec.dtype)}; "
            f"give a tensor, or capture the model with this value"
        )
    return value


def _check_constant(leaves: dict[str, Any], path: str, value: object) -> None:
    if path not in leaves:
        raise InputError(f"the call lacks {path} = {value!r}, which the captured call had")
    given = leaves.pop(path)
    if isinstance(given, torch.Tensor):
        raise InputError(
            f"{path} is {format_leaf(given)}, but the model was captured with {path} = {value!r}; "
            f"capture the model with a tensor to make it an input"
        )
    if not same_constant(given, value):
        raise InputError(
            f"{path} is {given!r}, but the model was captured with {path} = {value!r}, and what is no tensor is a "
            f"constant of the graph; pass it as a tensor, or capture the model once per value"
        )


@dataclass(frozen=True)
class NotReturned:
    """Stands in a model's output for an object that holds tensors and that no program can return, such as a cache."""

    path: str
    kind: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself asks for, as when it copies
            raise AttributeError(name)
        raise InputError(
            f"{self.path or 'output'} is {with_article(self.kind)}, which a sharded model does not return: its programs return "
            "tensors in tuples, lists, dicts and dataclasses; return the tensors that you need from "
            f"{self.path or 'output'}.{name}"
        )


@dataclass(frozen=True)
class Outputs:
    """The output of a model: its tensors with their paths, `Signature.results` and `Signature.out_spec`."""

    tensors: tuple[tuple[str, torch.Tensor], ...]
    results: tuple[tuple[int | None, Any], ...]
    spec: TreeSpec
    left_out: tuple[NotReturned, ...]


def describe_output(output: Any) -> Outputs:
    """Describe a model's output. Dataclasses are registered with torch; an object of another class is left out.

    Raises CaptureError if nothing else is returned.
    """
    pairs, spec = flatten_pytree(output)
    tensors: list[tuple[str, torch.Tensor]] = []
    numbers: dict[int, int] = {}  # of tensors, by id
    results: list[tuple[int | None, Any]] = []
    left_out: list[NotReturned] = []
    for path, leaf in pairs:
        if isinstance(leaf, torch.Tensor):
            number = numbers.setdefault(id(leaf), len(tensors))
            results.append((number, None))
            if number == len(tensors):
                tensors.append((path or "output", leaf))
        elif is_constant(leaf):
            results.append((None, leaf))
        else:
            left_out.append(NotReturned(path, type(leaf).__name__))
            results.append((None, left_out[-1]))
    if left_out and not tensors:
        where = f" at {left_out[0].path}" if left_out[0].path else ""
        raise CaptureError(
            f"the model returns {with_article(left_out[0].kind)}{where}, and tensors inside it "
            f"would be lost; return tensors in tuples, lists, dicts or dataclasses, or register the class with "
            f"torch.utils._pytree.register_pytree_node"
        )
    return Outputs(tuple(tensors), tuple(results), spec, tuple(left_out))
