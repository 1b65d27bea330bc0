"""Weights by the plans seen so far."""

from __future__ import annotations

import numpy as np
import pytest

from passes.search.model import Plan
from passes.search.room import Room, Step
from passes.search.weigh import weights_of


def plan(compute: float, across: float, memory: float) -> Plan:
    return Plan([], [], [], max(compute, across), 0.0, memory, np.array([[compute, 0.0, across]]))


def test_a_link_is_worth_as_much_as_makes_two_plans_equal() -> None:
    weights = weights_of([plan(3.0, 1.0, 0.0), plan(1.0, 5.0, 0.0)], None)
    computation, _, across = weights.segments[0]
    assert computation + across == pytest.approx(1.0)
    assert 3.0 * computation + 1.0 * across == pytest.approx(1.0 * computation + 5.0 * across)
    assert weights.byte == 0.0


def test_a_byte_is_worth_what_it_costs_to_save_it() -> None:
    weights = weights_of([plan(1.0, 0.0, 30e9), plan(2.0, 0.0, 10e9)], Room(20e9))
    assert weights.byte == pytest.approx(1.0 / 20e9)


def test_a_byte_is_worth_no_more_than_it_costs_to_free_it() -> None:
    weights = weights_of([plan(1.0, 0.0, 30e9), plan(2.0, 0.0, 10e9)], Room(20e9, (Step(15e9, 0.2 / 20e9),)))
    assert weights.byte == pytest.approx(0.2 / 20e9)


def test_where_no_plan_fits_a_byte_has_a_price_all_the_same() -> None:
    assert 0.0 < weights_of([plan(1.0, 0.0, 30e9)], Room(20e9)).byte < float("inf")
