"""Report the progress of planning, which may take many seconds."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from passes.ir.units import format_seconds

SHOWN_SECONDS = 0.1  # of a phase that a log names

Progress = Callable[[str], None]
"""Called with the name of each phase as it begins: "capture", "fold", "fsdp+megatron", "solve"."""


def silent(phase: str) -> None:
    """Report nothing."""


def say(text: str, *, enabled: bool, logged: bool = False) -> None:
    """Write one line about what follows: on a terminal, or where lines are `logged`, as `shown` does."""
    if not enabled:
        return
    if sys.stderr.isatty():
        display = importlib.import_module("autoshard.config.display")
        display.Console(stderr=True).print(text, highlight=False, markup=False)
    elif logged:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def shown(title: str, *, enabled: bool, logged: str = "") -> Iterator[Progress]:
    """Show `title`, and below it each phase with a clock, while the block runs.

    Only a terminal shows them: a pipe and a notebook stay quiet, and do not import `rich`. With `logged`, a name for what is
    made, they get the title when the block begins, and a line with the seconds of its phases when it ends: the reader of a
    job's log wants to know what the minutes go to.
    """
    if not enabled or not (sys.stderr.isatty() or logged):
        yield silent
        return
    if not sys.stderr.isatty():
        with _logged(title, logged) as progress:
            yield progress
        return
    display = importlib.import_module("autoshard.config.display")
    with display.Display(display.Console(stderr=True), title) as progress:
        yield progress


@contextmanager
def _logged(title: str, name: str) -> Iterator[Progress]:
    print(title, file=sys.stderr, flush=True)
    began: list[tuple[str, float]] = []
    yield lambda phase: began.append((phase, time.perf_counter()))
    ended = time.perf_counter()
    ends = [*(at for _, at in began[1:]), ended]
    seconds = [(phase, end - at) for (phase, at), end in zip(began, ends, strict=True)]
    phases = ", ".join(f"{phase} {format_seconds(one)}" for phase, one in seconds if one >= SHOWN_SECONDS)
    in_all = format_seconds(sum(one for _, one in seconds))
    print(f"{name} took {in_all}{f': {phases}' if phases else ''}", file=sys.stderr, flush=True)
