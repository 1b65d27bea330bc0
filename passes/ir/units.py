"""Bytes and seconds as people write and read them."""

from __future__ import annotations

import re

from passes.errors import UserError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


def format_bytes(count: float) -> str:
    """`1536` -> `"1.5 KiB"`."""
    size = float(count)
    for unit in _BINARY:
        if abs(size) < 1024 or unit == _BINARY[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError(count)


def format_seconds(seconds: float) -> str:
    """Three digits: `0.01234` -> `"12.3 ms"`."""
    for scale, unit in _SECONDS:
        if abs(seconds) >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} us" if seconds else "0 s"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def parse_bytes(text: str) -> int:
    """`"80GB"` -> 80 * 10**9, `"80GiB"` -> 80 * 2**30; a bare number is bytes. Raises UserError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else ""
    if match is None or (unit and unit not in _BYTES):
        raise UserError(f"cannot read {text!r} as bytes; write it as '80GB' (10**9 bytes each) or '80GiB' (2**30 each)")
    return int(float(match[1]) * _BYTES[unit or "B"])
