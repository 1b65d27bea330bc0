"""One replacement of a part of Inductor that writes wrong code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from passes._torch.patches import replaced
from passes._torch.supported import release


@dataclass(frozen=True)
class Correction:
    """A function that stands for `owner.name` while a graph is compiled, on releases of torch before `repaired`, if it is."""

    owner: Any
    name: str
    function: Callable[..., Any]
    repaired: tuple[int, int] | None = None

    @property
    def is_needed(self) -> bool:
        """Return whether this torch has the fault."""
        return self.repaired is None or release() < self.repaired

    def replacing(self) -> AbstractContextManager[None]:
        """Replace torch's function in this thread until a block ends."""
        return replaced(self.owner, self.name, self.function)
