"""Keep buffers that a backward needs as its forward read them.

Between a forward and its backward, another call may write the buffer: a batch norm reads its averages in evaluation, and
writes them in training. The buffer is copied when that happens, as it seldom does.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from weakref import WeakSet

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from passes.errors import UserError

_SAVED: MutableMapping[torch.Tensor, WeakSet[SavedBuffer]] = WeakTensorKeyDictionary()  # those that no call has written


class SavedBuffer:
    """A buffer, by its name, that a backward needs."""

    def __init__(self, name: str, buffer: torch.Tensor) -> None:
        self._name, self._value, self._version = name, buffer, buffer._version
        _SAVED.setdefault(buffer, WeakSet()).add(self)

    def keep(self, copy: torch.Tensor) -> None:
        """Take `copy` for the buffer, which is about to be written, unless it was changed before."""
        if self._value._version == self._version:
            self._value, self._version = copy, copy._version

    def read(self) -> torch.Tensor:
        """Return the buffer as it was. Raises UserError if it was changed other than by a call."""
        if self._value._version != self._version:
            raise UserError(
                f"buffer {self._name!r} was changed in place between a forward and its backward, which needs it as it was; "
                "change it after the backward"
            )
        return self._value


def write_buffer(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Give a buffer a new value; what a backward needs of it stays."""
    saved = _SAVED.pop(buffer, None)
    if saved:
        copy = buffer.clone()
        for one in saved:
            one.keep(copy)
    buffer.copy_(value)
