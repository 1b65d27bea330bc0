"""Joined collectives: what may share a message does, nothing waits for itself, and it is done where it pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from passes.cost.collective_time import collective_seconds
from passes.cost.program import Program, Task
from passes.cost.scheduling.best_schedule import bucketed, schedule
from passes.cost.scheduling.bucketing import FIRST, Growing, Hidden, bucket
from passes.cost.simulate import simulate
from passes.hardware.hardware import Hardware, hardware_named
from passes.ir.mesh import Mesh
from tests.cost.programs import gather, kernel, program

MESH = Mesh("dp=64", hardware="h100")  # eight nodes: a collective costs about 0.3 ms, whatever its size
KiB, MiB = 1 << 10, 1 << 20


def _priced(task: Task, nbytes: int) -> Task:
    assert MESH.hardware is not None
    seconds = collective_seconds(task.kind, nbytes, MESH.group_shape(("dp",)), MESH.hardware)
    return replace(task, seconds=seconds, nbytes=nbytes, dtype="f32")


def _gathers(*sizes: int) -> Program:
    """Return a forward that gathers and uses a weight of each size in bytes, cast first."""
    tasks: list[Task] = []
    for n, size in enumerate(sizes):
        tasks.append(kernel(f"cast{n}", 1e-6, f"w{n}"))
        tasks.append(_priced(gather(f"g{n}", 0, f"cast{n}", prefetchable=True), size))
        tasks.append(kernel(f"h{n}", 1e-4, f"g{n}", *([f"h{n - 1}"] if n else [])))
    given = program(*tasks, sizes={f"g{n}": size for n, size in enumerate(sizes)})
    return replace(given, mesh=MESH)


def _names(given: Program) -> list[str]:
    return [task.name for task in given.tasks]


def test_gathers_are_joined_where_the_first_stood() -> None:
    joined = bucket(_gathers(64 * KiB, 64 * KiB, 64 * KiB), 128 * KiB)
    assert _names(joined) == [
        "cast0", "cast1", "g0+1.sent", "g0+1", "g0+1.received", "h0", "h1", "cast2", "g2", "h2",
    ]  # fmt: skip
    assert simulate(joined).step_time < simulate(_gathers(64 * KiB, 64 * KiB, 64 * KiB)).step_time


def test_reductions_are_joined_where_the_last_stood() -> None:
    tasks = [kernel("dw0", 1e-4), kernel("dw1", 1e-4), kernel("dx", 1e-4)]
    reductions = [_priced(replace(gather(f"r{n}", 0, f"dw{n}", deferrable=True), kind="reduce_scatter"), KiB) for n in (0, 1)]
    order = (tasks[0], reductions[0], kernel("grad0", 1e-6, "r0"), tasks[1], reductions[1], tasks[2])
    joined = bucket(replace(program(*order), mesh=MESH), 2 * KiB)
    assert _names(joined)[:2] == ["dw0", "dw1"]
    assert _names(joined).index("r0+1") < _names(joined).index("grad0")
    assert _names(joined)[2] == "r0+1.sent"


def test_a_gather_of_a_gather_is_not_joined_with_it() -> None:
    first = _priced(gather("a", 0, "w", prefetchable=True), KiB)
    second = _priced(gather("b", 0, "a", prefetchable=True), KiB)
    given = replace(program(first, second, kernel("h", 1e-4, "b")), mesh=MESH)
    assert bucket(given, 1 << 20) == given


@pytest.mark.parametrize("change", [{"dtype": "bf16"}, {"backward": True}, {"axes": ("tp",)}, {"kind": "all_to_all"}])
def test_what_differs_is_not_joined(change: dict[str, object]) -> None:
    given = _gathers(KiB, KiB)
    tasks = tuple(replace(task, **change) if task.name == "g1" else task for task in given.tasks)
    given = replace(given, tasks=tasks)
    assert bucket(given, 1 << 20) == given


def test_what_costs_more_together_is_not_joined() -> None:
    given = _gathers(1 << 30, 1 << 30)
    assert bucket(given, 4 << 30) == given, "copying a gigabyte takes longer than another message"


def test_a_schedule_takes_the_best_size_of_buckets() -> None:
    given = _gathers(*[64 * KiB] * 12)
    best = schedule(given, buckets=(0, 128 * KiB, 1 << 20))
    assert best.bucket_bytes == 128 * KiB or best.timeline.step_time < schedule(given, buckets=(128 * KiB,)).timeline.step_time
    assert best.timeline.step_time < schedule(given).timeline.step_time


def test_each_axis_gets_the_size_that_suits_it() -> None:
    """Many small weights over one axis cost their latency; a few larger ones over another can be had one by one, in time."""
    calm = replace(hardware_named("h100"), name="calm", contention=0.0)  # a kernel beside a message is as fast
    mesh, tasks, sizes = Mesh("dp=64,tp=8", hardware=calm), list[Task](), dict[str, int]()
    assert mesh.hardware is not None
    for n in range(24):
        for axis, nbytes, is_there in (("dp", 64 * KiB, True), ("tp", 8 << 20, n % 3 == 0)):
            if is_there:
                seconds = collective_seconds("all_gather", nbytes, mesh.group_shape((axis,)), mesh.hardware)
                one = gather(f"{axis}{n}", seconds, f"{axis}_w{n}", prefetchable=True, dtype="f32", nbytes=nbytes)
                sizes[one.name] = nbytes
                tasks.append(replace(one, axes=(axis,), stream="across" if axis == "dp" else "inside"))
        operands = [name for name in (f"dp{n}", f"tp{n}") if name in sizes]
        tasks.append(kernel(f"h{n}", 1e-4, *operands, *([f"h{n - 1}"] if n else [])))
    given = replace(program(*tasks, sizes=sizes), mesh=mesh)
    tried = (0, 1 << 30)
    found, _ = bucketed(given, tried[1:])
    assert found == {(("dp",), "f32"): 1 << 30, (("tp",), "f32"): 0}
    apart = schedule(bucket(given, found)).timeline.step_time
    assert apart < schedule(given, buckets=tried).timeline.step_time


def test_a_size_between_the_smallest_and_the_largest_sends_earlier_with_less_latency() -> None:
    """Buckets that grow up to it send the first gradients earlier still."""
    calm = replace(hardware_named("h100"), name="calm", contention=0.0)
    tasks = list[Task]()
    for n in range(16):
        reduction = replace(gather(f"r{n}", 0, f"h{n}", deferrable=True), kind="reduce_scatter")
        tasks += [kernel(f"h{n}", 1e-4), _priced(reduction, 16 * MiB)]
    given = replace(program(*tasks), mesh=Mesh("dp=64", hardware=calm))
    found, best = bucketed(given, (32 * MiB, 512 * MiB))
    assert found == {(("dp",), "f32"): Growing(128 * MiB)}
    assert best.timeline.step_time < schedule(given, buckets=(128 * MiB,)).timeline.step_time
    others = schedule(given, buckets=(0, 32 * MiB, 512 * MiB)).timeline.step_time
    assert best.timeline.step_time < 0.95 * others


def test_a_sort_of_message_with_few_bytes_gets_a_bucket_that_is_smaller_than_the_smallest() -> None:
    """Reduce inside a node first, and then an eighth of the bytes across."""
    calm = replace(hardware_named("h100"), name="calm", contention=0.0)
    mesh, tasks = Mesh("dp=8,tp=8", hardware=calm), list[Task]()
    assert mesh.hardware is not None
    for n in range(16):
        tasks.append(kernel(f"h{n}", 1e-4, *([f"h{n - 1}"] if n else [])))
        for axis, made, nbytes in (("tp", f"h{n}", 16 * MiB), ("dp", f"tp{n}", 2 * MiB)):
            seconds = collective_seconds("reduce_scatter", nbytes, mesh.group_shape((axis,)), mesh.hardware)
            one = gather(f"{axis}{n}", seconds, made, deferrable=True, dtype="f32", nbytes=nbytes)
            stream = "across" if axis == "dp" else "inside"
            tasks.append(replace(one, kind="reduce_scatter", axes=(axis,), stream=stream))
    given = replace(program(*tasks), mesh=mesh)
    found, best = bucketed(given, (32 * MiB, 512 * MiB))
    assert found[("dp",), "f32"] == 8 * MiB
    assert best.timeline.step_time < schedule(given, buckets=(0, 32 * MiB, 512 * MiB)).timeline.step_time


def _hidden_reductions(hardware: Hardware) -> Program:
    """Return a backward whose kernels hide the reductions of a large gradient and four small ones per layer, inside a node."""
    mesh, tasks = Mesh("dp=8", hardware=hardware), list[Task]()
    for n in range(8):
        tasks.append(kernel(f"h{n}", 1e-3, *([f"h{n - 1}"] if n else [])))
        for name, nbytes in (("w", 16 * MiB), ("a", 8 * KiB), ("b", 8 * KiB), ("c", 8 * KiB), ("d", 8 * KiB)):
            seconds = collective_seconds("all_reduce", nbytes, mesh.group_shape(("dp",)), hardware)
            one = gather(f"{name}{n}", seconds, f"h{n}", deferrable=True, dtype="f32", nbytes=nbytes)
            tasks.append(replace(one, kind="all_reduce", stream="inside"))
    sizes = {task.outputs[0]: task.nbytes for task in tasks if task.is_collective}
    return replace(program(*tasks, sizes=sizes), mesh=mesh)


def test_of_messages_that_hide_only_small_ones_are_joined() -> None:
    """Copies delay kernels by all of their seconds, a hidden message by a part of its own."""
    given, tried = _hidden_reductions(hardware_named("h100")), (32 * MiB, 512 * MiB)
    found, best = bucketed(given, tried)
    assert found[("dp",), "f32"] in [Hidden(most) for most in tried]
    messages = [task for task in best.program.tasks if task.is_collective]
    alone, joined = ([task for task in messages if ("+" in task.name) is is_joined] for is_joined in (False, True))
    assert [task.nbytes for task in alone] == [16 * MiB] * 8
    assert sum(task.nbytes for task in joined) == 32 * 8 * KiB
    assert best.timeline.step_time < 0.99 * schedule(given, buckets=(0, *tried)).timeline.step_time


def test_hidden_messages_that_delay_no_kernel_are_sent_alone() -> None:
    calm = replace(hardware_named("h100"), name="calm", contention=0.0)
    given = _hidden_reductions(calm)
    assert bucket(given, Hidden(512 * MiB)) == given


def test_of_a_program_that_is_much_slower_than_another_no_more_sizes_are_tried() -> None:
    given = _gathers(*[64 * KiB] * 12)
    sizes = (0, 128 * KiB, 1 << 20)
    step = schedule(given).timeline.step_time
    assert schedule(given, buckets=sizes, worst=step / 2) == schedule(given)
    assert schedule(given, buckets=sizes, worst=step) == schedule(given, buckets=sizes) != schedule(given)


def test_growing_buckets_double() -> None:
    first = 64 * KiB
    joined = bucket(_gathers(*[first] * 12), Growing(FIRST * first))
    gathers = [task.nbytes // first for task in joined.tasks if task.kind == "all_gather"]
    assert gathers == [1, 2, 4, 5]
    assert Growing(FIRST * first).limit(20) == FIRST * first
