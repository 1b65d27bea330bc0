"""Price the operators that send rows of one rank while they multiply those of another.

The model follows `_pipelined_multi_all_gather_and_consume` and `_pipelined_produce_and_all2all` of
torch/distributed/_symmetric_memory/__init__.py. On k ranks, let the product of one rank's rows take P seconds, and their
transfer over the link L seconds:

- a gather copies its part to memory that the others can read, and synchronizes; then it multiplies that part while the next
  one arrives, and so on: max(k P, (k - 1) L + P). It synchronizes three times in all;
- a reduce-scatter computes the parts of the others, synchronizes twice for each, and sends one while it computes the next;
  its own part comes last: max(k P, (k - 1) L + P, (k - 1) P + L), with the barriers in L. A kernel then adds the terms.

Two copies never overlap, and two products are no faster at the same time than one after another. A product beside a copy is
slowed down by `COPY_CONTENTION`. A barrier takes a kernel's launch and one step of the link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from passes._torch import ALL_GATHER_MATMUL
from passes.cost.contention import Contention
from passes.cost.kernel_time import Product, product_seconds, region_seconds, tensor_bytes
from passes.hardware.hardware import Hardware
from passes.ir.call import Call, Tensor
from passes.ir.text import DTYPE_NAMES

# The part of a link's bandwidth that a copy of another device's memory reaches while others copy from this one: 672 of 900
# GB/s on ND H100 v5, 423 of 600 on ND A100 v4, 1,530 of 1,800 on ND GB200 v6 (Azure/AI-benchmarking-guide, device to device).
COPY_RATE = 0.75
# A product beside a copy: copy engines take memory's bandwidth and no units, so it is slowed down less than beside a
# collective. With contention c, hiding a message saves 1 / (1 + c) of its time; engines save 0.72 of it on average: products
# beside all-gathers and all-to-alls, arXiv 2412.14335.
COPY_CONTENTION = 0.39


@dataclass(frozen=True)
class Pipelined:
    """The seconds of an operator, and the bytes that it needs while it runs."""

    seconds: float
    sending: float  # of these, seconds in which the link is in use
    waiting: float  # of those, seconds in which nothing is computed
    flops: float
    nbytes: float  # sent or received, all ranks' together
    workspace: int


def pipelined(call: Call, hardware: Hardware) -> Pipelined:
    """Return the price of a call of one of the two operators, for ranks in one node."""
    if call.op is ALL_GATHER_MATMUL:
        part, others, dim, keep, ranks, _ = call.args
        return _gather(part, others, ranks, hardware, is_moved=dim > 0, keep=keep)
    rows, other, _, dim, ranks, _ = call.args
    return _reduction(rows, other, ranks, hardware, is_moved=dim > 0)


def _gather(
    part: Tensor, others: Sequence[Tensor], ranks: int, hardware: Hardware, *, is_moved: bool, keep: bool
) -> Pipelined:
    width = part.shape[-1]
    sent = tensor_bytes(part)
    products = [Product(1, math.prod(part.shape[:-1]), other.shape[1], width) for other in others]
    product = sum(_product(one, part, hardware) for one in products)
    link = _copy(sent, hardware)
    copies = (2 if is_moved else 1) * region_seconds(0.0, 2 * sent, hardware)  # into rows, and to shared memory
    beside = _beside((ranks - 1) * product, (ranks - 1) * link, hardware)
    seconds = copies + 3 * _barrier(hardware) + max(product + beside, (ranks - 1) * link + product)
    workspace = sent + (0 if keep else ranks * sent)
    flops = ranks * sum(one.flops for one in products)
    return _pipelined(seconds, (ranks - 1) * link, product + beside + copies, flops, ranks * sent, workspace)


def _reduction(rows: Tensor, other: Tensor, ranks: int, hardware: Hardware, *, is_moved: bool) -> Pipelined:
    count, width = math.prod(rows.shape[:-1]) // ranks, other.shape[1]
    one = Product(1, count, width, rows.shape[-1])
    sent = float(count * width * rows.dtype.itemsize)
    product = _product(one, rows, hardware)
    link = _copy(sent, hardware) + 2 * _barrier(hardware)
    around = region_seconds(0.0, 2 * tensor_bytes(rows), hardware) if is_moved else 0.0
    around += region_seconds(0.0, (ranks + 1) * sent, hardware)
    beside = _beside((ranks - 1) * product, (ranks - 1) * link, hardware)
    pipeline = max(product + beside, (ranks - 1) * link + product, beside + link)
    seconds = around + 2 * _barrier(hardware) + pipeline
    workspace = (ranks + 2) * sent + (tensor_bytes(rows) if is_moved else 0)
    return _pipelined(
        seconds, (ranks - 1) * link, product + beside + around, ranks * one.flops, ranks * sent, workspace
    )


def _pipelined(
    seconds: float, sending: float, computing: float, flops: float, nbytes: float, workspace: float
) -> Pipelined:
    waiting = seconds - computing
    return Pipelined(seconds, max(sending, waiting), waiting, flops, nbytes, int(workspace))


def _product(one: Product, like: Tensor, hardware: Hardware) -> float:
    nbytes = float((one.m * one.k + one.k * one.n + one.m * one.n) * like.dtype.itemsize)
    return product_seconds(one, nbytes, DTYPE_NAMES[like.dtype], hardware)


def _copy(nbytes: float, hardware: Hardware) -> float:
    return nbytes / (COPY_RATE * hardware.inside.bandwidth) + hardware.inside.latency


def _beside(products: float, copies: float, hardware: Hardware) -> float:
    """Return the seconds of `products` while links are in use for `copies` seconds."""
    return Contention(min(hardware.contention, COPY_CONTENTION)).kernel_end(0.0, products, copies)


def _barrier(hardware: Hardware) -> float:
    return hardware.launch + hardware.inside.latency
