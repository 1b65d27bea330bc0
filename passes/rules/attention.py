"""Sharding rules of scaled dot product attention, forward and backward, in every form that ATen has.

All forms share one index space: batch `b`, key heads `k`, query heads per key head `g`, query positions `s`, key
positions `t`, and head dims `e` and `v`. Batch and heads are independent. Query positions are too; the gradients of keys
and values are sums over them. Sharded queries of causal attention have a local form (`causal`, and `position_masks` beside a
mask or with keys of another length), and so do keys and values that are sharded with the queries (`ring`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from passes.ir.call import Call, Tensor
from passes.rules.local_forms.attention_pieces import has_argument, is_masked, runs_in_blocks
from passes.rules.local_forms.causal import causal_backward, causal_forward
from passes.rules.local_forms.position_masks import masked_by_positions
from passes.rules.local_forms.ring import ring_backward, ring_forward
from passes.rules.rule import Dims, Linear, LocalCall, Space, register

aten = torch.ops.aten

QUERIES, KEYS = "s", "t"  # the factors of positions
COLUMNS = "column"  # that of a mask with one row for all queries
_QUERY: Dims = (("b",), ("k", "g"), ("s",), ("e",))
_KEY: Dims = (("b",), ("k",), ("t",), ("e",))
_VALUE: Dims = (("b",), ("k",), ("t",), ("v",))
_OUT: Dims = (("b",), ("k", "g"), ("s",), ("v",))
_WEIGHTS: Dims = (("b",), ("k", "g"), ("s",), ("t",))
_BLOCKED = frozenset({"t", "e", "v"})

EFFICIENT_TILE = 32  # rows: the memory-efficient kernel pads its logsumexp to it (kAlignLSE in kernel_forward.h)


def is_attention(op: object) -> bool:
    """Return whether `op` is the forward of an attention."""
    return op in _FORWARD


def is_attention_backward(op: object) -> bool:
    """Return whether `op` is the backward of an attention."""
    return op in _BACKWARD


def operand_names(call: Call) -> tuple[str, ...]:
    """Return the names of the tensor operands of a call of attention, in the order of `operands`."""
    return tuple(name for name, _ in _named_operands(call))


@dataclass(frozen=True)
class _Factors:
    """Sizes of a call's factors, and the factors of its named tensors."""

    sizes: dict[str, int]
    named: dict[str, Dims]
    blocked: set[str]

    def of(self, name: str, tensor: Tensor) -> Dims:
        """Return the factors of an operand. One outside the kernel's index space (seeds, offsets) cannot be sharded."""
        if name in ("attn_mask", "attn_bias"):
            return self._mask(tensor)
        return self.named[name] if name in self.named else self.whole(tensor)

    def whole(self, tensor: Tensor) -> Dims:
        for size in tensor.shape:
            self.sizes[f"whole{size}"] = size
            self.blocked.add(f"whole{size}")
        return tuple((f"whole{size}",) for size in tensor.shape)

    def _mask(self, tensor: Tensor) -> Dims:
        """Return the factors of a mask, which broadcasts with the attention weights. A row for all queries stays whole, as
        a ring takes its columns from it.
        """
        dims = _WEIGHTS[4 - tensor.ndim :]
        if tensor.ndim < 2 or tensor.shape[-2] == 1:
            dims = (*dims[:-1], (COLUMNS,))
            self.sizes[COLUMNS] = self.sizes[KEYS]
            self.blocked.add(COLUMNS)
        return tuple(() if size == 1 else factors for factors, size in zip(dims, tensor.shape, strict=True))


def _factors(call: Call, logsumexp: Tensor | None) -> _Factors | None:
    query, key, value = (call.arg(name) for name in ("query", "key", "value"))
    if any(tensor.ndim != 4 for tensor in (query, key, value)) or query.shape[1] % key.shape[1]:
        return None
    if key.shape[:3] != value.shape[:3] or key.shape[0] != query.shape[0]:
        return None
    names = ("b", "k", "g", "s", "t", "e", "v")
    heads = key.shape[1], query.shape[1] // key.shape[1]
    lengths = (query.shape[0], *heads, query.shape[2], key.shape[2], query.shape[3], value.shape[3])
    sizes = dict(zip(names, lengths, strict=True))
    named = {"query": _QUERY, "key": _KEY, "value": _VALUE, "out": _OUT, "grad_out": _OUT, "grad_out_": _OUT}
    blocked = set(_BLOCKED)
    if call.arg("is_causal") and not runs_in_blocks(call) and not has_argument(call, "attn_mask"):
        blocked.add("s")  # query i sees keys up to i: the kernel counts from its first row
    if call.arg("dropout_p"):
        blocked |= set(names)  # the kernel draws by positions in its operands, which sharding would change
    factors = _Factors(sizes, named, blocked)
    if logsumexp is not None:
        named["logsumexp"] = _logsumexp(factors, logsumexp)
    return factors


