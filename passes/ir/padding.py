"""Padding: a digit of a dim made longer than it is, so that an axis divides it.

A dim is seen as `[outer, size, inner]`, as by layouts; padding makes it `[outer, padded, inner]`. With `outer` and `inner`
of 1, elements are added at the end of the dim (a vocabulary of 50257 becomes 50260); with an `inner` of 64, whole heads are
added to merged ones (`[6 * 64]` becomes `[8 * 64]`).

`pad_end` adds zeros at the end of a dim, and `cut_end` drops them again. They are ops of their own because they may change
nothing on a device: a stored parameter whose dim does not divide has zeros at the end of its parts already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from passes.ir.graph import is_reshard

_LIBRARIES: Any = torch.library  # not typed

_LIBRARIES.define("autoshard::pad_end", "(Tensor value, int dim, int size) -> Tensor")
_LIBRARIES.define("autoshard::cut_end", "(Tensor value, int dim, int size) -> Tensor")


def _pad_end(value: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    missing = [0, 0] * (value.dim() - dim - 1) + [0, size - value.shape[dim]]
    return torch.constant_pad_nd(value, missing)


def _cut_end(value: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return value.narrow(dim, 0, size).clone(memory_format=torch.contiguous_format)


_LIBRARIES.impl("autoshard::pad_end", "CompositeExplicitAutograd")(_pad_end)
_LIBRARIES.impl("autoshard::cut_end", "CompositeExplicitAutograd")(_cut_end)

PAD_END = torch.ops.autoshard.pad_end.default
CUT_END = torch.ops.autoshard.cut_end.default
PADS = (PAD_END, CUT_END)

Dims = Sequence[Sequence[str]]  # per dim, its factors


@dataclass(frozen=True)
class Digit:
    """The digit of an index with `size` values: `outer` digits stand before it and `inner` after it."""

    outer: int
    size: int
    inner: int

    @property
    def end(self) -> int:
        return self.outer * self.size

    @property
    def length(self) -> int:
        """Return the number of values of the whole index."""
        return self.outer * self.size * self.inner


@dataclass(frozen=True)
class Padding:
    """The digit of dim `dim` that has `padded` values instead of `digit.size`."""

    dim: int
    digit: Digit
    padded: int

    @property
    def length(self) -> int:
        """Return the size of the padded dim."""
        return self.digit.outer * self.padded * self.digit.inner

    @property
    def is_whole(self) -> bool:
        """Return whether the elements are added at the end of the dim."""
        return self.digit.outer == self.digit.inner == 1


@dataclass(frozen=True)
class Padded:
    """A parameter or input that is padded, and the first call that it is padded for."""

    value: Node
    padding: Padding
    user: Node


def is_gain(size: int, parts: int) -> bool:
    """Return whether padding lets each part be smaller than the whole."""
    return bool(size % parts) and -(-size // parts) < size


def padded_size(size: int, parts: int) -> int:
    """Return the least multiple of `parts` that is not below `size`."""
    return -(-size // parts) * parts


def padded_forms(value: Node) -> tuple[Node, ...]:
    """Return the padded forms of an input, each a padding of the one before it; there may be reshards between them."""
    found, queue = list[Node](), list(value.users)
    while queue:
        user = queue.pop(0)
        if user.target is PAD_END:
            found.append(user)
            queue = list(user.users)
        elif is_reshard(user):
            queue += user.users
    return tuple(found)


def padded_batch(value: Node) -> Node | None:
    """Return the call that pads dim 0 of an input, None if there is none."""
    return next((user for user in value.users if user.target is PAD_END and user.args[1] == 0), None)


def in_factor(sizes: Mapping[str, int], dims: Dims, dim: int, digit: Digit) -> tuple[str, Digit] | None:
    """Return the factor of `dim` that holds `digit`, and the digit in it; None if it spans several."""
    before = 1
    for factor in dims[dim]:
        length = sizes[factor]
        if digit.outer % before == 0 and (before * length) % digit.end == 0:
            return factor, Digit(digit.outer // before, digit.size, before * length // digit.end)
        before *= length
    return None


def in_dims(sizes: Mapping[str, int], dims: Dims, factor: str, digit: Digit) -> tuple[int, Digit] | None:
    """Return the dim that has `factor`, and its digit that `digit` of the factor is; None if no dim has the factor."""
    for dim, factors in enumerate(dims):
        if factor in factors:
            at = list(factors).index(factor)
            before, after = (math.prod(sizes[f] for f in some) for some in (factors[:at], factors[at + 1 :]))
            return dim, Digit(before * digit.outer, digit.size, digit.inner * after)
    return None
