"""Notice changes of a model that capture read: attributes, flags, hooks, submodules, parameters, a patched forward.

A *state* of a model is a description of all that a capture may read, by path. As long as nothing was written to the
dicts of the model's modules, the state is the same, which takes about 0.1 us a module to see; otherwise the model is
described again and compared with the states that it had before.
"""

from __future__ import annotations

import enum
import inspect
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, is_
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

from autoshard.capture.changes import Change
from autoshard.capture.held_objects import DEPTH_MAX, is_near
from autoshard.capture.object_contents import (
    CONTAINERS,
    INTERNAL,
    State,
    contents_of,
    dict_of,
    dicts_of,
    members_of,
)
from autoshard.capture.signature import is_constant
from autoshard.runtime.calls.alone import Alone
from autoshard.runtime.calls.descriptions import MISSING, Description, Entry, Same, Tied, format_changes, of_constant
from autoshard.runtime.calls.outside_values import OutsideValues
from autoshard.runtime.calls.stored_values import StoredValues
from passes._torch import OutsideRead, alike_as_now, required_gradients, unchanged_since_now

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
OBJECTS_MAX = 100_000  # that an attribute holds and that are looked at: about 0.1 s, where one of them was changed
_VERSION: Callable[[torch.Tensor], int] = attrgetter("_version")
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
    unseen: tuple[str, ...] = ()  # attributes that hold more than `OBJECTS_MAX` objects
    parameter_ids: frozenset[int] = frozenset()
    _parameters: tuple[nn.Parameter, ...] = ()
    _counting: tuple[nn.Parameter, ...] = ()  # those that count writes: parameters made in inference mode do not
    _writes_before: int = 0  # to parameters, when ranks compared their values
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
        found = describe(model, kind, forward, names=self.names, stored=self.stored)
        self.signature = inspect.signature(forward or kind.forward.__get__(model))
        self._handles, self._unchanged = RemovableHandle.next_id, found.watch(model, self.stored)
        self._parameters = tuple(model.parameters())
        self._counting = tuple(one for one in self._parameters if not one.is_inference())
        self.parameter_ids = frozenset(map(id, self._parameters))
        self.trained, self._alike = required_gradients(self._parameters), alike_as_now(self._parameters)
        self.training = tuple(module.training for module in model.modules())
        self.unseen = found.unseen
        return found.entries | self.outside.describe()

    def writes(self) -> int:
        """Return how often parameters were changed in place since ranks compared their values: equally often on all ranks."""
        return sum(map(_VERSION, self._counting)) - self._writes_before

    def values_agree(self, *, writes: int = 0) -> None:
        """Note that ranks have the same values of parameters, but for as many `writes` since."""
        self._writes_before += self.writes() - writes

    def forget(self) -> None:
        """Describe the model again at the next call."""
        self._unchanged = lambda: False

    def read(
        self,
        model: nn.Module,
        kind: type[nn.Module],
        names: frozenset[str] | None,
        outside: tuple[OutsideRead, ...],
        changes: tuple[Change, ...],
    ) -> None:
        """Note what the code of a captured call reads (`names`: None, if it may be anything), and what it changes.

        A value that no call read before, of the model or `outside` of it, counts as unchanged since.
        """
        before = self.names
        everything = names is None or self.names is None or any(name in names for name in _DYNAMIC)
        self.names = None if everything else frozenset().union(self.names or (), names or ())
        self.stored = self.stored.with_call(names, changes)
        new = self.outside.add(outside)
        found = self._described(model, kind)
        new |= {path: entry for path, entry in found.items() if not entry.is_read(before)}
        self.known = [new | known for known in self.known]
        self.known[self.current] = found

    def changes(self, before: int) -> tuple[str, ...]:
        """Return what differs between an earlier state and the present one, but for training flags."""
        found = self._changes(self.known[before], self.known[self.current])
        told = {path: ends for path, ends in found.items() if path.rpartition(".")[2] != "training"}
        return format_changes({path: ends for path, ends in told.items() if not path.endswith(ORDER)} or told)

    def _changes(self, old: Description, new: Description) -> dict[str, tuple[Any, Any]]:
        found = {}
        for path in old.keys() | new.keys():
            one, other = old.get(path, MISSING), new.get(path, MISSING)
            if one.value == other.value or self.stored.is_ignored(path):
                continue
            if one.is_read(self.names) and other.is_read(self.names):
                found[path] = (one.value, other.value)
        return dict(sorted(found.items()))


