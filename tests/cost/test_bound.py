"""No order exposes less than the bound, and the bound is met where an order can meet it."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.cost.program import ACROSS, Program
from passes.cost.scheduling.best_schedule import schedule
from passes.cost.scheduling.exposed_bound import exposed_bound
from passes.cost.simulate import simulate
from tests.cost.programs import gather, kernel, program, programs

LAW = settings(max_examples=50, deadline=None, derandomize=True)


def test_a_first_gather_and_a_last_reduction_are_exposed() -> None:
    tasks = [gather("g", 3, "w"), kernel("a", 5, "g"), kernel("b", 5, "a"), gather("r", 2, "b")]
    assert exposed_bound(program(*tasks)) == 3 + 2


def test_a_collective_hides_after_what_does_not_depend_on_it() -> None:
    tasks = [kernel("a", 1), gather("c", 4, "a"), kernel("b", 1, "c"), kernel("beside", 3, "a")]
    assert exposed_bound(program(*tasks)) == 1


def test_between_two_collectives_all_kernels_run_that_link_them() -> None:
    links = [
        gather("c", 4, "w"),
        kernel("a", 2, "c"),
        kernel("b", 3, "c"),
        gather("d", 4, "a", "b"),
        kernel("e", 1, "d"),
    ]
    assert exposed_bound(program(*links)) == 4 + 4


def test_a_link_that_is_busier_than_the_kernels_is_exposed() -> None:
    tasks = [task for n in range(4) for task in (gather(f"g{n}", 3, f"w{n}"), kernel(f"h{n}", 1, f"g{n}"))]
    assert exposed_bound(program(*tasks)) == 4 * 3 + 1 - 4


def test_forward_and_backward_are_bounded_by_themselves() -> None:
    tasks = [kernel("a", 9), gather("c", 2, "a"), gather("d", 5, "w"), kernel("b", 4, "d")]
    tasks[2:] = [replace(task, backward=True) for task in tasks[2:]]
    assert exposed_bound(program(*tasks)) == 2 + 5


def test_what_is_held_back_for_the_last_reduction_brings_its_own() -> None:
    tasks = [task for n in range(3) for task in (kernel(f"dw{n}", 4), gather(f"r{n}", 3, f"dw{n}"))]
    path = [kernel("dx", 4), kernel("de", 4, "dx"), gather("r", 8, "de")]
    assert exposed_bound(program(*tasks, *path)) == 8 - 3 * (4 - 3)


def test_a_reduction_on_two_links_one_after_the_other_is_one() -> None:
    tasks = [
        task
        for n in range(3)
        for task in (
            kernel(f"dw{n}", 4, "g"),
            gather(f"r{n}", 1, f"dw{n}"),
            gather(f"s{n}", 4, f"r{n}", stream=ACROSS),
        )
    ]
    path = [gather("g", 1, "w", prefetchable=True), kernel("de", 4, "g"), gather("r", 5, "de")]
    assert exposed_bound(program(*path, *tasks, gather("s", 8, "r", stream=ACROSS))) == 5 + 8


@pytest.mark.slow
@LAW
@given(programs())
def test_no_schedule_is_below_the_bound(given: Program) -> None:
    assert exposed_bound(given) <= schedule(given).timeline.exposed + 1e-9


@LAW
@given(programs(largest=6), st.integers(0, 63))
def test_no_order_at_all_is_below_the_bound(given: Program, early: int) -> None:
    tasks = [replace(task, prefetchable=task.is_collective and early >> n & 1 == 1) for n, task in enumerate(given.tasks)]
    given = replace(given, tasks=tuple(tasks))
    orders = filter(lambda order: _keeps_dependencies(given, order), permutations(range(len(given.tasks))))
    assert exposed_bound(given) <= min(simulate(given.reordered(order)).exposed for order in orders) + 1e-9


def _keeps_dependencies(given: Program, order: tuple[int, ...]) -> bool:
    places = {task: place for place, task in enumerate(order)}
    makers = given.index.makers
    return all(
        makers[b] < 0 or places[makers[b]] < places[n] for n, inputs in enumerate(given.index.inputs) for b in inputs
    )
