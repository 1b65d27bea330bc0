"""Loops that read what a scatter has written: torch 2.13 may run them before the scatter.

To fuse loops of different shapes on a CPU, Inductor lists anew what a loop reads. Torch 2.13 then forgets that the loop reads a
tensor after it was written into, and may fuse it with the loop that fills the tensor with zeros: gradients of a maximum over
windows, or of a nearest upsampling, were zero (https://github.com/pytorch/pytorch/issues/185509). Torch 2.14 remembers it.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.scheduler import SchedulerNode

from passes._torch.inductor.corrections.correction import Correction

_RECOMPUTE = SchedulerNode.recompute_size_and_body


def _recompute(node: SchedulerNode, *args: Any, **kwargs: Any) -> None:
    _RECOMPUTE(node, *args, **kwargs)
    node.set_read_writes(node.read_writes.rename(node.mutation_renames))


READS_AFTER_SCATTERS = Correction(SchedulerNode, "recompute_size_and_body", _recompute, repaired=(2, 14))
