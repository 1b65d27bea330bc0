"""Report the progress of planning, which may take many seconds."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]
"""Called with the name of each phase as it begins: "capture", "fold", "fsdp+megatron", "solve"."""


def silent(phase: str) -> None:
    """Report nothing."""
