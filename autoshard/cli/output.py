"""Where a command saves what it found."""

from __future__ import annotations

from pathlib import Path

from passes.errors import UserError


def check_output(path: str | None) -> None:
    """Raise UserError, before the work is done, where its result could not be saved."""
    if path is not None and not Path(path).parent.is_dir():
        raise UserError(f"there is no folder {str(Path(path).parent)!r} to save {path} in; make it, or give another path")
