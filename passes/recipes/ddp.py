"""Replicate parameters, split the batch, and sum gradients: PyTorch's DistributedDataParallel (Li et al. 2020)."""

from __future__ import annotations

from passes.recipes.recipe import Recipe

DDP = Recipe("ddp", "the batch is split, parameters are whole on every rank, gradients are summed", carries_batch=True)
