"""Trace a call of a model with dynamo, and what the call changes in the model's Python objects.

Python code that dynamo gives up on is run instead (`direct`), with a remark.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import nn

from autoshard.capture.capture_errors import (
    fails_error,
    kept_under_lock_error,
    marks_leaf,
    may_run_directly,
    not_directly,
    read_and_changed_error,
    side_effect_error,
    takes_lock,
    without_dynamo,
)
from autoshard.capture.changes import LISTS, Appended, Change, Traced, changes_of, stand_in
from autoshard.capture.direct import trace_directly
from autoshard.capture.held_objects import Path, held_objects, held_tensors, reach
from autoshard.capture.object_contents import dict_of
from passes._torch import SideEffect, TracedModule, clear_caches, rehearsed, trace_module
from passes.base import Remark
from passes.errors import CaptureError

_log = logging.getLogger("autoshard.capture")


@dataclass(frozen=True)
class TracedCall:
    """A traced call: its graph returns the model's output, a number, and the values of `changes`."""

    module: TracedModule
    changes: tuple[Change, ...] = ()
    remarks: tuple[Remark, ...] = ()


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> TracedCall:
    """Return the trace of a call of `model`, a copy on tensors without data, which the trace may change.

    Some modules set a flag on an object outside of them (a config, say) in their first call. If a second call changes
    nothing more, these constants are set here as the first call would set them. Other changes of objects that the
    model holds are values of the call. Raises CaptureError for changes that are not.
    """
    try:
        traced = _traced(_Call(model), args, kwargs, mode)
    except RuntimeError as error:
        if not may_run_directly(error):
            raise
        return _directly(model, args, kwargs, mode, error)
    if not traced.side_effects:
        return TracedCall(traced)
    settled = _settled(model, args, kwargs, mode, traced.side_effects)
    return TracedCall(settled) if settled is not None else _with_changes(model, args, kwargs, mode, traced)


def _directly(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any, error: RuntimeError
) -> TracedCall:
    """Trace a call by running it, after dynamo failed with `error`."""
    _log.info("dynamo cannot trace the model", exc_info=error)
    try:
        traced = copy_context().run(trace_directly, model, args, kwargs, mode)
        return TracedCall(traced, remarks=(without_dynamo(error),))
    except Exception as direct:  # of the user's code, or of torch's
        _log.info("the model cannot be run without data", exc_info=direct)
        clear_caches()
        raise not_directly(error, direct) from None


def _settled(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any, effects: tuple[SideEffect, ...]
) -> TracedModule | None:
    """Return the trace of a second call, if the first one sets flags only, and the second changes nothing."""
    if not all(effect.constants and set(effect.constants) == set(effect.names) for effect in effects):
        return None
    if any(isinstance(effect.changed, nn.Module) or dict_of(effect.changed) is None for effect in effects):
        return None
    before = [(vars(effect.changed), dict(vars(effect.changed))) for effect in effects]
    for effect in effects:
        for name, value in effect.constants.items():
            setattr(effect.changed, name, value)
    again = _traced(_Call(model), args, kwargs, mode)
    if not again.side_effects:
        return again
    for attributes, held in before:
        attributes.clear()
        attributes.update(held)
    return None


def _with_changes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any, first: TracedModule
) -> TracedCall:
    """Trace a call again that returns what it changed."""
    found = changes_of(model, first.side_effects)
    if isinstance(found, SideEffect):
        raise side_effect_error(found, model)
    before = {key: getattr(held, key[1]) for key, held in _added(model, found).items()}
    stand_in(model, found)
    try:
        traced = _traced(_Call(model, found), args, kwargs, mode)
    except RuntimeError as error:
        _log.info("torch cannot trace what the model changes", exc_info=error)
        refusal = _changed_error(found, first.side_effects, model)
        settled = _without_settled(model, args, kwargs, mode, first.side_effects, found, before)
        if settled is None:
            raise refusal from None
        try:
            stand_in(model, settled)
            traced, found = _traced(_Call(model, settled), args, kwargs, mode), settled
        except RuntimeError:
            raise refusal from None
    lists = [held for held in before.values() if isinstance(held, LISTS)]
    for effect in traced.side_effects:
        if any(effect.changed is held for held in lists):  # where no stand-in is, such as an item of a dict
            raise side_effect_error(effect, model)
    return TracedCall(traced, found.changes)


def _added(model: nn.Module, found: Traced) -> dict[tuple[Path, str], Any]:
    """Return the objects to whose attributes a call adds, by the object's path and the attribute's name."""
    return {(change.path, name): reach(model, change.path) for change in found.changes for name in change.added}


