"""Functions of torch that compute each row of a selection by itself, by name, and what their arguments say of dims.

The lists are closed: a function that is not in one of them has its selection refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

POINTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "addcdiv", "addcmul", "and_", "asin", "asinh", "atan", "atan2", "atanh",
        "bfloat16", "bool", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clip", "clone", "contiguous",
        "copysign", "cos", "cosh", "detach", "digamma", "div", "divide", "double", "elu", "eq", "erf", "erfc", "erfinv",
        "exp", "exp2", "expm1", "float", "floor", "floor_divide", "fmax", "fmin", "frac", "full_like", "ge", "gelu",
        "greater", "greater_equal", "gt", "half", "hardsigmoid", "hardswish", "hardtanh", "heaviside", "hypot", "int",
        "invert", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "le", "leaky_relu", "lerp", "less",
        "less_equal", "lgamma", "log", "log10", "log1p", "log2", "logaddexp", "logical_and", "logical_not",
        "logical_or", "logical_xor", "logit", "logsigmoid", "long", "lt", "masked_fill", "maximum", "minimum", "mish",
        "mod", "mul", "multiply", "nan_to_num", "ne", "neg", "negative", "not_equal", "ones_like", "or_", "positive",
        "pow", "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt", "selu", "sgn", "sigmoid", "sign", "silu",
        "sin", "sinc", "sinh", "softplus", "softshrink", "softsign", "sqrt", "square", "sub", "subtract", "tan", "tanh",
        "tanhshrink", "threshold", "to", "true_divide", "truediv", "trunc", "type_as", "where", "xlogy", "xor",
        "zeros_like"
    }
)
COUNTED = frozenset({"add", "sub", "mul", "truediv", "div"})  # which take the number of rows as a tensor
RELABELS = frozenset({"unsqueeze", "t", "transpose", "permute", "movedim", "swapaxes", "swapdims"})
SHAPES = frozenset({"view", "reshape", "flatten", "unflatten"})
NORMS = {"layer_norm": "normalized_shape", "rms_norm": "normalized_shape"}
SUMS = frozenset({"sum", "mean"})

# Functions that mix the elements of the dims that they are given: the place of these among the arguments, and the default.
ALONG: dict[str, tuple[int, Any]] = {
    "softmax": (1, None),
    "log_softmax": (1, None),
    "amax": (1, None),
    "amin": (1, None),
    "argmax": (1, None),
    "argmin": (1, None),
    "max": (1, None),
    "min": (1, None),
    "all": (1, None),
    "any": (1, None),
    "cumsum": (1, None),
    "squeeze": (1, None),
    "chunk": (2, 0),
    "split": (2, 0),
    "glu": (1, -1),
    "normalize": (2, 1),
    "cosine_similarity": (2, 1),
    "prod": (1, None),
    "var": (1, None),
    "std": (1, None),
    "sort": (1, -1),
    "argsort": (1, -1),
    "topk": (2, -1),
}

# Losses of pairs of elements: the result of reduction="none" has an element for each.
LOSSES: dict[Callable[..., Any], str] = {
    getattr(F, name): name
    for name in (
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "soft_margin_loss",
        "poisson_nll_loss",
        "kl_div",
    )
}
CLASS_LOSSES = {F.cross_entropy: "cross_entropy", F.nll_loss: "nll_loss"}
_LISTED = POINTWISE | RELABELS | SHAPES | SUMS | set(NORMS) | set(ALONG)
_OTHERS = {"getitem", "matmul", "linear", "embedding", "one_hot", "gather", "dropout", "cat"}


def _functions() -> dict[Any, str]:
    """Return the names of all listed functions by the object that a graph calls."""
    places = (operator, torch, F)
    return {getattr(place, name): name for place in places for name in _LISTED | _OTHERS if hasattr(place, name)}


FUNCTIONS = _functions()


def name_of_call(node: Node) -> str | None:
    """Return the name of the listed function or method that a node calls; None if it is none of them, or writes in place."""
    name = node.target if node.op == "call_method" else FUNCTIONS.get(node.target)
    if not isinstance(name, str) or name not in _LISTED | _OTHERS or node.kwargs.get("out") is not None:
        return None
    return None if node.kwargs.get("inplace") else name
