"""Plans that a prediction cannot tell apart are told apart by memory, then by simplicity."""

from __future__ import annotations

from autoshard.planner.ties import TIE, preferred
from autoshard.plans.outcome import Cost, Memory


def cost(step: float, memory: int) -> Cost:
    return Cost(step, step, 0.0, 0.0, Memory(memory))


def chosen(**costs: tuple[float, int]) -> str | None:
    return preferred({name: cost(*one) for name, one in costs.items()}, [name for name in costs if name != "solved"])


def test_a_faster_plan_is_better() -> None:
    assert chosen(solved=(1.0, 200), fsdp=(1 + 2 * TIE, 100)) == "solved"
    assert chosen() is None


def test_of_equally_fast_ones_less_memory_is_better() -> None:
    assert chosen(solved=(1.0, 200), fsdp=(1 + TIE / 2, 100)) == "fsdp"
    assert chosen(ddp=(1.0, 200), solved=(1 + TIE / 2, 100)) == "solved"


def test_of_equally_large_ones_a_recipe_is_better() -> None:
    assert chosen(solved=(1.0, 1000), zero2=(1 + TIE / 2, 1005), fsdp=(1 + TIE / 3, 1002)) == "fsdp"


def test_what_is_too_slow_does_not_say_how_small_plans_are() -> None:
    assert chosen(solved=(1.0, 1000), zero2=(1.005, 1005), fsdp=(1.5, 10)) == "zero2"
