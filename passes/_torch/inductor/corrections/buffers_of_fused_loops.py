"""Small buffers in fused loops, which stand for a whole tensor: torch uses them where they are too small or read by another name.

Where a CPU runs several loops inside of one outer loop, Inductor keeps a value between them in a buffer for one step of the
outer loop. Torch 2.13 does so, too, where a step takes 16 numbers of the outer loop at a time, and reads the numbers of
other rows (https://github.com/pytorch/pytorch/issues/185702); torch 2.14 does not. Both raise a KeyError where the value is
what a scatter has written, which is read by the name that it had before (https://github.com/pytorch/pytorch/issues/196570).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch._inductor.loop_body import LoopBody
from torch._inductor.virtualized import V

from passes._torch.inductor.corrections.correction import Correction

_FIT: Any = OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr
_READ: Any = LoopBody.get_read_expr


def _read(body: Any, name: str) -> Any:
    """Return where a loop reads the tensor `name`, or None, which is no place, if it does not read it by that name."""
    return _READ(body, name) if body.get_all_read_expr(name) else None


def _fit(node: OuterLoopFusedSchedulerNode, proxies: Sequence[Any], depth: int) -> bool:
    """Say whether loops can be fused as they are; False makes torch fuse them without such buffers, if it can."""
    buffers = getattr(V.get_local_buffer_context(), "local_buffers", None)
    if buffers and any(loop.steps != 1 for proxy in proxies for loop in proxy.loop_nest.loops[:depth]):
        return False
    return bool(_FIT(node, proxies, depth))


NAMES_OF_BUFFERS = Correction(LoopBody, "get_read_expr", _read)
SIZES_OF_BUFFERS = Correction(OuterLoopFusedSchedulerNode, "check_outer_fusion_loop_level_attr", _fit, repaired=(2, 14))
