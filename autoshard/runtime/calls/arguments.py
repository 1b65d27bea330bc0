"""Describe the arguments of a call: as a key of the program that runs it, and as text."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.capture.signature import Call, Signature, format_leaf, identity_of, is_constant, same_constant
from passes._torch import TreeSpec, containers_of, unflatten_pytree

Key = tuple[TreeSpec, frozenset[tuple[str, Hashable]]]
SHOWN = 12  # arguments of a call that a message shows


def key_of(call: Call, *, gradients: bool) -> Key:
    """Return what a program depends on of the arguments: structure, constants, and the types of tensors on this rank.

    `gradients`: gradients are enabled, so that it matters whether an argument needs one.
    """
    return call.spec, frozenset((path, _leaf_key(leaf, gradients)) for path, leaf in call.leaves.items())


def signature_key(signature: Signature, *, gradients: bool) -> Key:
    """Return the key of a captured call with global inputs, on meta as `Splits.whole` gives them."""
    meta = torch.device("meta")
    inputs = [
        (spec.path, (torch.Tensor, torch.Size(spec.shape), spec.dtype, torch.strided, meta, gradients and spec.requires_grad))
        for spec in signature.inputs
    ]
    constants = ((path, _leaf_key(value, gradients)) for path, value in signature.constants)
    return signature.in_spec, frozenset([*inputs, *constants])


def format_call(call: Call) -> str:
    """Return a call as messages show it: `tokens: int64[4, 16], scale: 2.0`."""
    return joined(format_arguments(call))


def joined(texts: Sequence[str]) -> str:
    """Return texts as one, the first of them if they are many."""
    more = (f"and {len(texts) - SHOWN} more",) if len(texts) > SHOWN else ()
    return ", ".join((*texts[:SHOWN], *more))


def format_arguments(call: Call) -> tuple[str, ...]:
    """Return the arguments of a call as messages show them; those that are the defaults are left out.

    Of containers, lists and dicts show by their items, if they have any; others are shown by their class.
    """
    parameters = call.bound.signature.parameters
    shown = (item for item in call.leaves.items() if item[0] not in parameters or not _is_default(item[1], parameters[item[0]]))
    containers = containers_of(unflatten_pytree(list(call.leaves.values()), call.spec))
    unlike = ((path, kind, size) for path, kind, size in containers if path and not (size and kind in (list, dict)))
    return (
        *(f"{path}: {_format(leaf)}" for path, leaf in shown),
        *(f"{path}: {kind.__name__}{'' if size else ' without items'}" for path, kind, size in unlike),
    ) or ("no arguments",)


def _is_default(leaf: Any, parameter: inspect.Parameter) -> bool:
    return is_constant(leaf) and same_constant(leaf, parameter.default)


def _format(leaf: Any) -> str:
    return f"{format_leaf(leaf)} (DTensor)" if isinstance(leaf, DTensor) else format_leaf(leaf)


def _leaf_key(leaf: Any, gradients: bool) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return type(leaf), leaf.shape, leaf.dtype, leaf.layout, leaf.device, gradients and leaf.requires_grad
    identity = identity_of(leaf)
    return type(leaf), identity if isinstance(identity, Hashable) else id(leaf)
