"""Sharding rules of ops that need some dims whole and treat the others as a batch: Fourier transforms, linear algebra,
the CTC loss.

Each rank runs the op on its part of the batch. For bags of embeddings of any length that is the embedding's width, as
offsets find the elements of whole values only. Bags of one length are rewritten to `embedding` and a sum by
`normalize`, so that batch and vocabulary may be sharded, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from passes._torch import CTC_LOSS
from passes.ir.call import Call, Tensor
from passes.rules.factors import Dim, Factors
from passes.rules.rule import Linear, LocalCall, Space, SpaceOf, register

aten = torch.ops.aten

SUMS = Linear((0,), ("sum", "avg"))


def _fourier(call: Call) -> Space:
    """Return the space of a transform, which is linear, over the dims that it names."""
    operand = call.operands[0]
    own = {dim % operand.ndim for dim in call.arg("dim")}
    factors = Factors()
    dims = [_with_own(factors, tensor.shape, own, f"t{i}_") for i, tensor in enumerate((operand, call.result))]
    return factors.space(dims[:1], dims[1:], linear=(SUMS,))


def _with_own(factors: Factors, shape: Sequence[int], own: set[int], prefix: str) -> list[Dim]:
    return [
        factors.one(f"{prefix}{dim}", size, blocked=True) if dim in own else factors.one(f"d{dim}", size)
        for dim, size in enumerate(shape)
    ]


def _matrices(*linear: Linear, pads: bool = True) -> SpaceOf:
    """Return the space of an op on stacks of matrices: each matrix by itself.

    Without `pads` no matrices are added, as the op raises for some.
    """

    def space(call: Call) -> Space:
        found = _stacked(call, call.operands[0].ndim - 2, linear)
        return found if pads else replace(found, unpadded=frozenset(found.sizes))

    return space


def _dense(call: LocalCall) -> Node:
    """Copy a part with gaps into contiguous memory, as the kernel takes no other."""
    return call.emit(call.call.op, call.emit(aten.clone.default, call.args[0], memory_format=torch.contiguous_format))


def _stacked(call: Call, batch: int, linear: tuple[Linear, ...] = ()) -> Space:
    """Return a space in which the first `batch` dims may be sharded, on all tensors that have them."""
    shape = call.operands[0].shape[:batch]
    factors = Factors()
    alike = batch > 0 and all(tensor.shape[:batch] == shape for tensor in (*call.operands, *call.results))

    shared = factors.dims(shape, prefix="batch") if alike else []

    def dims(tensor: Tensor, name: str) -> list[Dim]:
        kept = batch if alike else 0
        rest = tensor.shape[kept:]
        return shared[:kept] + factors.dims(rest, blocked=range(len(rest)), prefix=name)

    return factors.space(
        [dims(tensor, f"operand{i}_") for i, tensor in enumerate(call.operands)],
        [dims(tensor, f"result{i}_") for i, tensor in enumerate(call.results)],
        linear=linear,
    )


def _diagonal(call: Call) -> Space:
    """Return the space of the diagonal over two dims: it is the last dim of a result that has the others."""
    operand = call.operands[0]
    own = {call.arg("dim1") % operand.ndim, call.arg("dim2") % operand.ndim}
    factors = Factors()
    whole = _with_own(factors, operand.shape, own, "own")
    line = call.operands[1] if len(call.operands) > 1 else call.result
    diagonal = [dim for at, dim in enumerate(whole) if at not in own]
    diagonal.append(factors.one("diagonal", line.shape[-1], blocked=True))
    if len(call.operands) > 1:
        return factors.space([whole, diagonal], [whole], linear=(Linear((0, 1), SUMS.ops),))
    return factors.space([whole], [diagonal], linear=(SUMS,))


def _distances(letters: str, *linear: Linear) -> SpaceOf:
    """Return the space of distances between rows `p` and rows `r` of matrices, by the last two dims of each tensor."""
    *operands, result = letters.split()

    def space(call: Call) -> Space | None:
        batch = call.operands[0].ndim - 2
        shapes = [tensor.shape for tensor in (*call.operands, call.result)]
        if any(shape[:-2] != shapes[0][:batch] for shape in shapes):
            return None
        factors = Factors()
        first = factors.dims(shapes[0][:batch], prefix="batch")

        def dims(names: str, shape: Sequence[int]) -> list[Dim]:
            last = zip(names, shape[-2:], strict=True)
            return first + [factors.one(name, size, blocked=name == "m") for name, size in last]

        given = [dims(names, tensor.shape) for names, tensor in zip(operands, call.operands, strict=True)]
        return factors.space(given, [dims(result, call.result.shape)], linear=linear)

    return space


def _trilinear(call: Call) -> Space:
    """Return the space of the sum over `sumdim` of products of three operands, each with the dims that it lacks."""
    lacking = [call.arg(f"expand{i}") for i in (1, 2, 3)]
    ndim = call.operands[0].ndim + len(lacking[0])
    factors = Factors()
    named: list[list[Dim]] = []
    for operand, missing in zip(call.operands, lacking, strict=True):
        held = [dim for dim in range(ndim) if dim not in missing]
        named.append([factors.one(f"d{dim}", size) for dim, size in zip(held, operand.shape, strict=True)])
    result = [f"d{dim}" for dim in range(ndim) if dim not in call.arg("sumdim")]
    dims = [factors.one(name, size) for name, size in zip(result, call.result.shape, strict=True)]
    return factors.space(named, [dims], linear=tuple(Linear((i,)) for i in range(3)))


# Bags of embeddings


class _Bags:
    """The dims of the tensors of one call: `width` is shared, all others stay whole."""

    def __init__(self, width: int) -> None:
        self.factors = Factors()
        self.width = self.factors.one("width", width)
        self.count = 0

    def lists(self, tensor: Tensor) -> list[Dim]:
        """Return dims of their own, for indices, offsets and numbers of elements."""
        self.count += 1
        return self.factors.dims(tensor.shape, blocked=range(tensor.ndim), prefix=f"list{self.count}_")

    def rows(self, tensor: Tensor) -> list[Dim]:
        """Return the dims of a matrix that is as wide as the embedding, or those of a list."""
        return [*self.lists(Tensor(tensor.shape[:1], tensor.dtype)), self.width] if tensor.ndim == 2 else self.lists(tensor)


def _bags(call: Call) -> Space:
    """Return the space of bags, the bag of each element, sizes, and the elements of a maximum."""
    weight, *lists = call.operands
    bags = _Bags(weight.shape[1])
    operands = [bags.rows(weight), *map(bags.lists, lists)]
    found, of_element, sizes, largest = call.results
    results = [bags.rows(found), bags.lists(of_element), bags.lists(sizes), bags.rows(largest)]
    return bags.factors.space(operands, results, replicated_results=frozenset({1, 2} | ({3} if largest.ndim < 2 else set())))


def _bags_backward(call: Call) -> Space:
    grad, *others = call.operands
    bags = _Bags(grad.shape[1])
    operands = [bags.rows(tensor) for tensor in (grad, *others)]
    return bags.factors.space(operands, [bags.rows(call.result)])


def _bags_weights_backward(call: Call) -> Space:
    """Return the space of the gradient of each element's weight, a sum over the embedding's width."""
    grad, weight, *lists = call.operands
    bags = _Bags(grad.shape[1])
    operands = [bags.rows(grad), bags.rows(weight), *map(bags.lists, lists)]
    return bags.factors.space(operands, [bags.lists(call.result)])


def _ctc(call: Call) -> Space:
    """Return the space of the CTC loss of a batch of sequences; targets in one row belong to the whole batch."""
    log_probs, targets = call.operands[:2]
    factors = Factors()
    batch = factors.one("batch", log_probs.shape[1], blocked=targets.ndim == 1)
    time, classes = (factors.one(name, log_probs.shape[dim], blocked=True) for name, dim in (("time", 0), ("classes", 2)))
    longest = factors.one("longest", targets.shape[-1], blocked=True)
    found = factors.space(
        [[time, batch, classes], [longest] if targets.ndim == 1 else [batch, longest], [batch], [batch]],
        [[batch], [time, batch, classes]],
    )
    return replace(found, unpadded=frozenset(found.sizes))


register(CTC_LOSS, space=_ctc)
register(aten._fft_c2c.default, aten._fft_c2r.default, aten._fft_r2c.default, space=_fourier)
register(
    aten._linalg_solve_ex.default,
    aten.cholesky_inverse.default,
    aten.linalg_cholesky_ex.default,
    aten.linalg_householder_product.default,
    aten.linalg_inv_ex.default,
    aten.linalg_lu.default,
    aten.linalg_lu_factor_ex.default,
    aten.linalg_qr.default,
    space=_matrices(),
)
register(  # they raise for numbers that are not finite, and for pivots of 0
    aten._linalg_eigh.default,
    aten._linalg_eigvals.default,
    aten._linalg_svd.default,
    aten.linalg_eig.default,
    aten.linalg_lu_solve.default,
    aten.lu_unpack.default,
    space=_matrices(pads=False),
)
register(aten.linalg_matrix_exp.default, space=_matrices(), local=_dense)
register(aten.cholesky_solve.default, space=_matrices(SUMS))
register(aten.linalg_solve_triangular.default, space=_matrices(Linear((1,), SUMS.ops)))
register(aten.diagonal.default, aten.diagonal_scatter.default, space=_diagonal)
register(aten._cdist_forward.default, space=_distances("pm rm pr"))
register(aten._cdist_backward.default, space=_distances("pr pm rm pr pm", Linear((0,))))
register(aten._trilinear.default, space=_trilinear)
register(aten._embedding_bag.default, aten._embedding_bag_forward_only.default, space=_bags)
register(aten._embedding_bag_backward.default, space=_bags_backward)
register(aten._embedding_bag_per_sample_weights_backward.default, space=_bags_weights_backward)
