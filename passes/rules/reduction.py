"""Sharding rules of reductions, scans, sorts and other ops along a dim.

If the terms of a reduction combine (sum, max, min, product), its dim may be sharded and the result is partial. So may that of
a cumulative sum or product, to which the totals of other parts are added (`local_forms.cumulative`). The other ops need the dim
whole.
"""

from __future__ import annotations

import torch

from passes._torch import REVERSED_CUMSUM
from passes.ir.call import Call, Tensor
from passes.ir.collectives import ALL_GATHER
from passes.rules.factors import Dim, Factors, keeps_sums, whole_dims
from passes.rules.local_forms.cumulative import scanned
from passes.rules.rule import Linear, Reach, Space, SpaceOf, register

aten = torch.ops.aten

LINEAR = (Linear((0,), ("sum", "avg")),)


def _combining(op: str) -> SpaceOf:
    """Return the space of a reduction by `op`, which is partial if a reduced dim is sharded."""

    def space(call: Call) -> Space | None:
        terms = call.operands[0].dtype
        if op != "sum" and (terms is torch.bool or terms.is_complex):  # collectives reduce neither; sums of pairs are sums
            return _reduced(call, None, ())
        return _reduced(call, op, LINEAR if op == "sum" else (Linear((0,), (op,)),))

    return space


def _whole(linear: tuple[Linear, ...] = ()) -> SpaceOf:
    """Return the space of a reduction that needs its dims whole."""
    return lambda call: _reduced(call, None, linear)


def _reduced(call: Call, op: str | None, linear: tuple[Linear, ...]) -> Space:
    operand = call.operands[0]
    named = {parameter.name for parameter in call.op._schema.arguments}
    dims = whole_dims(call.arg("dim") if "dim" in named else None, operand.ndim)
    factors = Factors()
    whole = factors.dims(operand.shape, blocked=dims if op is None else ())
    keeps = "keepdim" in named and call.arg("keepdim")
    result: list[Dim] = []
    for dim, factor in enumerate(whole):
        if dim not in dims:
            result.append(factor)
        elif keeps:
            result.append(())
    reductions = {factor: op for dim in dims for factor in whole[dim]} if op is not None else {}
    return factors.space(
        [whole], [result] * len(call.results), linear=linear if _is_exact(call) else (), reductions=reductions
    )


def _is_exact(call: Call) -> bool:
    return keeps_sums(call.operands[0].dtype, call.result.dtype)


def _along_dim(linear: tuple[Linear, ...] = ()) -> SpaceOf:
    """Return a space in which every tensor has the operand's dims, and `dim` (all dims, if it is None) stays whole.

    Along `dim` a result may have another length, such as that of `topk`.
    """

    def space(call: Call) -> Space:
        operand = call.operands[0]
        dims = whole_dims(call.arg("dim"), operand.ndim)
        factors = Factors()
        whole = factors.dims(operand.shape, blocked=dims)
        operands = [_resized(factors, whole, tensor, dims) for tensor in call.operands]
        results = [_resized(factors, whole, tensor, dims) for tensor in call.results]
        return factors.space(operands, results, linear=linear if _is_exact(call) else ())

    return space


def _scan(linear: tuple[Linear, ...] = ()) -> SpaceOf:
    """Return the space of a cumulative op: along `dim`, the totals of other parts are gathered."""

    def space(call: Call) -> Space:
        operand = call.operands[0]
        factors = Factors()
        whole = factors.dims(operand.shape)
        for dim in whole_dims(call.arg("dim"), operand.ndim):
            for factor in whole[dim]:
                factors.reach(factor, Reach(0, ((ALL_GATHER.name, 0, 1),)))
        return factors.space([whole], [whole], linear=linear if _is_exact(call) else ())

    return space


def _resized(factors: Factors, whole: list[Dim], tensor: Tensor, dims: tuple[int, ...]) -> list[Dim]:
    size = {dim: tensor.shape[dim] for dim in dims if dim < tensor.ndim}
    return [
        factors.one(f"along{size[dim]}", size[dim], blocked=True) if dim in size else factor
        for dim, factor in enumerate(whole)
    ]


def _flattened(call: Call) -> Space:
    """Return the space of an op over all elements, whose result has an index of its own."""
    factors = Factors()
    operand = call.operands[0].shape
    whole = factors.dims(operand, blocked=range(len(operand)))
    results = [
        factors.dims(result.shape, blocked=range(result.ndim), prefix=f"result{i}_")
        for i, result in enumerate(call.results)
    ]
    return factors.space([whole], results)


register(aten.sum.default, aten.sum.dim_IntList, space=_combining("sum"))
register(aten.amax.default, aten.max.default, space=_combining("max"))
register(aten.amin.default, aten.min.default, space=_combining("min"))
register(aten.prod.default, aten.prod.dim_int, space=_combining("product"))
register(aten.mean.default, aten.mean.dim, space=_whole(LINEAR))
register(
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.argmax.default,
    aten.argmin.default,
    aten.kthvalue.default,
    aten.linalg_vector_norm.default,
    aten.logsumexp.default,
    aten.max.dim,
    aten.median.default,
    aten.median.dim,
    aten.min.dim,
    aten.mode.default,
    aten.std.correction,
    aten.std_mean.correction,
    aten.var.correction,
    aten.var_mean.correction,
    space=_whole(),
)
register(
    aten._log_softmax.default,
    aten._safe_softmax.default,
    aten._softmax.default,
    aten.argsort.default,
    aten.argsort.stable,
    aten.cummax.default,
    aten.cummin.default,
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
    space=_along_dim(),
)
register(
    aten._log_softmax_backward_data.default,
    aten._softmax_backward_data.default,
    space=_along_dim(LINEAR),
)
register(aten.cumsum.default, space=_scan(LINEAR), local=scanned)
register(REVERSED_CUMSUM, space=_scan(LINEAR), local=scanned, whole=True)
register(aten.cumprod.default, aten.logcumsumexp.default, space=_scan(), local=scanned)
register(aten.histc.default, space=_flattened)
