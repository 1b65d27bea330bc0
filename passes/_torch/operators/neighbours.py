"""A send around the ring of a group: its arguments are equal on all ranks, as those of torch's own sends are not.

A rank finds its neighbours when the call runs. On a GPU, what it sends is an all-to-all in which every other piece is empty: the
one functional collective that sends to a single rank, and whose result can be awaited later. On a CPU it sends by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import _register_work, _resolve_process_group

_TAG = 1009  # of messages: another than 0, with which users send
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


def _send_on_cpu(part: torch.Tensor, offset: int, name: str) -> torch.Tensor:
    """Do the same by a message of its own, and offer to receive before sending.

    The all-to-all of gloo sends first. The offer of a rank that comes later is then behind what it sends, so that the two
    directions of a link take turns.
    """
    group: Any = _resolve_process_group(name)  # type: ignore[arg-type]
    ranks, place = group.size(), group.rank()
    part, received = part.contiguous(), torch.empty(part.shape, dtype=part.dtype)
    _register_work(received, group.recv([received], (place - offset) % ranks, _TAG))
    _register_work(received, group.send([part], (place + offset) % ranks, _TAG))
    return received


_LIBRARY.impl("send", _send_on_cpu, "CPU")
_LIBRARY.impl("send", _send, "CUDA")
_LIBRARY.impl("send", lambda part, offset, name: part.new_empty(part.shape), "Meta")

SEND = torch.ops.autoshard.send.default
