"""Counts and covariances written with functions of fixed shapes: torch's own read values to check them, or to size a result."""

from __future__ import annotations

import torch
from torch import Tensor


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Do as `torch.bincount` does for numbers below `minlength`; a larger one is an index out of range when the program runs."""
    if minlength == 0:
        counts: Tensor = torch.ops.aten.bincount.default(input, weights, minlength)  # whose length depends on values
        return counts
    if input.dim() != 1 or input.is_floating_point() or (weights is not None and weights.shape != input.shape):
        raise ValueError("bincount takes a row of integers, and as many weights")
    if weights is not None and weights.requires_grad and torch.is_grad_enabled():  # torch raises the same error
        raise NotImplementedError("torch does not differentiate bincount: use zeros(length).scatter_add(0, x, weights)")
    if weights is None:
        ones = torch.ones_like(input, dtype=torch.int64)
        return torch.zeros(minlength, dtype=torch.int64, device=input.device).scatter_add(0, input.long(), ones)
    amounts = weights.detach() if weights.dtype == torch.float32 else weights.detach().double()
    return torch.zeros(minlength, dtype=amounts.dtype, device=input.device).scatter_add(0, input.long(), amounts)


def cov(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """Do as `torch.cov` does, without its checks of the values of weights."""
    if input.dim() > 2 or input.dtype == torch.bool:
        raise ValueError("cov takes numbers in one or two dims")
    values = input.reshape(1, -1) if input.dim() < 2 else input
    count = values.shape[1]
    for weights, is_float in ((fweights, False), (aweights, True)):
        if weights is not None and (weights.shape != (count,) or weights.is_floating_point() != is_float):
            raise ValueError("cov takes a weight for each observation: fweights are integers, aweights are not")
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        centred = values - values.sum(1, keepdim=True) / count
        product = centred @ centred.mT.conj()
        return (product / max(0, count - correction)).squeeze()
    total = weights.sum()
    centred = values - (values * weights).sum(1, keepdim=True) / total
    product = centred @ (centred * weights).mT.conj()
    freed = correction if aweights is None else correction * (weights * aweights).sum() / total
    degrees = total - freed
    return (product / torch.where(degrees > 0, degrees, 0)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Do as `torch.corrcoef` does."""
    covariances = cov(input)
    if covariances.dim() == 0:
        return covariances / covariances
    variances = covariances.diagonal()
    deviations = (variances.real if variances.is_complex() else variances).sqrt()
    found = covariances / deviations[:, None] / deviations[None, :]
    if found.is_complex():
        return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))
    return found.clamp(-1, 1)
