"""Read the collectives of a program, and the user's lines that need them, off a graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from passes.errors import VerifyError
from passes.ir.collectives import KINDS, SEND, is_collective, step_axes, step_kind
from passes.ir.graph import (
    InputRole,
    Origin,
    Transfer,
    input_of,
    is_recompute,
    layout_of,
    made_again,
    needs_of,
    note_of,
    operands,
    origin_of,
    outputs_of,
    placeholders,
    returned,
    saving_of,
    tensor_of,
    transfer_of,
)
from passes.ir.layout import local_shape
from passes.ir.mesh import Mesh
from passes.ir.units import format_bytes


@dataclass(frozen=True)
class Collective:
    """One collective of the program (`plan.collectives`), and the line of the model that needs it: bytes per rank, seconds."""

    id: str  # the name of its node
    kind: str  # "all_gather", "reduce_scatter", ...: a name in `passes.ir.collectives.KINDS`
    axes: tuple[str, ...]
    bytes: int  # received per rank, by the bandwidth-optimal (ring) algorithm
    backward: bool
    recomputed: bool  # a forward collective that is sent once more in the backward, for a value that is not kept
    origin: Origin  # the line of the user's code that needed it
    reason: str
    what: str = ""  # what it moves: "parameter layers.0.wq.weight", "gradient ...", "output loss", or a value: "%mm_1"
    bucket: str | None = None  # the bucket that it is sent in (in the backward, if in both); None: sent by itself
    seconds: float | None = None  # predicted duration; for one in a bucket, its part by bytes. None: unknown hardware
    exposed: float | None = None  # of those, seconds during which the device computes nothing
    behind: tuple[str, ...] = ()  # of sends: the kernels that hide them, by name, those that hide most first
    chunks: int = 1  # messages that it is sent in, one after another; 0: sent by an operator that computes as well

    @property
    def way(self) -> str:
        """Return how it is sent, and by which pass, if not in one message of its own."""
        if self.kind == SEND.name:
            size = format_bytes(self.bytes // self.chunks)
            return "in 1 message" if self.chunks == 1 else f"in {self.chunks} messages of {size} on average"
        if self.chunks != 1:
            way = f"in {self.chunks} chunks" if self.chunks else "in one operator with its product"
            return f"{way} (decompose_matmuls)"
        return "in a bucket (bucket_collectives)" if self.bucket is not None else ""


def collectives_of(gm: GraphModule, mesh: Mesh) -> tuple[Collective, ...]:
    """Return the collectives of a COLLECTIVE graph, in program order."""
    in_backward, again = _depends_on_tangents(gm), made_again(gm.graph)
    forward_uses, backward_uses = _uses(gm, in_backward, again)
    return tuple(
        _collective(
            node,
            mesh,
            backward=node in in_backward or (node in again and node in backward_uses and node not in forward_uses),
            recomputed=node in again and node in backward_uses and node in forward_uses and node not in in_backward,
        )
        for node in gm.graph.nodes
        if is_collective(node)
    )


def sends_of(gm: GraphModule, mesh: Mesh) -> tuple[Collective, ...]:
    """Return the messages that local forms send, read off a LOCAL graph: one entry for all of one call.

    A message that repeats an earlier one is not sent: the partitioner keeps what was received.
    """
    in_backward, by_call = _depends_on_tangents(gm), dict[str, list[tuple[Node, Transfer]]]()
    repeated = _repeated(gm)
    for node in gm.graph.nodes:
        transfer = transfer_of(node)
        if transfer is not None and transfer.what and node not in repeated:
            by_call.setdefault(transfer.steps[0], []).append((node, transfer))
    return tuple(
        _sent(call, sent, mesh, backward=any(node in in_backward or is_recompute(node) for node, _ in sent))
        for call, sent in by_call.items()
    )


def _repeated(gm: GraphModule) -> set[Node]:
    """Return the calls that are equal to earlier ones, in their operands and theirs."""
    first, known, found = dict[Node, Node](), dict[str, Node](), set[Node]()
    for node in gm.graph.nodes:
        if node.op == "call_function":
            args = map_arg((node.args, node.kwargs), lambda value: first.get(value, value))
            first[node] = known.setdefault(f"{node.target} {args}", node)
            if first[node] is not node:
                found.add(node)
    return found


def _sent(call: str, sent: Sequence[tuple[Node, Transfer]], mesh: Mesh, *, backward: bool) -> Collective:
    first, transfer = sent[0]
    return Collective(
        id=call,
        kind=transfer.kind,
        axes=tuple(dict.fromkeys(axis for _, one in sent for axis in one.axes)),
        bytes=sum(_received(node, one, mesh) for node, one in sent),
        backward=backward,
        recomputed=False,
        origin=origin_of(first),
        reason=_reason(first),
        what=", and ".join(dict.fromkeys(one.what for _, one in sent)),
        chunks=len(sent),
    )


def _received(node: Node, transfer: Transfer, mesh: Mesh) -> int:
    received, ranks = KINDS[transfer.kind].received, math.prod(map(mesh.axis_size, transfer.axes))
    assert received is not None, node
    return int(received(_nbytes(operands(node)[0]), _nbytes(node), ranks))


def _nbytes(node: Node) -> int:
    return tensor_of(node).numel() * tensor_of(node).element_size()


def _uses(gm: GraphModule, in_backward: set[Node], again: set[Node]) -> tuple[set[Node], set[Node]]:
    """Return the recomputed values that the forward uses, and those that the backward uses."""
    forward_uses, backward_uses = set[Node](), set[Node]()
    for node in reversed(gm.graph.nodes):
        for user in node.users:
            if user.op != "output" and user in in_backward:
                backward_uses.add(node)
            elif user not in again:
                forward_uses.add(node)
            else:
                forward_uses.update({node} if user in forward_uses else ())
                backward_uses.update({node} if user in backward_uses else ())
    return forward_uses, backward_uses


def with_remade(collectives: Sequence[Collective], gm: GraphModule) -> tuple[Collective, ...]:
    """Mark those of `collectives` that the LOCAL graph `gm` recomputes."""
    remade = [transfer_of(node) for node in gm.graph.nodes if saving_of(node) == "remade"]
    steps = {step for transfer in remade if transfer is not None for step in transfer.steps}
    return tuple(replace(one, recomputed=one.recomputed or (one.id in steps and not one.backward)) for one in collectives)


def _collective(node: Node, mesh: Mesh, *, backward: bool, recomputed: bool) -> Collective:
    tensor = tensor_of(node)
    before, after = (
        math.prod(local_shape(layout, tensor.shape, mesh)) * tensor.element_size()
        for layout in (needs_of(node)[0], layout_of(node))
    )
    ranks = math.prod(mesh.axis_size(axis) for axis in step_axes(node))
    kind = step_kind(node)
    assert kind.received is not None, node
    return Collective(
        id=node.name,
        kind=kind.name,
        axes=step_axes(node),
        bytes=kind.received(before, after, ranks),
        backward=backward,
        recomputed=recomputed,
        origin=_origin(node),
        reason=_reason(node),
        what=moved_by(node),
    )


def _reason(node: Node) -> str:
    """Return the pass that made a collective, and its reason: `"pass: reason"`. Raises VerifyError if no pass gave
    one.
    """
    made_by, _, reason = note_of(node).partition(": ")
    if not made_by.isidentifier() or not reason:
        raise VerifyError(f"%{node.name} sends between ranks, but no pass says why: its note is {note_of(node)!r}")
    return note_of(node)


def _origin(node: Node) -> Origin:
    """Return the origin of a collective; a sum of gradients, which is in no module, gets the module around its terms.
    """
    origin = origin_of(node)
    seen: dict[Node, None] = {}
    waiting = [node]
    while waiting and not origin.fqn:
        at = waiting.pop()
        fqns = [origin_of(value).fqn for value in operands(at) if value.op == "call_function"]
        if any(fqns):
            return replace(origin, fqn=_around([fqn for fqn in fqns if fqn]))
        waiting += [value for value in operands(at) if value not in seen and _is_sum(value)]
        seen |= dict.fromkeys(waiting)
    return origin


def _is_sum(node: Node) -> bool:
    """Return whether autograd or a pass adds terms here, or sends what is added."""
    return is_collective(node) or str(node.target) == "aten.add.Tensor"


def _around(fqns: Sequence[str]) -> str:
    """Return the innermost module that contains all of these modules."""
    split = [fqn.split(".") for fqn in fqns]
    same = [parts[0] for parts in zip(*split, strict=False) if len(set(parts)) == 1]
    return ".".join(same)


def moved_by(node: Node) -> str:
    """Return what a collective moves, by its name in the model if it has one; or what a collective of a value would move."""
    value = node
    while value.op == "call_function" and len(operands(value)) == 1:
        value = operands(value)[0]
    if value.op == "placeholder":
        return f"{input_of(value).role.value} {input_of(value).name}"
    user = node
    while len(user.users) == 1 and len(operands(user)) == 1 and (only := next(iter(user.users))).op != "output":
        user = only
    for returns, output in zip(returned(node.graph), outputs_of(node.graph), strict=True):
        if returns is user:
            return f"{output.role.value} {output.name}"
    return f"%{operands(node)[0].name}"


def _depends_on_tangents(gm: GraphModule) -> set[Node]:
    found = set(placeholders(gm.graph, InputRole.TANGENT))
    for node in gm.graph.nodes:
        if any(value in found for value in node.all_input_nodes):
            found.add(node)
    return found
