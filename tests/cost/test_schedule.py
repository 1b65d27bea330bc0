"""The schedule hides communication after compute, keeps every dependency, and is never worse than what it is given."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.cost.program import OPTIMIZER, Program, Task
from passes.cost.scheduling.best_schedule import prefetch, schedule
from passes.cost.scheduling.list_scheduling import Scheduler, list_schedule
from passes.cost.scheduling.movable_tasks import MovableTasks
from passes.cost.scheduling.task_queues import LOOKAHEAD
from passes.cost.scheduling.window import FreeMemory, Window
from passes.cost.simulate import simulate
from tests.cost.programs import contended, gather, kernel, program, programs

LAW = settings(max_examples=100, deadline=None, derandomize=True)


def _names(given: Program) -> list[str]:
    return [task.name for task in given.tasks]


def _layers(count: int, *, compute: float = 4, link: float = 3) -> Program:
    """Return a forward of `count` layers, each of which gathers its weight where it uses it."""
    tasks = []
    for n in range(count):
        tasks.append(gather(f"g{n}", link, f"w{n}", prefetchable=True))
        tasks.append(kernel(f"h{n}", compute, f"g{n}", *([f"h{n - 1}"] if n else [])))
    return program(*tasks, sizes={f"g{n}": 10 for n in range(count)})


def test_a_gather_runs_beside_the_kernels_before_its_use() -> None:
    given = _layers(4)
    assert simulate(given).step_time == 28
    assert simulate(prefetch(given, 10)).step_time == 3 + 4 * 4
    assert _names(prefetch(given, 10))[:4] == ["g0", "g1", "h0", "g2"]


@pytest.mark.parametrize(("window", "most"), [(10, 1), (20, 2), (40, 4)])
def test_the_window_bounds_what_is_gathered_ahead(window: int, most: int) -> None:
    order = _names(prefetch(_layers(8, compute=6, link=1), window))
    ahead = [sum(n[0] == "g" for n in order[:i]) - sum(n[0] == "h" for n in order[:i]) for i in range(len(order) + 1)]
    assert max(ahead) <= most + 1, "one is in use"
    assert simulate(prefetch(_layers(8, compute=6, link=1), window)).peak_memory <= 10 * (most + 1) + 16


def test_a_message_of_a_ring_is_no_later_than_in_the_given_order() -> None:
    given = program(
        gather("s0", 3, "w", prefetchable=True),
        kernel("h0", 4),
        gather("s1", 3, "s0", prefetchable=True),
        kernel("h1", 4, "h0", "s0"),
        kernel("h2", 4, "h1", "s1"),
        sizes={"s0": 10, "s1": 10},
    )
    found = list_schedule(MovableTasks.of(given), 0, fill=False, held_seconds=0, memory_budget=None)
    assert _names(found.program) == _names(given)


def test_what_makes_the_operand_of_a_gather_goes_with_it() -> None:
    given = program(
        kernel("h0", 5),
        kernel("cast", 1, "w"),
        gather("g", 3, "cast", prefetchable=True),
        kernel("h1", 1, "h0", "g"),
        kinds={"cast": "gathered"},
    )
    assert _names(prefetch(given, 10)) == ["cast", "g", "h0", "h1"]


def test_what_a_kernel_reads_besides_a_gather_is_made_in_its_turn() -> None:
    count = LOOKAHEAD + 1
    gathers = [gather(f"g{n}", 3, f"w{n}", prefetchable=True) for n in range(count)]
    kernels = [kernel(f"h{n + 1}", 4, f"h{n}", f"g{n}") for n in range(count)]
    last = gather("last", 3, "cast", prefetchable=True)
    given = program(
        kernel("cast", 1, "w"), kernel("h0", 4, "cast"), *gathers, *kernels, last, kernel("end", 4, "last"), sizes={"g0": 10}
    )
    assert set(_names(prefetch(given, 10))) == set(_names(given))


def test_a_tied_weight_that_is_read_first_and_gathered_last_brings_no_other_gather_forward() -> None:
    """The first kernel reads the cast that the last gather sends, and its result is sent by the same link."""
    gathers = [gather(f"g{n}", 3, f"w{n}", prefetchable=True) for n in range(4)]
    kernels = [kernel(f"h{n}", 4, f"h{n - 1}" if n else "sent", f"g{n}") for n in range(4)]
    given = program(
        kernel("cast", 1, "w"),
        kernel("first", 1, "cast"),
        gather("sent", 3, "first"),
        *(task for pair in zip(gathers, kernels, strict=True) for task in pair),
        gather("last", 3, "cast", prefetchable=True),
        kernel("end", 4, "h3", "last"),
        sizes={"last": 10},
    )
    found = prefetch(given, 20)
    assert _names(found)[:4] == ["g0", "cast", "first", "sent"]
    assert simulate(found).step_time == 3 + 3 + 5 * 4


def test_a_reduction_starts_when_its_gradient_is_made_and_holds_nothing_up() -> None:
    reduce = replace(gather("r", 4, "dw"), deferrable=True, backward=True)
    given = program(
        *(replace(kernel(n, 2, *i), backward=True) for n, i in (("dw", ()), ("dx", ()), ("dv", ("dx",)))),
        reduce,
        replace(kernel("cast", 1, "r"), backward=True),
        replace(kernel("du", 3, "dv"), backward=True),
        kinds={"cast": "gradient"},
    )
    ordered = prefetch(given, 0)
    assert _names(ordered) == ["dw", "r", "dx", "dv", "cast", "du"]
    assert simulate(ordered).exposed == 0


def test_an_independent_kernel_fills_the_gap_of_a_collective_on_the_path() -> None:
    given = program(kernel("a", 1), gather("c", 3, "a"), kernel("b", 1, "c"), kernel("other", 3, "a"))
    assert _names(prefetch(given, 0)) == ["a", "c", "other", "b"]
    assert simulate(prefetch(given, 0)).exposed == 0


def test_gradients_of_weights_can_wait_for_a_gap() -> None:
    tasks = [kernel("dy", 1), kernel("dw", 3, "dy"), kernel("dx", 1, "dy"), gather("c", 3, "dx"), kernel("dz", 1, "c")]
    kinds = {"dw": "gradient", "dz": "gradient"}
    given = program(*(replace(task, backward=True) for task in tasks), kinds=kinds)
    update = Task("update", OPTIMIZER, "compute", 1, ("dw",), backward=True)
    given = replace(given, tasks=(*given.tasks, update))
    held = prefetch(given, 0, fill=True)
    assert _names(held) == ["dy", "dx", "c", "dw", "dz", "update"]
    assert schedule(given).program == held


def _reduced(name: str, compute: float, link: float, *reads: str) -> list[Task]:
    """Return a gradient and its reduction."""
    made = [kernel(name, compute, *reads), gather(f"r.{name}", link, name, deferrable=True)]
    return [replace(task, backward=True) for task in made]


def test_gradients_of_weights_run_beside_the_reduction_that_ends_last() -> None:
    tasks: list[Task] = []
    for n in range(6):
        tasks += [replace(kernel(f"dx{n}", 4, *([f"dx{n - 1}"] if n else [])), backward=True)]
        tasks += _reduced(f"dw{n}", 4, 1 + (n == 4), f"dx{n}")
    given = program(*tasks, *_reduced("embedding", 1, 10, "dx5"))
    best = schedule(given)
    assert prefetch(given, 0) == given and simulate(given).exposed == 10
    assert _names(best.program)[-11:] == [
        "r.embedding", "dw4", "dw1", "r.dw4", "r.dw1", "dw2", "r.dw2", "dw3", "r.dw3", "dw5", "r.dw5",
    ]  # fmt: skip
    assert best.timeline.exposed == 1 and not best.fill


def test_gradients_that_are_held_are_made_though_many_buckets_wait_for_them() -> None:
    count, tasks = LOOKAHEAD + 8, list[Task]()
    for n in range(2 * count):
        tasks += [kernel(f"dx{n}", 1, *([f"dx{n - 1}"] if n else [])), kernel(f"dw{n}", 1, f"dx{n}")]
        if n % 2:
            tasks += [kernel(f"sent{n}", 0.1, f"dw{n - 1}", f"dw{n}"), gather(f"r{n}", 1, f"sent{n}", deferrable=True)]
    tasks = [replace(task, backward=True) for task in tasks]
    given = program(*tasks, *_reduced("embedding", 1, 10, f"dx{2 * count - 1}"))
    assert len(prefetch(given, 0, held_seconds=1e6).tasks) == len(given.tasks)
    assert simulate(prefetch(given, 0, held_seconds=1e6)).exposed < simulate(given).exposed


def test_what_fits_beside_a_kernel_is_reckoned_with_contention() -> None:
    given = _layers(3, compute=4, link=5)
    timeline = simulate(prefetch(contended(given, 0.25), 100))
    assert timeline.step_time == simulate(prefetch(given, 100)).step_time == 5 * 3 + 4, "links are the busiest"
    assert timeline.compute == 5 + 5 + 4


def test_what_fits_beside_a_kernel_is_reckoned_with_slower_links() -> None:
    given = _layers(3, compute=4, link=4)
    assert simulate(prefetch(given, 100)).step_time == 4 + 4 * 3
    slow = simulate(prefetch(contended(given, 0.0, 0.25), 100))
    assert slow.step_time == 4 + (4 + 0.8) * 2 + 4, "of each gather but the first, 0.8 s are left when the kernel has ended"


def test_the_backward_does_not_start_before_the_forward_has_ended() -> None:
    forward, backward = _layers(3), [gather("b", 3, "w0", prefetchable=True), kernel("bh", 1, "b", "h2")]
    tasks = (*forward.tasks, *(replace(task, backward=True) for task in backward))
    order = _names(prefetch(program(*tasks), 100))
    assert order.index("b") > order.index("h2")


def test_a_memory_limit_makes_the_window_small() -> None:
    given = _layers(8, compute=2, link=3)
    free = schedule(given)
    limit = simulate(prefetch(given, 10)).peak_memory
    assert schedule(given, memory_limit=limit).timeline.peak_memory <= limit
    assert free.timeline.step_time <= schedule(given, memory_limit=limit).timeline.step_time
    assert schedule(given, memory_limit=1).timeline.peak_memory <= free.timeline.peak_memory, "none fits"


def test_where_memory_is_short_nothing_is_gathered_ahead_and_elsewhere_all_the_same() -> None:
    layers = _layers(8)
    given = replace(layers, tasks=tuple(replace(t, workspace=60 * (t.name == "h4")) for t in layers.tasks))
    free, limit = schedule(given).timeline, simulate(given).peak_memory
    assert free.exposed == 3 and free.peak_memory > limit and simulate(given).exposed == 8 * 3
    best = schedule(given, memory_limit=limit).timeline
    assert best.peak_memory <= limit and best.exposed == 3 + 3, "the first gather, and that after the fourth layer"


def test_where_memory_is_short_no_kernel_goes_ahead_that_makes_more_than_there_is_room_for() -> None:
    layers = _layers(8)
    tasks = (*(replace(t, workspace=60 * (t.name == "h6")) for t in layers.tasks), kernel("mask", 1))
    given = program(*tasks, sizes={f"g{n}": 10 for n in range(8)}, kinds={"mask": "output"})
    limit = simulate(given).peak_memory
    assert _names(prefetch(given, 10))[:2] == ["g0", "mask"]
    best = schedule(given, memory_limit=limit).timeline
    assert best.peak_memory <= limit and best.exposed == 3 + 2, "the first gather, and g7, beside which it is made"


def test_where_memory_is_short_reductions_go_before_gathers_that_have_time() -> None:
    """On a link that is always busy: gathers that go first make every gradient wait for the end."""
    tasks: list[Task] = []
    for n in range(6):
        tasks += [replace(gather(f"g{n}", 3, f"w{n}", prefetchable=True), backward=True)]
        tasks += [replace(kernel(f"dx{n}", 1, f"g{n}", *([f"dx{n - 1}"] if n else [])), backward=True)]
        tasks += _reduced(f"dw{n}", 1, 3, f"dx{n}")
    given = program(*tasks, sizes={f"g{n}": 10 for n in range(6)} | {f"dw{n}": 20 for n in range(6)})
    free, tight = schedule(given), schedule(given, memory_limit=60)
    assert free.timeline.step_time == tight.timeline.step_time == 12 * 3
    assert free.timeline.peak_memory == 132 and tight.timeline.peak_memory == 59
    assert _names(free.program).index("r.dw0") > _names(free.program).index("g5")
    assert _names(tight.program).index("r.dw0") < _names(tight.program).index("g2")


def test_a_gather_goes_earlier_than_it_has_to_where_memory_has_room() -> None:
    layers = _layers(8, compute=6, link=1)
    given = replace(layers, tasks=tuple(replace(t, seconds=6.0) if t.name == "g4" else t for t in layers.tasks))
    just = prefetch(given, 10)
    free, tight = schedule(given), schedule(given, memory_limit=simulate(just).peak_memory)
    assert tight.program == just and tight.timeline.step_time == free.timeline.step_time == 1 + 8 * 6
    assert simulate(tight.program, links=1.5).exposed == 1.5 + 3, "of the first gather, and of the long one"
    assert simulate(free.program, links=1.5).exposed == 1.5


@LAW
@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.data())
def test_room_is_the_least_that_is_free_on_the_way(free: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(free) - 1))
    last = data.draw(st.integers(first, len(free) - 1))
    assert FreeMemory(free).least(first, last) == min(free[first : last + 1])


@st.composite
def marked(draw: st.DrawFn) -> Program:
    """Draw random programs with a forward, a backward, gathers of parameters and reductions that none waits for."""
    given = draw(programs())
    border = draw(st.integers(0, len(given.tasks)))
    early: set[str] = {"w"}
    tasks = []
    for number, task in enumerate(given.tasks):
        is_early = early.issuperset(task.inputs)
        early.update(task.outputs if is_early else ())
        is_read = any(task.name in other.inputs for other in given.tasks)
        tasks.append(
            replace(
                task,
                backward=number >= border,
                prefetchable=is_early and task.is_collective,
                deferrable=task.is_collective and not is_early and not is_read,
            )
        )
    return replace(given, tasks=tuple(tasks))


@LAW
@given(
    marked(),
    st.sampled_from((0, 3, 100)),
    st.booleans(),
    st.sampled_from((0.0, 5.0, 50.0)),
    st.sampled_from((None, 0, 9)),
    st.sampled_from(((0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.5, 1.0))),
)
def test_an_order_keeps_dependencies_and_is_never_worse(
    given: Program, window: int, fill: bool, held: float, room: int | None, contention: tuple[float, float]
) -> None:
    given = contended(given, *contention)
    found = prefetch(given, window, fill=fill, held_seconds=held, memory_budget=room)
    assert sorted(_names(found)) == sorted(_names(given))
    made: set[str] = {"w"}
    for task in found.tasks:
        assert made.issuperset(task.inputs), task.name
        made.update(task.outputs)
    assert simulate(found).step_time <= simulate(given).step_time
    assert prefetch(given, window, fill=fill, held_seconds=held, memory_budget=room) == found


@LAW
@given(marked(), st.sampled_from((0.0, 0.5)), st.sampled_from((0.25, 1.0)))
def test_an_order_is_reckoned_with_the_times_that_it_takes(given: Program, contention: float, links: float) -> None:
    given = contended(given, contention, links)
    scheduler = Scheduler(MovableTasks.of(given), Window(given.index, 100, None), fill=True, held_seconds=5.0)
    order = scheduler.run()
    timeline = simulate(given.reordered(order))
    reckoned = max(scheduler.clocks)
    assert timeline.step_time <= reckoned * (1 + 1e-9)  # a gather that waits for its link lets others run on the other link
    if len({task.stream for task in given.tasks if task.is_collective}) < 2:
        assert reckoned == pytest.approx(timeline.step_time)


@LAW
@given(marked(), st.integers(0, 40), st.booleans(), st.sampled_from((None, 9)), st.data())
def test_all_windows_that_an_order_names_give_it(
    given: Program, window: int, fill: bool, room: int | None, data: st.DataObject
) -> None:
    facts = MovableTasks.of(given)
    found = list_schedule(facts, window, fill=fill, held_seconds=0.0, memory_budget=room)
    assert window in found.windows
    other = data.draw(st.sampled_from(found.windows[:100]))
    assert _names(list_schedule(facts, other, fill=fill, held_seconds=0.0, memory_budget=room).program) == _names(found.program)


@LAW
@given(marked(), st.integers(0, 30))
def test_a_schedule_fits_where_any_order_tried_fits(given: Program, limit: int) -> None:
    best = schedule(given, memory_limit=limit).timeline
    as_given = simulate(given)
    if as_given.peak_memory <= limit:
        assert best.peak_memory <= limit and best.step_time <= as_given.step_time
    else:
        assert best.peak_memory <= as_given.peak_memory


@LAW
@given(programs(), st.randoms(use_true_random=False))
def test_tasks_in_another_order_have_the_index_that_is_made_for_it(given: Program, random: Random) -> None:
    order = random.sample(range(len(given.tasks)), len(given.tasks))
    reordered = given.reordered(order)
    assert reordered.tasks == tuple(given.tasks[number] for number in order)
    assert reordered.index == replace(reordered).index


def test_more_memory_has_to_be_worth_it() -> None:
    """Kernels that are held keep what they read: nothing is held for a gap that is next to nothing."""
    first = [
        kernel("dy", 1000),
        kernel("dw", 3, "dy"),
        kernel("dx", 1000, "dy", "x"),
        gather("c", 1, "dx"),
        kernel("dz", 1, "c"),
    ]
    kinds = {"dw": "gradient", "dz": "gradient"}
    given = program(*(replace(task, backward=True) for task in first), sizes={"dy": 50}, kinds=kinds)
    given = replace(given, tasks=(*given.tasks, Task("update", OPTIMIZER, "compute", 1, ("dw",), backward=True)))
    held = prefetch(given, 0, fill=True)
    assert simulate(held).step_time < simulate(given).step_time
    assert simulate(held).peak_memory > simulate(given).peak_memory
    assert schedule(given).program == given
