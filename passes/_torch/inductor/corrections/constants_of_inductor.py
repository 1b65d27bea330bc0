"""Constants: Inductor takes for known what is another number.

It writes a running sum of a constant as `arange(1, n + 1) * constant`, and leaves out that the sum was asked for as another
type: `torch.ones(4).cumsum(0, dtype=torch.long)` would be a float, and could not index
(https://github.com/pytorch/pytorch/issues/189518). For a constant without dims it raises (#193265). And it takes `x * 0` for
zeros, though where x is NaN or infinite it is NaN (https://github.com/pytorch/pytorch/pull/187580).
"""

from __future__ import annotations

import torch
from torch._inductor.fx_passes import post_grad
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.pattern_matcher import GraphPatternEntry, Match, PatternEntry

from passes._torch.inductor.corrections.correction import Correction


def _sum_of_constant() -> PatternEntry:
    entries = post_grad.pass_patterns[1].patterns["call_function", torch.ops.aten.cumsum.default]
    replacing = post_grad.pointless_cumsum_replacement
    return next(one for one in entries if isinstance(one, GraphPatternEntry) and one.handler is replacing)


_ENTRY = _sum_of_constant()
_CHECK, _FOLDED = _ENTRY.extra_check, UniformValueConstantFolder._add_peephole_patterns


def _keeps_its_type(match: Match) -> bool:
    node = match.output_node()
    return node.kwargs.get("dtype") is None and node.meta["val"].ndim > 0 and _CHECK(match)


def _fold_integers(folder: UniformValueConstantFolder) -> None:
    _FOLDED(folder)
    for node in list(folder.node_replacements):
        if node.meta["val"].dtype.is_floating_point or node.meta["val"].dtype.is_complex:
            del folder.node_replacements[node], folder.node_replacements_shapes[node], folder.constant_data_ptrs[node]


SUMS_OF_CONSTANTS = Correction(_ENTRY, "extra_check", _keeps_its_type)
PRODUCTS_WITH_ZERO = Correction(UniformValueConstantFolder, "_add_peephole_patterns", _fold_integers)
