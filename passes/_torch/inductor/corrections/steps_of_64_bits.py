"""Rows of numbers whose step is large: on CPUs, Inductor multiplies steps in 32 bits.

`torch.arange(40) * 10**9` is written as vectors of 64-bit integers from a first number and a step. The C++ compiler takes a
step that fits into 32 bits for an integer of 32 bits, and its products with 0 to 7 as well, though they may not fit: the
numbers are others (https://github.com/pytorch/pytorch/issues/175966).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.codegen.cpp import CppVecKernel

from passes._torch.inductor.corrections.correction import Correction

_ARANGE = CppVecKernel.arange


def _arange(kernel: CppVecKernel, index: Any, stride: Any) -> Any:
    written: Any = f"static_cast<int64_t>({stride})" if index.dtype == torch.int64 else stride
    return _ARANGE(kernel, index, written)


STEPS_OF_64_BITS = Correction(CppVecKernel, "arange", _arange)
