"""A cumulative sum from the end, which the gradient of a cumulative sum is, as one operator.

Torch reverses a dim, sums, and reverses it again: each reversal would exchange the parts of a sharded dim. This op exists until
a program is made local.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARIES: Any = torch.library  # not typed
_LIBRARY = _LIBRARIES.Library("autoshard", "FRAGMENT")
_LIBRARY.define("reversed_cumsum(Tensor self, int dim) -> Tensor")


def _reversed_cumsum(self: Tensor, dim: int) -> Tensor:
    return self.flip(dim).cumsum(dim).flip(dim)


for _key in ("CPU", "CUDA", "Meta"):
    _LIBRARY.impl("reversed_cumsum", _reversed_cumsum, _key)

REVERSED_CUMSUM = torch.ops.autoshard.reversed_cumsum.default
