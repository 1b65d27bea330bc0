"""Read a dumped graph, and run the passes that follow on it again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torch.fx import GraphModule

from autoshard.dumps.dump_header import PLACING, format_header, parse_header
from passes.base import PassContext, Remark
from passes.errors import GraphTextError, UserError, VerifyError
from passes.ir.mesh import Mesh
from passes.ir.text import format_graph, parse_graph
from passes.manager import PassManager
from passes.observers import Dumper, Verifier
from passes.verify import verify


@dataclass(frozen=True)
class Replayed:
    """The passes that were run, and the text of the graph after the last one."""

    ran: tuple[str, ...]
    text: str
    remarks: tuple[Remark, ...]


def replay(
    path: Path, *, after: str | None = None, folder: Path | None = None, recipe: str | None = None
) -> Replayed:
    """Read the graph in `path` and run the passes that come after the pass `after`, by default the one that the file
    is named after.

    Passes are configured as in the dump's header; a text without one is run by the default pipeline. The graph after
    each pass is written to `folder`, named as in the dump. A `recipe` places values, without constraints: needed for a
    dump from before the search, or without a header.

    Raises UserError for an unknown pass, if the passes to run need more than the file holds, or for a `recipe` where none
    of them places values; GraphTextError for text that is not a graph, or not a valid one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"the dump {path} cannot be read: {error.strerror}") from error
    header = parse_header(text)
    after = _named(path) if after is None else after
    start = _place([name for name, _ in header.passes], after) + 1
    gm, mesh = parse_graph(text)
    _check_valid(gm, mesh, path)
    if recipe is not None:
        left = [name for name, _ in header.passes[start:]]
        if not any(name in ("seed", *PLACING) for name in left):
            raise UserError(
                f"recipe={recipe!r}: the graph after {after!r} is placed already, and no pass after it reads a recipe; leave it "
                "out, or replay a dump from before the values were placed, such as 00_capture.txt"
            )
        header = header.placed_by(recipe, mesh)
    unknown = [name for name, one in header.passes[start:] if one is None]
    if unknown:
        raise UserError(
            f"the graph after {after!r} is not enough to run {' and '.join(unknown)}: what the user set, what a search "
            "found and passes of your own are not in the file; give a recipe to place it by, replay a later dump, or plan "
            "the model again"
        )
    passes = tuple(one for _, one in header.passes[start:] if one is not None)
    ctx, dumper = PassContext(mesh, unknown_ops=header.unknown_ops), Dumper(folder, header=format_header(header))
    dumper.dumped.extend([""] * (start + 1))  # number files as in the original dump
    PassManager(passes, (Verifier(), dumper)).run(gm, ctx)
    return Replayed(tuple(one.name for one in passes), format_graph(gm, mesh), tuple(ctx.remarks))


def _check_valid(gm: GraphModule, mesh: Mesh, path: Path) -> None:
    """Raise GraphTextError for a graph that is not valid at its stage: it is the user's, who may have edited the file."""
    try:
        verify(gm, mesh)
    except VerifyError as error:
        raise GraphTextError(f"{path} has no valid graph; correct it: {error}") from error


def _named(path: Path) -> str:
    """Return the name of the pass that a dump file is named after."""
    match = re.fullmatch(r"\d+_(\w+)", path.stem)
    if match is None:
        raise UserError(
            f"{path.name} is not named after a pass, as 06_insert_reshards.txt is; name the pass that wrote it: --after PASS"
        )
    return match[1]


def _place(names: list[str], name: str) -> int:
    """Return the place of a pass in the pipeline; -1 for "capture", which precedes all passes."""
    if name == "capture":
        return -1
    place = next((place for place, one in enumerate(names) if one == name or {one, name} == set(PLACING)), None)
    if place is None:
        raise UserError(f"there is no pass {name!r}; passes are {', '.join(names)}")
    return place
