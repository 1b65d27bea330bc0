"""Report the progress of planning, which may take many seconds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str], None]
"""Called with the name of each phase as it begins: "capture", "fold", "fsdp+megatron", "solve"."""


def silent(phase: str) -> None:
    """Report nothing."""


def say(text: str, *, enabled: bool) -> None:
    """Write one line about what follows; only on a terminal, as `shown` does."""
    if enabled and sys.stderr.isatty():
        display = importlib.import_module("autoshard.config.display")
        display.Console(stderr=True).print(text, highlight=False, markup=False)


@contextmanager
def shown(title: str, *, enabled: bool) -> Iterator[Progress]:
    """Show `title`, and below it each phase with a clock, while the block runs.

    Only a terminal shows them: a log, a pipe and a notebook stay quiet, and do not import `rich`.
    """
    if not enabled or not sys.stderr.isatty():
        yield silent
        return
    display = importlib.import_module("autoshard.config.display")
    with display.Display(display.Console(stderr=True), title) as progress:
        yield progress
