"""Say at which line of the user's code a thread is."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

_ROOT = Path(__file__).parents[3]
_INNER = tuple(
    f"{folder}/"
    for folder in (_ROOT / "autoshard", _ROOT / "passes", Path(torch.__file__).parent, sysconfig.get_path("stdlib"))
)
_INSTALLED = sysconfig.get_path("purelib")  # inside of the standard library's folder, and no part of it


def user_line(thread: int) -> str:
    """Return "train.py:45 in evaluate" for the innermost line outside of torch, autoshard and the standard library;
    empty if there is none.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None and _is_inner(frame):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_inner(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith("<"):
        return True
    return file.startswith(_INNER[:3]) or (file.startswith(_INNER[3]) and not file.startswith(_INSTALLED))
