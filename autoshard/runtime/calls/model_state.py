"""Notice changes of a model that capture read: attributes, flags, hooks, submodules, parameters, a patched forward.

A *state* of a model is a description of all that a capture may read, by path. As long as nothing was written to the
dicts of the model's modules, the state is the same, which takes about 0.1 us a module to see; otherwise the model is
described again and compared with the states that it had before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

from autoshard.capture.changes import Change
from autoshard.capture.held_objects import DEPTH_MAX, INTERNAL, inside_of
from autoshard.capture.signature import is_constant
from autoshard.runtime.calls.alone import Alone
from autoshard.runtime.calls.descriptions import MISSING, Description, Entry, Same, Tied, format_changes, of_constant
from autoshard.runtime.calls.outside_values import OutsideValues
from autoshard.runtime.calls.stored_values import StoredValues
from passes._torch import OutsideRead, alike_as_now, required_gradients, unchanged_since_now

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
_DYNAMIC = ("__dict__", "vars")  # code that reads one of these may read any attribute


@dataclass
class ModelStates:
    """The states that a model had when it was called, and which one it has."""

    names: frozenset[str] | None = frozenset()  # what the code of the captured calls reads
    stored: StoredValues = field(default_factory=StoredValues)  # by the captured calls, in objects of the model
    known: list[Description] = field(default_factory=list)
    current: int = 0
    signature: inspect.Signature = field(default_factory=inspect.Signature)
    given_forward: Any = None  # that the model's instance had when it was sharded, instead of its class's
    training: tuple[bool, ...] = ()  # per module
    trained: tuple[bool, ...] = ()  # per parameter: it requires a gradient
    outside: OutsideValues = field(default_factory=OutsideValues)
    _parameters: tuple[nn.Parameter, ...] = ()
    _unchanged: Callable[[], bool] = lambda: False
    _alike: Callable[[], bool] = lambda: False
    _handles: int = -1

    def own_forward(self, model: nn.Module) -> Any:
        """Return a forward that was set on the instance and is captured: a method of the model. None: its class's.

        Another function, such as one that calls the forward that was there before, runs as it is instead.
        """
        patched = model.__dict__.get("forward")
        is_own = patched is self.given_forward or (isinstance(patched, MethodType) and patched.__self__ is model)
        return patched if is_own else None

    def is_current(self) -> bool:
        """Return whether the model surely is in the state in which it was described last."""
        return (
            self._handles == RemovableHandle.next_id
            and self._unchanged()
            and self.outside.are_unchanged()
            and (self._alike() or required_gradients(self._parameters) == self.trained)  # in another mode, the second
        )

    def update(self, model: nn.Module, kind: type[nn.Module], *, is_new: bool = False) -> None:
        """Describe the model, and set `current` to the number of its state: a new one, if it was never in it before, or
        if it `is_new` for another reason.
        """
        found = self._described(model, kind)
        numbers = () if is_new else reversed(range(len(self.known)))
        self.current = next((one for one in numbers if not self._changes(self.known[one], found)), len(self.known))
        if self.current == len(self.known):
            self.known.append(found)

    def settle(self, model: nn.Module, kind: type[nn.Module]) -> None:
        """Describe the present state again, after its parameters were laid out."""
        self.known[self.current] = self._described(model, kind)

    def _described(self, model: nn.Module, kind: type[nn.Module]) -> Description:
        forward = self.own_forward(model)
        found = describe(model, kind, forward)
        self.signature = inspect.signature(forward or kind.forward.__get__(model))
        self._handles, self._unchanged = RemovableHandle.next_id, found.watch(model, self.stored)
        self._parameters = tuple(model.parameters())
        self.trained, self._alike = required_gradients(self._parameters), alike_as_now(self._parameters)
        self.training = tuple(module.training for module in model.modules())
        return found.entries | self.outside.describe()

    def forget(self) -> None:
        """Describe the model again at the next call."""
        self._unchanged = lambda: False

    def read(
        self, names: frozenset[str] | None, outside: tuple[OutsideRead, ...], changes: tuple[Change, ...]
    ) -> None:
        """Note what the code of a captured call reads (`names`: None, if it may be anything), and what it changes.

        A value `outside` of the model that no call read before counts as unchanged since.
        """
        new = self.outside.add(outside)
        self.known = [new | known for known in self.known]
        self.stored = self.stored.with_call(names, changes)
        if self.stored.changes:
            self.forget()
        everything = names is None or self.names is None or any(name in names for name in _DYNAMIC)
        self.names = None if everything else frozenset().union(self.names or (), names or ())

    def changes(self, before: int) -> tuple[str, ...]:
        """Return what differs between an earlier state and the present one, but for training flags."""
        found = self._changes(self.known[before], self.known[self.current])
        return format_changes({path: ends for path, ends in found.items() if path.rpartition(".")[2] != "training"})

    def _changes(self, old: Description, new: Description) -> dict[str, tuple[Any, Any]]:
        found = {}
        for path in old.keys() | new.keys():
            one, other = old.get(path, MISSING), new.get(path, MISSING)
            if one.value == other.value or self.stored.is_ignored(path):
                continue
            if one.is_read(self.names) and other.is_read(self.names):
                found[path] = (one.value, other.value)
        return dict(sorted(found.items()))


def describe(model: nn.Module, kind: type[nn.Module], forward: Any) -> Describing:
    """Return the description of a model of the class `kind`, with all in which a change of it would be seen.

    `forward` is the one set on the model itself that counts, or None.
    """
    found = Describing()
    for name in GLOBAL_HOOKS:
        hooks = vars(global_hooks)[name]
        found.dicts.append(hooks)
        found.add(name, tuple(map(Same, hooks.values())), ())
    for prefix, module in model.named_modules(remove_duplicate=False):
        found.module(prefix, module, kind if module is model else type(module))
    if forward is None:
        found.entries.pop("forward", None)
    return found


class Describing:
    """The description of a model while it is made."""

    def __init__(self) -> None:
        self.entries: Description = {}
        self.dicts: list[Mapping[Any, Any]] = []
        self.lists: list[tuple[list[Any], list[Any]]] = []  # with a copy of each
        self.forwards: dict[type[nn.Module], Any] = {}
        self.seen: dict[int, str] = {}  # id of a tensor or object -> its first path

    def watch(self, model: nn.Module, stored: StoredValues) -> Callable[[], bool]:
        """Return a function that says whether the model is still as it was described, but for what its calls store."""
        holders = stored.holders(model)
        changing = {id(one.inside) for one in holders}
        unwritten = unchanged_since_now([one for one in self.dicts if id(one) not in changing])
        lists = [(one, copy) for one, copy in self.lists if id(one) not in changing]
        forwards, looks = tuple(self.forwards.items()), [(one, one.look(_described)) for one in holders]

        def check() -> bool:
            return (
                unwritten()
                and all(one.look(_described) == before for one, before in looks)
                and all(kind.forward is forward for kind, forward in forwards)
                and all(len(one) == len(copy) and all(map(is_, one, copy)) for one, copy in lists)
            )

        return check

    def add(self, path: str, value: Any, names: tuple[str, ...]) -> None:
        self.entries[path] = Entry(value, names)

    def module(self, prefix: str, module: nn.Module, kind: type[nn.Module]) -> None:
        """Describe a module, but for its children."""
        dot = f"{prefix}." if prefix else ""
        self.forwards[kind] = kind.forward
        self.add(f"{prefix or 'the model'} itself", (Same(module), Same(kind), Same(kind.forward)), ())
        self.dicts += [module.__dict__, *(part for part in (module._parameters, module._buffers, module._modules) if part)]
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            self.add(dot + name, self._tensor(dot + name, tensor), ())
        for name in HOOKS:
            hooks = [hook for hook in module.__dict__[name].values() if not isinstance(hook, Alone)]
            if hooks:
                self.dicts.append(module.__dict__[name])
                self.add(dot + name, tuple(map(Same, hooks)), ())
        library = kind.__module__.startswith("torch.")
        for name, value in module.__dict__.items():
            if name not in INTERNAL:
                self.value(dot + name, value, () if library or name in ("training", "forward") else (name,), DEPTH_MAX)

    def _tensor(self, path: str, tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        first = self.seen.setdefault(id(tensor), path)
        if first != path:
            return Tied(first)
        placements = tensor.placements if isinstance(tensor, DTensor) else None
        return first, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, placements

    def value(self, path: str, value: Any, names: tuple[str, ...], depth: int) -> None:
        """Describe the value of an attribute: constants by value, containers and plain objects by what they hold."""
        if isinstance(value, torch.Tensor):
            self.add(path, self._tensor(path, value), names)
            return
        if is_constant(value):
            self.add(path, of_constant(value), names)
            return
        inside = inside_of(value)
        is_known = self.seen.setdefault(id(value), path) != path
        self.add(path, type(value) if isinstance(value, list | tuple | dict | set | frozenset) else Same(value), names)
        if inside is None or is_known or not depth:
            return
        if isinstance(inside, dict):
            self.dicts.append(inside)
        if isinstance(inside, list):
            self.lists.append((inside, list(inside)))
        is_object = isinstance(inside, dict) and inside is not value
        for key, item in inside.items() if isinstance(inside, dict) else enumerate(inside):
            self.value(f"{path}.{key}", item, (*names, str(key)) if is_object and names else names, depth - 1)


def _described(value: Any) -> Any:
    """Return the description of one value, to be compared with that of another."""
    found = Describing()
    found.value("", value, (), DEPTH_MAX)
    return {path: entry.value for path, entry in found.entries.items()}
