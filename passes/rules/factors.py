"""Writing down an index space: factors are named as their dims are met."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from passes.rules.rule import Dims, Linear, Space

Dim = tuple[str, ...]


class Factors:
    """The factors of one call, collected while its operands and results are described."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._blocked: set[str] = set()

    def one(self, name: str, size: int, *, blocked: bool = False) -> Dim:
        """A dim (or part of one) that is one factor; none at all where it has one element."""
        if size == 1:
            return ()
        self._sizes[name] = size
        if blocked or size == 0:
            self._blocked.add(name)
        return (name,)

    def dims(self, shape: Sequence[int], *, blocked: Collection[int] = (), prefix: str = "d") -> list[Dim]:
        """One factor per dim, named by the dim's number; `blocked` are the dims the op needs whole."""
        return [self.one(f"{prefix}{dim}", size, blocked=dim in blocked) for dim, size in enumerate(shape)]

    def space(
        self,
        operands: Sequence[Sequence[Dim]],
        results: Sequence[Sequence[Dim]],
        *,
        linear: tuple[Linear, ...] = (),
        reductions: dict[str, str] | None = None,
        replicated_results: frozenset[int] = frozenset(),
    ) -> Space:
        return Space(
            sizes=self._sizes,
            operands=tuple(_frozen(dims) for dims in operands),
            results=tuple(_frozen(dims) for dims in results),
            blocked=frozenset(self._blocked),
            reductions=reductions or {},
            linear=linear,
            replicated_results=replicated_results,
        )


def _frozen(dims: Sequence[Dim]) -> Dims:
    return tuple(dims)


def whole_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Dims counted from 0, in order; all of them for None or an empty list, as reductions have it."""
    if isinstance(dims, int):
        dims = (dims,)
    if not dims or ndim == 0:
        return tuple(range(ndim))
    return tuple(sorted({dim % ndim for dim in dims}))


def keeps_sums(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a term converted from `source` to `target` loses nothing that its sum would keep."""
    if source is torch.bool:
        return False
    if source == target:
        return True
    if torch.promote_types(source, target) != target:
        return False
    is_count = not (source.is_floating_point or source.is_complex)
    return not (is_count and target.is_floating_point) or torch.finfo(target).bits >= 32
