"""Group the nodes that become one kernel: regions of pointwise ops and reductions, as Inductor fuses them.

Regions partition the kernels of a graph; a view is no kernel and belongs to none. A product, an attention or a
collective is a region by itself. Every region has a rank and reads only regions of lower rank, so that the regions can
always run one after another.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node

from passes._torch import OpOverload
from passes.cost.kernel_time import LOOKUPS, is_view
from passes.ir.graph import is_random, operands, results_of, tensor_of
from passes.ir.reached_values import all_followed

MAX_NODES = 64  # of a region: torch._inductor.config.max_fusion_size


@cache
def is_fusible(op: Any) -> bool:
    """Return whether Inductor generates the op's kernel itself, so that it can fuse it with its neighbours."""
    if not isinstance(op, OpOverload) or op._schema.is_mutable:
        return False
    return torch.Tag.pointwise in op.tags or _packet(op) in _POINTWISE or is_reduction(op)


def is_generated(node: Node) -> bool:
    """Return whether Inductor generates the kernel of a call: of a fusible op, or a scatter of one number into a constant,
    whose values are not complex.
    """
    if not is_fusible(node.target) and not _is_one_hot(node):
        return False
    return not any(value.is_complex() for value in (*results_of(node), *map(tensor_of, operands(node))))


def joins_products(node: Node) -> bool:
    """Return whether a call concatenates products, or views of them: Inductor does not fuse it with what reads it."""
    return node.target is torch.ops.aten.cat.default and all(source_of(one).target in _PRODUCTS for one in operands(node))


def is_written_by_products(node: Node) -> bool:
    """Return whether a call concatenates products, not seen through views: each writes its part of the result itself, so that
    Inductor generates no kernel (`ConcatKernel.can_realize_into_without_copy`)."""
    parts = operands(node)
    return joins_products(node) and len(set(parts)) == len(parts) and not any(map(is_alias, parts))


def _is_one_hot(node: Node) -> bool:
    """Return whether a call puts a number in one place per row of a constant, which Inductor writes as a comparison."""
    if node.target is not torch.ops.aten.scatter.value:
        return False
    base, dim, index, _ = node.args
    assert isinstance(base, Node) and isinstance(dim, int) and isinstance(index, Node)
    shape = tensor_of(index).shape
    return source_of(base).target is torch.ops.aten.full.default and len(shape) > 0 and shape[dim] == 1


@cache
def is_reduction(op: Any) -> bool:
    """Return whether the op reduces, or scans, dims of its operand in one kernel."""
    return isinstance(op, OpOverload) and torch.Tag.pointwise not in op.tags and _packet(op) in _REDUCTIONS


def _packet(op: OpOverload) -> str:
    """Return `"sum"` for `aten.sum.dim_IntList`."""
    return op._schema.name.rpartition("::")[2]


def regions(graph: Graph, forward: Collection[Node] | None = None) -> tuple[tuple[Node, ...], ...]:
    """Return the kernels of a graph with values, in an order in which they can run, close to that of the graph.

    Nodes of the `forward` are in no kernel with others, if they are given; else what the partitioner noted of nodes counts.
    """
    return _Fusion(graph, forward).regions()


def source_of(node: Node) -> Node:
    """Return the kernel or input that computes the value of `node`: through views and items of a tuple."""
    while is_alias(node):
        (node,) = node.all_input_nodes[:1]
    return node


def is_alias(node: Node) -> bool:
    """Return whether the node allocates no memory: a view, or an item of a tuple. A view of a number, as the conjugate of `1j`
    in a backward, is a kernel."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    return node.target is operator.getitem or (isinstance(node.target, OpOverload) and is_view(node.target))


def region_bytes(region: Sequence[Node]) -> int:
    """Return the bytes that cross the region's border: what it reads from outside, and its results that are read outside."""
    inside = set(region)
    read: dict[Node, dict[Node, int]] = {}  # by source, by the alias through which it is read
    for node in region:
        for operand in operands(node):
            if source_of(operand) not in inside:
                read.setdefault(source_of(operand), {})[operand] = bytes_read(node, operand)
    total = sum(min(node_nbytes(source), sum(parts.values())) for source, parts in read.items())
    return total + sum(node_nbytes(node) for node in region if _is_read_outside(node, inside))


def bytes_read(user: Node, operand: Node) -> int:
    """Return the bytes that a node reads of an operand.

    Through a view that repeats elements (expand) or selects some (slice), each stored element counts at most once.
    """
    if user.target in LOOKUPS and user.args[0] is operand:
        return min(node_nbytes(operand), node_nbytes(user))
    least = node_nbytes(operand)
    while is_alias(operand):
        (operand,) = operand.all_input_nodes[:1]
        least = min(least, node_nbytes(operand))
    return least


def node_nbytes(node: Node) -> int:
    """Return the bytes of a node's results on a device."""
    return sum(map(tensor_nbytes, results_of(node)))


def tensor_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.dtype.itemsize


