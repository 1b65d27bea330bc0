"""See what a run of the user's Python code changes besides tensors: objects that it holds, and variables outside of it.

Dynamo reads this off the code that it traces. A run without dynamo is seen from outside: which functions run, what the
objects that they can reach hold before and after it, and which generators of random numbers they ask.
"""

from __future__ import annotations

import dis
import functools
import gc
import random
import sys
import sysconfig
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from autoshard.capture.object_contents import CONTAINERS, State, Step, contents_of
from autoshard.capture.signature import is_constant, same_constant
from passes._torch import names_read

_DEPTH_MAX = 4  # objects in objects that are looked at
_ITEMS_MAX = 1000  # a larger container is data
_SEEDING = ("manual_seed", "seed", "set_state", "graphsafe_set_state")  # of a torch.Generator
_STORES = ("STORE_GLOBAL", "DELETE_GLOBAL")
_OUTER_STORES = ("STORE_DEREF", "DELETE_DEREF")
_TORCH = f"{Path(torch.__file__).parent}/"
_MODULES = Path(nn.modules.__file__).parent
_CHECKPOINT = str(checkpoint_sequential.__code__.co_filename)
_LIBRARY = f"{sysconfig.get_path('stdlib')}/"
_HERE = tuple(f"{Path(__file__).parents[2] / package}/" for package in ("autoshard", "passes"))
_FUNCTIONS = (BuiltinFunctionType, FunctionType, MethodType)
_CLOSED = (*_FUNCTIONS, nn.Module)


@dataclass
class Functions:
    """Functions of the user, and of libraries, that ran: their code, with what they name outside of themselves."""

    outside: dict[CodeType, dict[str, Any]] = field(default_factory=dict)
    draws: str = ""  # the function that drew or seeded random numbers outside of a graph
    checkpoints: bool = False
    _seen: dict[int, CodeType] = field(default_factory=dict)  # by id: the hash of code reads all of it

    def __post_init__(self) -> None:
        """Leave out what garbage collection calls, which runs at any time and is not of the model."""
        codes = [getattr(callback, "__code__", None) for callback in gc.callbacks]
        self._seen |= {id(code): code for code in codes if isinstance(code, CodeType)}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the functions that run until the block ends."""
        before = sys.getprofile()
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before)

    @contextmanager
    def noted(self, held: Held) -> Iterator[None]:
        """Note the Python functions that run until the block ends, and whether numbers were drawn, but not by which
        function: at a third of the time. What a function names outside of itself is `held` as it is found there first.
        """
        before, drawn = sys.gettrace(), _generators()
        seen = self._seen

        def called(frame: Any, event: str, argument: Any) -> None:
            if id(frame.f_code) not in seen:  # of many thousands
                self._call(frame, held)

        sys.settrace(called)
        try:
            yield
        finally:
            sys.settrace(before)
        if _generators() != drawn:
            self.draws = self.draws or "random"

    def _call(self, frame: Any, held: Held | None = None) -> None:
        code = frame.f_code
        if id(code) in self._seen:
            return
        self._seen[id(code)] = code
        self.checkpoints = self.checkpoints or code.co_filename == _CHECKPOINT
        if _is_users(code.co_filename):
            self.outside[code] = _outside(frame)
            if held is not None:
                held.hold(self.outside[code])

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self._call(frame)
        elif event == "c_call":
            owner = getattr(argument, "__self__", None)
            seeds = isinstance(owner, torch.Generator) and argument.__name__ in _SEEDING
            if seeds or isinstance(owner, random.Random):
                self.draws = self.draws or argument.__name__

    @property
    def names(self) -> frozenset[str]:
        """Return the names that the code of the user, and of torch's modules, reads."""
        of_torch = (
            code for code in self._seen.values() if Path(code.co_filename).parent == _MODULES and code.co_name != "__getattr__"
        )
        return frozenset().union(*map(names_read, (*self.outside, *of_torch)))

    def forget_dead(self) -> None:
        """Let go of what the run alone held: variables of functions that it made, which end with it."""
        while True:
            held = Counter(id(value) for outside in self.outside.values() for value in outside.values())
            dead = [
                (outside, name)
                for outside in self.outside.values()
                for name in outside
                if sys.getrefcount(outside[name]) <= held[id(outside[name])] + 1  # the call's own
            ]
            for outside, name in dead:
                del outside[name]
            if not dead:
                return

    def stored(self) -> str:
        """Return a variable outside of a function that the function assigns, or ""."""
        for code in self.outside:
            for step in dis.get_instructions(code):
                if step.opname in _STORES or (step.opname in _OUTER_STORES and step.argval in code.co_freevars):
                    return str(step.argval)
        return ""


