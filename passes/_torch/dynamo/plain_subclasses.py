"""Let AOTAutograd run what it compiled on subclasses of tensors that no dispatch is needed for."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo  # imported before AOTAutograd, which dynamo imports in turn
from torch._functorch._aot_autograd import runtime_wrappers

from passes._torch.patches import once


def allow_in_compiled_code(subclass: type[torch.Tensor]) -> None:
    """Let compiled functions take tensors of `subclass`, which changes nothing below `__torch_function__`.

    AOTAutograd traces such tensors as plain ones, but a check of custom operators, in the first run of what was compiled,
    knows the types of torch alone, and fails for others.
    """
    once(f"{subclass.__name__} in compiled code", lambda: _add(subclass))


def _add(subclass: type[torch.Tensor]) -> None:
    checks: Any = runtime_wrappers
    checks.HANDLED_TYPES = (*checks.HANDLED_TYPES, subclass)
