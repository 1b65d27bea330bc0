"""The cost of a collective: published figures, laws, formulas."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import sympy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from passes.cost.collective_time import collective_formula, collective_seconds, formula_for, link_of, values_of
from passes.hardware.hardware import Group, Hardware, hardware_named
from passes.ir.collectives.formulas import SYMBOLS, ring_formula

H100 = hardware_named("h100")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
PRESETS = ("a100", "a100-pcie", "h100", "h100-500w", "h200", "b200", "gb200", "cpu")

# NCCL 2.27 tests on H100 published in the AutoParallel repository: kind, ranks, nodes, us, GB/s of large messages.
# Those over nodes (and to 8 GPUs) whose kind is a ring are of NCCL's ring alone.
NCCL = (
    ("ring", 2, 1, 8, 537),
    ("ring", 4, 1, 17, 434),
    ("ring", 8, 1, 30, 394),
    ("all_reduce", 2, 1, 10, 324),
    ("all_reduce", 4, 1, 15, 236),
    ("all_reduce", 8, 1, 31, 267),
    ("all_to_all", 8, 1, 50, 380),
    ("ring", 16, 2, 70, 410),
    ("ring", 32, 4, 146, 396),
    ("ring", 64, 8, 297, 390),
    ("ring", 128, 16, 599, 387),
    ("ring", 256, 32, 1204, 385),
    ("ring", 2, 2, 22, 96),
    ("ring", 8, 8, 106, 55),
    ("ring", 32, 32, 442, 50),
    ("all_reduce", 16, 2, 53, 267),
    ("all_reduce", 64, 8, 109, 160),
    ("all_reduce", 256, 32, 165, 160),
)
# Reported, an all-reduce over 8 nodes or more takes longer than a reduce-scatter and an all-gather after it: the law
# that it does not costs 18 % there. Worst of the others: 7 % of large messages, 26 % (4 us) of small ones.
LARGE_TOLERANCE = 0.08
NODES_REDUCE_TOLERANCE = 0.20
SMALL_TOLERANCE = 0.27


def modelled(kind: str, nbytes: float, group: Group) -> float:
    if kind == "ring":
        return float(ring_formula(link_of(group), sweeps=1).subs(values_of(nbytes, group, H100)))
    return collective_seconds(kind, nbytes, group, H100)


@pytest.mark.parametrize(("kind", "ranks", "nodes", "microseconds", "rate"), NCCL)
def test_published_figures_are_met(kind: str, ranks: int, nodes: int, microseconds: float, rate: float) -> None:
    group, large = Group(ranks, nodes), 1e15
    latency = modelled(kind, 0, group)
    off = (modelled(kind, large, group) - latency) * rate * 1e9 / large - 1
    print(f"{kind} {ranks} ranks on {nodes} nodes: large {off:+.1%}, small {latency * 1e6 / microseconds - 1:+.1%}")
    assert abs(off) < (NODES_REDUCE_TOLERANCE if kind == "all_reduce" and nodes > 2 else LARGE_TOLERANCE)
    assert latency == pytest.approx(microseconds * 1e-6, rel=SMALL_TOLERANCE)


def test_large_gathers_go_around_the_ring() -> None:
    for ranks, nodes in ((8, 1), (256, 32), (100, 100)):
        group = Group(ranks, nodes)
        assert collective_seconds("all_gather", 1e9, group, H100) == pytest.approx(modelled("ring", 1e9, group))


def test_small_reductions_over_many_nodes_go_up_a_tree() -> None:
    group = Group(256, 32)
    ring = float(ring_formula("across", sweeps=2).subs(values_of(1e3, group, H100)))
    assert collective_seconds("all_reduce", 1e3, group, H100) < ring / 10


# Laws -------------------------------------------------------------------------------------------------------------

law = settings(deadline=None)  # the first call of each formula compiles it
hardware = st.sampled_from(PRESETS).map(hardware_named)
kinds = st.sampled_from(KINDS)
sizes = st.integers(0, 1 << 40)
per_node = st.integers(1, 8)
nodes = st.integers(2, 300)


def in_a_node(machine: Hardware, ranks: int) -> Group:
    assume(ranks <= machine.node_size)
    return Group(ranks)


groups = st.one_of(
    st.integers(1, 8).map(Group),
    st.builds(lambda p, n: Group(p * n, n, p), per_node, nodes),
    st.builds(lambda p, n, extra: Group(p * n + extra, n, p), st.integers(1, 4), nodes, st.integers(0, 4)),
)


@law
@given(kinds, groups, hardware)
def test_no_collective_takes_less_than_nothing_and_one_rank_takes_nothing(
    kind: str, group: Group, machine: Hardware
) -> None:
    assert collective_seconds(kind, 1 << 20, Group(1), machine) == 0.0
    assert (collective_seconds(kind, 0, group, machine) > 0) == (group.ranks > 1)


@law
@given(kinds, sizes, sizes, groups, hardware)
def test_more_bytes_take_no_less(kind: str, one: int, more: int, group: Group, machine: Hardware) -> None:
    small, large = sorted((one, more))
    assert collective_seconds(kind, small, group, machine) <= collective_seconds(kind, large, group, machine)


@law
@given(kinds, sizes, st.integers(1, 72), st.integers(1, 72), hardware)
def test_more_ranks_of_a_node_take_no_less(kind: str, nbytes: int, one: int, more: int, machine: Hardware) -> None:
    few, many = (in_a_node(machine, ranks) for ranks in sorted((one, more)))
    assert _at_most(collective_seconds(kind, nbytes, few, machine), collective_seconds(kind, nbytes, many, machine))


@law
@given(kinds, sizes, per_node, st.integers(1, 300), st.integers(1, 300), hardware)
def test_more_nodes_take_no_less(kind: str, nbytes: int, p: int, one: int, more: int, machine: Hardware) -> None:
    few, many = (Group(p * count, count, p) for count in sorted((one, more)))
    assert _at_most(collective_seconds(kind, nbytes, few, machine), collective_seconds(kind, nbytes, many, machine))


@law
@given(kinds, sizes, st.integers(2, 72), st.integers(2, 72), hardware)
def test_ranks_spread_over_nodes_take_no_less(
    kind: str, nbytes: int, ranks: int, spread: int, machine: Hardware
) -> None:
    together = in_a_node(machine, ranks)
    count = min(spread, ranks)
    apart = Group(ranks, count, ranks // count)
    near, far = (collective_seconds(kind, nbytes, group, machine) for group in (together, apart))
    assert _at_most(near, far)


@law
@given(sizes, groups, hardware)
def test_a_reduction_is_between_its_halves_and_their_sum(nbytes: int, group: Group, machine: Hardware) -> None:
    gather, scatter, reduce = (
        collective_seconds(kind, nbytes, group, machine) for kind in ("all_gather", "reduce_scatter", "all_reduce")
    )
    assert _at_most(scatter, reduce) and _at_most(reduce, scatter + gather)


def _at_most(small: float, large: float) -> bool:
    return small <= large * (1 + 1e-12)


# Formulas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [Group(8), Group(64, 8)])
def test_what_is_printed_is_what_is_evaluated(kind: str, group: Group) -> None:
    formula = formula_for(kind, group, H100)
    assert formula.free_symbols <= set(SYMBOLS)
    value = float(formula.evalf(subs=values_of(1 << 25, group, H100)))
    assert value == pytest.approx(collective_seconds(kind, 1 << 25, group, H100), rel=1e-9)


def test_a_formula_reads_as_in_a_textbook() -> None:
    assert str(collective_formula("all_to_all")) == "2*N/c + N*(k - 1)/(b*k) + a*(2*k - 2) + s"
    assert str(ring_formula("inside", sweeps=1)) == "2*N/c + N*(k - 1)/(b*k) + a*(k - 1) + s"


def test_gloo_scatters_what_it_reduces_whole() -> None:
    cpu = hardware_named("cpu")
    assert formula_for("reduce_scatter", Group(4), cpu) == formula_for("all_reduce", Group(4), cpu)
    assert formula_for("reduce_scatter", Group(4), H100) != formula_for("all_reduce", Group(4), H100)


def test_a_formula_can_be_solved_for_the_size_at_which_the_tree_gives_way_to_the_ring() -> None:
    group = Group(100, 100)
    values = values_of(0, group, H100)
    size = next(iter(symbol for symbol in SYMBOLS if symbol.name == "N"))
    del values[size]
    ring, tree = (expression.subs(values) for expression in collective_formula("all_gather", "across").args)
    crossing = float(sympy.nsolve(ring - tree, size, 1e7))
    below, above = (collective_seconds("all_gather", at, group, H100) for at in (crossing * 0.9, crossing * 1.1))
    assert below < modelled("ring", crossing * 0.9, group) * 0.999
    assert above == pytest.approx(modelled("ring", crossing * 1.1, group))


def test_a_look_up_takes_microseconds() -> None:
    group = Group(8)
    collective_seconds("all_gather", 1, group, H100)
    start = time.process_time()
    for _ in range(10_000):
        collective_seconds("all_gather", 1, group, H100)
    assert (time.process_time() - start) / 10_000 < 3e-5


def test_a_switch_is_no_faster_than_the_links_to_it() -> None:
    def seconds(part: float) -> float:
        inside = replace(H100.inside, bandwidth=H100.inside.bandwidth * part)
        return collective_seconds("all_reduce", 1 << 30, Group(8, 1, 8), replace(H100, name=f"h100 x {part}", inside=inside))

    assert seconds(0.02) > 10 * seconds(1.0) and seconds(0.1) > 2 * seconds(0.5) > 2 * seconds(1.0)
