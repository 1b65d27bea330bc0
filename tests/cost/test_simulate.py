"""The simulator keeps the rules of streams and of memory, and the laws that follow from them."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.cost.program import ACROSS, OPTIMIZER, PERSISTENT, STREAMS, Buffer, Program
from passes.cost.simulate import simulate
from tests.cost.programs import contended, gather, kernel, program, programs

LAW = settings(max_examples=60, deadline=None, derandomize=True)


def _spans(given: Program) -> dict[str, list[float]]:
    timeline = simulate(given)
    return {t.name: span for t, *span in zip(given.tasks, timeline.starts, timeline.ends, strict=True)}


def test_a_program_without_tasks_takes_no_time() -> None:
    """Simulate a backward of views alone: it reads what the forward saved, and computes nothing."""
    run = simulate(replace(program(), buffers=(Buffer("saved", 4, "activation"),)))
    assert (run.memory, run.peak_memory, run.peak_task) == ((), 0, 0)


def test_a_kernel_waits_for_the_collective_it_reads() -> None:
    run = program(gather("g", 3, "w"), kernel("free", 1), kernel("user", 1, "g"), kernel("late", 1))
    assert _spans(run) == {"g": [0, 3], "free": [0, 1], "user": [3, 4], "late": [4, 5]}


def test_a_collective_waits_for_the_kernels_issued_before_it() -> None:
    assert _spans(program(kernel("a", 2), gather("g", 1, "w")))["g"] == [2, 3]
    assert _spans(program(gather("g", 1, "w"), kernel("a", 2)))["g"] == [0, 1]


def test_links_are_independent_and_each_is_a_queue() -> None:
    run = program(gather("g", 2, "w"), gather("h", 2, "w"), gather("i", 3, "w", stream=ACROSS))
    assert _spans(run) == {"g": [0, 2], "h": [2, 4], "i": [0, 3]}


def test_a_collective_of_a_collective_holds_up_the_compute_stream() -> None:
    run = program(gather("g", 2, "w"), gather("h", 2, "g", stream=ACROSS), kernel("a", 1))
    assert _spans(run) == {"g": [0, 2], "h": [2, 4], "a": [2, 3]}


def test_a_kernel_is_slower_while_a_link_is_in_use() -> None:
    run = program(gather("g", 3, "w"), kernel("a", 1), kernel("b", 2), kernel("c", 1, "g"))
    timeline = simulate(contended(run, 0.5))
    assert timeline.ends == (3, 1.5, 4, 5), "of b, 1 s of work takes the 1.5 s until the gather has ended"
    assert (timeline.compute, timeline.compute_by_task, timeline.exposed) == (5, (0, 1.5, 2.5, 1), 0)
    assert simulate(run).ends == (3, 1, 3, 4)


def test_a_collective_is_slower_while_a_kernel_runs() -> None:
    run = program(gather("g", 3, "w"), gather("h", 2, "w"), kernel("a", 3), kernel("b", 1, "h"), kernel("c", 1))
    timeline = simulate(contended(run, 0.0, 0.5))
    assert timeline.starts == (0, 4, 0, 6, 7) and timeline.ends == (4, 6, 3, 7, 8), "of g, 2 s of work take the 3 s of a"
    assert (timeline.communication, timeline.exposed, timeline.compute) == (6, 3, 5)
    assert simulate(run).ends == (3, 5, 3, 6, 7)


def test_a_kernel_and_a_collective_slow_each_other_down() -> None:
    outlasted = program(gather("g", 2, "w"), kernel("a", 4), kernel("b", 1, "g"))
    outlasting = program(gather("g", 5, "w"), kernel("a", 2), kernel("b", 1, "g"))
    assert simulate(contended(outlasted, 0.5, 0.5)).ends == (3, 5, 6), "3 s beside g, in which 2 s of a's work is done"
    assert simulate(contended(outlasting, 0.5, 0.5)).ends == (6, 3, 7), "3 s beside a, in which 2 s of g's work is done"


def test_a_link_that_has_done_its_work_before_a_kernel_ends_is_no_later_than_that() -> None:
    run = program(gather("g", 1, "w"), gather("h", 5, "w", stream=ACROSS), kernel("a", 4), gather("i", 1, "w"))
    assert simulate(contended(run, 0.0, 1.0)).ends == (2, 7, 4, 5)


def test_a_kernel_that_sends_neither_slows_down_nor_is_slower() -> None:
    sends = replace(kernel("s", 2), link=ACROSS, sending=2.0)
    run = program(gather("g", 3, "w"), sends, kernel("a", 1))
    assert simulate(contended(run, 1.0, 0.5)).ends == (3.5, 2, 3.75)


def test_the_optimizer_waits_for_all_gradients() -> None:
    update = replace(kernel("update", 1, "a"), kind=OPTIMIZER, outputs=())
    assert _spans(program(kernel("a", 1), gather("g", 5, "a"), update))["update"] == [6, 7]


def test_exposed_time_is_communication_without_compute() -> None:
    run = program(gather("g", 3, "w"), gather("h", 2, "w", stream=ACROSS), kernel("a", 1), kernel("b", 1, "g"))
    timeline = simulate(run)
    assert (timeline.step_time, timeline.compute, timeline.communication) == (4, 2, 3)
    assert (timeline.exposed, timeline.hidden) == (2, 1)
    assert {task.name: seconds for task, seconds in timeline.exposed_by_task} == {"g": 2, "h": 1}
    assert [(task.name, seconds) for task, seconds in timeline.kernels_beside(0.25, 3.5)] == [("a", 0.75), ("b", 0.5)]


def test_a_value_is_live_from_its_making_to_its_last_use() -> None:
    run = program(kernel("a", 1, "w"), kernel("b", 1, "a"), kernel("c", 1, "b"), sizes={"w": 1, "a": 10, "b": 100})
    timeline = simulate(run)
    assert timeline.memory == (11, 111, 102)
    assert [buffer.name for buffer in timeline.live_at_peak] == ["b", "a", "w"]
    assert timeline.memory_by_kind == {"temporary": 110, "parameter": 1}


def test_the_operand_of_a_collective_is_live_until_it_ends() -> None:
    reduce = gather("g", 2, "a")
    run = program(kernel("a", 1), reduce, kernel("b", 1), kernel("c", 1), kernel("d", 1), sizes={"a": 10, "g": 0})
    assert simulate(run).memory == (10, 10, 11, 11, 1)


def test_a_gradient_stays_to_the_end() -> None:
    run = program(kernel("a", 1), kernel("b", 1), sizes={"a": 10}, kinds={"a": "gradient"})
    assert simulate(run).memory == (10, 11)


def test_a_kernel_in_place_takes_the_memory_of_what_it_reads_last() -> None:
    one = program(kernel("a", 1), kernel("b", 1, "a", in_place=True), sizes={"a": 10, "b": 10})
    read_again = program(kernel("a", 1), kernel("b", 1, "a", in_place=True), kernel("c", 1, "a"), sizes={"a": 9, "b": 9, "c": 0})
    assert simulate(one).peak_memory == 10
    assert simulate(read_again).peak_memory == 18


def test_workspace_counts_while_its_task_runs() -> None:
    timeline = simulate(program(kernel("a", 1, workspace=7), kernel("b", 1)))
    assert timeline.memory == (8, 1)
    assert timeline.memory_by_kind == {"temporary": 1, "workspace": 7}


@LAW
@given(programs())
def test_a_step_is_between_its_busiest_stream_and_the_sum_of_all(given: Program) -> None:
    busy = [sum(task.seconds for task in given.tasks if task.stream == stream) for stream in STREAMS]
    assert max(busy) <= simulate(given).step_time <= sum(busy)


@LAW
@given(programs())
def test_a_step_is_compute_and_exposed_communication(given: Program) -> None:
    timeline = simulate(given)
    assert timeline.step_time == timeline.compute + timeline.exposed
    assert 0 <= timeline.exposed <= timeline.communication
    for task, exposed in timeline.exposed_by_task:
        assert 0 <= exposed <= task.seconds


@LAW
@given(programs(), st.sampled_from((0.25, 0.5, 2.0)))
def test_contention_slows_what_is_hidden_and_no_more(given: Program, contention: float) -> None:
    free, slow = simulate(given), simulate(contended(given, contention))
    assert slow.step_time >= free.step_time
    assert slow.step_time == pytest.approx(slow.compute + slow.exposed)
    assert slow.compute - free.compute == pytest.approx(contention / (1 + contention) * slow.hidden)


@LAW
@given(programs(), st.sampled_from((0.0, 0.25, 1.0)), st.sampled_from((0.25, 0.5)))
def test_link_contention_slows_what_is_hidden_and_no_more(given: Program, contention: float, links: float) -> None:
    free, slow = simulate(given), simulate(contended(given, contention, links))
    assert slow.step_time >= free.step_time - 1e-9
    assert slow.step_time == pytest.approx(slow.compute + slow.exposed)
    assert slow.compute - free.compute == pytest.approx(contention / (1 + contention) * slow.hidden)
    for task, start, end, (sent, exposed) in zip(
        *_collectives(given, slow.starts), _collectives(given, slow.ends)[1], slow.exposed_by_task, strict=True
    ):
        assert sent is task
        assert end - start - task.seconds == pytest.approx(links / (1 + links) * (end - start - exposed))


@LAW
@given(programs(), st.data())
def test_a_task_more_is_never_faster(given: Program, data: st.DataObject) -> None:
    gone = data.draw(st.integers(0, len(given.tasks) - 1))
    without = replace(given, tasks=given.tasks[:gone] + given.tasks[gone + 1 :])
    assert simulate(without).step_time <= simulate(given).step_time


@pytest.mark.slow
@LAW
@given(programs(), st.data())
def test_a_slower_task_is_never_faster(given: Program, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(given.tasks) - 1))
    slower = replace(given.tasks[at], seconds=given.tasks[at].seconds + 1)
    assert simulate(given).step_time <= simulate(replace(given, tasks=_with(given.tasks, at, slower))).step_time


def _collectives(given: Program, times: tuple[float, ...]) -> tuple[list, list]:  # type: ignore[type-arg]
    chosen = [(task, time) for task, time in zip(given.tasks, times, strict=True) if task.is_collective]
    return [task for task, _ in chosen], [time for _, time in chosen]


def _with(tasks: tuple, at: int, task: object) -> tuple:  # type: ignore[type-arg]
    return (*tasks[:at], task, *tasks[at + 1 :])


@LAW
@given(programs())
def test_memory_is_at_least_the_state_and_at_most_everything(given: Program) -> None:
    timeline = simulate(given)
    state = sum(b.nbytes for b in given.buffers if b.kind in PERSISTENT)
    everything = sum(b.nbytes for b in given.buffers)
    assert state <= timeline.peak_memory <= everything + max(task.workspace for task in given.tasks)
    assert sum(timeline.memory_by_kind.values()) == timeline.peak_memory
    assert len(timeline.memory) == len(timeline.turns) == len(given.tasks) and list(timeline.turns) == sorted(timeline.turns)


@LAW
@given(programs())
def test_memory_in_place_is_never_more(given: Program) -> None:
    apart = replace(given, tasks=tuple(replace(task, in_place=False) for task in given.tasks))
    assert simulate(given).peak_memory <= simulate(apart).peak_memory


def test_forty_thousand_tasks_take_seconds() -> None:
    tasks = [gather(f"g{i}", 2, "w") if i % 5 == 0 else kernel(f"t{i}", 1, f"t{i - 6}") for i in range(6, 40_000)]
    run = program(*(kernel(f"t{i}", 1) for i in range(6)), *tasks)
    run.index  # noqa: B018  is made once per program
    started = time.process_time()
    timeline = simulate(run)
    assert timeline.peak_memory > 0 and timeline.exposed >= 0
    assert time.process_time() - started < 10, "a second on a quiet machine"


@pytest.mark.parametrize("what", ["step_time", "compute", "communication", "exposed", "peak_memory"])
def test_an_empty_program_costs_nothing(what: str) -> None:
    assert getattr(simulate(program()), what) == 0
