"""What a planning of many seconds tells of itself while it runs."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]
"""Told the name of each phase as it begins: "capture", "fold", "fsdp+megatron", "solve"."""


def silent(phase: str) -> None:
    """Nobody listens."""
