"""What if: a plan is made again with something changed, and what that changes can be read."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Mesh, Options, PlanError, ShardingPlan, UserError, plan
from autoshard.cli.main import main
from autoshard.inspection import difference
from autoshard.planner import recipe_candidates
from autoshard.planner.effort import QUICK
from autoshard.planner.ties import TIE


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False)) for _ in range(3)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, y)


def planned(mesh: str = "dp=2,tp=2", hardware: str = "h100", batch: int = 8, **options: Any) -> ShardingPlan:
    with torch.device("meta"):
        model, x = Stack(), torch.empty(batch, 4, 16)
    return plan(model, Mesh(mesh, hardware=hardware), (x, x), options=Options(**options))


@cache
def base() -> ShardingPlan:
    return planned(recipe="fsdp+megatron")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"mesh": "dp=4,tp=1", "hardware": "a100"},
        {"hardware": "a100"},
        {"recipe": "fsdp", "params": {"layers.*.0.weight": {"tp": "S(1)"}}},
        {"params": {"layers.*": {"tp": "S(1)"}}},
    ],
)
def test_a_plan_made_again_is_the_plan_that_is_asked_for(change: dict[str, Any]) -> None:
    assert base().replan(**change) == planned(**{"recipe": "fsdp+megatron", **change})


def test_a_search_made_again_is_the_search_that_is_asked_for() -> None:
    def made(**options: Any) -> ShardingPlan:
        return plan(nn.Linear(8, 12), Mesh("dp=2", hardware="h100"), (torch.randn(4, 8),), options=Options(**options))

    assert made(recipe="ddp").replan(recipe="auto", memory_limit="1MB", prove=True) == made(memory_limit="1MB")


@pytest.mark.slow
def test_a_quick_answer_is_simulated_and_says_what_is_not_proven() -> None:
    wide = planned(mesh="dp=4,tp=1", hardware="a100", batch=1 << 14)
    quick, again, proven = (wide.replan(mesh="dp=2,tp=4", hardware="h100", prove=prove) for prove in (False, False, True))
    assert quick == again and quick.search is not None and proven.search is not None
    assert quick.cost is not None and proven.cost is not None and quick.cost.step_time >= proven.cost.step_time * (1 - TIE)
    assert quick.search.solver_gap is not None and quick.search.solver_gap <= QUICK.gap
    assert {one.name for one in quick.search.candidates} == {one.name for one in proven.search.candidates}
    assert {one.note for one in quick.search.candidates if one.cost is None} == {
        "a quick answer: not simulated; plan.replan(..., prove=True) does"
    }


@pytest.mark.slow
def test_a_quick_answer_tries_every_recipe_where_the_simulator_does_not_agree_with_the_solver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recipe_candidates, "OFF", 0.0)  # the step is simulated 4 % longer than the solver's model says
    quick = planned(mesh="dp=4,tp=1", hardware="a100").replan(mesh="dp=2,tp=4", hardware="h100")
    assert quick.search is not None
    notes = [one.note for one in quick.search.candidates if one.cost is None]
    assert notes and all(note.startswith("at least ") for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"hardware": "a100-pcie"},
        pytest.param({"mesh": "dp=4,tp=1"}, marks=pytest.mark.slow),
        pytest.param({"params": {"layers.*.0.weight": {"tp": "S(1)"}}}, marks=pytest.mark.slow),
    ],
)
def test_what_a_search_kept_changes_no_answer(change: dict[str, Any]) -> None:
    kept = base().replan(recipe="auto")
    answer = planned(recipe="fsdp").replan(recipe="auto", **change)  # of a plan that no search was made for
    assert kept.replan(**change) == answer


def test_what_cannot_be_changed() -> None:
    with pytest.raises(UserError) as caught:
        base().replan(memory_limits="60GB")
    assert str(caught.value).startswith("plan.replan(memory_limits=...) is no option; replan takes mesh, recipe, hardware,")
    with pytest.raises(UserError, match=r"replan\(mixed_precision=...\) needs a new capture: call autoshard.plan\(...\)"):
        base().replan(mixed_precision=MixedPrecisionPolicy(torch.bfloat16))


def test_a_loaded_plan_does_not_hold_its_model() -> None:
    with pytest.raises(PlanError) as caught:
        ShardingPlan.from_json(base().to_json()).replan(mesh="dp=4")
    assert str(caught.value) == (
        "this plan was loaded from a file, or runs, and does not hold the model that it was made for; make it again with "
        "autoshard.plan(model, mesh, args, options=...) and ask that one"
    )


def test_equal_plans_have_no_difference() -> None:
    same = base().diff(ShardingPlan.from_json(base().to_json()))
    assert not same and str(same) == "no difference"


def test_a_difference_reads_by_section_with_layers_folded() -> None:
    assert_expected_inline(str(base().diff(base().replan(recipe="fsdp"))), """\
settings
  plan    fsdp, megatron -> fsdp, fsdp
  recipe  fsdp+megatron  -> fsdp
step
  step time     314 us  -> 240 us   -74.0 us (-23.6 %)
  compute       237 us  -> 201 us   -35.9 us (-15.2 %)
  exposed comm  77.0 us -> 38.9 us  -38.1 us (-49.5 %)
  hidden comm   60.3 us -> 31.9 us  -28.4 us (-47.2 %)
