"""Read numbers of DTensors as those of all ranks, and let `tensor.data = other` change a DTensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from passes._torch.dtensor import local_of_dtensor, relay_dtensor
from passes._torch.patches import once


def read_whole_numbers(whole_of: Callable[[DTensor], torch.Tensor]) -> None:
    """Let `item()`, `float()`, `bool()` and formats of a DTensor of one number give that of all ranks.

    torch reads this rank's: `p.grad.norm().item()` is the norm of a part, and a parameter of one number that is sharded has none
    on other ranks. `whole_of` gathers a number that ranks have parts of.
    """
    once("DTensor's numbers", lambda: _read_whole(whole_of))


def _read_whole(whole_of: Callable[[DTensor], torch.Tensor]) -> None:
    def read(op: Any, args: tuple[DTensor], kwargs: Mapping[str, Any]) -> Any:
        tensor = cast(DTensor, args[0].detach())
        return (local_of_dtensor(tensor) if _is_whole(tensor) else whole_of(tensor)).item()

    written: Any = DTensor.__format__

    def formatted(self: DTensor, spec: str) -> str:
        is_number = self.dim() == 0 and (spec or _is_whole(self))  # without a format, ranks' parts are shown as they are
        return format(self.item(), spec) if is_number else str(written(self, spec))

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = read
    DTensor.__format__ = formatted  # type: ignore[method-assign, assignment]


def _is_whole(tensor: DTensor) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)


def assign_to_parts(part_like: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    """Let `weight.data = other` change a DTensor, which torch ignores: it replaces an empty storage, and not this rank's part.

    `part_like` lays `other`, a whole tensor or a DTensor, out as the first is.
    """
    once("DTensor's data", lambda: _assign_together(part_like))


def _assign_together(part_like: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    written: Any = torch.Tensor.data

    def read(self: DTensor) -> Any:
        return written.__get__(self)

    def assign(self: DTensor, value: torch.Tensor) -> None:
        if value.shape != self.shape:
            raise RuntimeError(
                f"a tensor of {tuple(value.shape)} is assigned to the data of a DTensor of {tuple(self.shape)}; assign a DTensor "
                "or the whole tensor; to change the shape of a parameter, assign a new nn.Parameter and build the optimizer again"
            )
        part = part_like(value.detach(), self)
        written.__set__(self, part)
        relay_dtensor(self, local_of_dtensor(part), part._spec)

    DTensor.data = property(read, assign)  # type: ignore[assignment]
