"""A send around the ring of a group: its arguments are equal on all ranks, as those of torch's own sends are not.

A rank finds its neighbours when the call runs. What it sends is an all-to-all in which every other piece is empty: the
one functional collective that sends to a single rank on all backends, and whose result can be awaited later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import _resolve_process_group

_LIBRARIES: Any = torch.library  # not typed
_LIBRARY = _LIBRARIES.Library("autoshard", "FRAGMENT")
_LIBRARY.define(
    "send(Tensor part, int offset, str group) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _send(part: torch.Tensor, offset: int, name: str) -> torch.Tensor:
    """Give this rank's part to the rank `offset` places after it, and return the part that it gets; await it."""
    group: Any = _resolve_process_group(name)  # type: ignore[arg-type]
    ranks, place, count = group.size(), group.rank(), part.numel()
    sent, received = [0] * ranks, [0] * ranks
    sent[(place + offset) % ranks] = received[(place - offset) % ranks] = count
    exchange: Any = torch.ops._c10d_functional.all_to_all_single
    moved: torch.Tensor = exchange(part.reshape(-1), received, sent, name)
    return moved.view(part.shape)


_LIBRARY.impl("send", _send, "CPU")
_LIBRARY.impl("send", _send, "CUDA")
_LIBRARY.impl("send", lambda part, offset, name: part.new_empty(part.shape), "Meta")

SEND = torch.ops.autoshard.send.default
