"""Functions that dynamo traces in place of torch's own, which it cannot trace."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import trace_rules
from torch._dynamo.decorators import substitute_in_graph
from torch._dynamo.variables import UserFunctionVariable
from torch.backends import cudnn
from torch.distributions import Distribution, constraints, kl
from torch.nn.attention.flex_attention import AuxOutput, flex_attention
from torch.nn.modules import transformer
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from passes._torch.dynamo.equal_masks import masked_select
from passes._torch.operators.counts import bincount, corrcoef, cov
from passes._torch.operators.ctc import CTC_LOSS
from passes._torch.patches import once


def teach_dynamo() -> None:
    """Let dynamo trace the functions of this module in place of torch's."""
    once("functions in place of torch's", _substitute)
    _teach_distributions()
    _teach_divergences()


def _substitute() -> None:
    functions: tuple[tuple[Any, Any], ...] = (
        (checkpoint_sequential, _checkpoint_sequential),
        (F.ctc_loss, _ctc_loss),
        *((getattr(torch, name), traced) for name, traced in METHODS.items()),
        (cudnn.flags, _cudnn_flags),
        (flex_attention, _flex_attention),
        (transformer._detect_is_causal_mask, _detect_is_causal_mask),
    )
    for original, traced in functions:
        trace_rules.get_torch_obj_rule_map().pop(original, None)
        substitute_in_graph(original, skip_signature_check=True)(traced)


def _checkpoint_sequential(functions: Any, segments: int, input: Any, use_reentrant: Any = None, **kwargs: Any) -> Any:
    """Do as `torch.utils.checkpoint.checkpoint_sequential` does: checkpoint all segments but the last."""
    layers = list(functions.children()) if isinstance(functions, torch.nn.Sequential) else functions
    size = len(layers) // segments
    for start in range(0, size * (segments - 1), size):
        input = checkpoint(_run_layers, layers[start : start + size], input, use_reentrant=use_reentrant, **kwargs)
    return _run_layers(layers[size * (segments - 1) :], input)


def _run_layers(layers: Any, value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Do as `torch.nn.functional.ctc_loss` does, with an operator whose results have fixed shapes."""
    lengths = torch.as_tensor(target_lengths, device=log_probs.device).reshape(-1)
    times = torch.as_tensor(input_lengths, device=log_probs.device).reshape(-1)
    batch = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    losses: Tensor = CTC_LOSS(batch, targets, times, lengths, blank, zero_infinity)[0]
    if reduction == "mean":
        return (losses / lengths.to(losses.dtype).clamp(min=1)).mean()
    if reduction == "sum":
        return losses.sum()
    if reduction == "none":
        return losses if log_probs.dim() == 3 else losses.squeeze(0)
    raise ValueError(f"{reduction} is not a valid value for reduction")


# Functions of torch that are methods of tensors, too, by their name.
METHODS: dict[str, Callable[..., Tensor]] = {
    "masked_select": masked_select,
    "bincount": bincount,
    "cov": cov,
    "corrcoef": corrcoef,
}


def mask_not_compared() -> None:
    """Stand for the remark that a mask is taken as it is; a capture leaves its call out and says so."""


def _detect_is_causal_mask(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Take a mask for any one, unless `is_causal` says more: torch compares its values with those of a causal mask, so that
    attention may use a faster kernel.
    """
    if is_causal is None and mask is not None:
        mask_not_compared()
    return is_causal is True


def flex_attention_replaced() -> None:
    """Stand for the remark that another kernel is used; a capture leaves its call out and says so."""


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Do as `flex_attention` does, whose operator keeps graphs of its own: by another kernel with a mask of all pairs, or
    written out where `score_mod` changes scores.
    """
    flex_attention_replaced()
    places = [torch.arange(size, device=query.device) for size in (*query.shape[:3], key.size(2))]
    indices = [one.view([-1 if dim == place else 1 for dim in range(4)]) for place, one in enumerate(places)]
    mask = None if block_mask is None else block_mask.mask_mod(*indices)
    mask = mask if mask is None or mask.dim() == 4 else mask.expand(1, 1, query.size(2), key.size(2))
    repeats = query.size(1) // key.size(1) if enable_gqa else 1
    keys, values = (one.repeat_interleave(repeats, 1) if repeats > 1 else one for one in (key, value))
    scores = query @ keys.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    changed = scores if score_mod is None else score_mod(scores, *indices)
    masked = changed if mask is None else changed.masked_fill(mask.logical_not(), -torch.inf)
    if changed is scores:
        result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    elif mask is None:
        result = masked.softmax(-1) @ values
    else:
        result = masked.softmax(-1).masked_fill(mask.any(-1, keepdim=True).logical_not(), 0.0) @ values
    if return_lse:
        return result, masked.logsumexp(-1)
    if return_aux is not None:
        lse, largest = (masked.logsumexp(-1), masked.amax(-1))
        return result, AuxOutput(lse if return_aux.lse else None, largest if return_aux.max_scores else None)
    return result


def _cudnn_flags(*args: Any, **kwargs: Any) -> Any:
    """Leave out `torch.backends.cudnn.flags`, which chooses kernels and changes no values."""
    return nullcontext()


def _teach_distributions() -> None:
    """Let dynamo trace how distributions check their arguments; the checks are left out as others are.

    This is needed for each capture: `init_process_group` clears the map.
    """
    rules = trace_rules.get_torch_obj_rule_map()
    rules[constraints.is_dependent] = rules[F.gaussian_nll_loss] = UserFunctionVariable


def _teach_divergences() -> None:
    """Look up the formulas of `kl_divergence` for all classes there are: torch does so in the first call, and keeps them."""
    classes: list[type] = [Distribution]
    find: Any = kl._dispatch_kl
    for known in classes:
        classes += set(type.__subclasses__(known)) - set(classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes for which torch has two formulas
        for one, other in itertools.product(classes, repeat=2):
            if (one, other) not in kl._KL_MEMOIZE:
                kl._KL_MEMOIZE[one, other] = find(one, other)