def _without_settled(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: Any,
    effects: tuple[SideEffect, ...],
    found: Traced,
    before: dict[tuple[Path, str], Any],
) -> Traced | None:
    """Return the changes without the numbers that a second call leaves as the first one set them: a size that is limited to
    that of the input, say. Calls before and after such a change have a program each. None if there are no such numbers.
    """
    added = _added(model, found)
    first = _constants(effects)
    for key, held in added.items():
        setattr(held, key[1], first.get((id(held), key[1]), before[key]))
    try:
        second = _constants(_traced(_Call(model), args, kwargs, mode).side_effects)
    except RuntimeError:
        return None
    finally:
        for key, held in added.items():
            setattr(held, key[1], before[key])
    settled = {
        key
        for key, held in added.items()
        if (number := (id(held), key[1])) in first and second.get(number, first[number]) == first[number]
    }
    if not settled:
        return None
    changes = [
        replace(change, added=change.added - {name for path, name in settled if path == change.path}) for change in found.changes
    ]
    return Traced(tuple(changes), found.buffers)


def _constants(effects: tuple[SideEffect, ...]) -> dict[tuple[int, str], Any]:
    """Return the constants that a call stores, by the object's id and the attribute's name."""
    return {(id(effect.changed), name): value for effect in effects for name, value in effect.constants.items()}


def _changed_error(found: Traced, effects: tuple[SideEffect, ...], model: nn.Module) -> CaptureError:
    """Return the error for changes that cannot be traced: something is read that is added to, if there is such a thing."""
    added = {name: (path, change) for change in found.changes for name, path in change.added_paths}
    for effect in effects:
        for name in (*effect.names, effect.source.rpartition(".")[2]):
            if name in added:
                path, change = added[name]
                is_list = isinstance(getattr(reach(model, change.path), name), Appended)
                return read_and_changed_error(path, effect, is_list=is_list)
    return side_effect_error(effects[0], model)


def _traced(call: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> TracedModule:
    """Return the trace of a call.

    A module that holds a lock while it sets itself up in its first call (hooks, say) is called once before, on tensors
    without data. Where `requires_grad_()` on a value stops the trace, it is left out.
    """
    marks_leaves, is_set_up = True, False
    while True:
        try:
            with _without_locks(call):
                return trace_module(call, args, kwargs, marks_leaves=marks_leaves)
        except RuntimeError as error:
            if takes_lock(error) and not is_set_up:
                _set_up(call, args, kwargs, mode)
                is_set_up = True
            elif marks_leaf(error) and marks_leaves:
                marks_leaves = False
            else:
                raise


@contextmanager
def _without_locks(model: nn.Module) -> Iterator[None]:
    """Take the locks off each `functools.cached_property` of the classes that a model is made of: Python 3.11 has them, and
    dynamo cannot take a lock."""
    classes = {base for _, held in held_objects(model) for base in type(held).__mro__}
    found = [one for base in classes for one in vars(base).values() if isinstance(one, cached_property) and hasattr(one, "lock")]
    locks = [one.lock for one in found]
    for one in found:
        one.lock = nullcontext()
    try:
        yield
    finally:
        for one, lock in zip(found, locks, strict=True):
            one.lock = lock


def _set_up(call: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> None:
    """Call a module once on tensors without data. Raises CaptureError if it keeps one of those that it computes, which a graph
    would take for a constant."""
    before = {id(tensor) for _, tensor in held_tensors(call)} | set(map(id, call.buffers()))
    try:
        with rehearsed(mode):
            call(*args, **kwargs)
    except (AttributeError, LookupError) as error:  # of the user's code
        raise fails_error(error) from None
    after = ((name.removeprefix("autoshard_module."), tensor) for name, tensor in chain(held_tensors(call), call.named_buffers()))
    for name, tensor in after:
        if id(tensor) not in before:
            raise kept_under_lock_error(name)


class _Call(nn.Module):
    """Module that calls the traced module under a name that cannot clash with those of its children.

    It returns the values of `changes` after the call, and copies new buffers into those that were there before. The call
    reads copies of these, as autograd keeps what the backward needs, and no write may reach that.
    """

    def __init__(self, module: nn.Module, changes: Traced | None = None) -> None:
        super().__init__()
        self.autoshard_module = module
        self.changes = () if changes is None else changes.changes
        self.buffers_of = () if changes is None else changes.buffers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = [_buffers(self.autoshard_module, path) for path, _ in self.buffers_of]
        for path, names in self.buffers_of:
            _copy_buffers(reach(self.autoshard_module, path), names)
        output = self.autoshard_module(*args, **kwargs)
        for (path, _), held in zip(self.buffers_of, before, strict=True):
            for name, new in _buffers(self.autoshard_module, path).items():
                _assign(held[name], new)
        # Dynamo returns no graph if nothing is computed; the second result makes sure that something is.
        return output, torch.zeros(()), [change.values(self.autoshard_module) for change in self.changes]


def _buffers(model: nn.Module, path: Path) -> dict[str, Any]:
    return dict(reach(model, path)._buffers)


def _copy_buffers(module: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        held = module._buffers.get(name)
        if held is not None:
            setattr(module, name, held.clone())


def _assign(held: torch.Tensor | None, new: torch.Tensor | None) -> None:
    if new is held:
        return
    if held is None or new is None or held.shape != new.shape or held.dtype != new.dtype:
        raise ValueError("a buffer gets another shape or dtype")
    held.copy_(new)
