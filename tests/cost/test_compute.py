"""What kernels cost: operations counted, the roofline, published rates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.cost.kernel_time import (
    PRODUCT,
    Attended,
    Product,
    attention_seconds,
    kernel_bytes,
    kernel_flops,
    kernel_seconds,
    product_seconds,
    region_seconds,
)
from passes.hardware.hardware import Hardware, hardware_named
from passes.ir.call import Call, Tensor

aten = torch.ops.aten
H100, H200, A100 = (replace(hardware_named(name), spread=0.0) for name in ("h100", "h200", "a100"))  # one typical device


def call(op: Any, *args: Any, **kwargs: Any) -> Call:
    """Return the call of an op on meta tensors, for (shape, dtype) pairs or shapes of bf16."""

    def tensor(value: Any) -> Any:
        return torch.empty(value, dtype=torch.bfloat16, device="meta") if isinstance(value, tuple) else value

    def abstract(value: Any) -> Any:
        return Tensor(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value

    args = tuple(map(tensor, args))
    made = op(*args, **kwargs)
    results = tuple(map(abstract, made if isinstance(made, tuple) else (made,)))
    return Call(op, tuple(map(abstract, args)), kwargs, tuple(r for r in results if isinstance(r, Tensor)))


def attention(
    query: tuple[int, ...], key: tuple[int, ...], *, is_causal: bool = False, backward: bool = False
) -> Call:
    q, k, stats = Tensor(query, torch.bfloat16), Tensor(key, torch.bfloat16), Tensor(query[:3], torch.float32)
    if backward:
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return Call(op, (q, q, k, k, q, stats, 0.0, is_causal), {}, (q, k, k))
    return Call(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, k, 0.0, is_causal), {}, (q, stats))


@pytest.mark.parametrize(
    ("made", "flops"),
    [
        (call(aten.mm.default, (3, 5), (5, 7)), 2 * 3 * 5 * 7),
        (call(aten.addmm.default, (7,), (3, 5), (5, 7)), 2 * 3 * 5 * 7),
        (call(aten.bmm.default, (2, 3, 5), (2, 5, 7)), 2 * 2 * 3 * 5 * 7),
        (call(aten.baddbmm.default, (2, 3, 7), (2, 3, 5), (2, 5, 7)), 2 * 2 * 3 * 5 * 7),
        (call(aten.linear.default, (2, 3, 5), (7, 5)), 2 * 2 * 3 * 5 * 7),
        (call(aten.mv.default, (3, 5), (5,)), 2 * 3 * 5),
        (call(aten.dot.default, (5,), (5,)), 2 * 5),
        (call(aten.add.Tensor, (3, 5), (3, 5)), 0),
        (attention((2, 4, 10, 8), (2, 4, 6, 8)), 4 * 2 * 4 * 10 * 6 * 8),
        (attention((2, 4, 10, 8), (2, 4, 10, 8), is_causal=True), 4 * 2 * 4 * 55 * 8),
        (attention((2, 4, 10, 8), (2, 2, 10, 8), is_causal=True, backward=True), 10 * 2 * 4 * 55 * 8),
    ],
)
def test_operations_of_a_kernel(made: Call, flops: float) -> None:
    assert kernel_flops(made) == flops


CONVOLUTIONS = [
    ((2, 6, 9, 9), (4, 6, 3, 3), False, 1),
    ((2, 6, 9, 9), (4, 3, 3, 3), False, 2),
    ((2, 6, 5, 5), (6, 4, 3, 3), True, 1),
]


@pytest.mark.parametrize(("value", "weight", "transposed", "groups"), CONVOLUTIONS)
def test_operations_of_a_convolution(
    value: tuple[int, ...], weight: tuple[int, ...], transposed: bool, groups: int
) -> None:
    settings = (None, [2, 2], [1, 1], [1, 1], transposed, [0, 0], groups)
    forward = call(aten.convolution.default, value, weight, *settings)
    positions = value if transposed else forward.result.shape  # each meets every element of the kernel once
    assert kernel_flops(forward) == 2 * positions[0] * math.prod(positions[2:]) * math.prod(weight)
    gradient = forward.result.shape
    mask = [True, True, False]
    backward = call(aten.convolution_backward.default, gradient, value, weight, None, *settings[1:], mask)
    assert kernel_flops(backward) == 2 * kernel_flops(forward)


def test_large_products_reach_what_is_published() -> None:
    cube = Product(1, 8192, 8192, 8192)
    nbytes = 3 * 8192 * 8192 * 2.0
    rate = cube.flops / product_seconds(cube, nbytes, "bf16", H200)
    assert 0.98 * 769e12 < rate < 798e12, "measured on one H200"
    assert 0.70 < cube.flops / product_seconds(cube, nbytes, "bf16", H100) / 989e12 < 0.80


def test_small_products_reach_less() -> None:
    def reached(m: int, n: int, k: int) -> float:
        product = Product(1, m, n, k)
        return product.flops / product_seconds(product, 2.0 * (m * n + n * k + m * k), "bf16", H100) / H100.rate("bf16")

    assert reached(16384, 4096, 14336) > reached(16384, 4096, 512) > reached(1024, 1024, 4096) > reached(128, 128, 128)
    assert reached(1024, 1024, 2048) < 0.4, "64 squares of 128 for 132 units"


# What cuBLAS reaches in TFLOP/s: batch, m, n, k. H100: xla/service/gpu/model/matmul_interpolator_data.h in openxla/xla, bf16.
# A100: ND A100 v4 in Azure/AI-benchmarking-guide, f16.
PRODUCTS = {
    H100: (
        (1, 4096, 4096, 4096, 783), (2, 4096, 4096, 4096, 808), (4, 4096, 2048, 4096, 809), (1, 4096, 4096, 2048, 739),
        (1, 4096, 4096, 512, 543), (1, 4096, 4096, 256, 392), (1, 4096, 1024, 4096, 738), (1, 4096, 512, 4096, 650),
        (1, 4096, 1024, 1024, 488), (1, 2048, 2048, 2048, 632), (4, 2048, 2048, 2048, 726), (1, 2048, 4096, 1024, 594),
        (1, 1024, 2048, 2048, 524), (1, 1024, 1024, 2048, 350), (1, 2048, 512, 2048, 348), (1, 4096, 2048, 256, 304),
        (1, 4096, 2048, 512, 447), (1, 4096, 512, 512, 239), (1, 4096, 256, 2048, 305), (1, 2048, 256, 4096, 307),
        (1, 512, 512, 2048, 115), (4, 4096, 256, 2048, 589), (2, 1024, 4096, 1024, 597), (4, 1024, 4096, 1024, 675),
        (4, 4096, 4096, 512, 620), (4, 4096, 4096, 256, 504), (1, 256, 4096, 4096, 412), (1, 1024, 2048, 256, 140),
        (1, 256, 256, 2048, 31),
    ),
    A100: (
        (1, 1024, 1024, 1024, 119), (1, 2048, 2048, 2048, 222), (1, 4096, 4096, 4096, 228), (1, 8192, 8192, 8192, 254),
        (1, 16384, 16384, 16384, 257), (1, 6144, 12288, 12288, 251), (1, 802816, 192, 768, 158),
    ),
}  # fmt: skip


@pytest.mark.parametrize("machine", PRODUCTS, ids=lambda machine: machine.name)
def test_products_reach_what_is_published(machine: Hardware) -> None:
    off = []
    for batch, m, n, k, rate in PRODUCTS[machine]:
        product = Product(batch, m, n, k)
        seconds = product_seconds(product, 2.0 * batch * (m * n + n * k + m * k), "bf16", machine)
        off.append(abs(math.log(product.flops / seconds / (rate * 1e12))))
    assert sum(off) / len(off) < 0.11 and max(off) < 0.35


# What FlashAttention-2 reaches on an H100 with 128 dims, in TFLOP/s: Shah et al. 2024, "FlashAttention-3", figures 5 and 6.
ATTENTIONS = [
    (512, True, False, 191), (1024, True, False, 260), (2048, True, False, 298), (4096, True, False, 319),
    (8192, True, False, 333), (16384, True, False, 335), (512, False, False, 309), (1024, False, False, 350),
    (4096, False, False, 368), (16384, False, False, 370), (1024, False, True, 260), (4096, False, True, 310),
    (16384, False, True, 322),
]  # fmt: skip


@pytest.mark.parametrize(("length", "is_causal", "backward", "rate"), ATTENTIONS)
def test_attention_reaches_what_is_published(length: int, is_causal: bool, backward: bool, rate: float) -> None:
    shape = (16384 // length, 16, length, 128)
    made = attention(shape, shape, is_causal=is_causal, backward=backward)
    assert kernel_flops(made) / kernel_seconds(made, H100) == pytest.approx(rate * 1e12, rel=0.11)


def test_attention_of_narrow_heads_reaches_less() -> None:
    wide, narrow = ((2, 16, 8192, width) for width in (128, 64))
    rates = [kernel_flops(made) / kernel_seconds(made, H100) for made in (attention(wide, wide), attention(narrow, narrow))]
    assert rates[1] / rates[0] == pytest.approx(0.90, rel=0.02), "Shah et al. 2024, figure 6"


def test_a_product_with_a_vector_takes_the_time_to_read_the_matrix() -> None:
    made = call(aten.mm.default, (1, 16384), (16384, 16384))
    assert kernel_seconds(made, H100) == pytest.approx(16384 * 16384 * 2 / H100.memory_bandwidth, rel=0.05)


def test_f32_runs_at_the_rate_of_f32() -> None:
    cube = Product(1, 4096, 4096, 4096)
    assert product_seconds(cube, 0.0, "f32", H100) > 10 * product_seconds(cube, 0.0, "bf16", H100)


def test_long_attention_is_a_product_and_short_attention_is_not() -> None:
    long = attention((2, 8, 8192, 128), (2, 8, 8192, 128), is_causal=True)
    peak = H100.rate("bf16") * H100.attention
    assert 0.8 * peak < kernel_flops(long) / kernel_seconds(long, H100) < peak
    short = attention((1, 1, 64, 128), (1, 1, 64, 128))
    assert kernel_flops(short) / kernel_seconds(short, H100) < peak / 100
    many, few = (attention_seconds(Attended(rows, 128, 1024), 1e12, 0.0, "bf16", H100) for rows in (1 << 20, 1 << 10))
    assert many < few


def test_views_are_free() -> None:
    assert kernel_seconds(call(aten.view.default, (4, 6), [24]), H100) == 0.0
    assert kernel_seconds(call(aten.t.default, (4, 6)), H100) == 0.0
    assert kernel_seconds(call(aten.clone.default, (4, 6)), H100) > 0.0


def test_a_look_up_reads_what_it_takes_of_the_table() -> None:
    table, index = Tensor((100_000, 64), torch.float32), Tensor((8,), torch.int64)
    made = Call(aten.embedding.default, (table, index), {}, (Tensor((8, 64), torch.float32),))
    assert kernel_bytes(made) == 2 * 8 * 64 * 4 + 8 * 8


def test_ranks_wait_for_the_slowest_device() -> None:
    cube, long = Product(1, 8192, 8192, 8192), attention((2, 8, 8192, 128), (2, 8, 8192, 128))
    slowest = replace(H100, spread=0.1)
    for alone, waited in (
        (product_seconds(cube, 0.0, "bf16", H100), product_seconds(cube, 0.0, "bf16", slowest)),
        (kernel_seconds(long, H100), kernel_seconds(long, slowest)),
    ):
        assert waited - H100.launch == pytest.approx(1.1 * (alone - H100.launch))
    assert region_seconds(0.0, 1e9, slowest) == region_seconds(0.0, 1e9, H100), "memory's clock is the same on all"


@settings(deadline=None)
@given(
    st.tuples(*[st.integers(1, 10_000)] * 4), st.tuples(*[st.integers(0, 1000)] * 4), st.sampled_from(["bf16", "f32"])
)
def test_a_larger_product_takes_no_less(shape: tuple[int, ...], more: tuple[int, ...], dtype: str) -> None:
    small, large = Product(*shape), Product(*(a + b for a, b in zip(shape, more, strict=True)))
    assert product_seconds(small, 0.0, dtype, H100) <= product_seconds(large, 0.0, dtype, H100)
    at_best = small.flops / H100.rate(dtype)
    assert product_seconds(small, 0.0, dtype, H100) >= at_best + H100.launch


@settings(deadline=None)
@given(st.integers(0, 1 << 40), st.sampled_from(["h100", "a100", "cpu"]).map(hardware_named))
def test_a_region_takes_its_launch_and_its_bytes(nbytes: int, machine: Hardware) -> None:
    seconds = region_seconds(0.0, nbytes, machine)
    assert seconds == pytest.approx(machine.launch + nbytes / machine.memory_bandwidth)


def test_the_formula_of_a_product_can_be_read() -> None:
    assert str(PRODUCT) == "launch + Max(D/c, (2*K + 3*t)*(G*(M + t/8)*(N + t/8) + 3*t**2*u/10)/(e*f))"
