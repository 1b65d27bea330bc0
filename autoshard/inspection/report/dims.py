"""A letter for every dim of a graph; the same dim has the same letter in all values: `[B_dp, S_tp, D]`.

A dim is a product of factors. Rules say which dims of a call's operands and results are the same; a dim that a view
splits has several factors everywhere, so a weight of `heads * head_dim` rows reads `[H, K, D]`, whatever its shape.
Slices and concatenations do not relate dims. Parameters that differ only in their layer's number share letters.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch.fx import Graph, Node

from passes._torch import OpOverload
from passes.ir.graph import (
    InputRole,
    input_of,
    is_reshard,
    is_tensor,
    item_of,
    operands,
    placeholders,
    results_of,
    tensor_of,
)
from passes.ir.layout import Layout, Partial, Shard
from passes.ir.mesh import Mesh
from passes.rules.rule import Space, space_of

Factors = tuple[int, ...]  # of one dim, outermost first; () for a dim of size 1

_BATCH, _SEQUENCE, _WIDTH = "B", "S", "D"  # dims of inputs; the dim that most parameters share
_POOL = "FHKVENGMPQTLXYZACIJO"  # U is "unreduced", W the weights of a module
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)
_MEANING = {  # of dims of an op's first operand, in the literature's letters
    "embedding": ("V",),
    "_scaled_dot_product_flash_attention_for_cpu": ("B", "H", "S", "K"),
    "_scaled_dot_product_flash_attention": ("B", "H", "S", "K"),
    "_scaled_dot_product_efficient_attention": ("B", "H", "S", "K"),
}


@dataclass(frozen=True)
class Letters:
    """The dims of a graph's values: letters by factor, sizes by letter."""

    dims: dict[Node, tuple[tuple[Factors, ...], ...]]  # per result, per dim
    names: dict[int, str]
    sizes: dict[str, int]

    def format(self, node: Node, layout: Layout, mesh: Mesh, *, result: int = 0) -> str:
        """Format as `[B_dp, S, D] {U_tp}`: axes stand at the dim that they shard, outermost first; U is unreduced."""
        return self.format_dims(self.dims[node][result], layout, mesh)

    def format_dims(self, dims: Sequence[Factors], layout: Layout, mesh: Mesh, order: Sequence[int] | None = None) -> str:
        """Format as `format` does, with dims in another order if given."""
        found = []
        for dim in order if order is not None else range(len(dims)):
            axes = _axes_by_factor([self.sizes[self.names[f]] for f in dims[dim]], layout, dim, mesh)
            found += [self.names[f] + (f"_{axes[i]}" if axes[i] else "") for i, f in enumerate(dims[dim])] or ["1"]
        terms = [
            f"{'U' if p.op == 'sum' else p.op}_{name}"
            for name, p in zip(mesh.names, layout.placements, strict=True)
            if isinstance(p, Partial)
        ]
        return f"[{', '.join(found)}]" + (f" {{{', '.join(terms)}}}" if terms else "")


def letters_of(graph: Graph) -> Letters:
    """Return the letters of all dims of a graph with global shapes."""
    factors = _Factors()
    dims: dict[Node, tuple[tuple[Factors, ...], ...]] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        item = item_of(node) if node.op == "call_function" else None
        if item is not None:
            dims[node] = (dims[item[0]][item[1]],)
        elif is_reshard(node):
            dims[node] = dims[operands(node)[0]]
        else:
            dims[node] = tuple(tuple(factors.new(size) for size in tensor.shape) for tensor in results_of(node))
            _unify(factors, node, dims)
    _tie_layers(factors, graph, dims)
    resolved = {n: tuple(tuple(factors.resolved(d) for d in ds) for ds in results) for n, results in dims.items()}
    names = _named(graph, resolved)
    return Letters(resolved, names, {name: factors.sizes[factor] for factor, name in names.items()})


