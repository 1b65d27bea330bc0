"""Find multipliers from the assignments seen so far."""

from __future__ import annotations

import numpy as np
import pytest

from passes.search.model.memory_budget import MemoryBudget, RecomputationStep
from passes.search.solvers.cutting_planes import best_multipliers
from passes.search.solvers.evaluate import Assignment


def assignment(compute: float, across: float, memory: float) -> Assignment:
    return Assignment([], [], [], max(compute, across), memory, np.array([[compute, 0.0, across]]))


def test_a_link_is_worth_as_much_as_makes_two_assignments_equal() -> None:
    multipliers = best_multipliers([assignment(3.0, 1.0, 0.0), assignment(1.0, 5.0, 0.0)], None)
    computation, _, across = multipliers.segments[0]
    assert computation + across == pytest.approx(1.0)
    assert 3.0 * computation + 1.0 * across == pytest.approx(1.0 * computation + 5.0 * across)
    assert multipliers.byte == 0.0


def test_a_byte_is_worth_what_it_costs_to_save_it() -> None:
    multipliers = best_multipliers([assignment(1.0, 0.0, 30e9), assignment(2.0, 0.0, 10e9)], MemoryBudget(20e9))
    assert multipliers.byte == pytest.approx(1.0 / 20e9)


def test_a_byte_is_worth_no_more_than_it_costs_to_free_it() -> None:
    budget = MemoryBudget(20e9, (RecomputationStep(15e9, 0.2 / 20e9),))
    multipliers = best_multipliers([assignment(1.0, 0.0, 30e9), assignment(2.0, 0.0, 10e9)], budget)
    assert multipliers.byte == pytest.approx(0.2 / 20e9)


def test_where_nothing_fits_a_byte_has_a_price_all_the_same() -> None:
    assert 0.0 < best_multipliers([assignment(1.0, 0.0, 30e9)], MemoryBudget(20e9)).byte < float("inf")
