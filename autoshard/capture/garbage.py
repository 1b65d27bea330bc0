"""Pause garbage collection while large graphs are built, since each collection would walk all live nodes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection in a `with` block: it would take a quarter of a capture of 40 layers, and half of an
    evaluation.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
