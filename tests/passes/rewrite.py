"""A graph as text before a pass, and after it. Both are verified, and a pass says whether it changed anything."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

import passes.rules  # registers the rules
from passes.base import Pass, PassContext
from passes.ir.graph import set_stage, stage_of, tensor_of
from passes.ir.text import format_graph, parse_graph
from passes.verify import verify

assert passes.rules


def rewrite(pass_: Pass, before: str, *remarks: str) -> str:
    """Return the text of what `pass_` makes of the graph; it must say that it changed it, and make these remarks."""
    text, made = _run(pass_, before, changed=True)
    assert made == list(remarks)
    return text


def assert_declines(pass_: Pass, before: str) -> None:
    """Fail unless `pass_` leaves the graph as it is and says so."""
    after, _ = _run(pass_, before, changed=False)
    assert after == before.lstrip().replace(f"stage {pass_.takes.name}", f"stage {pass_.gives.name}")


def _run(pass_: Pass, before: str, *, changed: bool) -> tuple[str, list[str]]:
    gm, mesh = parse_graph(before.lstrip())
    ctx = PassContext(mesh)
    assert stage_of(gm) is pass_.takes
    verify(gm, mesh)
    assert pass_.run(gm, ctx) is changed
    set_stage(gm, pass_.gives)
    verify(gm, mesh)
    return format_graph(gm, mesh), [remark.text for remark in ctx.remarks]


def assert_same_values(pass_: Pass, before: str) -> None:
    """Fail unless the global program gives the same numbers after `pass_`."""
    gm, mesh = parse_graph(before.lstrip())
    expected = _results(gm)
    pass_.run(gm, PassContext(mesh))
    gm.recompile()
    torch.testing.assert_close(_results(gm), expected)


def _results(gm: GraphModule) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = [tensor_of(node) for node in gm.graph.find_nodes(op="placeholder")]
    given = [torch.rand(v.shape, dtype=torch.float64, generator=generator).mul(3).to(v.dtype) for v in values]
    return list(gm(*given))
