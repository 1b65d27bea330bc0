"""Cut a graph into kernels: which calls run as one, and the buffers that each kernel reads and writes.

With fusion, three rules of Inductor decide: `fused_regions` joins calls; a value that only pointwise kernels read is
computed again in each of them and is never in memory; and neighbours that loop over the same elements and share their
largest operand become one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from passes.cost.fused_regions import (
    bytes_read,
    is_generated,
    is_reduction,
    is_written_by_products,
    joins_products,
    node_nbytes,
    regions,
)
from passes.cost.graph_buffers import Values, viewed_by
from passes.ir.graph import is_random, operands, results_of

# Kernels that may each read what a recomputed value is made of: torch._inductor.config.realize_reads_threshold.
MAX_READS = 4


@dataclass(frozen=True)
class Kernel:
    """Calls that run as one kernel, the bytes that they read of each buffer, and the buffers that they write."""

    nodes: tuple[Node, ...]
    reads: Mapping[str, int]
    outputs: tuple[str, ...]
    nbytes: int  # read and written

    @property
    def is_generated(self) -> bool:
        """Return whether Inductor writes its code; others are an operator's own kernel, or a collective."""
        return len(self.nodes) > 1 or is_generated(self.nodes[-1])

    @property
    def is_random(self) -> bool:
        """Return whether it draws random numbers."""
        return any(map(is_random, self.nodes))


_Inlined = dict[str, dict[str, int]]  # by a value that is never in memory: what its readers read instead, and bytes of it
_Group = tuple[tuple[Node, ...], dict[str, int]]  # the calls of a kernel, and the bytes that it reads by buffer


def kernels_of(graph: Graph, values: Values, *, fused: bool) -> list[Kernel]:
    """Return the kernels of a graph in an order in which they can run. Without `fused`, each call is one."""
    inlined = _inlined(graph, values) if fused else {}
    groups = [(nodes, _reads(nodes, values, inlined)) for nodes in _groups(graph, values, inlined, fused=fused)]
    if fused:
        groups = _horizontally_fused(groups, values, inlined)
    needed = {name for value in graph.output_node().all_input_nodes for name in values.names[value]}
    needed.update(name for _, reads in groups for name in reads)
    kernels = []
    for nodes, reads in groups:
        outputs = tuple(name for node in nodes for name in values.names[node] if name in needed)
        moves = not (fused and len(nodes) == 1 and is_written_by_products(nodes[0]))
        nbytes = sum(reads.values()) + sum(values.sizes[name] for name in outputs) if moves else 0
        kernels.append(Kernel(nodes, reads, outputs, nbytes))
    return kernels


def _groups(graph: Graph, values: Values, inlined: _Inlined, *, fused: bool) -> list[tuple[Node, ...]]:
    """Return the calls of each kernel: those whose values are in memory."""
    calls = [(node,) for node in graph.nodes if node.op == "call_function"]
    made = (tuple(node for node in group if viewed_by(node) is None) for group in (regions(graph) if fused else calls))
    return [group for group in made if not all(name in inlined for node in group for name in values.names[node])]


def _inlined(graph: Graph, values: Values) -> _Inlined:
    """Return the values that are recomputed in each kernel that reads them."""
    inlined: _Inlined = {}
    for node in graph.nodes:
        if node.op != "call_function" or not _is_pointwise(node):
            continue
        readers = [reader for name in values.names[node] for reader in values.readers.get(name, ())]
        is_stored = any(reader.op == "output" or not is_generated(reader) for reader in readers)
        if not is_stored and not is_random(node) and len(reads := _reads((node,), values, inlined)) <= MAX_READS:
            inlined |= {name: reads for name in values.names[node]}
    return inlined


def _horizontally_fused(groups: list[_Group], values: Values, inlined: _Inlined) -> list[_Group]:
    """Join neighbours that loop over the same elements and read the same of them."""
    found: list[_Group] = []
    for nodes, reads in groups:
        if found and _is_one_loop(*found[-1], nodes, reads, values):
            nodes = (*found.pop()[0], *nodes)
            reads = _reads(nodes, values, inlined)
        found.append((nodes, reads))
    return found


def _is_one_loop(
    nodes: tuple[Node, ...], reads: dict[str, int], other: tuple[Node, ...], other_reads: dict[str, int], values: Values
) -> bool:
    if not all(map(_is_pointwise, (*nodes, *other))):
        return False
    elements = [{math.prod(tensor.shape) for tensor in results_of(group[-1])} for group in (nodes, other)]
    made = {name for node in nodes for name in values.names[node]}
    shared = [values.sizes[name] for name in reads if name in other_reads]
    smallest = min(values.sizes[name] for node in nodes for name in values.names[node])
    return elements[0] == elements[1] and made.isdisjoint(other_reads) and max(shared, default=0) >= smallest


def _reads(nodes: tuple[Node, ...], values: Values, inlined: _Inlined) -> dict[str, int]:
    """Return the bytes that a kernel of these calls reads, by buffer."""
    made = {name for node in nodes for name in values.names[node]}
    parts: dict[str, dict[object, int]] = {}  # by buffer, by what it is read through
    for node in nodes:
        for operand in operands(node):
            part = bytes_read(node, operand) / max(1, node_nbytes(operand))  # a look-up reads few elements
            for name in values.names[operand]:
                if name in made:
                    continue
                if name in inlined:
                    for source, nbytes in inlined[name].items():
                        read = parts.setdefault(source, {})
                        read[name] = max(read.get(name, 0), math.ceil(part * nbytes))
                else:
                    parts.setdefault(name, {})[operand] = bytes_read(node, operand)
    return {name: min(values.sizes[name], sum(read.values())) for name, read in parts.items()}


def _is_pointwise(node: Node) -> bool:
    return is_generated(node) and not is_reduction(node.target) and not joins_products(node)

