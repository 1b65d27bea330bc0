"""Scatters out of tiles of two loops: with several threads, torch 2.13 adds rows to other places than their own.

On a CPU, Inductor takes 16 numbers of two loops at a time where values are read along both, as the gradient of an embedding
whose result is transposed. With more than one thread, it adds the results by an atomic operation, whose places torch 2.13
moves twice by the number of the inner loop: it adds to other rows, and behind the end of the tensor
(https://github.com/pytorch/pytorch/issues/191837). Torch 2.14 moves them once.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import config
from torch._inductor.codegen.cpp import CppTile2DKernel, CppVecKernel

from passes._torch.inductor.corrections.correction import Correction

_STORE: Any = CppTile2DKernel.store
_STORE_OF_ROWS: Any = CppVecKernel.store


def _store(kernel: Any, name: str, index: Any, value: Any, mode: str | None = None) -> None:
    is_atomic = mode == "atomic_add" and (config.cpp.dynamic_threads or kernel.num_threads != 1)
    if is_atomic and not kernel.need_vec_transpose(kernel.rename_indexing(index)):
        _STORE_OF_ROWS(kernel, name, index, value, mode)  # it moves the index itself
    else:
        _STORE(kernel, name, index, value, mode)


PLACES_OF_SCATTERS = Correction(CppTile2DKernel, "store", _store, repaired=(2, 14))
