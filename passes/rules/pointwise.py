"""Sharding rules of pointwise ops: one index space for all, and a table of those that are linear.

Operands broadcast against the result from the last dim backwards. Ops that torch tags as pointwise need no entry here;
the lists hold those without the tag, and those that pass partial values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from passes._torch import OpOverload
from passes.ir.call import Call, Tensor
from passes.ir.layout import PARTIAL_OPS
from passes.rules.factors import Dim, Factors, keeps_sums
from passes.rules.rule import Linear, Space, register, register_tag

aten = torch.ops.aten
prims = torch.ops.prims

Groups = tuple[tuple[str, ...], ...]  # names of arguments in which an op is jointly linear


def pointwise_space(call: Call) -> Space | None:
    """Return the broadcast index space of `call`, without partial rows; None if shapes do not broadcast."""
    return _space(call, ())


def linear_in(groups: Groups, ops: tuple[str, ...] = ("sum", "avg")) -> Callable[[Call], Space | None]:
    """Return the space of a pointwise op that is linear in each group of arguments, with the others replicated.

    A number in a group is a constant term: the op is linear only if it is 0. `ops` are the reductions that pass.
    """

    def space(call: Call) -> Space | None:
        return _space(call, tuple(_linear(call, groups, ops)))

    return space


def _space(call: Call, linear: tuple[Linear, ...]) -> Space | None:
    if not call.results:  # `equal` gives a bool, but has the tag
        return None
    shape = call.result.shape
    factors = Factors()
    whole = factors.dims(shape)
    operands = [_broadcast(tensor.shape, shape, whole) for tensor in call.operands]
    results = [_broadcast(tensor.shape, shape, whole) for tensor in call.results]
    if None in operands or None in results:
        return None
    return factors.space(
        [dims for dims in operands if dims is not None],
        [dims for dims in results if dims is not None],
        linear=linear,
        replicated_results=frozenset(i for i, t in enumerate(call.results) if t.shape != shape),
    )


def _broadcast(shape: tuple[int, ...], result: tuple[int, ...], whole: list[Dim]) -> list[Dim] | None:
    """Return the factors of an operand of `shape`: those of the result dims that it spans."""
    if 0 in shape and 0 not in result:  # an empty buffer that the op carries but does not read
        return [()] * len(shape)
    missing = len(result) - len(shape)
    if missing < 0:
        return None
    dims: list[Dim] = []
    for size, length, factor in zip(shape, result[missing:], whole[missing:], strict=True):
        if size not in (1, length):
            return None
        dims.append(factor if size == length else ())
    return dims


def _linear(call: Call, groups: Groups, ops: tuple[str, ...]) -> Iterator[Linear]:
    positions = _positions(call)
    for group in groups:
        values = {name: call.arg(name) for name in group}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        constants = [value for name, value in values.items() if name not in tensors]
        if not tensors or any(value != 0 for value in constants):
            continue
        if all(keeps_sums(tensor.dtype, call.result.dtype) for tensor in tensors.values()):
            yield Linear(tuple(positions[name] for name in tensors), ops)


def _positions(call: Call) -> dict[str, int]:
    """Return the place of each tensor argument among the operands."""
    positional = [p.name for p in call.op._schema.arguments if not p.kwarg_only]
    given = [*zip(positional, call.args, strict=False), *call.kwargs.items()]
    return {name: i for i, name in enumerate(name for name, value in given if isinstance(value, Tensor))}


def _per_channel(call: Call) -> Space:
    """Return the space of an op whose operands after the first hold a number per element of `axis`."""
    shape = call.operands[0].shape
    factors = Factors()
    whole = factors.dims(shape)
    line = [whole[call.arg("axis") % len(shape)]]
    return factors.space([whole, *([line] * (len(call.operands) - 1))], [whole] * len(call.results))


@dataclass(frozen=True)
class _Linear:
    """Ops that are linear in the same arguments."""

    groups: Groups
    ops: tuple[OpOverload, ...]
    reductions: tuple[str, ...] = ("sum", "avg")


_MOVES = PARTIAL_OPS  # an op that only moves elements passes every reduction

_LINEAR = (
    _Linear(
        (("self", "other"),),
        (
            aten.add.Tensor,
            aten.add.Scalar,
            aten.sub.Tensor,
            aten.sub.Scalar,
            aten.rsub.Tensor,
            aten.rsub.Scalar,
        ),
    ),
    _Linear((("self",), ("other",)), (aten.mul.Tensor,)),
    _Linear((("self",),), (aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)),
    _Linear((("self",),), (aten.neg.default, aten.conj_physical.default, aten._conj.default)),
    _Linear((("self",),), (aten.deg2rad.default, aten.rad2deg.default)),
    _Linear((("self", "tensor1"), ("self", "tensor2")), (aten.addcmul.default,)),
    _Linear((("self", "tensor1"),), (aten.addcdiv.default,)),
    _Linear((("self", "end"),), (aten.lerp.Scalar, aten.lerp.Tensor)),
    _Linear((("abs",),), (aten.polar.default,)),
    _Linear((("real", "imag"),), (aten.complex.default,)),
    _Linear(
        (("grad_output",),),
        (
            aten.elu_backward.default,
            aten.gelu_backward.default,
            aten.hardsigmoid_backward.default,
            aten.hardswish_backward.default,
            aten.hardtanh_backward.default,
            aten.leaky_relu_backward.default,
            aten.log_sigmoid_backward.default,
            aten.logit_backward.default,
            aten.mish_backward.default,
            aten.native_dropout_backward.default,
            aten._prelu_kernel_backward.default,
            aten.sigmoid_backward.default,
            aten.silu_backward.default,
            aten.softplus_backward.default,
            aten.softshrink_backward.default,
            aten.tanh_backward.default,
            aten.threshold_backward.default,
        ),
    ),
    _Linear((("grad_out",),), (aten.hardshrink_backward.default,)),
    _Linear((("self", "other"),), (aten.maximum.default, aten.max.other), ("max",)),
    _Linear((("self", "other"),), (aten.minimum.default, aten.min.other), ("min",)),
    _Linear((("self", "other"),), (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf), _MOVES),
    _Linear((("self", "value"),), (aten.masked_fill.Scalar, aten.masked_fill.Tensor), _MOVES),
    _Linear((("value",),), (aten.fill.Tensor,), _MOVES),
    _Linear((("src",),), (aten.copy.default,), _MOVES),
    _Linear((("a",),), (prims.convert_element_type.default,), _MOVES),
    _Linear(
        (("self",),),
        (
            aten._to_copy.default,
            aten.alias.default,
            aten.clone.default,
            aten.contiguous.default,
            aten.detach.default,
            aten.lift_fresh_copy.default,
            aten.positive.default,
        ),
        _MOVES,
    ),
)

_NOT_LINEAR = (  # and not tagged as pointwise by torch
    aten.__and__.Scalar,
    aten.__and__.Tensor,
    aten.__or__.Scalar,
    aten.__or__.Tensor,
    aten._prelu_kernel.default,
    aten.fake_quantize_per_tensor_affine_cachemask.default,
    aten.fill.Scalar,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.hardswish.default,
    aten.log_sigmoid_forward.default,
    aten.where.Scalar,
)

register_tag(torch.Tag.pointwise, space=pointwise_space)
register(aten.fake_quantize_per_channel_affine_cachemask.default, space=_per_channel)
register(*_NOT_LINEAR, space=pointwise_space)
for _entry in _LINEAR:
    register(*_entry.ops, space=linear_in(_entry.groups, _entry.reductions))
