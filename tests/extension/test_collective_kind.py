"""A kind of collective of one's own costs one entry: here, parts are shifted around the ranks of an axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autoshard.debug.rank_interpreter import run_ranks
from autoshard.plans.collectives import collectives_of
from passes.base import PassContext
from passes.cost.build_program import program_of_graph
from passes.cost.collective_time import collective_seconds
from passes.errors import VerifyError
from passes.hardware.hardware import hardware_named
from passes.ir.collectives import Kind, StepCall, register, unregister
from passes.ir.collectives.formulas import A, B, N, S, a, b, c, p, s
from passes.ir.graph import layout_of, placeholders, transfer_of
from passes.ir.layout import Shard, assemble, local_part
from passes.ir.mesh import Mesh
from passes.ir.text import format_graph, parse_graph
from passes.localize import Localize
from passes.manager import PassManager
from passes.observers import Verifier
from passes.verify import verify

# --- an op that shifts: in a process group it would call isend and irecv, here it has a form on fake tensors alone

torch.library.define("autoshard_ring::shift", "(Tensor part, int offset, str group) -> Tensor")
torch.library.impl("autoshard_ring::shift", "Meta")(lambda part, offset, group: torch.empty_like(part))


# --- the kind


def shift(value: Tensor, axes: Sequence[str], offset: int = 1) -> Tensor:
    """Give each rank of an axis the part of the rank `offset` places after it, around the ring."""
    return value


def lower_shift(call: StepCall) -> Node:
    offset = call.args[0] if call.args else 1
    return call.wait(call.emit(torch.ops.autoshard_ring.shift.default, call.contiguous(call.value), offset, call.group))


def sent_around(calls: Sequence[Sequence[Any]]) -> list[Tensor]:
    """Return what each rank of a group receives, from the arguments of the call on each."""
    return [calls[(place + offset) % len(calls)][0] for place, (_, offset, _) in enumerate(calls)]


SHIFT = Kind(
    step=shift,
    moves=lambda have, to: isinstance(have, Shard) and have == to,
    lower=lower_shift,
    ops={torch.ops.autoshard_ring.shift.default: sent_around},
    received=lambda before, after, ranks: before,
    pieces=lambda before, after, ranks: before,
    seconds=lambda fabric: s + a + N / b + 2 * N / c if fabric.where == "inside" else S + A + N / B,
    sent=lambda where: (N, 0 * N) if where == "inside" else (N - N / p, N / p),  # of p ranks, one is next to another node
    is_reshard=False,  # another rank's part is another value
    takes_one_axis=True,
    source="a message is a latency and its bytes over the bandwidth of its link",
)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register(SHIFT)
    yield
    unregister(SHIFT)


# --- what it takes part in

TEXT = """\
mesh dp=2,cp=3
stage COLLECTIVE
%x: f32[4, 6] {dp:S(0), cp:S(1)} = input("x")
%relu: f32[4, 6] {dp:S(0), cp:S(1)} = relu(%x)
%shift: f32[4, 6] {dp:S(0), cp:S(1)} = shift(%relu, ["cp"], 2)      # | ring_attention: keys of the next rank
return output("0") %shift
"""
MESH = Mesh("dp=2,cp=3", hardware="h100")


def lowered() -> GraphModule:
    """Return the program of one device, verified, as it is read back from its text."""
    gm, _ = parse_graph(TEXT)
    PassManager((Localize(),), (Verifier(),)).run(gm, PassContext(MESH))
    gm, _ = parse_graph(format_graph(gm, MESH))
    verify(gm, MESH)
    return gm


def test_it_is_written_and_read() -> None:
    gm, mesh = parse_graph(TEXT)
    assert format_graph(gm, mesh) == TEXT
    assert "autoshard_ring.shift(%relu, 2, " in format_graph(lowered(), MESH)


def test_simulated_ranks_pass_their_parts_on() -> None:
    gm = lowered()
    (x,) = placeholders(gm.graph)
    whole = torch.arange(24.0).view(4, 6)
    inputs = [[local_part(whole, layout_of(x), MESH, at)] for at in MESH.coordinates()]
    parts = [part for (part,) in run_ranks(gm, MESH, inputs)]
    assert torch.equal(assemble(parts, (4, 6), layout_of(x), MESH), whole.roll(-2 * 2, dims=1))


def test_it_is_listed_and_takes_time() -> None:
    (listed,) = collectives_of(parse_graph(TEXT)[0], MESH)
    part = 2 * 2 * 4  # bytes: f32[2, 2]
    assert (listed.kind, listed.axes, listed.bytes) == ("shift", ("cp",), part)
    (task,) = [task for task in program_of_graph(lowered(), MESH).tasks if task.kind == "shift"]
    assert task.nbytes == part
    assert task.seconds == collective_seconds("shift", part, MESH.group_shape(("cp",)), hardware_named("h100")) > 0


@pytest.mark.parametrize(
    ("changed", "to", "message"),
    [("{dp:S(0), cp:S(1)} = shift", "{dp:S(0), cp:R} = shift", r"on cp it goes from S\(1\) to R")],
)
def test_what_it_does_not_do_is_refused(changed: str, to: str, message: str) -> None:
    gm, _ = parse_graph(TEXT.replace(changed, to))
    with pytest.raises(VerifyError, match=message):
        verify(gm, MESH)


def test_a_call_over_another_group_is_refused() -> None:
    gm = lowered()
    (node,) = [node for node in gm.graph.nodes if transfer_of(node) is not None]
    node.update_arg(2, MESH.group_name(("dp",)))
    with pytest.raises(VerifyError, match="it is no collective over cp"):
        verify(gm, MESH)


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match="there is a collective 'shift' already"):
        register(SHIFT)