def _is_read_outside(node: Node, inside: set[Node]) -> bool:
    return any(reader not in inside for reader in _readers(node))


@dataclass(eq=False)
class _Region:
    """Hold a kernel while nodes join it."""

    first: int  # index of its first node
    rank: int
    is_open: bool  # whether nodes may join
    phase: Any
    elements: int  # of its largest operand or result: the loop that it is
    nodes: list[Node] = field(default_factory=list)
    is_read: bool = False  # by a node outside
    reduces_rows: bool = False
    late: list[Node] = field(default_factory=list)  # results that are complete only when the kernel has ended


class _Fusion:
    """Walk over the graph once: each node joins the region of an operand, or opens its own."""

    def __init__(self, graph: Graph, forward: Collection[Node] | None) -> None:
        self._forward = forward
        self._of: dict[Node, _Region] = {}
        self._all: list[_Region] = []
        self._inputs: dict[Node, list[Node]] = {}  # per node, whose values it reads
        for index, node in enumerate(graph.nodes):
            if node.op == "call_function" and not is_alias(node):
                self._add(index, node)

    def regions(self) -> tuple[tuple[Node, ...], ...]:
        """Return the nodes of each region, in an order in which they can run."""
        alive = [region for region in self._all if region.nodes]
        return tuple(tuple(sorted(region.nodes)) for region in self._ordered(alive))

    def _ordered(self, alive: list[_Region]) -> Iterable[_Region]:
        """Yield each region after those that it reads; of those that can run, the one that begins first."""
        readers: dict[int, list[_Region]] = {region.first: [] for region in alive}
        waiting: dict[int, int] = {}
        for region in alive:
            sources = self._sources(region)
            waiting[region.first] = len(sources)
            for source in sources:
                readers[source.first].append(region)
        ready = [(region.first, region) for region in alive if not waiting[region.first]]
        heapq.heapify(ready)
        while ready:
            _, region = heapq.heappop(ready)
            yield region
            for reader in readers[region.first]:
                waiting[reader.first] -= 1
                if not waiting[reader.first]:
                    heapq.heappush(ready, (reader.first, reader))

    def _sources(self, region: _Region) -> list[_Region]:
        found = {source.first: source for node in region.nodes for source in self._read_by(node)}
        return [source for first, source in found.items() if first != region.first]

    def _read_by(self, node: Node) -> list[_Region]:
        """Return the regions of the node's operands, once each, in order of operands."""
        found: dict[_Region, None] = {}
        for source in self._inputs[node]:
            if (region := self._of.get(source)) is not None:
                found[region] = None
        return list(found)

    def _add(self, index: int, node: Node) -> None:
        self._inputs[node] = [source_of(operand) for operand in node.all_input_nodes]
        read = self._read_by(node)
        elements = _elements(node)
        is_open = is_generated(node) and not _is_shared_place(node) and not joins_products(node)
        candidates = sorted(read, key=lambda region: (-region.rank, -region.first)) if is_open else []
        joined = next((region for region in candidates if self._join(node, region, read, elements)), None)
        if joined is None:
            joined = _Region(
                first=index,
                rank=1 + max((region.rank for region in read), default=0),
                is_open=is_open,
                phase=self._phase(node),
                elements=elements,
            )
            self._all.append(joined)
        self._put(node, joined, elements)
        for region in read:
            if region is not joined and not self._merge(region, joined, read):
                region.is_read = True

    def _phase(self, node: Node) -> Any:
        if self._forward is None:
            return node.meta.get("partitioner_tag")
        return "is_forward" if node in self._forward else "is_backward"

    def _join(self, node: Node, region: _Region, read: list[_Region], elements: int) -> bool:
        """Prepare `region` for `node`; return whether the node can join it."""
        below = max((other.rank for other in read if other is not region), default=-1)
        if below >= region.rank and region.is_read:
            return False  # another operand may depend on the region
        if not region.is_open or len(region.nodes) == MAX_NODES or not self._fits(node, region, elements):
            return False
        region.rank = max(region.rank, below + 1)
        return True

    def _fits(self, node: Node, region: _Region, elements: int) -> bool:
        if _are_apart(self._phase(node), region.phase) or not _nests(elements, region.elements):
            return False
        if region.late and any(source_of(operand) in region.late for operand in operands(node)):
            return False
        if not is_reduction(node.target):
            return True
        # One loop sums along rows, or down columns: the sums of rows can be used in it, those of columns cannot.
        return not region.late if _reduces_rows(node) else not region.reduces_rows

    def _put(self, node: Node, region: _Region, elements: int) -> None:
        region.nodes.append(node)
        region.phase = region.phase or self._phase(node)
        region.elements = max(region.elements, elements)
        self._of[node] = region
        if is_reduction(node.target):
            if _reduces_rows(node):
                region.reduces_rows = True
            else:
                region.late.append(node)

    def _merge(self, region: _Region, into: _Region, read: list[_Region]) -> bool:
        """Merge `region` into `into`, whose last node reads it, if no other does; return whether they merged."""
        if region.is_read or region.late or not (region.is_open and into.is_open):
            return False
        if _are_apart(region.phase, into.phase):
            return False
        if len(region.nodes) + len(into.nodes) > MAX_NODES or not _nests(region.elements, into.elements):
            return False
        if region.reduces_rows and into.late:
            return False
        if region.rank > into.rank and into.is_read:
            return False
        into.rank = max(into.rank, region.rank)
        into.first = min(into.first, region.first)
        into.phase = into.phase or region.phase
        into.elements = max(into.elements, region.elements)
        into.reduces_rows |= region.reduces_rows
        into.nodes = region.nodes + into.nodes
        for node in region.nodes:
            self._of[node] = into
        region.nodes = []
        return True


