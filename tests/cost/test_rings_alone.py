"""Gloo has rings alone: no tree makes its messages cheaper."""

from __future__ import annotations

import pytest
import sympy

from passes.cost.collective_time import collective_formula


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_library_with_rings_alone_is_priced_with_one_formula(kind: str) -> None:
    assert isinstance(collective_formula(kind, "across"), sympy.Min)
    assert not collective_formula(kind, "across", scatter_sends_all=True).has(sympy.log)