def _logsumexp(factors: _Factors, tensor: Tensor) -> Dims:
    """Return the factors of the logsumexp: `[b, h, s]`, for cuDNN with a fourth dim of size 1.

    Kernels that pad it to more than `s` elements need `s` whole.
    """
    length = tensor.shape[2]
    row: tuple[str, ...] = ("s",)
    if length != factors.sizes["s"]:
        factors.blocked.add("s")
        (row,) = factors.whole(Tensor((length,), tensor.dtype))
    return (("b",), ("k", "g"), row, *((),) * (tensor.ndim - 3))


def _space(call: Call, factors: _Factors, results: tuple[Dims, ...], linear: tuple[Linear, ...]) -> Space:
    extra = range(len(results), len(call.results))
    dims = (*results, *(factors.whole(call.results[i]) for i in extra))
    operands = tuple(factors.of(name, tensor) for name, tensor in _named_operands(call))
    return Space(
        factors.sizes,
        operands,
        dims,
        frozenset(factors.blocked),
        counted=frozenset({"s"}) if call.arg("is_causal") else frozenset(),
        linear=() if call.arg("dropout_p") else linear,
        replicated_results=frozenset(extra),
        masks=frozenset(number for number, name in enumerate(operand_names(call)) if name in ("attn_mask", "attn_bias")),
        rings={"t": "s"} if "logsumexp" in factors.named and (has_argument(call, "attn_mask") or not is_masked(call)) else {},
    )


def _named_operands(call: Call) -> list[tuple[str, Tensor]]:
    positional = [parameter.name for parameter in call.op._schema.arguments][: len(call.args)]
    given: list[tuple[str, Any]] = [*zip(positional, call.args, strict=True), *call.kwargs.items()]
    return [(name, value) for name, value in given if isinstance(value, Tensor)]


def _forward(call: Call) -> Space | None:
    """Return the space of a kernel that gives `(out, logsumexp, seeds and sizes ...)`."""
    factors = _factors(call, call.results[1])
    if factors is None or _returns_debug_mask(call):
        return None
    return _space(call, factors, (_OUT, factors.named["logsumexp"]), ())


def _returns_debug_mask(call: Call) -> bool:
    return any(p.name == "return_debug_mask" for p in call.op._schema.arguments) and bool(call.arg("return_debug_mask"))


def _math(call: Call) -> Space | None:
    """Return the space of attention in plain operations, which gives `(out, weights)`."""
    factors = _factors(call, None)
    if factors is None or call.arg("dropout_mask") is not None:
        return None
    return _space(call, factors, (_OUT, _WEIGHTS), ())


def _backward(call: Call) -> Space | None:
    """Return the space of a backward, which gives `(grad_query, grad_key, grad_value)`, and the mask's gradient if
    requested."""
    factors = _factors(call, call.arg("logsumexp"))
    if factors is None:
        return None
    results = [_QUERY, _KEY, _VALUE]
    if len(call.results) == 4:
        results.append(factors.of("attn_bias", call.results[3]))
    # All gradients are linear in `grad_out`, as is rowsum(grad_out * out), which all of them contain.
    return _space(call, factors, tuple(results), (Linear((0,)),))


def _tiled(space_of: Callable[[Call], Space | None]) -> Callable[[Call], Space | None]:
    """Restrict the spaces of a kernel that has no grouped heads and pads its logsumexp: query positions split only into
    tiles."""

    def space(call: Call) -> Space | None:
        plain = space_of(call)
        if plain is not None and plain.sizes["g"] > 1:
            return None
        if plain is None or "s" in plain.blocked:
            return plain
        if plain.sizes["s"] % EFFICIENT_TILE:
            return replace(plain, blocked=plain.blocked | {"s"})
        sizes = {**plain.sizes, "s": plain.sizes["s"] // EFFICIENT_TILE, "row": EFFICIENT_TILE}
        return replace(
            plain,
            sizes=sizes,
            operands=tuple(_split_rows(dims) for dims in plain.operands),
            results=tuple(_split_rows(dims) for dims in plain.results),
            blocked=plain.blocked | {"row"},
        )

    return space


def _split_rows(dims: Dims) -> Dims:
    return tuple(("s", "row") if factors == ("s",) else factors for factors in dims)


def _local_forward(call: LocalCall) -> tuple[Node, ...] | None:
    return ring_forward(call) or causal_forward(call) or masked_by_positions(call)


def _local_backward(call: LocalCall) -> tuple[Node, ...] | None:
    return ring_backward(call) or causal_backward(call) or masked_by_positions(call)


_FLASH = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
)
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_MATH = aten._scaled_dot_product_attention_math.default
_FORWARD = (*_FLASH, _EFFICIENT, _MATH)
_FLASH_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
)
_EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
_BACKWARD = (*_FLASH_BACKWARD, _EFFICIENT_BACKWARD)

register(*_FLASH, space=_forward, local=_local_forward)
register(*_FLASH_BACKWARD, space=_backward, local=_local_backward)
register(_EFFICIENT, space=_tiled(_forward), local=_local_forward)
register(_EFFICIENT_BACKWARD, space=_tiled(_backward), local=_local_backward)
register(_MATH, space=_math, local=masked_by_positions)
