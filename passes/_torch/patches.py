"""Every place where a part of torch is replaced, in one list, and how that is kept to where it is wanted.

For a block of code, in the thread that runs it (`replaced`); other threads keep torch's own:

| what | while | why | where |
|---|---|---|---|
| `distributed_c10d._process_group_name` | a group is made | ranks name a group by its members, not by a count | groups.py |
| `GraphModule.recompile` | a graph is partitioned | code that nobody calls is not written | graphs.py |
| `partitioners.has_recomputable_rng_ops` | a graph is partitioned | attention without dropout draws nothing | partition.py |
| `ConstantFolder.node_to_last_non_output_use` | constants are folded | torch's walk takes longest | inductor/compilation.py |
| `PatternMatcherPass.apply` | patterns are looked for | impossible ones are left out | inductor/inductor_patterns.py |
| `warnings.showwarning` | a call is traced | dynamo tells of side effects in a warning only | side_effects.py |

For the rest of the process, from when it is needed, and once (`once`):

| what | from when | where it applies | where |
|---|---|---|---|
| `_c10d_functional.all_gather_into_tensor` on CPU | groups on gloo are opened | torch 2.13 and newer | groups.py |
| `DTensor`'s three hooks for checkpoints | a sharded module is made | its DTensors of several boxes | checkpoint_hooks.py |

Settings of Inductor are set for each compilation (inductor/inductor_settings.py), never for the process.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Replacement:
    """What was there, and by thread what stands in its place, the innermost last."""

    original: Any
    by_thread: dict[int, list[Callable[..., Any]]] = field(default_factory=dict)

    def chosen(self) -> Callable[..., Any]:
        stack = self.by_thread.get(threading.get_ident())
        function: Callable[..., Any] = stack[-1] if stack else self.original
        return function


_LOCK = threading.Lock()
_REPLACED: dict[tuple[int, str], _Replacement] = {}  # by owner and name
_DONE: set[str] = set()  # what `once` did


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let `owner.name`, a function, be another one for this thread until the block ends."""
    key, thread = (id(owner), name), threading.get_ident()
    with _LOCK:
        if key not in _REPLACED:
            _REPLACED[key] = _Replacement(vars(owner)[name])
            setattr(owner, name, _dispatcher(_REPLACED[key]))
        replacement = _REPLACED[key]
        replacement.by_thread.setdefault(thread, []).append(function)
    try:
        yield
    finally:
        with _LOCK:
            replacement.by_thread[thread].pop()
            if not replacement.by_thread[thread]:
                del replacement.by_thread[thread]
            if not replacement.by_thread:
                setattr(owner, name, replacement.original)
                del _REPLACED[key]


def _dispatcher(replacement: _Replacement) -> Callable[..., Any]:
    @functools.wraps(replacement.original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return replacement.chosen()(*args, **kwargs)

    return dispatch


def once(name: str, patch: Callable[[], None]) -> None:
    """Run `patch` where none of that name ran in this process."""
    with _LOCK:
        if name not in _DONE:
            patch()
            _DONE.add(name)