def describe(
    model: nn.Module, kind: type[nn.Module], forward: Any, *, names: frozenset[str] | None, stored: StoredValues
) -> Describing:
    """Return the description of a model of the class `kind`, with all in which a change of it would be seen.

    `forward` is the one set on the model itself that counts, or None. What `names` do not lead to is left out, and what is
    `stored` and not read.
    """
    found = Describing(names, stored, {id(module): prefix for prefix, module in model.named_modules()})
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

    def __init__(
        self, names: frozenset[str] | None = None, stored: StoredValues | None = None, seen: dict[int, str] | None = None
    ) -> None:
        self.names = names
        self.stored = stored if stored is not None and stored.changes else None
        self.entries: Description = {}
        self.dicts: list[Mapping[Any, Any]] = []
        self.lists: list[tuple[Collection[Any], list[Any]]] = []  # and other containers, with a copy of each
        self.looks: list[tuple[Callable[[], Any], Any]] = []  # functions that look at other objects, and what they saw
        self.objects: list[Any] = []  # whose classes are looked at
        self.forwards: dict[type[nn.Module], Any] = {}
        self.seen = {} if seen is None else seen  # id of a module, tensor or object -> its first path
        self.unseen: tuple[str, ...] = ()
        self._left = OBJECTS_MAX  # of the present attribute

    def watch(self, model: nn.Module, stored: StoredValues) -> Callable[[], bool]:
        """Return a function that says whether the model is still as it was described, but for what its calls store."""
        holders = stored.holders(model)
        changing = {id(one.inside) for one in holders}
        unwritten = unchanged_since_now([one for one in self.dicts if id(one) not in changing])
        lists = [(one, copy) for one, copy in self.lists if id(one) not in changing]
        of_holders: list[Callable[[], Any]] = [partial(one.look, _described) for one in holders]
        looks: list[tuple[Callable[[], Any], Any]] = [*self.looks, *((look, look()) for look in of_holders)]
        forwards, objects, kinds = tuple(self.forwards.items()), self.objects, [*map(type, self.objects)]

        def check() -> bool:
            return (
                unwritten()
                and all(look() == before for look, before in looks)
                and all(kind.forward is forward for kind, forward in forwards)
                and all(map(is_, map(type, objects), kinds))
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
                self._left = OBJECTS_MAX
                self.value(dot + name, value, () if library or name in ("training", "forward") else (name,), DEPTH_MAX)
                if self._left < 0:
                    self.unseen += (dot + name,)
                    self.add(f"{dot}{name} itself", Same(value), (name,))

    def _tensor(self, path: str, tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        first = self.seen.setdefault(id(tensor), path)
        if first != path:
            return Tied(first)
        placements = tensor.placements if isinstance(tensor, DTensor) else None
        return first, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, placements

    def value(self, path: str, value: Any, names: tuple[str, ...], depth: int) -> None:
        """Describe the value of an attribute: constants by value, other objects by what they hold.

        A tensor at a negative `depth` is not read in each call: it is a constant of the program.
        """
        is_read = self.names is None or self.names.issuperset(names)
        if not is_read or (self.stored is not None and self.stored.is_ignored(path)):
            return
        self._left -= 1
        if self._left < 0:
            return
        if isinstance(value, torch.Tensor):
            described = self._tensor(path, value)
            self.add(path, described if depth >= 0 else (Same(value), described), names)
        elif isinstance(value, State):
            self.add(path, value, names)
        elif is_constant(value):
            self.add(path, of_constant(value), names)
            if isinstance(value, enum.Enum):
                self._inside(path, value, names, depth)
        else:
            is_known = self.seen.setdefault(id(value), path) != path
            kind = type(value)
            self.add(path, kind if isinstance(value, CONTAINERS) else (Same(value), Same(kind)), names)
            if not is_known:
                self._inside(path, value, names, depth)

    def _inside(self, path: str, value: Any, names: tuple[str, ...], depth: int) -> None:
        contents = contents_of(value)
        if contents is None:
            return
        self._look(value)
        if isinstance(value, dict) and len(value) > 1:
            self.add(path + ORDER, tuple(map(_name, range(len(value)), value)), names)
        for number, (step, item) in enumerate(contents.items()):
            name = _name(number, step.key)
            inner = (*names, name) if names and step.is_named and not step.is_item else names
            inside = ".".join(part for part in (path, name) if part)
            while inside in self.entries:  # of another key with this name: 1 and "1"
                inside += "'"
            self.value(inside, item, inner, depth - 1 if is_near(value, step, depth) else -1)

    def _look(self, value: Any) -> None:
        """Add how a change of what an object holds is seen."""
        self.dicts += dicts_of(value)
        if dict_of(value) is not None and not isinstance(value, FunctionType | MethodType):
            self.objects.append(value)
        if isinstance(value, list | deque | set | OrderedDict):
            self.lists.append((value, list(value)))
        elif not isinstance(value, _SEEN_IN_DICTS) and (members_of(type(value)) or dict_of(value) is None):
            look = partial(_look_at, value)
            self.looks.append((look, look()))


_SEEN_IN_DICTS = (dict, tuple, frozenset, FunctionType, MethodType, partial, nn.Module)  # all else of them stays as it is
ORDER = " (order)"  # ends the path of the order of a dict's keys


def _look_at(value: Any) -> list[Any]:
    return [one if isinstance(one, State) else id(one) for one in (contents_of(value) or {}).values()]


def _name(number: int, key: Any) -> str:
    """Return the name of an item, which is the same on all ranks."""
    return str(key) if is_constant(key) or isinstance(key, tuple) else f"{type(key).__name__} {number}"


def _described(value: Any) -> Any:
    """Return the description of one value, to be compared with that of another."""
    found = Describing()
    found.value("", value, (), DEPTH_MAX)
    return {path: entry.value for path, entry in found.entries.items()}
