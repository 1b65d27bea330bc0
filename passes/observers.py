"""Observers of a pipeline: verification, dumps, times, op counts and logs. No pass depends on them."""

from __future__ import annotations

import difflib
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch.fx import GraphModule

from passes._torch import trace_artifact
from passes.base import Observer, Pass, PassContext
from passes.errors import UserError, VerifyError
from passes.ir.text import format_graph, format_target
from passes.verify import verify


@dataclass(frozen=True)
class Verifier(Observer):
    """Checks the graph before the first pass, and after every one that changed it."""

    ran: list[str] = field(default_factory=list)

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        if not self.ran:
            verify(gm, ctx.mesh)

    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        try:
            if changed or pass_.gives is not pass_.takes:
                verify(gm, ctx.mesh)
        except VerifyError as error:
            ran = ", ".join(self.ran) or "none"
            raise VerifyError(f"after pass {pass_.name!r}: {error}\n  passes run before it: {ran}") from error
        self.ran.append(pass_.name)


@dataclass(frozen=True)
class Dumper(Observer):
    """Writes the graph as text: `00_capture.txt`, then `01_normalize.txt`, ... for each pass that changed it.

    The number is the pass's place in the pipeline; if one is missing, that pass changed nothing. With `mode="diff"`,
    files after the first hold the changes since the last one. With `rank`, files go into the folder `rank<n>`. The same
    text goes to PyTorch's structured trace, and with `folder=None` only there. Every graph that is written in full
    starts with `header`.
    """

    folder: Path | None
    mode: Literal["full", "diff"] = "full"
    rank: int | None = None
    header: str = ""
    dumped: list[str] = field(default_factory=list)  # the text after each pass so far

    @property
    def place(self) -> Path | None:
        """Return the folder of this rank's files."""
        return self.folder if self.folder is None or self.rank is None else self.folder / f"rank{self.rank}"

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        if not self.dumped:
            self._dump("capture", format_graph(gm, ctx.mesh))

    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        if changed:
            self._dump(pass_.name, format_graph(gm, ctx.mesh))
        else:
            self.dumped.append(self.dumped[-1])

    def _dump(self, name: str, text: str) -> None:
        file = f"{len(self.dumped):02d}_{name}"
        content = self.header + text
        if self.mode == "diff" and self.dumped:
            content = _diff(self.dumped[-1], text)
        self.dumped.append(text)
        trace_artifact(f"autoshard_{file}", content)
        if (folder := self.place) is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{file}.txt").write_text(content, encoding="utf-8")
            except OSError as error:
                raise UserError(f"the graph cannot be written to {folder}: {error.strerror}; give a folder") from error


def _diff(old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=2, lineterm="")
    return "".join(f"{line}\n" for line in list(lines)[2:])


@dataclass(frozen=True)
class Timer(Observer):
    """Records the seconds that each pass takes, in pipeline order; those of a pass that runs twice are added up."""

    seconds: dict[str, float] = field(default_factory=dict)
    started: list[float] = field(default_factory=list)

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        self.started.append(time.perf_counter())

    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        self.seconds[pass_.name] = self.seconds.get(pass_.name, 0.0) + time.perf_counter() - self.started.pop()


@dataclass(frozen=True)
class Logger(Observer):
    """Logs after each pass its time, and the calls that it added and removed.

    `TORCH_LOGS="+autoshard"` shows the log, as for any module that torch finds by name; so does Python's `logging`.
    """

    name: str = "autoshard.passes"
    counted: list[Counter[str]] = field(default_factory=list)
    started: list[float] = field(default_factory=list)

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        if self._log.isEnabledFor(logging.DEBUG):
            self.counted.append(_count(gm))
            self.started.append(time.perf_counter())

    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        if self.counted:
            old, new, seconds = self.counted.pop(), _count(gm), time.perf_counter() - self.started.pop()
            change = ", ".join(f"{new[op] - old[op]:+d} {op}" for op in sorted(old | new) if new[op] != old[op])
            what = change or ("other arguments or layouts" if changed else "no change")
            self._log.debug("%s: %.3f s: %s", pass_.name, seconds, what)

    @property
    def _log(self) -> logging.Logger:
        return logging.getLogger(self.name)


@dataclass(frozen=True)
class OpDiff(Observer):
    """Counts the calls of each op that every pass adds (+) and removes (-)."""

    changes: dict[str, Mapping[str, int]] = field(default_factory=dict)
    counted: list[Counter[str]] = field(default_factory=list)

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        self.counted.append(_count(gm))

    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        old, new = self.counted.pop(), _count(gm)
        change = {op: new[op] - old[op] for op in sorted(old | new)}
        self.changes[pass_.name] = {op: count for op, count in change.items() if count}


def _count(gm: GraphModule) -> Counter[str]:
    return Counter(format_target(node.target) for node in gm.graph.nodes if node.op == "call_function")
