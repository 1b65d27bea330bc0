"""Choose from options and environment which graphs a run writes, and where."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule

from autoshard.config.options import Dump, Options
from autoshard.dumps.dump_header import Header, format_header
from passes._torch import is_traced, trace_artifact
from passes.base import Pass
from passes.observers import Dumper

_FROM_ENVIRONMENT = {"folder": "AUTOSHARD_DUMP", "mode": "AUTOSHARD_DUMP_MODE", "ranks": "AUTOSHARD_DUMP_RANKS"}


@dataclass(frozen=True)
class GraphDump:
    """Writer of a run's graphs: to files, or on ranks that write none, to PyTorch's structured trace if that is on."""

    dumper: Dumper

    def of(self, passes: Sequence[Pass], options: Options) -> Dumper:
        """Return the observer that writes the graph after each of these passes, so that it can be replayed."""
        return replace(self.dumper, header=format_header(Header.of(passes, options.unknown_ops)))

    def compiled(self, name: str, gm: GraphModule) -> None:
        """Write a graph, as passed to the backend, as code: `compiled_forward.txt`."""
        text = gm.print_readable(print_output=False)
        trace_artifact(f"autoshard_compiled_{name}", text)
        if (folder := self.dumper.place) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"compiled_{name}.txt").write_text(text, encoding="utf-8")


def dump_of(options: Options) -> GraphDump | None:
    """Return what this rank dumps, by `options` or else by the environment. Raises UserError for an unknown mode."""
    chosen = _asked(options)
    rank, is_each = dist.get_rank() if dist.is_initialized() else 0, chosen.ranks == "all"
    if chosen.folder and (is_each or rank == 0):
        return GraphDump(Dumper(Path(chosen.folder), chosen.mode, rank if is_each else None))
    return GraphDump(Dumper(None, chosen.mode)) if is_traced() else None


def _asked(options: Options) -> Dump:
    """Return what is dumped and where; without a folder, nothing is."""
    if isinstance(options.dump, Dump):
        return options.dump
    given: dict[str, Any] = {name: os.environ.get(variable) for name, variable in _FROM_ENVIRONMENT.items()}
    if options.dump is not None:
        given["folder"] = options.dump or None
    return Dump(**{"folder": "", **{name: value for name, value in given.items() if value}})
