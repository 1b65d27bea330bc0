"""Predict the seconds of a kernel: a roofline of arithmetic and memory, plus its launch.

A matrix product is computed in square tiles of `tile` x `tile` results, `units` of them at a time. A tile takes its K terms,
and as long as 1.5 tiles of terms to fill the pipeline and to write its results. A library has kernels of several tiles and
takes the one that fits best, so that an eighth of a tile is wasted at each edge, and 0.3 of a round of tiles at the end. So
large products reach the device's efficiency and small ones a part of it, without the steps that counting whole tiles would
give. These parts are the least squares of what cuBLAS reaches on an H100 for 29 shapes from 256 to 4096
(xla/service/gpu/model/matmul_interpolator_data.h in openxla/xla): 10 % off on average, 38 % for the smallest; on an A100
(ND A100 v4 in Azure/AI-benchmarking-guide) 5 %, but for 192 columns. `tests/cost/test_compute.py` holds them to both.

A fused attention multiplies like a product; a unit takes a tile of queries. It takes as long as half a tile of keys to begin
and to write its results; if it is causal, as long as another tile, for the keys on the diagonal that no query attends to and
as units have unequal work. The softmax, which no tensor core computes, takes as long as 16 dims of a head. These figures are
those of FlashAttention-2 on an H100 from 512 to 16,384 positions (Shah et al. 2024, "FlashAttention-3", figures 5 and 6), to
6 %; it has 0.90 of the rate with 64 dims that it has with 128.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import sympy
import torch

from passes._torch import (
    ALIGNED_CONVOLUTION,
    ALIGNED_CONVOLUTION_INPUT,
    ALIGNED_CONVOLUTION_WEIGHT,
    OpOverload,
)
from passes.hardware.hardware import Hardware
from passes.ir.call import Call, Tensor
from passes.ir.text import DTYPE_NAMES

aten = torch.ops.aten

G, M, N, K = sympy.symbols("G M N K", positive=True)
F, D, f, c, e, t, u, launch = sympy.symbols("F D f c e t u launch", positive=True)
w, A, idle = sympy.symbols("w A idle", positive=True)

SYMBOLS = {
    G: "products in a batch",
    M: "rows of a product's result",
    N: "columns of a product's result",
    K: "terms summed for each result",
    w: "dims of a head",
    A: "keys that a query attends to, on average",
    idle: "keys that a unit could attend to while it begins, ends, and waits for others",
    F: "floating point operations",
    D: "bytes read and written",
    f: "FLOP/s, dense, for the operands' dtype",
    c: "bytes/s of memory, read and written together",
    e: "part of f that a kernel reaches on a large problem, on the slowest device",
    t: "edge of the square of results that a unit makes at a time",
    u: "such squares made at once",
    launch: "seconds that every kernel takes beside its work",
}

ROOFLINE = sympy.Max(F / f, D / c) + launch
FILL, EDGE, ROUND = 1.5, 0.125, 0.3  # tiles of terms, tiles at an edge, and rounds of tiles that a product wastes: see above
_fill, _edge, _round = (sympy.Rational(str(part)) for part in (FILL, EDGE, ROUND))
_squares = G * (M + _edge * t) * (N + _edge * t) + _round * u * t**2
PRODUCT = sympy.Max(2 * (K + _fill * t) * _squares / (f * e), D / c) + launch
SOFTMAX = 16  # dims of a head that take as long as the softmax
ATTENTION = sympy.Max(F * (1 + _round * u * t / (G * M)) * (1 + idle / A) * (1 + SOFTMAX / w) / (f * e), D / c) + launch

# FLOPs of an attention backward per FLOP of its forward: five products for two, as FlashAttention computes the attention
# weights again, then the gradients of v, weights, q and k (Dao 2023, "FlashAttention-2", section 4.1).
BACKWARD_PRODUCTS = 2.5
# The part of the forward's rate that the backward reaches: 318 of 370 TFLOP/s with 8,192 positions and 128 dims on an H100
# (Shah et al. 2024, figures 5 and 6), 0.63 and 0.73 of the rate of an A100 (Dao 2023).
BACKWARD_RATE = 0.86


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
        return attention_seconds(_attended(call), kernel_flops(call), nbytes, _dtype(call), hardware)
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
    shape = (product.batch, product.m, product.n, product.k, 1, 1, 1)
    return float(_compiled("product")(*shape, product.flops, nbytes, *_figures(hardware, dtype, hardware.efficiency)))


@dataclass(frozen=True)
class Attended:
    """Describe a fused attention: `rows` query positions, counted over batch and heads, of `width` dims each, that attend to
    `keys` others on average.
    """

    rows: int
    width: int
    keys: float
    causal: bool = False
    backward: bool = False


def attention_seconds(attended: Attended, flops: float, nbytes: float, dtype: str, hardware: Hardware) -> float:
    """Return the seconds of a fused attention that computes `flops`."""
    idle_keys = hardware.tile * (1.5 if attended.causal else 0.5)
    shape = (1, attended.rows, 1, 1, attended.width, attended.keys, idle_keys)
    efficiency = hardware.attention * (BACKWARD_RATE if attended.backward else 1.0)
    return float(_compiled("attention")(*shape, flops, nbytes, *_figures(hardware, dtype, efficiency)))


@lru_cache(maxsize=1 << 14)
def region_seconds(flops: float, nbytes: float, hardware: Hardware, dtype: str = "f32") -> float:
    """Return the seconds of one fused kernel that computes `flops` and reads and writes `nbytes`."""
    return float(_compiled("roofline")(1, 1, 1, 1, 1, 1, 1, flops, nbytes, *_figures(hardware, dtype, 1.0)))


def _figures(hardware: Hardware, dtype: str, efficiency: float) -> tuple[float, ...]:
    """Return the values of the symbols after D, in order, for the slowest device."""
    rate = hardware.rate(dtype)
    at_slowest = efficiency / (1 + hardware.spread)
    return rate, hardware.memory_bandwidth, at_slowest, hardware.tile, hardware.units, hardware.launch


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
    found = _PRODUCTS.get(call.op) or _NAMED_PRODUCTS.get(str(call.op))
    return found(call) if found is not None else ()


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
    return (_convolved(call, call.operands[0], call.result, is_transposed=call.arg("transposed")),)


def _aligned_convolution(call: Call) -> tuple[Product, ...]:
    return (_convolved(call, call.operands[0], call.result),)


def _aligned_convolution_input(call: Call) -> tuple[Product, ...]:
    forward = _convolved(call, call.result, call.arg("grad_output"))
    return (Product(forward.batch, forward.m, forward.k, forward.n),)


def _aligned_convolution_weight(call: Call) -> tuple[Product, ...]:
    forward = _convolved(call, call.arg("input"), call.arg("grad_output"))
    return (Product(forward.batch, forward.n, forward.k, forward.m),)


def _convolved(call: Call, value: Tensor, result: Tensor, *, is_transposed: bool = False) -> Product:
    """Return a convolution as one product per group: positions x channels out x (channels in x kernel)."""
    weight, groups = call.arg("weight"), call.arg("groups")
    positions = value if is_transposed else result  # each is multiplied with the whole kernel
    into, outof = result.shape[1] // groups, value.shape[1] // groups
    rows = positions.shape[0] * math.prod(positions.shape[2:])
    return Product(groups, rows, into, outof * math.prod(weight.shape[2:]))


def _convolution_backward(call: Call) -> tuple[Product, ...]:
    """Return the products of both gradients: each is as large as the forward's."""
    gradient, value = call.arg("grad_output"), call.arg("input")
    forward = _convolved(call, value, gradient, is_transposed=call.arg("transposed"))
    of_input = Product(forward.batch, forward.m, forward.k, forward.n)
    of_weight = Product(forward.batch, forward.n, forward.k, forward.m)
    wanted = call.arg("output_mask")
    return tuple(product for product, is_wanted in zip((of_input, of_weight), wanted, strict=False) if is_wanted)


