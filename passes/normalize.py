"""Rewrite equivalent calls to one form, so that later passes and rules have fewer cases."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Graph, GraphModule, Node

from passes._torch import OpOverload, fake_mode_of
from passes.base import Pass, PassContext
from passes.ir.graph import Stage, is_random, is_reshard, set_draw, value_of
from passes.normal_forms import REWRITES, At, Split, align_convolutions, split_projections


@dataclass(frozen=True)
class Normalize(Pass):
    """Rewrite equivalent calls to one form, merge equal values, remove unused ones.

    The rewrites stand in `passes/normal_forms`, under the same numbers.

    1. `alias`, `detach`, conversions to the same dtype and views to the same shape are removed.
    2. `reshape` and `_unsafe_view` become `view`; `t` and `transpose` become `permute`. A view of a view (a permute of
       a permute) becomes one. `as_strided` becomes the view, slices and permutation that it is.
    3. `addmm` becomes `mm` and `add`, so that a partial product can be reduced before the bias is added; a convolution
       with a bias likewise, and the gradient of the bias becomes a sum.
    4. `mean` becomes `sum` and `div` by the global count, which are linear, so that it can be partial.
    5. `split` and `unbind` become slices and selects; `cat` loses operands without elements. Filled tensors become
       `full`.
    6. `var_mean` over dim 0 (batch statistics) becomes sums, so that the batch can be sharded.
    7. The sum of a row with one nonzero entry becomes that entry, so that the gradient of a cross-entropy never needs
       a whole row of the vocabulary.
    8. `_embedding_bag` over bags of one length becomes `embedding` and a sum, so that the batch can be sharded.
    9. Determinants become a factorization and products, which do not depend on the strides of a matrix.
    10. A product whose columns slices cut into unequal parts, such as a fused query, key and value with fewer key heads,
        becomes a product per part, if an axis of `parts` ranks can shard a part: each is then sharded by itself.
    11. A padded convolution, or a slice of one, with one result for each stride of inputs, such as a causal one, becomes an
        `aligned_convolution`: no value has another length, so that positions can be sharded.
    12. Two reversals are none. A cumulative sum between two, as its gradient is, becomes a `reversed_cumsum`: reversals would
        exchange the parts of a sharded dim.
    13. Equal calls without side effects and random numbers are merged; unused calls are removed.

    Before:

        mesh tp=2
        stage CAPTURED
        %b: f32[6] = parameter("b")
        %w: f32[8, 6] = parameter("w")
        %x: f32[4, 8] = input("x")
        %addmm: f32[4, 6] = addmm(%b, %x, %w)
        %mean: f32[4] = mean.dim(%addmm, [1])
        return output("output") %mean

    After:

        mesh tp=2
        stage CAPTURED
        %b: f32[6] = parameter("b")
        %w: f32[8, 6] = parameter("w")
        %x: f32[4, 8] = input("x")
        %mm: f32[4, 6] = mm(%x, %w)
        %add: f32[4, 6] = add.Tensor(%mm, %b)
        %sum_1: f32[4] = sum.dim_IntList(%add, [1], False)
        %div: f32[4] = div.Tensor(%sum_1, 6)
        return output("output") %div
    """

    name: ClassVar[str] = "normalize"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.CAPTURED

    parts: int = 1

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        changed = False
        fake_mode = fake_mode_of([value_of(node) for node in gm.graph.nodes if node.op == "placeholder"])
        for node in list(gm.graph.nodes):
            rewrite = REWRITES.get(node.target) if node.op == "call_function" else None
            if rewrite is not None:
                changed |= rewrite(At(gm.graph, node, fake_mode))
        changed |= align_convolutions(gm.graph, fake_mode)
        split = split_projections(gm.graph, fake_mode, self.parts) if self.parts > 1 else ()
        for one in split:
            ctx.remark(self, one.first, _text(one, self.parts))
        changed |= bool(split)
        changed |= _merge_equal(gm.graph)
        changed |= _drop_dead(gm.graph)
        _number_draws(gm.graph)
        return changed


def _text(split: Split, parts: int) -> str:
    columns = " + ".join(map(str, split.columns))
    return f"{columns} columns of a product become products of their own, for an axis of {parts} to shard each by itself"


# --- 13: merge equal calls, remove unused ones


def _merge_equal(graph: Graph) -> bool:
    seen: dict[Any, Node] = {}
    merged = False
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_pure(node) or is_reshard(node):
            continue
        key = (node.target, _key(node.args), _key(node.kwargs))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
            merged = True
        else:
            seen[key] = node
    return merged


def _is_pure(node: Node) -> bool:
    if isinstance(node.target, OpOverload):
        return not is_random(node) and not node.is_impure(impure_random=False)
    return node.target is operator.getitem


def _number_draws(graph: Graph) -> None:
    """Number the random calls before passes copy or move them, as copies must draw the same numbers."""
    for draw, node in enumerate(filter(is_random, graph.nodes)):
        set_draw(node, draw)


def _key(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_key(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    return (type(value).__name__, str(value)) if isinstance(value, float) else (type(value).__name__, value)


def _drop_dead(graph: Graph) -> bool:
    dropped = False
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            graph.erase_node(node)
            dropped = True
    return dropped
