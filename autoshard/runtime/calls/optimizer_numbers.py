"""Follow the numbers that optimizers step with, such as learning rates: ranks that step with others train different models."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from passes._torch import local_of_dtensor

DIGITS = 6  # of a number that count: hosts may compute a schedule's last digits differently
SHOWN = 3  # groups of parameters whose numbers a message shows


@dataclass(frozen=True)
class _Steps:
    """The numbers of an optimizer's last step, and a digest of those of all its steps."""

    last: str
    digest: str
    parameter: int  # the id of the optimizer's first one

    def __str__(self) -> str:
        return f"{self.last} ({self.digest[:4]})"


# By this rank's part of the first parameter, which outlives an optimizer. Torch cannot convert (`model.bfloat16()`) a DTensor
# with a weak reference; a parameter that is converted gets another part, and its record is begun again, on all ranks alike.
_STEPS: MutableMapping[torch.Tensor, _Steps] = WeakTensorKeyDictionary()


@cache
def follow_optimizers() -> None:
    """Note from now on with which numbers optimizers of sharded models step."""
    register_optimizer_step_post_hook(_note)


def numbers_of_steps(ids: Collection[int]) -> str:
    """Return "SGD lr=0.1 (4f2a)" for the optimizers of parameters with these ids; it is to be equal on all ranks."""
    return " and ".join(sorted(str(steps) for steps in _STEPS.values() if steps.parameter in ids)) or "none"


def _note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    held = (one for group in optimizer.param_groups for one in group["params"])
    first = next((one for one in held if isinstance(one, DTensor)), None)
    if first is None:
        return
    chosen = _length_of_step(optimizer, first)
    groups = sorted({", ".join(_numbers(group | chosen)) for group in optimizer.param_groups})  # ranks may have another order
    part = local_of_dtensor(first)
    last, before = f"{type(optimizer).__name__} {' and '.join(groups[:SHOWN])}", _STEPS.get(part)
    told = repr((before and before.digest, type(optimizer).__name__, groups))
    _STEPS[part] = _Steps(last, hashlib.blake2b(told.encode(), digest_size=8).hexdigest(), id(first))


def _length_of_step(optimizer: Optimizer, first: DTensor) -> dict[str, Any]:
    """Return the length of the step that LBFGS chose: its line search compares losses that it is given."""
    length = optimizer.state[first].get("t") if isinstance(optimizer, LBFGS) else None
    if isinstance(length, DTensor):  # a part of a sum cannot be read without the other ranks
        length = length.to_local() if all(one.is_replicate() for one in length.placements) else None
    return {} if length is None else {"length of the last step": float(length)}


def _numbers(group: dict[str, Any]) -> Iterator[str]:
    """Yield "lr=0.1" for each number of a group of parameters. That of a tensor on another device would make it wait."""
    for name, value in sorted(group.items()):
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.device.type == "cpu" and value.dim() == 0:
            yield f"{name}={_text(value.item())}"
        elif isinstance(value, tuple | list) and all(map(_is_number, value)):
            yield f"{name}=({', '.join(map(_text, value))})"
        elif _is_number(value):
            yield f"{name}={_text(value)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: float) -> str:
    return f"{value:.{DIGITS}g}"
