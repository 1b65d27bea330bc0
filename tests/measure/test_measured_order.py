"""Predicted and measured orders are compared by rank."""

from __future__ import annotations

import pytest

from benchmarks.measured_order import correlation, report


def test_equal_orders_correlate_and_opposite_ones_do_not() -> None:
    assert correlation((0.1, 0.2, 0.4), (1.0, 5.0, 9.0)) == pytest.approx(1.0)
    assert correlation((0.1, 0.2, 0.4), (9.0, 5.0, 1.0)) == pytest.approx(-1.0)
    assert correlation((1.0, 2.0, 3.0, 4.0), (2.0, 1.0, 3.0, 4.0)) == pytest.approx(0.8)


def test_plans_are_printed_by_predicted_time(capsys: pytest.CaptureFixture[str]) -> None:
    report(("late", "early"), (2.0, 1.0), (4.0, 1.0))
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.split()[0] == "early" and first.endswith("ratio 1.000")
    assert second.split()[0] == "late" and second.endswith("ratio 0.500")
    assert last == "2 plans, rank correlation 1.000"