def _generators() -> Any:
    """Return the state of the generators of random numbers that belong to no object."""
    return random.getstate(), torch.random.get_rng_state().tolist()


def _is_users(file: str) -> bool:
    is_library = file.startswith(_LIBRARY) and "site-packages" not in file
    return not (is_library or file.startswith((_TORCH, "<frozen", *_HERE)))


def _outside(frame: Any) -> dict[str, Any]:
    """Return the variables of modules and of enclosing functions that a function may read."""
    code, inside = frame.f_code, frame.f_locals if frame.f_code.co_freevars else {}
    found = {name: frame.f_globals[name] for name in code.co_names if name in frame.f_globals}
    return found | {name: inside[name] for name in code.co_freevars if name in inside}


class Held:
    """The values that a model and the functions that it runs hold: to be compared after a run."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[str, Any, Any]] = {}
        self._modules: set[int] = set()  # the attributes of modules, by id

    @staticmethod
    def by(model: nn.Module, arguments: Any, functions: Functions) -> Held:
        """Return what a model, its arguments and functions hold."""
        held = Held()
        held._add_model(model, arguments)
        for outside in functions.outside.values():
            held.hold(outside)
        return held

    def _add_model(self, model: nn.Module, arguments: Any) -> None:
        self._add("an argument", arguments, _DEPTH_MAX)
        for prefix, module in model.named_modules():
            cached = _cached_properties(type(module))
            self._modules.add(id(vars(module)))
            self._add(prefix, vars(module), _DEPTH_MAX + 1, cached)
            for kind in type(module).__mro__:
                if not kind.__module__.startswith(("torch.", "builtins")):
                    self._add(kind.__name__, _Class(kind), _DEPTH_MAX)

    def hold(self, variables: Mapping[str, Any]) -> None:
        """Add what variables hold, by name."""
        for name, value in variables.items():
            self._add(name, _Class(value) if isinstance(value, type) else value, _DEPTH_MAX)

    def changed(self, *, but_flags: bool = False) -> str:
        """Return the path of an object that is no longer as it was, or "".

        With `but_flags`, constants may be set in objects that are no modules, such as a config: dynamo takes such a call for
        one that finds them set, too.
        """
        for path, value, before in self._before.values():
            ignored, contents = before
            present = _contents(value, ignored)
            are_flags = but_flags and id(value) not in self._modules and not isinstance(value, list | dict | set | deque)
            for key in dict.fromkeys((*contents, *present)):
                old, new = contents.get(key), present.get(key)
                is_kept = key in contents and key in present and _is_same(old, new)
                if not is_kept and not (are_flags and is_constant(old) and is_constant(new)):
                    return _join(path, str(key.key))
        return ""

    def _add(self, path: str, value: Any, depth: int, ignored: frozenset[str] = frozenset()) -> None:
        number = id(value.kind if isinstance(value, _Class) else value)
        if number in self._before:
            return
        contents = _contents(value, ignored)
        if contents is None:
            return
        self._before[number] = (path, value, (ignored, contents))
        if depth and len(contents) <= _ITEMS_MAX:
            for step, item in contents.items():
                self._add(_join(path, str(step.key)), item, depth - 1)


class _Class:
    """Stands for the attributes of a class."""

    def __init__(self, kind: type) -> None:
        self.kind = kind


def _contents(value: Any, ignored: frozenset[str] = frozenset()) -> Any:
    """Return what an object holds, by the step to it; None for one that is known not to change."""
    if isinstance(value, _Class):
        value = dict(vars(value.kind))
    elif isinstance(value, _CLOSED):
        return None
    found = contents_of(value)
    if not found and not (found is None or isinstance(value, CONTAINERS)):
        return {Step("", is_item=True): State(value)}
    return {step: item for step, item in found.items() if step.key not in ignored} if found and ignored else found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, State) and isinstance(other, State):
        return one == other
    return one is other or (is_constant(one) and is_constant(other) and same_constant(one, other))


def _cached_properties(kind: type) -> frozenset[str]:
    """Return the names under which a module keeps what it computes once: a program computes it in each call."""
    names = (name for one in kind.__mro__ for name, value in vars(one).items() if isinstance(value, functools.cached_property))
    return frozenset(names)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
