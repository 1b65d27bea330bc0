"""Formatting of bytes and seconds."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def format_bytes(count: float, digits: int = 1) -> str:
    """Return `"1.5 KiB"` for `1536`, with so many digits after the point."""
    size = float(count)
    for unit in _BINARY:
        if abs(size) < 1024 or unit == _BINARY[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.{digits}f} {unit}"
        size /= 1024
    raise AssertionError(count)


def format_unequal_bytes(one: float, other: float) -> tuple[str, str]:
    """Return two counts with as few digits as tell them apart: `"1.26 GiB", "1.31 GiB"`."""
    texts = ((format_bytes(one, digits), format_bytes(other, digits)) for digits in range(1, 9))
    return next((both for both in texts if both[0] != both[1]), (f"{one:.0f} B", f"{other:.0f} B"))


def format_seconds(seconds: float) -> str:
    """Return seconds with three digits: `"12.3 ms"` for `0.01234`."""
    for scale, unit in _SECONDS:
        if abs(seconds) >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} us" if seconds else "0 s"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
