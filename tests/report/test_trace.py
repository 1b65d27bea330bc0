"""The trace holds the simulated step: every task once, what is exposed, and memory by kind."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from autoshard import PlanError, ShardingPlan
from autoshard.inspection.report.timeline import memory_by_turn
from passes.errors import UserError
from tests.report.plans import deep, tiny_llama, unknown_hardware


def events(plan: ShardingPlan, tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    plan.to_trace(path)
    found = json.loads(path.read_text())["traceEvents"]
    assert isinstance(found, list)
    return found


def test_every_task_is_an_event_of_its_length_on_its_track(tmp_path: Path) -> None:
    found = [event for event in events(deep(), tmp_path) if event["ph"] == "X" and event["cat"] != "exposed"]
    timeline = deep().timeline
    assert timeline is not None
    assert [event["name"] for event in found] == [task.name for task in timeline.program.tasks]
    assert max(event["ts"] + event["dur"] for event in found) == pytest.approx(1e6 * timeline.step_time)
    assert {event["tid"] for event in found} == {0, 1}
    collective = next(event for event in found if event["tid"] == 1)
    assert collective["args"]["axes"] in ("dp", "tp") and "plans.py:" in collective["args"]["for"]


def test_exposed_stretches_add_up_and_do_not_overlap(tmp_path: Path) -> None:
    for plan in (deep(), tiny_llama()):
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in events(plan, tmp_path) if e.get("cat") == "exposed"]
        assert plan.cost is not None
        assert sum(end - start for start, end in spans) == pytest.approx(1e6 * plan.cost.exposed_comm)
        assert all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(spans))


def test_memory_is_a_counter_that_reaches_the_peak(tmp_path: Path) -> None:
    totals = [sum(event["args"].values()) for event in events(tiny_llama(), tmp_path) if event["ph"] == "C"]
    assert tiny_llama().cost is not None
    assert max(totals) == tiny_llama().cost.peak_memory


def test_memory_by_kind_adds_up_at_every_turn() -> None:
    timeline = tiny_llama().timeline
    assert timeline is not None
    by_kind = memory_by_turn(timeline)
    assert tuple(map(sum, zip(*by_kind.values(), strict=True))) == timeline.memory


def test_exposed_spans_are_those_of_the_exposed_times() -> None:
    timeline = tiny_llama().timeline
    assert timeline is not None
    spans: dict[str, float] = {}
    for number, start, end in timeline.exposed_spans:
        assert timeline.starts[number] <= start < end <= timeline.ends[number]
        name = timeline.program.tasks[number].name
        spans[name] = spans.get(name, 0.0) + end - start
    assert spans == {task.name: pytest.approx(seconds) for task, seconds in timeline.exposed_by_task if seconds > 1e-15}


def test_a_plan_without_a_step_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        unknown_hardware().to_trace(tmp_path / "trace.json")
    assert str(caught.value) == (
        "this plan has no simulated step: its hardware is unknown, or it was made by passes of your own; "
        "make it with plan(model, Mesh('dp=8', hardware='h100'), args), or run with Options(hardware='cpu')"
    )


def test_a_path_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot be written to .*: No such file or directory; give a path that can be"):
        deep().to_trace(tmp_path / "none" / "trace.json")
