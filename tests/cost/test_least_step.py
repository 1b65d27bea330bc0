"""No order, no buckets and no chunks make a step shorter than the bound that prunes recipes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.cost.build_program import program_of_graph
from passes.cost.collective_time import collective_seconds
from passes.cost.program import Program
from passes.cost.scheduling.best_schedule import schedule
from passes.cost.scheduling.bucketing import bucket
from passes.cost.scheduling.least_step import least_of_graph, least_step
from passes.cost.simulate import simulate
from passes.hardware.hardware import hardware_named
from passes.ir.collectives import KINDS
from passes.ir.folded_layers import Repeats
from passes.ir.mesh import Mesh
from passes.ir.text import parse_graph
from tests.cost.programs import contended, gather, kernel, program, programs

LAW = settings(max_examples=50, deadline=None, derandomize=True)
MESH = Mesh("dp=64", hardware="h100")
KiB = 1 << 10


def gathers(*sizes: int) -> Program:
    """Return a forward that gathers and uses a weight of each size in bytes."""
    tasks = []
    for n, size in enumerate(sizes):
        seconds = collective_seconds("all_gather", size, MESH.group_shape(("dp",)), hardware_named("h100"))
        tasks.append(gather(f"g{n}", seconds, f"w{n}", prefetchable=True, nbytes=size))
        tasks.append(kernel(f"h{n}", 1e-5, f"g{n}", *([f"h{n - 1}"] if n else [])))
    return replace(program(*tasks), mesh=MESH)


@LAW
@given(programs(), st.sampled_from([0.0, 0.5]))
def test_no_order_is_shorter(some: Program, contention: float) -> None:
    some = contended(some, contention, contention / 2)
    assert least_step(some) <= schedule(some).timeline.step_time * (1 + 1e-12)
    assert least_step(some) <= simulate(some).step_time * (1 + 1e-12)


@pytest.mark.parametrize("nbytes", [0, 128 * KiB, 1 << 30])
def test_no_buckets_are_shorter(nbytes: int) -> None:
    some = gathers(*[64 * KiB] * 8)
    assert least_step(some) <= schedule(bucket(some, nbytes)).timeline.step_time
    assert least_step(some) > collective_seconds("all_gather", 512 * KiB, MESH.group_shape(("dp",)), hardware_named("h100")) / 2


def test_it_is_the_busiest_stream_of_each_part() -> None:
    tasks = [kernel("a", 4), gather("c", 3, "a"), gather("d", 2, "w"), kernel("b", 7, "d"), gather("e", 9, "b")]
    tasks[3:] = [replace(task, backward=True) for task in tasks[3:]]
    assert least_step(program(*tasks)) == max(4, 3 + 2) + max(7, 9)


def test_messages_that_an_operator_may_send_do_not_count() -> None:
    tasks = [kernel("a", 4), gather("c", 5, "a"), kernel("b", 0, "c")]
    assert [least_step(program(*tasks), are_sent_apart=apart) for apart in (True, False)] == [5, 4]


LOCAL = """
mesh tp=2
stage LOCAL
%x: bf16[4096, 4096] = input("x")
%w: bf16[4096, 4096] = parameter("w")
%one: bf16[8192, 4096] = _c10d_functional.all_gather_into_tensor(%x, 2, "tp=2:tp")
%a: bf16[8192, 4096] = _c10d_functional.wait_tensor(%one)
%two: bf16[8192, 4096] = _c10d_functional.all_gather_into_tensor(%x, 2, "tp=2:tp")
%b: bf16[8192, 4096] = _c10d_functional.wait_tensor(%two)
%mm: bf16[8192, 4096] = mm(%a, %w)
%mm_1: bf16[8192, 4096] = mm(%b, %w)
%add: bf16[8192, 4096] = add.Tensor(%mm, %mm_1)
return output("output") %add
"""


def test_the_bound_of_a_graph_counts_equal_calls_once_and_no_fused_kernels() -> None:
    """The partitioner merges equal calls; which kernels it leaves apart is not known before."""
    mesh = Mesh("tp=2", hardware="h100")
    gm = parse_graph(LOCAL)[0]
    by_name = {task.nodes[0]: task for task in program_of_graph(gm, mesh, fused=False).tasks}
    product, message = by_name["mm"].seconds, by_name["one"].seconds
    assert product > message and by_name["add"].seconds > 0
    assert least_of_graph(gm, mesh, Repeats()) == least_of_graph(gm, mesh, Repeats(), are_sent_apart=False) == product
    fast = Mesh("tp=2", hardware=replace(hardware_named("h100"), flops=(("bf16", 1e18), ("f32", 1e18))))
    assert least_of_graph(gm, fast, Repeats()) == pytest.approx(message)


@pytest.mark.parametrize("mesh", [MESH, Mesh("dp=8", hardware="a100"), Mesh("dp=8", hardware="a100-pcie")], ids=str)
def test_one_message_takes_no_longer_than_its_parts(mesh: Mesh) -> None:
    assert mesh.hardware is not None
    for kind in (name for name, kind in KINDS.items() if kind.seconds is not None):
        for parts in ((1 * KiB, 64 * KiB), (1 << 20, 1 << 20), (3 << 20, 900 << 20)):
            whole, *apart = (collective_seconds(kind, n, mesh.group_shape(("dp",)), mesh.hardware) for n in (sum(parts), *parts))
            assert whole <= sum(apart), kind
