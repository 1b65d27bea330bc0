"""Planning, a first call and a new shape say on a terminal what they do; a job's log gets a line before and after each."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import Mesh, Options, autoshard, plan
from autoshard.config import progress
from autoshard.config.progress import shown


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")


def planned(progress: bool) -> None:
    plan(nn.Linear(4, 4), Mesh("dp=2"), (torch.ones(2, 4),), options=Options(recipe="fsdp", progress=progress))


def test_planning_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    on_terminal(monkeypatch)
    planned(progress=True)
    said = capsys.readouterr().err
    assert said.startswith("planning Linear on dp=2: capture, search, simulate\n")
    assert "capture" in said.partition("\n")[2] and "in all" in said


def test_the_option_turns_it_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    on_terminal(monkeypatch)
    planned(progress=False)
    assert capsys.readouterr().err == ""


def test_a_job_s_log_says_what_a_program_is_and_what_it_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as clock:
        clock.setattr(time, "perf_counter", iter([1.0, 3.0, 3.05, 10.0]).__next__)
        with shown("Linear: program 2, for training", enabled=True, logged="Linear: program 2") as progress:
            for phase in ("capture", "fold", "compile"):
                progress(phase)
    said = capsys.readouterr().err
    assert said == "Linear: program 2, for training\nLinear: program 2 took 9.00 s: capture 2.00 s, compile 6.95 s\n"


def test_planning_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    planned(progress=True)
    assert capsys.readouterr().err == ""


def test_calls_on_a_terminal(
    one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal(monkeypatch)
    model = autoshard(nn.Linear(4, 4), one_rank, (torch.ones(2, 4),), options=Options(recipe="fsdp", compile="eager"))
    assert capsys.readouterr().err.startswith("sharding Linear on dp=1: capture, plan, compile\n")
    model(torch.ones(2, 4))
    assert capsys.readouterr().err == ""
    model(torch.ones(3, 4))
    said = capsys.readouterr().err
    assert said.startswith("Linear: program 2, for training, input: float32[3, 4]: capture, plan, compile; program 1 took ")
    with torch.no_grad():
        model.eval()(torch.ones(3, 4))
    assert "program 3, for evaluation without gradients" in capsys.readouterr().err


def test_a_model_without_arguments_on_a_terminal(
    one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal in (False, True):
        if terminal:
            on_terminal(monkeypatch)
        autoshard(nn.Linear(4, 4), one_rank, options=Options(recipe="fsdp", compile="eager"))
        said = "Linear on dp=1: captured, planned and compiled at its first call; with args=..., now\n"
        assert capsys.readouterr().err == (said if terminal else "")


TOLD = (
    "the search for a plan takes over 0 seconds; Options(time_limit=...) bounds it, and a plan that was saved needs none: "
    "plan(...).save(path), then autoshard(..., plan=path)"
)


@pytest.mark.parametrize(("slow", "time_limit", "told"), [(0.001, None, [TOLD]), (0.001, 5.0, []), (60.0, None, [])])
def test_a_slow_search_says_what_bounds_it(
    slow: float, time_limit: float | None, told: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "SLOW", slow)
    plan(nn.Linear(8, 8), Mesh("dp=2", hardware="h100"), (torch.randn(8, 8),), options=Options(time_limit=time_limit))
    assert [record.getMessage() for record in caplog.records if record.name == "autoshard.planner"] == told
