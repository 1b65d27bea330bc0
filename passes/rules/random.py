"""Random numbers that do not depend on the layout: each is a hash of the step, the op and its global index.

With a generator per rank, the numbers depend on local shapes, and another mesh gives other dropout masks. Here a
number is a function of (seed of the step, ordinal of the op, index in the global tensor): all layouts draw the same
numbers, and so does a single device.

The hash is two keyed rounds of a 32-bit mixer, in int64 and without overflow: products of a 32-bit word and a
31-bit constant, masked back to a word. Eager and compiled code then agree to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from passes.ir.call import Call, Tensor
from passes.ir.graph import set_draw, tensor_of
from passes.rules.rule import Dims, LocalCall, Space, register, register_named

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default

_WORD = (1 << 32) - 1
# Shifts and multipliers of a 32-bit mixer of low bias: https://github.com/skeeto/hash-prospector, issue 19.
_SHIFTS = (16, 15, 15)
_MULTIPLIERS = (0x21F0AAAD, 0x735A2D97)
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # bits of the significand
_STREAMS = 2  # words that one op draws per element, at most


def _elementwise(call: Call) -> Space | None:
    """Return a space with a factor per dim of the result; operands have its shape, or broadcast to it."""
    shape = call.result.shape
    dims = tuple((f"d{dim}",) for dim in range(len(shape)))
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)}
    operands = tuple(_broadcast(tensor, dims) for tensor in call.operands)
    return Space(sizes, operands, (dims,))


def _broadcast(tensor: Tensor, dims: Dims) -> Dims:
    skip = len(dims) - tensor.ndim
    return tuple(dims[skip + dim] if size > 1 else () for dim, size in enumerate(tensor.shape))


@dataclass(frozen=True)
class _Source:
    """Random words of one op: its ordinal, and the global index of each element of this rank's part."""

    call: LocalCall
    number: int
    index: Node

    def words(self, stream: int) -> Node:
        """Return a 32-bit word per element, in i64; each stream is independent of the others."""
        call, ordinal = self.call, self.number * _STREAMS + stream
        first, second = _keys(call, 2 * ordinal)
        index = self.index
        if math.prod(call.call.result.shape) > _WORD:
            second = _xor(call, _shifted(call, index, 32), second)
            index = call.emit(aten.bitwise_and.Scalar, index, _WORD)
        once = _mix(call, _xor(call, index, first))
        return _mix(call, _xor(call, once, second))

    def fraction(self, stream: int, dtype: torch.dtype) -> Node:
        """Return uniform numbers in [0, 1) with at most 32 random bits."""
        digits = min(_DIGITS[dtype], 32)
        bits = _shifted(self.call, self.words(stream), 32 - digits)
        return self.call.emit(aten.mul.Tensor, self.call.emit(convert, bits, dtype), 2.0**-digits)


def _source(call: LocalCall) -> _Source:
    return _Source(call, call.number(), _global_index(call))


def _global_index(call: LocalCall) -> Node:
    """Return the row-major global index of each element of this rank's part: i64[per-device shape]."""
    shape = call.call.result.shape
    index: Node | None = None
    for dim, size in enumerate(shape):
        position = call.positions(call.result_layout(), dim, size)
        stride = math.prod(shape[dim + 1 :])
        line = call.emit(aten.view.default, position, [-1] + [1] * (len(shape) - dim - 1))
        scaled = line if stride == 1 else call.emit(aten.mul.Tensor, line, stride)
        index = scaled if index is None else call.emit(aten.add.Tensor, index, scaled)
    return index if index is not None else call.emit(aten.mul.Tensor, call.seed(), 0)


# Draws


def _uniform(source: _Source, dtype: torch.dtype) -> Node:
    """Return uniform numbers in [0, 1), with as many random bits as the significand of `dtype` has."""
    call, digits = source.call, _DIGITS[dtype]
    if digits <= 32:
        return source.fraction(0, dtype)
    high = call.emit(aten.mul.Tensor, source.words(0), 1 << (digits - 32))
    bits = call.emit(aten.add.Tensor, high, _shifted(call, source.words(1), 64 - digits))
    return call.emit(aten.mul.Tensor, call.emit(convert, bits, dtype), 2.0**-digits)


def _normal(source: _Source, dtype: torch.dtype) -> Node:
    """Return normal numbers of mean 0 and variance 1, by the Box-Muller transform of two uniform ones."""
    call = source.call
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # 1 - u is in (0, 1], where the logarithm is finite.
    log = call.emit(aten.log.default, call.emit(aten.rsub.Scalar, source.fraction(0, wide), 1.0))
    radius = call.emit(aten.sqrt.default, call.emit(aten.mul.Tensor, log, -2.0))
    angle = call.emit(aten.mul.Tensor, source.fraction(1, wide), 2 * math.pi)
    drawn = call.emit(aten.mul.Tensor, radius, call.emit(aten.cos.default, angle))
    return _cast(call, drawn, dtype)


def _integers(source: _Source, low: int, high: int) -> Node:
    """Return integers in [low, high)."""
    call, count = source.call, high - low
    if count <= 1 << 31:
        drawn = _shifted(call, call.emit(aten.mul.Tensor, source.words(0), count), 32)
    else:
        top = call.emit(aten.mul.Tensor, _shifted(call, source.words(0), 1), 1 << 32)
        drawn = call.emit(aten.remainder.Scalar, call.emit(aten.add.Tensor, top, source.words(1)), count)
    return call.emit(aten.add.Tensor, drawn, low) if low else drawn


