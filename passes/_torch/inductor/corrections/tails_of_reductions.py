"""Reductions over tiles whose two tiled loops are not neighbours: torch writes more results than there are.

On a CPU, Inductor takes 16 numbers of two loops at a time where values are read along both. The last tile of the outer loop may
have fewer, and what is written behind the reduction has a case of its own for it, but only if the loop right inside of the
outer one is the reduction. With another loop between them, torch 2.13 and 2.14 write 16 results there, too: over those of the
next row, and behind the end of the tensor (https://github.com/pytorch/pytorch/issues/196681).
"""

from __future__ import annotations

from typing import Any

from torch._inductor.codegen.cpp import CppKernelProxy

from passes._torch.inductor.corrections.correction import Correction

_AGGREGATE = CppKernelProxy.aggregate_reduction_buffers


def _aggregate(proxy: CppKernelProxy, is_reduced_inside: bool, outer_loop: Any) -> None:
    """Separate the cases wherever the innermost loop, the second tiled one, is a reduction and the outer one is not."""
    if outer_loop is not None and len(proxy.kernels) > 2:  # with two tiled loops, there are more than a main kernel and a tail
        assert proxy.loop_nest is not None and proxy.loop_nest.loops is not None
        is_reduced_inside |= proxy.loop_nest.loops[-1].is_reduction and not outer_loop.is_reduction
    _AGGREGATE(proxy, is_reduced_inside, outer_loop)


TAILS_OF_REDUCTIONS = Correction(CppKernelProxy, "aggregate_reduction_buffers", _aggregate)
