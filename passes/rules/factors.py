"""`Factors`, which builds the index space of a call dim by dim."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from passes.rules.rule import Dims, Linear, Reach, Space

Dim = tuple[str, ...]


class Factors:
    """The factors of one call, collected while its operands and results are described."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._blocked: set[str] = set()
        self._held: dict[str, int] = {}
        self._reaches: dict[str, Reach] = {}

    def one(self, name: str, size: int, *, blocked: bool = False) -> Dim:
        """Return a dim (or part of one) made of one factor, or of none if it has one element."""
        if size == 1:
            return ()
        self._sizes[name] = size
        if blocked or size == 0:
            self._blocked.add(name)
        return (name,)

    def dims(self, shape: Sequence[int], *, blocked: Collection[int] = (), prefix: str = "d") -> list[Dim]:
        """Return one factor per dim, named by the dim's number; the op needs those in `blocked` whole."""
        return [self.one(f"{prefix}{dim}", size, blocked=dim in blocked) for dim, size in enumerate(shape)]

    def hold(self, factor: str, elements: int) -> None:
        """Say that only that many elements of a padded factor are stored on one side of the call."""
        self._held[factor] = elements

    def reach(self, factor: str, reach: Reach) -> None:
        """Say that the local form reads elements of other parts."""
        self._reaches[factor] = reach

    def space(
        self,
        operands: Sequence[Sequence[Dim]],
        results: Sequence[Sequence[Dim]],
        *,
        linear: tuple[Linear, ...] = (),
        reductions: dict[str, str] | None = None,
        numbered: frozenset[str] = frozenset(),
        replicated_results: frozenset[int] = frozenset(),
    ) -> Space:
        return Space(
            sizes=self._sizes,
            operands=tuple(_frozen(dims) for dims in operands),
            results=tuple(_frozen(dims) for dims in results),
            blocked=frozenset(self._blocked),
            reductions=reductions or {},
            linear=linear,
            numbered=numbered,
            replicated_results=replicated_results,
            held=self._held,
            reaches=self._reaches,
        )


def _frozen(dims: Sequence[Dim]) -> Dims:
    return tuple(dims)


def whole_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return dims counted from 0, in order; all dims for None or an empty list, as in ATen's reductions."""
    if isinstance(dims, int):
        dims = (dims,)
    if not dims or ndim == 0:
        return tuple(range(ndim))
    return tuple(sorted({dim % ndim for dim in dims}))


def keeps_sums(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a sum of terms converted from `source` to `target` is the converted sum, up to rounding."""
    if source is torch.bool:
        return False
    if source == target:
        return True
    if _promoted(source, target) != target:
        return False
    is_count = not (source.is_floating_point or source.is_complex)
    return not (is_count and target.is_floating_point) or torch.finfo(target).bits >= 32


def _promoted(first: torch.dtype, second: torch.dtype) -> torch.dtype | None:
    """Return the dtype of a sum of both; None where torch adds no such pair, as a float8 and another dtype."""
    try:
        return torch.promote_types(first, second)
    except RuntimeError:
        return None
