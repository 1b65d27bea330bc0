"""Where a run writes its graphs, and which: from options and the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule

from autoshard.config.options import Options
from autoshard.debug.dump_header import Header, format_header
from passes._torch import is_traced, trace_artifact
from passes.base import Pass
from passes.observers import Dumper

_FROM_ENVIRONMENT = {"dump": "AUTOSHARD_DUMP", "dump_mode": "AUTOSHARD_DUMP_MODE", "dump_ranks": "AUTOSHARD_DUMP_RANKS"}


@dataclass(frozen=True)
class Dump:
    """What is written where; by a rank that writes nothing, only to PyTorch's structured trace, where that is on."""

    dumper: Dumper

    def of(self, passes: Sequence[Pass], options: Options) -> Dumper:
        """Writes what each of these passes makes of a graph, so that it can be replayed."""
        return replace(self.dumper, header=format_header(Header.of(passes, options.unknown_ops)))

    def compiled(self, name: str, gm: GraphModule) -> None:
        """Write a graph as it is given to the backend, as code: `compiled_forward.txt`."""
        text = gm.print_readable(print_output=False)
        trace_artifact(f"autoshard_compiled_{name}", text)
        if (folder := self.dumper.place) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"compiled_{name}.txt").write_text(text, encoding="utf-8")


def dump_of(options: Options) -> Dump | None:
    """What `options`, or else the environment, ask this rank to dump. Raises UserError for a mode that there is not."""
    asked: dict[str, Any] = {name: os.environ.get(variable) for name, variable in _FROM_ENVIRONMENT.items()}
    untouched = {name for name in asked if getattr(options, name) == getattr(Options(), name)}
    options = replace(options, **{name: value for name, value in asked.items() if value and name in untouched})
    rank, is_each = dist.get_rank() if dist.is_initialized() else 0, options.dump_ranks == "all"
    if options.dump and (is_each or rank == 0):
        return Dump(Dumper(Path(options.dump), options.dump_mode, rank if is_each else None))
    return Dump(Dumper(None, options.dump_mode)) if is_traced() else None
