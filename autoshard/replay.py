"""A dump is read back, and the passes behind it are run again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from autoshard.constraints import recipes_of
from autoshard.pipeline import default_pipeline
from passes.base import Pass, PassContext, Remark
from passes.errors import UserError
from passes.ir.text import format_graph, parse_graph
from passes.manager import PassManager
from passes.observers import Dumper, Verifier
from passes.seed import Seed

CONFIGURED = ("seed", "cast_parameters")  # passes that a text cannot tell how they were set


@dataclass(frozen=True)
class Replayed:
    """The passes that were run, and the text of the graph behind the last one."""

    ran: tuple[str, ...]
    text: str
    remarks: tuple[Remark, ...]


def replay(
    path: Path, *, behind: str | None = None, folder: Path | None = None, recipe: str | None = None
) -> Replayed:
    """Read the graph in `path` and run the default pipeline from behind the pass `behind` on: by default the one that the
    file is named after. `folder` is where to write what each pass makes of it, named as in the dump. With a `recipe`, a
    dump from in front of the seeds does as well: placed by that recipe, without constraints and mixed precision.

    Raises UserError for a pass that there is not, or from in front of which a text is not enough; GraphTextError for text
    that is no graph.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"the dump {path} cannot be read: {error.strerror}") from error
    passes = default_pipeline()
    behind = _named(path) if behind is None else behind
    start = _place(passes, behind) + 1
    configured = [one.name for one in passes[start:] if one.name in CONFIGURED]
    if configured and recipe is None:
        raise UserError(
            f"a graph from behind {behind!r} is not enough to run {' and '.join(configured)}: recipes, constraints and "
            "precision are not in the text; give a recipe to place it by, replay a later dump, or plan the model again"
        )
    gm, mesh = parse_graph(text)
    if recipe is not None:
        passes = default_pipeline(Seed(recipes_of(recipe, mesh)))
    ctx, dumper = PassContext(mesh), Dumper(folder)
    dumper.dumped.extend([""] * (start + 1))  # so that files are numbered as in the dump that it comes from
    PassManager(passes[start:], (Verifier(), dumper)).run(gm, ctx)
    return Replayed(tuple(one.name for one in passes[start:]), format_graph(gm, mesh), tuple(ctx.remarks))


def _named(path: Path) -> str:
    """The pass that a file of a dump is named after."""
    match = re.fullmatch(r"\d+_(\w+)", path.stem)
    if match is None:
        raise UserError(f"{path.name} is not named after a pass, as 05_insert_reshards.txt is; say behind which: --from PASS")
    return match[1]


def _place(passes: tuple[Pass, ...], name: str) -> int:
    """The place of a pass in the pipeline; of what was captured, in front of it; of a search, that of the placement."""
    names = ["propagate" if one.name == "solve" else one.name for one in passes]
    if name == "capture":
        return -1
    if name not in (*names, "solve"):
        raise UserError(f"there is no pass {name!r}; passes are {', '.join(names)}")
    return names.index("propagate" if name == "solve" else name)
