"""Mark tensors that are whole on every rank, so that a call does not take them for this rank's part of a batch.

A program returns this rank's part of an output as a plain tensor. An output of a batch that the axes do not divide, or one
that does not have the batch as a dim, is whole on every rank. What is computed from such outputs alone is whole, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import get_default_nowrap_functions

from autoshard.runtime.parameters import Place
from passes._torch import flatten_pytree, map_pytree, without_torch_function

_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class WholeTensor(torch.Tensor):
    """A plain tensor that is whole on every rank.

    An operator whose tensors are all whole returns a WholeTensor; next to a plain tensor it returns a plain one, as nothing
    is known of that. A DTensor that is replicated joins in as the tensor that it holds.

    A number with a gradient, such as a sum of losses, is marked, too, so that a count that is a DTensor may divide it: its
    gradient would be a DTensor otherwise. The mark of a number says nothing else.
    """

    @staticmethod
    def of(tensor: torch.Tensor) -> torch.Tensor:
        """Mark a tensor as whole; a number is returned as it is."""
        return tensor.as_subclass(WholeTensor) if tensor.dim() > 0 else tensor

    def plain(self) -> torch.Tensor:
        """Return the tensor without its mark."""
        found: torch.Tensor = without_torch_function(torch.Tensor.as_subclass, (self, torch.Tensor), {})
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func` as on plain tensors, and mark what it makes of whole tensors alone.

        A backward may run code of the user again, such as a call in a checkpoint, whose tensors are marked as those of any code.
        """
        if func in _BACKWARDS and not any(isinstance(one, WholeTensor) for _, one in flatten_pytree((args[1:], kwargs))[0]):
            outputs = map_pytree(lambda one: one.plain() if isinstance(one, WholeTensor) else one, args[0])
            return func(outputs, *args[1:], **(kwargs or {}))
        return without_torch_function(_called, (func, args, kwargs or {}), {})

    def __format__(self, spec: str) -> str:
        """Format a number as torch formats a plain one."""
        return format(self.plain(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save the tensor without its mark, which says nothing to the process that loads it."""
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy the tensor as a plain one is copied, and mark the copy."""
        return WholeTensor.of(copy.deepcopy(self.plain(), memo))


def replicated_tensor(tensor: torch.Tensor, place: Place) -> DTensor:
    """Return a DTensor that has all of `tensor` on every rank; a gradient goes back to `tensor`."""
    whole = [Replicate()] * place.mesh.ndim
    return DTensor.from_local(tensor.to(place.device).contiguous(), place.device_mesh, whole, run_check=False)


def _called(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    held, named = map_pytree(_held, (args, dict(kwargs)))
    result = func(*held, **named)
    if isinstance(result, torch.Size):  # `map_pytree` would make it a tuple
        return result
    given = list(_tensors((held, named)))
    if func in get_default_nowrap_functions() or not all(isinstance(one, WholeTensor) for one in given):
        return result
    return map_pytree(lambda one: _marked(one, is_whole=bool(given)), result)


def _marked(value: Any, *, is_whole: bool) -> Any:
    """Mark a plain tensor that an operator returns if it `is_whole`, or if it is a number with a gradient."""
    if type(value) is not torch.Tensor or not (value.requires_grad if value.dim() == 0 else is_whole):
        return value
    return value.as_subclass(WholeTensor)


def _held(value: Any) -> Any:
    if isinstance(value, DTensor) and all(isinstance(placement, Replicate) for placement in value.placements):
        return WholeTensor.of(value.to_local())
    return value


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that have dims: a number does not say whether it is of one rank."""
    return (one for _, one in flatten_pytree(values)[0] if isinstance(one, torch.Tensor) and one.dim() > 0)
