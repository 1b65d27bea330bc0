"""Load `file.py:function` from a command line: a function of the user's that returns a model and its arguments.

    def llama3_8b(batch: int = 64, seq: int = 8192):
        tokens = torch.empty(batch, seq, dtype=torch.long)
        return Llama(LLAMA3_8B), (tokens, tokens)

It is called on meta, so a model of any size takes no memory. It returns `(model, args)` or `(model, args, kwargs)`.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from passes.errors import UserError


@dataclass(frozen=True)
class Target:
    """A model and one call of it, with the global batch."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def load_target(text: str, given: Mapping[str, int], *, device: str = "meta") -> Target:
    """Return what the function of `"file.py:function"` returns on a device; `given` are keyword arguments for it.

    Raises UserError that says what is wrong with the file, the function or its result.
    """
    path, colon, name = text.rpartition(":")
    if not colon or not path or not name:
        raise UserError(f"cannot read the target {text!r}; write it as 'file.py:function'")
    function = _function(_module(Path(path)), name, path)
    _check_arguments(function, text, given)
    with torch.device(device):
        made = _guarded(lambda: function(**given), f"{text} raised")
    return _target(made, text)


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r}; the target is 'file.py:function', seen from {Path.cwd()}")
    spec = importlib.util.spec_from_file_location(f"autoshard_target_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{str(path)!r} is no Python file; the target is 'file.py:function'")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look up their module here
    sys.path[:0] = [str(path.parent.resolve()), str(Path.cwd())]
    _guarded(lambda: spec.loader.exec_module(module) if spec.loader else None, f"{path} cannot be imported:")
    return module


def _guarded(call: Callable[[], Any], what: str) -> Any:
    """Return `call()`; raise UserError, with the user's line, for anything that it raises, an exit included."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<frozen")]
        place = f" ({Path(own[-1].filename).name}:{own[-1].lineno}: {own[-1].line})" if own else ""
        raise UserError(f"{what} {type(error).__name__}: {error}{place}") from error


def _function(module: ModuleType, name: str, path: str) -> Callable[..., Any]:
    found = vars(module)
    if name in found and callable(found[name]):
        function: Callable[..., Any] = found[name]
        return function
    if name in found:
        raise UserError(f"{path}:{name} is {type(found[name]).__name__}, not a function that gives (model, args)")
    own = [n for n, v in found.items() if inspect.isfunction(v) and v.__module__ == module.__name__ and n[0] != "_"]
    close = difflib.get_close_matches(name, own, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UserError(f"{path} has no {name!r}; its functions are {', '.join(own) or 'none'}.{hint}")


def _check_arguments(function: Callable[..., Any], text: str, given: Mapping[str, int]) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(**given)
    except TypeError as error:
        raise UserError(
            f"{text} takes {signature}, which does not go with {_flags(given)}: {error}; --batch and --seq give the "
            "arguments of these names"
        ) from error


def _flags(given: Mapping[str, int]) -> str:
    return " ".join(f"--{name} {value}" for name, value in given.items()) or "no arguments"


def _target(made: object, text: str) -> Target:
    match made:
        case (nn.Module() as model, tuple() as args):
            return Target(model, args, {})
        case (nn.Module() as model, tuple() as args, Mapping() as kwargs):
            return Target(model, args, kwargs)
    shown = f"({', '.join(type(one).__name__ for one in made)})" if isinstance(made, tuple) else type(made).__name__
    raise UserError(
        f"{text} gives {shown}; it has to give (model, args) or (model, args, kwargs): an nn.Module, a tuple and a dict"
    )
