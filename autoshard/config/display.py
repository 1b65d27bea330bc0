"""Show the phases of planning on stderr while it runs: one line per phase, with a clock on a terminal."""

from __future__ import annotations

import resource
import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import ProgressColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from passes.ir.units import format_bytes, format_seconds

KIB = 1024  # ru_maxrss is in KiB on Linux


class Display:
    """A `Progress` that is also a context manager; if stderr is not a terminal, it writes plain lines without a clock.
    """

    def __init__(self, console: Console, title: str = "") -> None:
        columns: tuple[ProgressColumn, ...] = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self.title = title
        self.console, self.bars = console, Bars(*columns, console=console, disable=not console.is_terminal)
        self.began = self.phase_began = time.perf_counter()
        self.phase: str | None = None
        self.bar: TaskID | None = None

    def __call__(self, phase: str) -> None:
        """Show that `phase` has begun and that the one before it is over."""
        self._end()
        self.phase, self.phase_began = phase, time.perf_counter()
        self.bar = self.bars.add_task(phase, total=1)

    def __enter__(self) -> Display:
        if self.title:
            self.console.print(self.title, highlight=False, markup=False)
        self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._end()
        self.bars.stop()
        if kind is None:
            seconds = format_seconds(time.perf_counter() - self.began)
            memory = format_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB)
            self.console.print(f"{seconds} in all, at most {memory} of memory", highlight=False)

    def _end(self) -> None:
        if self.phase is None or self.bar is None:
            return
        self.bars.update(self.bar, completed=1)
        if not self.console.is_terminal:
            self.console.print(f"{self.phase}: {format_seconds(time.perf_counter() - self.phase_began)}", highlight=False)
        self.phase = None
