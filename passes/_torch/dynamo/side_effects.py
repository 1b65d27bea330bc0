"""Side effects of a call that dynamo traces: changes of Python objects."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import TempLocalSource
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import CommonListMethodsVariable
from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable

from passes._torch.patches import replaced
from passes._torch.results import SideEffect

_log = logging.getLogger("autoshard.capture")
_DYNAMO = "/torch/_dynamo/"  # in the paths of its files
_SIDE_EFFECTS = "While compiling, we found certain side effects"  # how dynamo's warning begins


@contextmanager
def watch_side_effects() -> Iterator[list[SideEffect]]:
    """Collect the changes of Python objects that dynamo warns of when it traces for export.

    The warning only names the objects; their source lines are read from the tracer, which is on the stack at that time.
    """
    effects: list[SideEffect] = []

    def show(message: Warning | str, *place: Any, **more: Any) -> None:
        if not str(message).startswith(_SIDE_EFFECTS):
            _report(message, place, report, more)
            return
        frame = sys._getframe()
        while not isinstance(frame.f_locals.get("self"), OutputGraph):
            assert frame.f_back is not None
            frame = frame.f_back
        graph = frame.f_locals["self"]
        tracked, objects = graph.side_effects, _objects(graph.side_effects)
        dropped = set(map(id, _dropped(tracked.store_attr_mutations)))
        for variable in tracked._get_modified_vars():
            if _is_restored(variable, tracked.store_attr_mutations.get(variable)) or _is_dict_restored(variable):
                continue
            if _is_empty_again(variable, objects.get(id(variable))):
                continue
            if id(objects.get(id(variable))) in dropped:
                continue  # as a cache that a context fills, and drops at its end
            stacks = tracked.mutation_user_stacks.get(variable, ())
            if variable.source is None or isinstance(variable.source, TempLocalSource):
                continue
            if isinstance(variable, TorchFunctionModeStackVariable):
                continue  # contexts of the call itself, such as torch.no_grad
            stored = tracked.store_attr_mutations.get(variable) or {}
            constants = {name: new.as_python_constant() for name, new in stored.items() if new.is_python_constant()}
            changed, source = objects.get(id(variable)), source_name(variable.source)
            if isinstance(changed, set) and variable.is_python_constant() and variable.as_python_constant() == changed:
                continue  # what is added was in it, as the name of a buffer that is assigned again
            read = (name for name in stored if _is_default(changed, name) or _is_read(graph.guards, source, name))
            stack = "".join(stacks[0].format()) if stacks else ""
            effects.append(SideEffect(source, stack, changed, tuple(stored), constants, frozenset(read), _keys(variable)))

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_SIDE_EFFECTS)
        report = warnings.showwarning
        with replaced(warnings, "showwarning", show):
            yield effects


def _report(message: Warning | str, place: tuple[Any, ...], report: Any, more: dict[str, Any]) -> None:
    """Pass a warning on; one of dynamo's own, which is a page of hints, goes to the log."""
    if _DYNAMO in str(place[1]):
        _log.info("%s", message)
    else:
        report(message, *place, **more)


def _keys(variable: Any) -> tuple[Any, ...]:
    """Return the keys of a dict that have new values."""
    if not isinstance(variable, ConstDictVariable):
        return ()
    before = variable.original_items
    changed = (key.vt for key, new in variable.items.items() if variable.is_new_item(before.get(key.vt), new))
    return tuple(key.as_python_constant() for key in changed if key.is_python_constant())


def _objects(tracked: Any) -> dict[int, Any]:
    """Return the Python objects of variables, by the variable's id."""
    alive = {id(one): one for one in tracked.keepalive}
    return {id(variable): alive.get(number) for number, variable in tracked.id_to_variable.items()}


def _is_default(changed: Any, name: str) -> bool:
    """Return whether an attribute has the value of its class so far: dynamo's guard on it, if any, is the class's."""
    has_own = "__dict__" in dir(type(changed)) and name in vars(changed)
    return not has_own and name in dir(type(changed))


def _is_read(guards: Any, source: str, name: str) -> bool:
    """Return whether the trace depends on the value that an attribute had before: dynamo guards all that it reads."""
    paths = (f"{source}.{name}", f"{source}.__dict__['{name}']")
    for guard in guards:
        if guard.name in paths or guard.name.startswith(tuple(f"{path}{mark}" for path in paths for mark in ".[")):
            return True
        asked = isinstance(guard.create_fn, partial) and guard.create_fn.func.__name__ == "HASATTR"
        if asked and guard.name == source and guard.create_fn.keywords.get("attr") == name:
            return True
    return False


def _is_restored(variable: Any, stored: dict[str, Any] | None) -> bool:
    """Return whether a call leaves all attributes that it sets as they were, such as a flag that is set and reset, or a cache
    that is empty again."""
    if not stored:
        return False
    held = _attributes(variable)
    return all(
        name in held and new.is_python_constant() and _is_same(new.as_python_constant(), held[name])
        for name, new in stored.items()
    )


def _attributes(variable: Any) -> dict[str, Any]:
    """Return the attributes that the object of a variable had before the call."""
    value = vars(variable).get("value")
    return dict(vars(value)) if "__dict__" in dir(type(value)) else {}


def _is_same(new: Any, held: Any) -> bool:
    return new is held or (type(new) is type(held) and isinstance(new, dict | list | set) and not new and not held)


def _is_dict_restored(variable: Any) -> bool:
    """Return whether a dict ends with the items that it began with, in their order, as a module's parameters do that are swapped
    for others while it is called."""
    if not isinstance(variable, ConstDictVariable):
        return False
    items = {key.vt: value for key, value in variable.items.items()}
    if not all(key.is_python_constant() for key in (*items, *variable.original_items)):
        return False
    both = variable.original_items, items
    before, after = ([(key.as_python_constant(), _identity(value)) for key, value in one.items()] for one in both)
    return before == after


def _is_empty_again(variable: Any, held: Any) -> bool:
    """Return whether a list that was empty before the call is so after it."""
    return isinstance(held, list | deque) and not held and isinstance(variable, CommonListMethodsVariable) and not variable.items


def _identity(value: Any) -> int:
    """Return the identity of an item. One that the call did not read is left as it is: to realize it adds an input."""
    return id(value.realize() if value.is_realized() else value)


def _dropped(stored: Any) -> Iterator[Any]:
    """Yield dicts and lists that a call leaves empty, by putting others in the attributes that held them: nobody sees how it
    changed these."""
    for variable, values in stored.items():
        if _is_restored(variable, values):
            held = _attributes(variable)
            yield from (held[name] for name in values if isinstance(held[name], dict | list | set))


def source_name(source: Any) -> str:
    return str(source.name() if callable(source.name) else source.name)