memory
  peak         28.3 KiB -> 36.3 KiB  +8.0 KiB (+28.3 %)
  activations  5.8 KiB  -> 3.8 KiB   -2.0 KiB (-34.8 %)
  gathered     10.0 KiB -> 20.0 KiB  +10.0 KiB (+100.0 %)
  inputs       2.0 KiB  -> 1.0 KiB   -1.0 KiB (-50.2 %)
  temporary    1.5 KiB  -> 2.5 KiB   +1.0 KiB (+66.7 %)
parameters
  layers.0-2.0.weight  {dp:S(0/2), tp:S(0)} -> {dp:S(0), tp:S(0/2)}
  layers.0-2.2.weight  {dp:S(0), tp:S(1)}   -> {dp:S(0), tp:S(0/2)}
inputs
  x  {dp:S(0), tp:R} -> {dp:S(0), tp:S(0/2)}
  y  {dp:S(0), tp:R} -> {dp:S(0), tp:S(0/2)}
values
  layers.0.0          {dp:S(0), tp:S(1)} -> {dp:S(0), tp:S(0/2)}  7 of 7, most like this
  layers.0-1.1        {dp:S(0), tp:S(2)} -> {dp:S(0), tp:S(0/2)}  3 of 3
  layers.0-2.{0,2}    {dp:S(0), tp:S(1)} -> {dp:S(0), tp:S(0/2)}  9 of 9, most like this
  outside of modules  {dp:S(0), tp:S(1)} -> {dp:S(0), tp:S(0/2)}  9 of 11
  layers.2.1          {dp:S(0), tp:S(2)} -> {dp:S(0), tp:S(0/2)}  3 of 4
collectives
  all_gather tp layers.0-2.{0,2}         5 x, 2.5 KiB  -> -               exposed -21.8 us
  reduce_scatter dp.tp layers.0-2.{0,2}  -             -> 6 x, 9.0 KiB    exposed +15.5 us
  all_gather dp.tp layers.0-2.{0,2}      -             -> 11 x, 16.5 KiB  exposed +15.5 us
  reduce_scatter tp layers.0-2.{0,2}     5 x, 2.5 KiB  -> -               exposed -13.4 us
  all_gather dp layers.0-2.{0,2}         11 x, 5.5 KiB -> -               exposed -13.2 us
  reduce_scatter dp layers.0-2.{0,2}     6 x, 3.0 KiB  -> -               exposed -8.71 us""")


def test_a_difference_on_another_mesh() -> None:
    assert_expected_inline(str(base().diff(base().replan(mesh="dp=4,tp=2", hardware="a100"))), """\
settings
  mesh  dp=2,tp=2 on h100 -> dp=4,tp=2 on a100
step
  step time     314 us  -> 490 us   +176 us (+56.0 %)
  compute       237 us  -> 385 us   +149 us (+62.7 %)
  exposed comm  77.0 us -> 104 us   +27.2 us (+35.4 %)
  hidden comm   60.3 us -> 60.3 us  +0.00 us (+0.0 %)
memory
  peak         28.3 KiB -> 19.1 KiB  -9.1 KiB (-32.3 %)
  parameters   3.0 KiB  -> 1.5 KiB   -1.5 KiB (-50.0 %)
  optimizer    6.0 KiB  -> 3.0 KiB   -3.0 KiB (-50.0 %)
  activations  5.8 KiB  -> 2.9 KiB   -2.9 KiB (-50.0 %)
  inputs       2.0 KiB  -> 1.0 KiB   -1.0 KiB (-49.8 %)
  temporary    1.5 KiB  -> 768 B     -768 B (-50.0 %)
collectives
  all_gather dp layers.0-2.{0,2}      11 x, 5.5 KiB -> 11 x, 8.2 KiB  exposed +13.6 us
  reduce_scatter tp layers.0-2.{0,2}  5 x, 2.5 KiB  -> 5 x, 1.2 KiB   exposed +12.8 us
  reduce_scatter dp layers.0-2.{0,2}  6 x, 3.0 KiB  -> 6 x, 4.5 KiB   exposed +6.81 us
  all_reduce dp output                1 x, 4 B      -> 1 x, 6 B       exposed -5.95 us
  all_gather tp layers.0-2.{0,2}      5 x, 2.5 KiB  -> 5 x, 1.2 KiB   exposed -0.01 us""")


def test_diff_reads_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base().save(tmp_path / "a.json")
    base().replan(recipe="fsdp").save(tmp_path / "b.json")
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert capsys.readouterr().out == f"{base().diff(base().replan(recipe='fsdp'))}\n"


def test_a_remark_without_a_source_line_names_its_value() -> None:
    def padded(batch: int) -> ShardingPlan:
        return plan(nn.Linear(16, 16), Mesh("dp=2", hardware="h100"), (torch.empty(batch, 16),), options=Options(recipe="ddp"))

    found = [change.what for change in padded(8).diff(padded(7)).changes if change.section == "remarks"]
    assert found == ["pad: a batch of 7 is padded to 8, which 2 divides: 14.29% more [%input_1]"]
    assert f"remark {found[0]}" in str(padded(7))


def test_an_exposed_time_that_did_not_change_is_said_without_a_number() -> None:
    assert [difference._exposed(more) for more in (0.0, -1e-12, 2e-6, -2e-6)] == [
        *("exposed as before", "exposed as before", "exposed +2.00 us", "exposed -2.00 us")
    ]
