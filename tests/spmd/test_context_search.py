"""A search shards the sequence of attention where that pays, and says where attention is whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard import Mesh, Options
from autoshard.planner.recipe_candidates import context_names
from autoshard.planner.ties import TIE
from passes.hardware.hardware import Hardware, hardware_named
from passes.ir.graph import layouts_of
from passes.ir.text import parse_graph
from passes.recipes import registered_recipes
from passes.recipes.context_parallel import POSITIONS
from passes.rules.attention import is_attention
from tests.spmd.oracle import Reference, compare, plan_ranks
from tests.spmd.test_context import TOLERANCE, attend


def slow(*, bandwidth: float) -> Hardware:
    """Return a machine on which small attention takes longer than messages; `bandwidth` of links in bytes/s."""
    h100 = hardware_named("h100")
    link = replace(h100.inside, bandwidth=bandwidth, latency=1e-9, setup=1e-9, reduces=0.0)
    flops = tuple((dtype, 1e6) for dtype, _ in h100.flops)
    return replace(h100, name=f"slow {bandwidth}", flops=flops, launch=1e-9, inside=link, units=1, tile=1, contention=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("causal", "bandwidth", "is_ring"),
    # On the last but one, a ring would be faster if its messages did not slow attention down.
    [(True, 1e9, False), (True, 1e5, True), (False, 1e9, False), (False, 1e5, False), (False, 3e4, True)],
    ids=["causal", "causal, slow links", "full", "full, slow links", "full, slower links"],
)
def test_a_search_shards_positions_where_heads_do_not_divide(causal: bool, bandwidth: float, is_ring: bool) -> None:
    whole = Reference.of(attend((1, 16, 12), causal=causal))
    ranks = whole.plan(Mesh("cp=4", hardware=slow(bandwidth=bandwidth)), Options())
    plan = ranks.planned.plan
    assert plan.search is not None and plan.search.chosen == "solved" and plan.cost is not None
    graph, _ = parse_graph(plan.graph("COLLECTIVE"))
    calls = [node for node in graph.graph.nodes if is_attention(node.target)]
    assert calls and all(layouts_of(node)[0].axes_on(POSITIONS) for node in calls)
    assert bool(plan.count("send")) == is_ring
    fixed = next(one.cost for one in plan.search.candidates if one.name == "context")
    assert fixed is None or plan.cost.step_time <= fixed.step_time * (1 + TIE)  # None: proven to be slower
    compare(ranks.run().step, whole.step, TOLERANCE)


def test_a_searched_plan_says_that_attention_runs_whole() -> None:
    """Try 1 sequence, 2 heads of keys and 6 positions, which 4 ranks cannot share, on an axis where no sequence is padded."""
    case = attend((1, 6, 12))
    mesh = Mesh("tp=4", hardware=slow(bandwidth=1e6))  # where a recipe, with more messages, is no tie
    plan = plan_ranks(case, mesh, Options(inputs={"x": {"tp": "S(2)"}})).planned.plan
    found = [(one.pass_name, one.text) for one in plan.remarks if "runs whole" in one.text]
    assert found == [
        ("solve", "on tp: attention runs whole on all 4 ranks: each computes 3.46e+03 FLOP in 36.1 ms, and as a part 864")
    ]


@pytest.mark.slow
def test_a_search_pads_positions_that_ranks_do_not_divide() -> None:
    whole = Reference.of(attend((1, 15, 12)))
    ranks = whole.plan(Mesh("cp=4", hardware=slow(bandwidth=1e9)), Options())
    plan = ranks.planned.plan
    assert plan.search is not None and plan.search.chosen == "solved" and plan.cost is not None
    other = next(one for one in plan.search.candidates if one.name == "solved, not padded")
    assert other.cost is None and other.note == "at least 848 ms: not simulated" and plan.cost.step_time < 0.848 / 2
    compare(ranks.run().step, whole.step, TOLERANCE)


WAYS = ("context(gather)", "context(ring)", "context(all_to_all)")


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_the_way_chosen_is_as_fast_as_any_fixed_way(causal: bool, kv_heads: int) -> None:
    """Over numbers of ranks and links, in the simulator."""
    whole, worse = Reference.of(attend((1, 32, 12), causal=causal, kv_heads=kv_heads)), []
    for ranks, bandwidth in ((2, 1e9), (4, 1e9), (4, 3e5), (2, 2e4)):
        mesh, steps = Mesh(f"cp={ranks}", hardware=slow(bandwidth=bandwidth)), dict[str, float]()
        for name in ("context", *WAYS[: 3 if kv_heads % ranks == 0 else 2]):
            cost = whole.plan(mesh, Options(recipe=name)).planned.plan.cost
            assert cost is not None
            steps[name] = cost.step_time
        if steps["context"] > min(steps.values()):
            worse.append((ranks, bandwidth, steps))
    assert worse == []


def test_of_ways_that_are_near_the_fastest_is_taken_and_told() -> None:
    """By the formulas alone it is the ring."""
    whole = Reference.of(attend((1, 8, 12), causal=True))
    plan = whole.plan(Mesh("cp=2", hardware=slow(bandwidth=1e5)), Options(recipe="context")).planned.plan
    assert plan.recipes == (WAYS[2],)
    assert [one.text for one in plan.remarks] == [
        "context(all_to_all) is the fastest, by simulated steps of 165 ms; context(ring) 170 ms, context(gather) 179 ms"
    ]


def test_a_search_tries_the_ways_that_its_recipe_did_not_choose() -> None:
    """Its candidate `context` takes the ring, by the formulas."""
    whole = Reference.of(attend((1, 8, 12), causal=True))
    search = whole.plan(Mesh("cp=2", hardware=slow(bandwidth=1e5)), Options()).planned.plan.search
    assert search is not None
    found = {one.name: one for one in search.candidates}
    assert {"context", WAYS[0], WAYS[2]} <= found.keys() and WAYS[1] not in found
    assert all(found[name].cost is not None or "at least" in found[name].note for name in ("context", WAYS[0], WAYS[2]))


def test_activations_take_a_part_of_the_memory() -> None:
    whole, taken = Reference.of(attend((1, 256, 12), causal=True, kv_heads=4)), list[int]()
    for ranks in (1, 2, 4):
        plan = whole.plan(Mesh(f"cp={ranks}", hardware=hardware_named("h100")), Options(recipe=WAYS[1])).planned.plan
        assert plan.cost is not None
        taken.append(plan.cost.memory.activations)
    assert taken[1] <= 1.01 * taken[0] / 2 and taken[2] <= 1.01 * taken[0] / 4


def test_recipes_with_context_are_tried_on_an_axis_for_sequences() -> None:
    assert list(context_names(Mesh("dp=2,tp=2"))) == []
    assert list(context_names(Mesh("cp=2"))) == ["context"]
    names = list(context_names(Mesh("dp=2,cp=2,tp=2")))
    assert "fsdp+context+megatron" in names
    assert len(names) < len(registered_recipes()) ** 2
