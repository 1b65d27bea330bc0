"""Sharding rules of matrix products, with and without an added term."""

from __future__ import annotations

import torch

from passes.ir.call import Call
from passes.rules.rule import Dims, Linear, Space, SpaceOf, register, rule

aten = torch.ops.aten


def _plus_term(left: str, right: str, result: str) -> SpaceOf:
    """Return the space of `term + left @ right`, one letter per dim; if a summed dim is sharded, the term must be
    partial."""

    def space(call: Call) -> Space | None:
        term, *factors = call.operands
        sizes: dict[str, int] = {}
        for tensor, letters in zip(factors, (left, right), strict=True):
            sizes |= zip(letters, tensor.shape, strict=True)
        spanned = result[len(result) - term.ndim :]
        term_dims = tuple(
            (letter,) if length == sizes[letter] and length > 1 else ()
            for letter, length in zip(spanned, term.shape, strict=True)
        )
        summed = [letter for letter in left if letter not in result]
        return Space(
            sizes=sizes,
            operands=(term_dims, _dims(left), _dims(right)),
            results=(_dims(result),),
            linear=(Linear((0, 1)), Linear((0, 2))),
            partial_operands={letter: (0,) for letter in summed},
        )

    return space


def _dims(letters: str) -> Dims:
    return tuple((letter,) for letter in letters)


rule(aten.mm.default)("m k, k n -> m n")
rule(aten.bmm.default)("b m k, b k n -> b m n")
rule(aten.mv.default)("m k, k -> m")
rule(aten.dot.default)("k, k -> ")
register(aten.addmm.default, space=_plus_term("mk", "kn", "mn"))
register(aten.baddbmm.default, space=_plus_term("bmk", "bkn", "bmn"))
register(aten.addbmm.default, space=_plus_term("bnm", "bmp", "np"))
register(aten.addmv.default, space=_plus_term("mk", "k", "m"))