class _Factors:
    """A union-find of factors: some turn out equal to others, or products of smaller ones."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.parts: list[Factors | None] = []  # what a factor turned out to be

    def new(self, size: int) -> Factors:
        if size == 1:
            return ()
        self.sizes.append(size)
        self.parts.append(None)
        return (len(self.sizes) - 1,)

    def size(self, dim: Factors) -> int:
        return math.prod(self.sizes[factor] for factor in dim)

    def resolved(self, dim: Factors) -> Factors:
        found: list[int] = []
        for factor in dim:
            parts = self.parts[factor]
            if parts is None:
                found.append(factor)
            else:
                self.parts[factor] = resolved = self.resolved(parts)
                found += resolved
        return tuple(found)

    def unify(self, one: Factors, other: Factors, *, may_split: bool) -> None:
        """Take both dims as the same; where their factors do not line up, what is left stays apart."""
        left, right = list(self.resolved(one))[::-1], list(self.resolved(other))[::-1]
        while left and right:
            a, b = left.pop(), right.pop()
            if a == b:
                continue
            small, large = sorted((a, b), key=lambda factor: (self.sizes[factor], factor))
            if self.sizes[large] == self.sizes[small]:
                rest, remainder = 1, 0  # of empty dims, too
            elif self.sizes[small]:
                rest, remainder = divmod(self.sizes[large], self.sizes[small])
            else:
                return
            if remainder or (rest > 1 and not may_split):
                return
            tail = self.new(rest)
            self.parts[large] = (small, *tail)
            (left if large == a else right).extend(tail)
            left, right = (list(self.resolved(tuple(reversed(side))))[::-1] for side in (left, right))


def _unify(factors: _Factors, node: Node, dims: dict[Node, tuple[tuple[Factors, ...], ...]]) -> None:
    space = _space_of(node)
    if space is None:
        return
    is_view = node.target in _VIEWS
    known: dict[tuple[str, ...], Factors] = {}
    used = [dims[operand][0] if len(dims[operand]) == 1 else () for operand in operands(node)]
    made = {factor for shape in dims[node] for dim in shape for factor in dim}
    for shape, expected in zip((*used, *dims[node]), (*space.operands, *space.results), strict=False):
        for dim, names in zip(shape, expected, strict=False):
            if names not in known and (len(names) == 1 or not is_view):
                known[names] = dim
            joined = known[names] if names in known else _joined(factors, names, space, known)
            if joined != dim and factors.size(joined) == factors.size(dim):
                factors.unify(joined, dim, may_split=is_view or not made.isdisjoint(dim))


def _joined(factors: _Factors, names: tuple[str, ...], space: Space, known: dict[tuple[str, ...], Factors]) -> Factors:
    """Return the factors of a dim that a rule names as several, known by their names."""
    return tuple(f for name in names for f in known.setdefault((name,), factors.new(space.sizes[name])))


def _tie_layers(factors: _Factors, graph: Graph, dims: dict[Node, tuple[tuple[Factors, ...], ...]]) -> None:
    """Give equal parameters of equal layers the same dims, unless one of them would have a dim twice."""
    first: dict[tuple[str, torch.Size], tuple[Factors, ...]] = {}
    for node in placeholders(graph, InputRole.PARAMETER):
        if not is_tensor(node):
            continue
        key = re.sub(r"\d+", "#", input_of(node).name), tensor_of(node).shape
        kept = first.setdefault(key, dims[node][0])
        pairs = [(factors.resolved(one), factors.resolved(other)) for one, other in zip(kept, dims[node][0], strict=True)]
        together = [factor for one, other in pairs for factor in {*one, *other}]
        if len(together) == len(set(together)):
            for one, other in pairs:
                factors.unify(one, other, may_split=True)


def _space_of(node: Node) -> Space | None:
    return space_of(node) if node.op == "call_function" else None


def _named(graph: Graph, dims: dict[Node, tuple[tuple[Factors, ...], ...]]) -> dict[int, str]:
    """Return a letter per factor: of inputs first, then parameters, then operands of known ops, then the rest."""
    names: dict[int, str] = {}
    for wanted, factor in _wishes(graph, dims):
        if factor not in names:
            taken = set(names.values())
            names[factor] = next(name for name in _tries(wanted) if name not in taken)
    return names


def _tries(wanted: str) -> Iterator[str]:
    yield from (wanted, *_POOL)
    yield from (f"{_POOL[0]}{number}" for number in count(1))


def _wishes(graph: Graph, dims: dict[Node, tuple[tuple[Factors, ...], ...]]) -> Iterator[tuple[str, int]]:
    for node in placeholders(graph, InputRole.INPUT):
        if is_tensor(node):
            is_sequence = tensor_of(node).dim() == (3 if tensor_of(node).is_floating_point() else 2)
            wanted = (_BATCH, _SEQUENCE) if is_sequence else (_BATCH,)
            yield from ((name, dim[0]) for name, dim in zip(wanted, dims[node][0], strict=False) if dim)
    held = [dims[node][0] for node in placeholders(graph, InputRole.PARAMETER) if is_tensor(node)]
    made = [shape for results in dims.values() for shape in results]
    matrices = _counted([shape for shape in held if len(shape) > 1] or held)
    everywhere = _counted(made)
    yield from ((_WIDTH, f) for f in sorted(matrices, key=lambda f: (-matrices[f], -everywhere[f]))[:1])
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and (meaning := _MEANING.get(node.target.overloadpacket.__name__)):
            shape = dims[operands(node)[0]][0]
            yield from ((name, dim[0]) for name, dim in zip(meaning, shape, strict=False) if dim)
    for shape in (*held, *made):
        yield from ((_POOL[0], factor) for dim in shape for factor in dim)


def _counted(shapes: Sequence[tuple[Factors, ...]]) -> Counter[int]:
    return Counter(factor for shape in shapes for dim in shape for factor in dim)


def _axes_by_factor(sizes: Sequence[int], layout: Layout, dim: int, mesh: Mesh) -> list[str]:
    """Return the axes that shard each factor of a dim: `"dp.tp"`; `"tp/3"` where each of three parts is sharded; `"cp~"`
    where the second half is mirrored.
    """
    if not sizes:  # a dim of size 1
        return []
    found: list[list[str]] = [[] for _ in sizes]
    cut = [1 for _ in sizes]
    for axis in layout.axes_on(dim):
        placement = layout.on(axis)
        assert isinstance(placement, Shard)
        number, outer = 0, placement.half if placement.mirror else placement.outer
        while number + 1 < len(sizes) and outer % sizes[number] == 0 and outer >= sizes[number]:
            outer //= sizes[number]
            number += 1
        blocks = outer // cut[number] if outer % cut[number] == 0 else outer
        found[number].append(mesh.names[axis] + (f"/{blocks}" if blocks > 1 else "") + "~" * (placement.mirror > 0))
        cut[number] *= mesh.sizes[axis] * blocks
    return [".".join(axes) for axes in found]

