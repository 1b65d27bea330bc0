"""More memory than there is costs what computing values again takes; that is near what it takes in a program."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from autoshard import Mesh, Options, plan
from autoshard.planner.recomputation import Kept, Settling, Trial
from examples.llama import TINY, Llama
from passes.search.evaluate import evaluate
from passes.search.find import Goal, solve
from passes.search.room import Room, Step, relief_of
from passes.search.sides import Sides
from tests.search.test_find import problem_of, small_graph


def test_the_cheapest_bytes_are_freed_first() -> None:
    relief = relief_of([(4.0, 8.0), (1.0, 1.5), (2.0, 2.0), (2.0, 5.0)])
    assert relief == (Step(2.0, 1.0), Step(2.0, 3.0))  # the second point is above the line from nothing to the third
    room = Room(10.0, relief)
    assert [room.seconds(memory) for memory in (9.0, 11.0, 13.0, 14.0)] == [0.0, 1.0, 5.0, 8.0]
    assert room.fits(14.0) and not room.fits(14.1)


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_is_better_than_its_bytes_at_any_price(seed: int) -> None:
    draw = random.Random(seed)
    room = Room(draw.uniform(-2, 10), relief_of([(draw.uniform(0, 9), draw.uniform(0, 9)) for _ in range(4)]))
    for _ in range(50):
        memory, base, byte = room.most - draw.uniform(0, 20), draw.uniform(0, 3), draw.uniform(0, 5)
        assert byte * (memory - base) - room.worth(byte, base) <= room.seconds(memory) + 1e-9


@pytest.mark.parametrize(("seed", "share"), [(0, 0.5), (0, 0.9), (1, 0.7), (2, 0.6), (2, 0.95)])
def test_the_plan_is_the_best_of_all_with_what_they_compute_again(seed: int, share: float) -> None:
    lines = small_graph(seed, "tp=2").splitlines()
    problem, prices = problem_of("\n".join([*lines[:10], 'return output("output") %v2']) + "\n")
    sides = Sides(problem, prices)
    ranges = (range(len(variable.choices)) for variable in problem.variables)
    picks = [list(picked) for picked in product(*ranges)]
    free = [plan for picked in picks if (plan := evaluate(sides, picked, keeps=0.0)) is not None]
    fastest, smallest = min(free, key=lambda one: one.objective), min(one.memory for one in free)
    limit = share * smallest  # all have to free something
    size = smallest - limit
    for relief in (
        (Step(size, fastest.objective / 9 / size), Step(size, fastest.objective / size)),
        (Step(4 * size, fastest.objective / 50 / size),),
    ):
        room = Room(limit, relief)
        fitting = [one.objective + room.seconds(one.memory) for one in free if room.fits(one.memory)]
        found, bound = solve(problem, prices, Goal(limit, gap=1e-6, relief=relief))
        assert found.objective == pytest.approx(min(fitting), rel=1e-5)
        assert bound <= min(fitting) * (1 + 1e-9) and room.fits(found.memory)


CONFIG = replace(TINY, layers=6, dim=1024, heads=8, kv_heads=8, hidden=4096, vocab=1024, seq=512)


@pytest.mark.parametrize("mesh", ["dp=8", "dp=2,tp=4", "dp=2,cp=2,tp=2"])
def test_what_can_be_freed_is_near_what_a_program_frees(mesh: str) -> None:
    with torch.device("meta"):
        model, tokens = Llama(CONFIG), torch.empty(64, CONFIG.seq, dtype=torch.long)
    made = plan(model, Mesh(mesh, hardware="h100"), (tokens, tokens), options=Options())
    again = made.replan(recompute="block").recomputation
    assert made.state is not None and made.state.prepared is not None and again is not None
    relief = made.state.prepared.relief
    assert again.freed is not None and again.compute is not None
    assert sum(step.nbytes for step in relief) == pytest.approx(again.freed, rel=0.3)
    assert sum(step.nbytes * step.seconds for step in relief) == pytest.approx(again.compute, rel=0.5)


def test_a_quick_answer_stops_at_the_first_program_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model, tokens = Llama(CONFIG), torch.empty(64, CONFIG.seq, dtype=torch.long)
    made = plan(model, Mesh("dp=8", hardware="h100"), (tokens, tokens), options=Options())
    assert made.cost is not None
    trials, trial = list[Kept](), Settling.trial

    def counted(self: Settling, kept: Kept) -> Trial:
        trials.append(kept)
        return trial(self, kept)

    monkeypatch.setattr(Settling, "trial", counted)
    limit = int(0.5 * made.cost.peak_memory)
    quick = made.replan(memory_limit=limit)
    assert quick.cost is not None and quick.cost.peak_memory <= limit and quick.recomputation is not None
    assert trials[0] is None and 2 <= len(trials) <= 3, trials
    proven = made.replan(memory_limit=limit, prove=True)
    assert proven.cost is not None and proven.cost.step_time <= quick.cost.step_time * 1.001
