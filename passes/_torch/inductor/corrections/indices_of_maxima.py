"""Indices of maxima and minima over several dims: Inductor counts elements in the order of its loops.

`argmax()` without a dim counts elements in the order of the tensor. Inductor counts so only where it knows, before it chooses
the order of loops, that memory is in another one. It does not know that of a tensor it has yet to compute, as
`y.sin().t().contiguous()`: its loops take the order of what they read, and the index is that of another element. Of
https://github.com/pytorch/pytorch/issues/183082, torch has mended what is in memory.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import lowering
from torch._inductor.ir import PermuteView, TensorBox

from passes._torch.inductor.corrections.correction import Correction

_REDUCTION: Any = lowering._make_reduction_inner


def _counted_in_order(x: Any, *, reduction_type: str | None = None, **kwargs: Any) -> Any:
    if reduction_type is not None and reduction_type.startswith(("argmax", "argmin")):
        x = TensorBox(PermuteView(data=x.data, dims=list(range(len(x.get_size())))))  # of a permuted one, it counts always
    return _REDUCTION(x, reduction_type=reduction_type, **kwargs)


INDICES_OF_MAXIMA = Correction(lowering, "_make_reduction_inner", _counted_in_order)
