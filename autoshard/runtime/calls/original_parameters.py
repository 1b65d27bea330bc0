"""Notice that an optimizer trains the model that was given to `autoshard`, and not the copy that came back.

The given model may be trained by itself, beside its sharded copy: its parameters have gradients then. An optimizer is in error
if none of its parameters of a given model has a gradient while a sharded copy of one has.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from passes.errors import UserError

_log = logging.getLogger("autoshard.programs")


@dataclass(frozen=True, eq=False)
class _Copy:
    """A sharded copy of a model, and how many parameters of the model are trained."""

    model: weakref.ref[nn.Module]
    trained: int


@dataclass
class _Originals:
    """The parameters of models that were sharded, while they live, with their names in each copy.

    An optimizer is looked at again if it has more parameters than it had, or if another model was sharded.
    """

    copies: MutableMapping[torch.Tensor, dict[_Copy, str]] = field(default_factory=WeakTensorKeyDictionary)
    seen: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = field(default_factory=weakref.WeakKeyDictionary)
    number: int = 0  # of models that were sharded


_originals = _Originals()


def remember_originals(model: nn.Module, sharded: nn.Module) -> None:
    """Let optimizers of `model` say that it is `sharded`, its copy, that is trained.

    Warns if another model was sharded that shares trained parameters with this one: their copies share none.
    """
    if not _originals.number:
        register_optimizer_step_post_hook(_check_optimizer)
    _originals.number += 1
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    _warn_of_shared(model, trained)
    copy = _Copy(weakref.ref(sharded), len(trained))
    for name, parameter in trained.items():
        _originals.copies.setdefault(parameter, {})[copy] = name


def _warn_of_shared(model: nn.Module, trained: dict[str, nn.Parameter]) -> None:
    """Warn of a sharded model that shares a part with `model`, where neither is a part of the other, or the same."""
    shared: dict[_Copy, list[str]] = {}
    for name, parameter in trained.items():
        for copy in _originals.copies.get(parameter, ()):
            shared.setdefault(copy, []).append(name)
    for copy, names in shared.items():
        other = copy.model()
        if other is not None and len(names) < min(len(trained), copy.trained):
            _log.warning(
                "%s shares parameter %r with a model that was sharded before (%s), but each sharded model has a copy of its "
                "own, and trains it alone; to train one, shard a module that holds both models, and choose by an argument",
                type(model).__name__,
                names[0],
                type(other).__name__,
            )


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise UserError for an optimizer that trains nothing; after its step, as a closure computes gradients in it."""
    if torch.compiler.is_compiling():
        return
    key = sum(len(group["params"]) for group in optimizer.param_groups), _originals.number
    if _originals.seen.get(optimizer) == key:
        return
    given = [one for group in optimizer.param_groups for one in group["params"] if one in _originals.copies]
    if not given or any(one.grad is not None for one in given):
        _originals.seen[optimizer] = key
        return
    trained = next((name for one in given for name in _names_with_gradient(one)), None)
    if trained is not None:
        raise UserError(
            f"the optimizer holds parameter {trained!r} of the model that was given to autoshard(...), which has no gradient: "
            "the sharded model is a copy, with parameters and gradients of its own, and this step trains nothing of it; build "
            "the optimizer on the sharded model's parameters, after autoshard(...)"
        )


def _names_with_gradient(parameter: torch.Tensor) -> Iterator[str]:
    """Yield the names of a parameter in sharded copies where it has a gradient."""
    for copy, name in _originals.copies[parameter].items():
        model = copy.model()
        found = None if model is None else dict(model.named_parameters()).get(name)
        if found is not None and found.grad is not None:
            yield name
