"""Plans that a prediction cannot tell apart are told apart by sturdiness, by memory, then by simplicity."""

from __future__ import annotations

from autoshard.planner.ties import TIE, preferred
from passes.cost.simulate import Timeline, simulate
from tests.cost.programs import gather, kernel, program


def timeline(step: float, memory: int, sent: float = 0.0) -> Timeline:
    """Return a step of `step` seconds with a peak of `memory` bytes, in which messages of `sent` seconds are awaited."""
    tasks = [kernel("k", step - sent)] + [gather("g", sent), kernel("awaits", 0.0, "g")] * bool(sent)
    return simulate(program(*tasks, sizes={"k": memory, "g": 0, "awaits": 0}))


def chosen(**plans: tuple[float, int] | tuple[float, int, float]) -> str | None:
    return preferred(
        {name: timeline(*one) for name, one in plans.items()}, [name for name in plans if name != "solved"]
    )


def test_a_faster_plan_is_better() -> None:
    assert chosen(solved=(1.0, 200), fsdp=(1 + 2 * TIE, 100)) == "solved"
    assert chosen() is None


def test_of_equally_fast_ones_the_one_that_slower_links_lengthen_least_is_better() -> None:
    assert chosen(fsdp=(1.0, 100, 0.4), solved=(1 + TIE / 2, 200, 0.1)) == "solved"
    assert chosen(fsdp=(1.0, 100, 0.1), solved=(1 + TIE / 2, 200, 0.1)) == "fsdp"


def test_of_equally_sturdy_ones_less_memory_is_better() -> None:
    assert chosen(solved=(1.0, 200), fsdp=(1 + TIE / 2, 100)) == "fsdp"
    assert chosen(ddp=(1.0, 200), solved=(1 + TIE / 2, 100)) == "solved"


def test_of_equally_large_ones_a_recipe_is_better() -> None:
    assert chosen(solved=(1.0, 1000), zero2=(1 + TIE / 2, 1005), fsdp=(1 + TIE / 3, 1002)) == "fsdp"


def test_what_is_too_slow_does_not_say_how_small_plans_are() -> None:
    assert chosen(solved=(1.0, 1000), zero2=(1.005, 1005), fsdp=(1.5, 10)) == "zero2"
