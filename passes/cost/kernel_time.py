"""Predict the seconds of a kernel: a roofline of arithmetic and memory, plus its launch.

A matrix product is computed in square tiles of `tile` x `tile` results, `units` of them at a time. On average it wastes half
a tile at each edge, half a tile of steps to fill the pipeline, and half a round of tiles at the end. So large products
reach the device's efficiency and small ones a part of it, without the steps that counting whole tiles would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import sympy
import torch

from passes._torch import OpOverload
from passes.hardware.hardware import Hardware
from passes.ir.text import DTYPE_NAMES
from passes.rules.rule import Call, Tensor

aten = torch.ops.aten

G, M, N, K = sympy.symbols("G M N K", positive=True)
F, D, f, c, e, t, u, launch = sympy.symbols("F D f c e t u launch", positive=True)

SYMBOLS = {
    G: "products in a batch",
    M: "rows of a product's result",
    N: "columns of a product's result",
    K: "terms summed for each result",
    F: "floating point operations",
    D: "bytes read and written",
    f: "FLOP/s, dense, for the operands' dtype",
    c: "bytes/s of memory, read and written together",
    e: "part of f that a kernel reaches on a large problem",
    t: "edge of the square of results that a unit makes at a time",
    u: "such squares made at once",
    launch: "seconds that every kernel takes beside its work",
}

ROOFLINE = sympy.Max(F / f, D / c) + launch
PRODUCT = sympy.Max(2 * (K + t / 2) * (G * (M + t / 2) * (N + t / 2) + u * t**2 / 2) / (f * e), D / c) + launch
ATTENTION = sympy.Max(F * (1 + u * t / (2 * G * M)) / (f * e), D / c) + launch  # a unit takes t query positions

# FLOPs of an attention backward per FLOP of its forward: five products for two, as FlashAttention computes the attention
# weights again, then the gradients of v, weights, q and k (Dao 2023, "FlashAttention-2", section 4.1).
BACKWARD_PRODUCTS = 2.5


def kernel_seconds(call: Call, hardware: Hardware) -> float:
    """Return the seconds of a call that runs as a kernel of its own, for its per-device shapes. A view takes 0."""
    if is_view(call.op):
        return 0.0
    nbytes = kernel_bytes(call)
    products = _products(call)
    if products:
        dtype = _dtype(call)
        # Several products, as the two of a convolution's backward, are as many kernels.
        return sum(product_seconds(product, nbytes / len(products), dtype, hardware) for product in products)
    if call.op in _ATTENTION:
        return attention_seconds(kernel_flops(call), nbytes, _query_rows(call), _dtype(call), hardware)
    return region_seconds(0.0, nbytes, hardware, _dtype(call))


def kernel_flops(call: Call) -> float:
    """Return the FLOPs of a product, convolution or attention; 0 for others, which memory bounds."""
    if call.op in _ATTENTION:
        return _attention_flops(call)
    return sum(product.flops for product in _products(call))


def kernel_bytes(call: Call) -> float:
    """Return the bytes that a call reads and writes; of a lookup table, only those that it reads."""
    written = sum(map(tensor_bytes, call.results))
    operands = call.operands
    if call.op in LOOKUPS:
        table, *others = operands
        return written + min(tensor_bytes(table), written) + sum(map(tensor_bytes, others))
    return written + sum(map(tensor_bytes, operands))


def tensor_bytes(tensor: Tensor) -> float:
    """Return the bytes of an operand or result of a call."""
    return float(math.prod(tensor.shape) * tensor.dtype.itemsize)


@dataclass(frozen=True)
class Product:
    """`batch` products of an [m, k] and a [k, n] matrix."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """Return its floating point operations: a multiplication and an addition per term."""
        return 2.0 * self.batch * self.m * self.n * self.k


@lru_cache(maxsize=1 << 14)
def product_seconds(product: Product, nbytes: float, dtype: str, hardware: Hardware) -> float:
    """Return the seconds of a kernel that multiplies matrices of `dtype` ("bf16") and moves `nbytes`."""
    shape = (product.batch, product.m, product.n, product.k)
    return float(_compiled("product")(*shape, product.flops, nbytes, *_figures(hardware, dtype, hardware.efficiency)))


def attention_seconds(flops: float, nbytes: float, rows: int, dtype: str, hardware: Hardware) -> float:
    """Return the seconds of a fused attention over `rows` query positions, counted over batch and heads."""
    shape = (1, rows, 1, 1)
    return float(_compiled("attention")(*shape, flops, nbytes, *_figures(hardware, dtype, hardware.attention)))


@lru_cache(maxsize=1 << 14)
def region_seconds(flops: float, nbytes: float, hardware: Hardware, dtype: str = "f32") -> float:
    """Return the seconds of one fused kernel that computes `flops` and reads and writes `nbytes`."""
    return float(_compiled("roofline")(1, 1, 1, 1, flops, nbytes, *_figures(hardware, dtype, 1.0)))


def _figures(hardware: Hardware, dtype: str, efficiency: float) -> tuple[float, ...]:
    """Return the values of the symbols after D, in order."""
    rate = hardware.rate(dtype)
    return rate, hardware.memory_bandwidth, efficiency, hardware.tile, hardware.units, hardware.launch


@cache
def _compiled(which: str) -> Callable[..., Any]:
    formula = {"roofline": ROOFLINE, "product": PRODUCT, "attention": ATTENTION}[which]
    compiled: Callable[..., Any] = sympy.lambdify(tuple(SYMBOLS), formula, "math")
    return compiled


def is_view(op: OpOverload) -> bool:
    """Return whether the op is a view: it moves no data."""
    return op.is_view or op is aten._unsafe_view.default


def _dtype(call: Call) -> str:
    """Return the dtype of the arithmetic: that of the first floating point operand, or result."""
    tensors = (*call.operands, *call.results)
    return next((DTYPE_NAMES[tensor.dtype] for tensor in tensors if tensor.dtype.is_floating_point), "f32")


LOOKUPS = frozenset({aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default})


# Products -------------------------------------------------------------------------------------------------------


def _products(call: Call) -> tuple[Product, ...]:
    """Return the matrix products that the call computes."""
    return _PRODUCTS[call.op](call) if call.op in _PRODUCTS else ()


def _matrices(first: int) -> Callable[[Call], tuple[Product, ...]]:
    """Return a function from a call to its product of two operands, [.., m, k] and [.., k, n], from `first` on."""

    def products(call: Call) -> tuple[Product, ...]:
        left, right = call.operands[first : first + 2]
        *batch, rows, terms = left.shape
        return (Product(math.prod(batch), rows, right.shape[-1], terms),)

    return products


def _vector(first: int) -> Callable[[Call], tuple[Product, ...]]:
    """Return a function from a call to its product of a matrix, operand `first`, and a vector."""
    def products(call: Call) -> tuple[Product, ...]:
        *rows, terms = call.operands[first].shape
        return (Product(1, math.prod(rows), 1, terms),)

    return products


def _linear(call: Call) -> tuple[Product, ...]:
    value, weight = call.operands[:2]
    return (Product(1, math.prod(value.shape[:-1]), weight.shape[0], weight.shape[1]),)


def _convolution(call: Call) -> tuple[Product, ...]:
    return (_convolved(call, call.operands[0], call.result),)


def _convolved(call: Call, value: Tensor, result: Tensor) -> Product:
    """Return a convolution as one product per group: positions x channels out x (channels in x kernel)."""
    weight, groups = call.arg("weight"), call.arg("groups")
    positions = value if call.arg("transposed") else result  # each is multiplied with the whole kernel
    into, outof = result.shape[1] // groups, value.shape[1] // groups
    rows = positions.shape[0] * math.prod(positions.shape[2:])
    return Product(groups, rows, into, outof * math.prod(weight.shape[2:]))


def _convolution_backward(call: Call) -> tuple[Product, ...]:
    """Return the products of both gradients: each is as large as the forward's."""
    gradient, value = call.arg("grad_output"), call.arg("input")
    forward = _convolved(call, value, gradient)
    of_input = Product(forward.batch, forward.m, forward.k, forward.n)
    of_weight = Product(forward.batch, forward.n, forward.k, forward.m)
    wanted = call.arg("output_mask")
    return tuple(product for product, is_wanted in zip((of_input, of_weight), wanted, strict=False) if is_wanted)


