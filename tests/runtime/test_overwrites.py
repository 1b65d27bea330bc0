"""Compiled code reads a value before it writes into it: Inductor alone gives wrong rows here."""

from __future__ import annotations

import pytest
import torch

from autoshard.compile.compiled import compile_split, split_program
from passes.ir.text import parse_graph

PERMUTED = """
mesh dp=2
stage LOCAL
%x: f64[8, 4] = input("x")
%index: i64[8] = input("index")
%doubled: f64[8, 4] = mul.Tensor(%x, 2)
%rows: f64[8, 4] = view({rows})
%put: f64[8, 4] = index_put(%doubled, [%index], %rows)
%total: f64[4] = sum.dim_IntList(%put, [0])
return output("put") %put, output("total") %total
"""


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["%doubled, [8, 4]", "%x, [8, 4]"])
def test_rows_are_read_before_they_are_written(rows: str) -> None:
    gm, _ = parse_graph(PERMUTED.format(rows=rows).strip())
    x, index = torch.randn(8, 4, dtype=torch.float64), torch.arange(8).flip(0)
    compiled, eager = (compile_split(split_program(gm, mode=mode), mode=mode) for mode in ("inductor", "eager"))
    found, expected = compiled.forward([x, index])[0], eager.forward([x, index])[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