def _cast(call: LocalCall, value: Node, dtype: torch.dtype) -> Node:
    return value if tensor_of(value).dtype == dtype else call.emit(convert, value, dtype)


# The hash


def _keys(call: LocalCall, salt: int) -> tuple[Node, Node]:
    """Return two 32-bit words that depend on the step's seed and on `salt`, the same for all elements."""
    seed = call.seed()
    low = call.emit(aten.bitwise_and.Scalar, seed, _WORD)
    high = call.emit(aten.bitwise_and.Scalar, _shifted(call, seed, 32), _WORD)
    first = _mix(call, low)
    second = _mix(call, _xor(call, first, high))
    keys = tuple(call.emit(aten.bitwise_xor.Scalar, word, _salted(salt + i)) for i, word in enumerate((first, second)))
    for key in keys:
        set_draw(key, salt)
    return keys[0], keys[1]


def _salted(salt: int) -> int:
    """Compute `_mix` of a Python number, counted from 1 because 0 is mapped to 0."""
    word = (salt + 1) * 0x9E3779B9 & _WORD
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        word = (word ^ word >> shift) * multiplier & _WORD
    return word ^ word >> _SHIFTS[-1]


def _mix(call: LocalCall, word: Node) -> Node:
    """Apply a bijection of 32-bit words in which every bit of the result depends on all bits."""
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        word = call.emit(aten.mul.Tensor, _xor(call, word, _shifted(call, word, shift)), multiplier)
        word = call.emit(aten.bitwise_and.Scalar, word, _WORD)
    return _xor(call, word, _shifted(call, word, _SHIFTS[-1]))


def _shifted(call: LocalCall, word: Node, bits: int) -> Node:
    return call.emit(aten.bitwise_right_shift.Tensor_Scalar, word, bits) if bits else word


def _xor(call: LocalCall, a: Node, b: Node) -> Node:
    return call.emit(aten.bitwise_xor.Tensor, a, b)


# Local forms


def _rand(call: LocalCall) -> Node:
    return _uniform(_source(call), call.call.result.dtype)


def _randn(call: LocalCall) -> Node:
    return _normal(_source(call), call.call.result.dtype)


def _scaled_uniform(call: LocalCall) -> Node:
    low, high = call.call.arg("from"), call.call.arg("to")
    scaled = call.emit(aten.mul.Tensor, _rand(call), high - low)
    return call.emit(aten.add.Tensor, scaled, low)


def _scaled_normal(call: LocalCall) -> Node:
    scaled = call.emit(aten.mul.Tensor, _randn(call), call.call.arg("std"))
    return call.emit(aten.add.Tensor, scaled, call.call.arg("mean"))


def _exponential(call: LocalCall) -> Node:
    log = call.emit(aten.log.default, call.emit(aten.rsub.Scalar, _rand(call), 1.0))
    return call.emit(aten.mul.Tensor, log, -1.0 / call.call.arg("lambd"))


def _randint(call: LocalCall) -> Node:
    low = call.call.arg("low") if any(p.name == "low" for p in call.call.op._schema.arguments) else 0
    drawn = _integers(_source(call), low, call.call.arg("high"))
    return _cast(call, drawn, call.call.result.dtype)


def _permutation(call: Call) -> Space:
    """Return a space in which the permutation is drawn whole."""
    return Space({"d0": call.result.shape[0]}, (), ((("d0",),),), frozenset({"d0"}))


def _randperm(call: LocalCall) -> Node:
    """Return the sort order of that many random words, no two of which are equal."""
    order = call.emit(aten.argsort.stable, _source(call).words(0), stable=True)
    return _cast(call, order, call.call.result.dtype)


def _bernoulli(call: LocalCall) -> Node:
    """Draw 1 with the probability that the operand holds."""
    hit = call.emit(aten.lt.Tensor, _uniform(_source(call), torch.float32), call.args[-1])
    return _cast(call, hit, call.call.result.dtype)


def _bernoulli_p(call: LocalCall) -> Node:
    hit = call.emit(aten.lt.Scalar, _uniform(_source(call), torch.float32), call.call.arg("p"))
    return _cast(call, hit, call.call.result.dtype)


register(aten.rand.default, aten.rand_like.default, space=_elementwise, local=_rand)
register(aten.randn.default, aten.randn_like.default, space=_elementwise, local=_randn)
register(aten.uniform.default, space=_elementwise, local=_scaled_uniform)
register(aten.normal_functional.default, space=_elementwise, local=_scaled_normal)
register_named("prims.normal.default", space=_elementwise, local=_scaled_normal)
register(aten.exponential.default, space=_elementwise, local=_exponential)
register(
    aten.randint.default,
    aten.randint.low,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    space=_elementwise,
    local=_randint,
)
register(aten.randperm.default, space=_permutation, local=_randperm)
register(aten.bernoulli.default, aten.bernoulli.Tensor, space=_elementwise, local=_bernoulli)
register(aten.bernoulli.p, space=_elementwise, local=_bernoulli_p)
