"""PyTorch's structured trace (TORCH_TRACE)."""

from __future__ import annotations

from torch._logging._internal import trace_log, trace_structured_artifact


def trace_artifact(name: str, text: str) -> None:
    """Add `text` to PyTorch's structured trace (TORCH_TRACE), where `tlparse` shows it."""
    trace_structured_artifact(name, "string", lambda: text)


def is_traced() -> bool:
    """Return whether PyTorch's structured trace is enabled, which is known after the first artifact."""
    return bool(trace_log.handlers)