def _per_expert(call: Call) -> tuple[Product, ...]:
    """Return a product of sorted rows with the matrices of their experts: each row is multiplied with one."""
    rows, matrices = call.operands[:2]
    return (Product(1, rows.shape[0], matrices.shape[2], rows.shape[1]),)


def _per_expert_backward(call: Call) -> tuple[Product, ...]:
    """Return the products of both gradients: each is as large as the forward's."""
    return _per_expert(call) * 2


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
    ALIGNED_CONVOLUTION: _aligned_convolution,
    ALIGNED_CONVOLUTION_INPUT: _aligned_convolution_input,
    ALIGNED_CONVOLUTION_WEIGHT: _aligned_convolution_weight,
}
_NAMED_PRODUCTS: dict[str, Callable[[Call], tuple[Product, ...]]] = {  # ops of libraries, defined when they are imported
    "transformers.grouped_mm_fallback.default": _per_expert,
    "transformers.grouped_mm_fallback_backward.default": _per_expert_backward,
}


# Attention ------------------------------------------------------------------------------------------------------


def _attention_flops(call: Call) -> float:
    query, key, value = (call.arg(name) for name in ("query", "key", "value"))
    pairs = _pairs(query.shape[-2], key.shape[-2], is_causal=bool(call.arg("is_causal")))
    forward = 2.0 * math.prod(query.shape[:-2]) * pairs * (query.shape[-1] + value.shape[-1])
    return float(forward * BACKWARD_PRODUCTS if call.op in _ATTENTION_BACKWARD else forward)


def _pairs(queries: int, keys: int, *, is_causal: bool) -> float:
    """Return the number of query-key pairs that are computed: if causal, query i attends to keys 0 to i."""
    if not is_causal:
        return float(queries * keys)
    seen = min(queries, keys)
    return seen * (seen + 1) / 2 + max(0, queries - keys) * keys


def _attended(call: Call) -> Attended:
    query, key = call.arg("query"), call.arg("key")
    assert isinstance(query, Tensor) and isinstance(key, Tensor)
    rows, queries, is_causal = math.prod(query.shape[:-1]), query.shape[-2], bool(call.arg("is_causal"))
    keys = max(1.0, _pairs(queries, key.shape[-2], is_causal=is_causal) / max(1, queries))
    return Attended(rows, query.shape[-1], keys, is_causal, backward=call.op in _ATTENTION_BACKWARD)


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
