"""The pass manager: runs passes in order, checks their stages, and reports which one failed."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from passes.base import Observer, Pass, PassContext
from passes.errors import PassError, UserError
from passes.ir.graph import Stage, origin_of, set_stage, stage_of


@dataclass(frozen=True)
class PassManager:
    """A pipeline of passes: `PassManager((Normalize(), Propagate()), (Verifier(),)).run(gm, ctx)`."""

    passes: tuple[Pass, ...]
    observers: tuple[Observer, ...] = ()

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        """Run all passes on `gm`, in place.

        Raises UserError for a pipeline in the wrong order, before anything runs. A pass's own UserError is passed on;
        any other exception of a pass becomes a PassError.
        """
        check_order(self.passes, stage_of(gm))
        rewritten = False
        for i, pass_ in enumerate(self.passes):
            for observer in self.observers:
                observer.before(pass_, gm, ctx)
            try:
                changed = pass_.run(gm, ctx)
            except UserError:
                raise
            except Exception as error:
                raise PassError(_failure(pass_, error, gm, self.passes[:i])) from error
            set_stage(gm, pass_.gives)
            rewritten |= changed
            for observer in self.observers:
                observer.after(pass_, gm, ctx, changed)
        if rewritten:
            gm.recompile()  # once at the end: generating code takes as long as a pass


def check_order(passes: Sequence[Pass], stage: Stage) -> None:
    """Raise UserError for a pipeline in which a pass does not get the stage that it takes."""
    before = "at the start of the pipeline"
    for pass_ in passes:
        if pass_.takes is not stage:
            raise UserError(
                f"pass {pass_.name!r} takes a graph that is {pass_.takes.name}, but {before} it is {stage.name}; "
                f"move {pass_.name!r} after a pass that gives {pass_.takes.name}, or leave it out"
            )
        stage, before = pass_.gives, f"after {pass_.name!r}"


def _failure(pass_: Pass, error: Exception, gm: GraphModule, ran: Sequence[Pass]) -> str:
    lines = [f"pass {pass_.name!r} failed at stage {stage_of(gm).name}: {type(error).__name__}: {error}"]
    node = _node_in_hand(error)
    if node is not None:
        origin = origin_of(node)
        lines += [f"  node: %{node.name}, {node.op} {node.target}"]
        lines += [f"  from: {origin}"] if str(origin) else []
        lines += [f"        {origin.source.strip()}"] if origin.source.strip() else []
    lines += [f"  passes run before it: {', '.join(p.name for p in ran) or 'none'}"]
    return "\n".join(lines)


def _node_in_hand(error: Exception) -> Node | None:
    """Return the variable `node` of the innermost frame that has one, so that no pass has to record its current
    node."""
    held = [frame.f_locals.get("node") for frame, _ in traceback.walk_tb(error.__traceback__)]
    nodes = [node for node in held if isinstance(node, Node)]
    return nodes[-1] if nodes else None
