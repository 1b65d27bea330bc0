"""Figures are written with three digits and a unit."""

from __future__ import annotations

import pytest

from passes.ir.units import format_bytes, format_seconds, format_unequal_bytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3e-8, "0.03 us"),
        (1e-6, "1.00 us"),
        (99.97e-6, "100 us"),
        (999.6e-6, "1.00 ms"),
        (0.01234, "12.3 ms"),
        (0.9999, "1.00 s"),
        (9.996, "10.0 s"),
        (1234.5, "1234 s"),
        (-0.25, "-250 ms"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (1 << 52, "4096.0 TiB"), (-2048, "-2.0 KiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("counts", "texts"),
    [
        ((1 << 30, 1 << 31), ("1.0 GiB", "2.0 GiB")),
        ((1.31 * 2**30, 1.34 * 2**30), ("1.31 GiB", "1.34 GiB")),
        ((1 << 30, (1 << 30) + 1), ("1073741824 B", "1073741825 B")),
    ],
)
def test_unequal_bytes_have_as_many_digits_as_tell_them_apart(counts: tuple[float, float], texts: tuple[str, str]) -> None:
    """A memory error said that no plan fits in 1.3 GiB, and the smallest takes 1.3 GiB."""
    assert format_unequal_bytes(*counts) == texts
