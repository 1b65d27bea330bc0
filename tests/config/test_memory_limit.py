"""Read memory limits of `Options`: numbers of bytes, and text with a unit."""

from __future__ import annotations

import pytest

from autoshard import Options, UserError


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


@pytest.mark.parametrize(
    "limit",
    [0, -1, 0.5, 10**400, float("inf"), float("nan"), True, "0GB", "0.1B", "-5GB", "60", "60Gb", "1 Gib"]
    + [f"{'9' * 400}GB", "9" * 5000],
)
def test_what_is_no_limit_is_refused(limit: float | str) -> None:
    with pytest.raises(UserError) as caught:
        Options(memory_limit=limit)
    assert str(caught.value) == f"Options(memory_limit={limit!r}): give bytes above 0, or text such as '60GB' or '60GiB'"
