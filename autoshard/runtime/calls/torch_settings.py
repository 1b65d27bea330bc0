"""Read the settings of torch that a program depends on."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from passes._torch import function_modes


def torch_settings() -> tuple[Hashable, ...]:
    """Return what a trace or Inductor decides by, apart from autocast.

    These are the dtype of new tensors, whether kernels have to be deterministic and how exact they multiply, which Inductor
    writes into its code, and which attention may be used, which a trace chooses; and modes that are asked at each function of
    torch. The default device is left out: a tensor on another device than the model's is an error on one device, too.
    """
    cuda = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.get_deterministic_debug_mode(),
        torch.get_float32_matmul_precision(),
        cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
        cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
        *function_modes(),
    )
