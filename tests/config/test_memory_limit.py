"""Read memory limits of `Options`: numbers of bytes, and text with a unit."""

from __future__ import annotations

import pytest

from autoshard import Options


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, 90),
        (1e9, 10**9),
        (64 << 30, 64 << 30),
        ("60GB", 60 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("60gb", 60 * 10**9),
        ("2kib", 2 << 10),
        ("512B", 512),
    ],
)
def test_a_limit_is_read_as_bytes(limit: float | str | None, expected: int) -> None:
    assert Options(memory_limit=limit).memory_bytes(100) == expected