_PRODUCTS: dict[OpOverload, Callable[[Call], tuple[Product, ...]]] = {
    aten.mm.default: _matrices(0),
    aten.bmm.default: _matrices(0),
    aten.matmul.default: _matrices(0),
    aten.addmm.default: _matrices(1),
    aten.baddbmm.default: _matrices(1),
    aten.mv.default: _vector(0),
    aten.addmv.default: _vector(1),
    aten.dot.default: _vector(0),
    aten.linear.default: _linear,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}


# Attention ------------------------------------------------------------------------------------------------------


def _attention_flops(call: Call) -> float:
    query, key, value = (call.arg(name) for name in ("query", "key", "value"))
    pairs = _pairs(query.shape[-2], key.shape[-2], is_causal=bool(call.arg("is_causal")))
    forward = 2.0 * math.prod(query.shape[:-2]) * pairs * (query.shape[-1] + value.shape[-1])
    return float(forward * BACKWARD_PRODUCTS if call.op in _ATTENTION_BACKWARD else forward)


def _pairs(queries: int, keys: int, *, is_causal: bool) -> float:
    """Return the number of query-key pairs that are computed: if causal, query i attends to keys 0 to i.

    Fewer queries than keys are a part of as many as there are keys: all but half a square (`passes/rules/causal.py`).
    """
    if not is_causal:
        return float(queries * keys)
    seen = min(queries, keys)
    return seen * (seen + 1) / 2 + abs(queries - keys) * seen


def _query_rows(call: Call) -> int:
    query = call.arg("query")
    assert isinstance(query, Tensor)
    return math.prod(query.shape[:-1])


_ATTENTION_FORWARD = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        aten._scaled_dot_product_attention_math.default,
        aten.scaled_dot_product_attention.default,
    }
)
_ATTENTION_BACKWARD = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_fused_attention_overrideable_backward.default,
    }
)
_ATTENTION = _ATTENTION_FORWARD | _ATTENTION_BACKWARD
