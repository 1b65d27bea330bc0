"""Report the progress of planning, which may take many seconds."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from passes.ir.units import format_seconds

SHOWN_SECONDS = 0.1  # of a phase that a log names
SLOW = 60.0  # seconds: most searches take less, and who waits longer asks whether the process hangs

_log = logging.getLogger("autoshard.planner")

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


@contextmanager
def told_if_slow(time_limit: float | None) -> Iterator[None]:
    """Warn once if the search that the block makes takes over a minute without a limit, in seconds, on its time."""
    timer = threading.Timer(SLOW, _tell)
    timer.daemon = True
    if time_limit is None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell() -> None:
    _log.warning(
        "the search for a plan takes over %.0f seconds; Options(time_limit=...) bounds it, and a plan that was saved needs none: "
        "plan(...).save(path), then autoshard(..., plan=path)",
        SLOW,
    )