def _is_shared_place(node: Node) -> bool:
    """Return whether a node computes indices, or what follows from them alone, for several generated kernels.

    In a kernel with one of them they would make kernels of the others, which may belong to distant layers.
    """
    return len(list(_readers(node))) > 1 and is_inlined_place(node)


def is_inlined_place(node: Node) -> bool:
    """Return whether a node computes indices, or what follows from them, that all kernels which read them compute again: they
    are never in memory.
    """
    if not is_generated(node) or is_reduction(node.target) or is_random(node):
        return False
    return all(reader.op != "output" and is_generated(reader) for reader in _readers(node)) and _is_place(node)


def _is_place(node: Node) -> bool:
    """Return whether a value is one number, or computed from such: coordinates of ranks, indices, masks of padding."""

    def computed_from(value: Node) -> Sequence[Node] | None:
        source = source_of(value)
        if all(tensor.numel() == 1 for tensor in results_of(value)):
            return ()
        return operands(source) if source.op == "call_function" and is_generated(source) else None

    return all_followed(node, computed_from)


def _readers(node: Node) -> Iterator[Node]:
    """Yield the users of a value that are no views, through views."""
    for user in node.users:
        if is_alias(user):
            yield from _readers(user)
        else:
            yield user


def _are_apart(one: Any, other: Any) -> bool:
    """Return whether one belongs to the forward and the other to the backward; nodes that Inductor adds do not say."""
    return None not in (one, other) and one != other


def _elements(node: Node) -> int:
    """Return the elements of a node's loop: of its results, or of the operand that it reduces."""
    tensors = list(results_of(node))
    if is_reduction(node.target):
        tensors += [tensor_of(operand) for operand in operands(node)]
    return max((tensor.numel() for tensor in tensors), default=0)


def _nests(one: int, other: int) -> bool:
    """Return whether a loop over the elements of one can be part of a loop over those of the other."""
    small, large = (one, other) if one < other else (other, one)
    return small > 0 and large % small == 0


def _reduces_rows(node: Node) -> bool:
    """Return whether only the last dims are reduced: a row then stays in one block of threads."""
    value = operands(node)[0]
    ndim = tensor_of(value).ndim
    names = _argument_names(node.target)
    if "normalized_shape" in names:
        return True
    if "dim" not in names:
        return False
    place = names.index("dim")
    given: Any = node.args[place] if place < len(node.args) else node.kwargs.get("dim")
    if given is None:
        return False
    dims = sorted(dim % max(1, ndim) for dim in ([given] if isinstance(given, int) else given))
    return 0 < len(dims) < ndim and dims == list(range(ndim - len(dims), ndim))


def _argument_names(op: Any) -> list[str]:
    assert isinstance(op, OpOverload)
    return [argument.name for argument in op._schema.arguments]


_PRODUCTS = frozenset(
    {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default}
)
_POINTWISE = frozenset(  # functional ops that torch does not tag: copies, fills, look-ups, and moves of elements
    {
        "_prelu_kernel", "_to_copy", "__and__", "__or__", "arange", "cat", "clone", "constant_pad_nd", "contiguous",
        "convert_element_type", "copy", "device_put", "embedding", "empty", "empty_like", "eye", "fill", "flip",
        "floor_divide", "full", "full_like", "gather", "hardswish", "index", "index_select", "iota", "lift_fresh_copy",
        "log_sigmoid_forward", "masked_fill", "new_empty", "new_full", "new_ones", "new_zeros", "one_hot", "ones",
        "ones_like", "rand", "rand_like", "randn", "randn_like", "repeat", "roll", "scalar_tensor", "select_scatter",
        "slice_scatter", "stack", "tril", "triu", "where", "zeros", "zeros_like", "inductor_seed",
        "inductor_lookup_seed", "inductor_random",
    }
)
_REDUCTIONS = frozenset(
    {
        "_fused_rms_norm", "_log_softmax", "_log_softmax_backward_data", "_safe_softmax", "_softmax",
        "_softmax_backward_data", "all", "amax", "amin", "any", "argmax", "argmin", "linalg_vector_norm", "logsumexp",
        "max", "mean", "min", "native_layer_norm", "norm", "prod", "std", "std_mean", "sum", "var", "var_mean",
    }
)
