"""A plan that is asked why says what was chosen, what else there was and at what price, and where it came from."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from autoshard import Mesh, Options, ShardingPlan, UserError, plan
from autoshard.cli.main import main
from autoshard.planner.evaluation import seeded
from autoshard.plans.collectives import Collective
from passes.search import goal, prepared
from passes.search.alternatives import alternatives


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.sum()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.relu(self.up(x))), y)


def planned(**options: object) -> ShardingPlan:
    with torch.device("meta"):
        model, x = Wide(), torch.empty(2048, 1024)
    return plan(model, Mesh("tp=4", hardware="h100"), (x, x), options=Options(**options))


@cache
def searched() -> ShardingPlan:
    return planned()


@cache
def propagated() -> ShardingPlan:
    return planned(recipe="megatron")


def collective_of(one: ShardingPlan, kind: str) -> Collective:
    return next(found for found in one.collectives if found.kind == kind)


def test_a_searched_parameter() -> None:
    assert_expected_inline(str(searched().explain("up.weight")), """\
parameter up.weight
up.weight: f32[4096, 1024] {tp:S(0)}
  no constraint; chosen by what the whole step costs
  the most promising alternatives: the whole step, all else chosen for each, by the search's model;
      this plan is simulated at 814 us
    layout       step   change  at least  compute  communication     memory
  * {tp:S(0)}  803 us                      751 us        52.2 us   76.0 MiB
    {tp:S(1)}  885 us  +10.2 %   +10.2 %   751 us         123 us   80.0 MiB
    {tp:R}     888 us  +10.6 %   +10.6 %   781 us         107 us  128.0 MiB
passes
  solve changed %up_weight: f32[4096, 1024] {tp:S(0)} = parameter("up.weight")""")


def test_a_parameter_of_a_recipe() -> None:
    assert_expected_inline(str(propagated().explain("down.weight")), """\
parameter down.weight
down.weight: f32[1024, 4096] {tp:S(1)}
  constraint: tp:S(1): megatron: row-parallel
  the most promising alternatives: the whole step, all else chosen for each, by the search's model;
      this plan is simulated at 832 us
    layout       step   change  at least  compute  communication     memory
  * {tp:S(1)}  803 us                      751 us        52.2 us   76.0 MiB
    {tp:S(0)}  880 us   +9.5 %    +9.5 %   751 us         123 us   84.0 MiB
    {tp:R}     888 us  +10.6 %   +10.6 %   781 us         107 us  128.0 MiB
collectives
  %reduce_scatter: reduce_scatter over tp, 6.0 MiB, forward, exposed 35.3 us of 35.3 us
    seed: megatron: row-parallel output      # test_explanation.py:39 down
  %all_gather: all_gather over tp, 6.0 MiB, backward, exposed 35.3 us of 35.3 us
    insert_reshards: mm needs {tp:R}      # test_explanation.py:39 down
passes
  seed changed %down_weight: f32[1024, 4096] pinned(tp:S(1) "megatron: row-parallel") = ...
  propagate changed %down_weight: f32[1024, 4096] {tp:S(1)} pinned(tp:S(1) "megatron: row-pa ...
  lower_reshards added %reduce_scatter: f32[2048, 1024] {tp:S(0)} = reduce_scatter(%mm_1, ["tp"])
  lower_reshards added %all_gather: f32[2048, 1024] {tp:R} = all_gather(%mul_1, ["tp"])""")


def test_what_no_recipe_reaches_was_not_searched() -> None:
    lines = str(planned(recipe="ddp").explain("up.weight")).splitlines()
    assert lines[1] == "up.weight: f32[4096, 1024] {tp:R}"
    assert lines[2] == "  no constraint; nothing was searched, and nothing shards it"
    assert "chosen by" not in str(planned(recipe=None).explain("y"))


def test_a_module_is_its_values() -> None:
    assert_expected_inline(str(propagated().explain("down")), """\
module down
down.weight: f32[1024, 4096] {tp:S(1)}
  constraint: tp:S(1): megatron: row-parallel
  the most promising alternatives: the whole step, all else chosen for each, by the search's model;
      this plan is simulated at 832 us
    layout       step   change  at least  compute  communication     memory
  * {tp:S(1)}  803 us                      751 us        52.2 us   76.0 MiB
    {tp:S(0)}  880 us   +9.5 %    +9.5 %   751 us         123 us   84.0 MiB
    {tp:R}     888 us  +10.6 %   +10.6 %   781 us         107 us  128.0 MiB
%permute_1: f32[4096, 1024]<1, 4096> {tp:S(0)}      # test_explanation.py:39 down
%mm_1: f32[2048, 1024] {tp:P(sum)}      # test_explanation.py:39 down
  constraint: tp:S(0) before its users: megatron: row-parallel output
%mm_2: f32[1024, 4096] {tp:S(1)}      # test_explanation.py:39 down
%mm_3: f32[2048, 4096] {tp:S(1)}      # test_explanation.py:39 down
  on tp: %mm_3 S(1): a parameter stays <- %down_weight S(1): megatron: row-parallel
  the most promising alternatives: the whole step, all else chosen for each, by the search's model;
      this plan is simulated at 832 us
    layout          step   change  at least  compute  communication     memory
  * {tp:S(1)}     803 us                      751 us        52.2 us   76.0 MiB
    {tp:S(0)}     927 us  +15.4 %    +6.8 %   752 us         153 us   98.0 MiB
    {tp:P(sum)}   976 us  +21.6 %   +16.4 %   777 us         182 us   98.0 MiB
    {tp:R}       1.16 ms  +45.0 %   +36.3 %  1.04 ms         107 us  128.0 MiB
collectives
  %reduce_scatter: reduce_scatter over tp, 6.0 MiB, forward, exposed 35.3 us of 35.3 us
    seed: megatron: row-parallel output      # test_explanation.py:39 down
  %all_gather: all_gather over tp, 6.0 MiB, backward, exposed 35.3 us of 35.3 us
    insert_reshards: mm needs {tp:R}      # test_explanation.py:39 down
passes
  seed changed 1 nodes, added 1 nodes
  propagate changed 6 nodes
  insert_reshards added 1 nodes, changed 2 nodes
  cancel_reshards changed 2 nodes, removed 1 nodes
  lower_reshards added 2 nodes, changed 1 nodes
remarks
  propagate: on tp: a gradient is sharded as its parameter: operands S(1), S(1) become R, S(1),
      giving S(1) [%mm_2, test_explanation.py:39 down]
  propagate: on tp: a parameter stays: operands S(0), S(1) become R, S(1), giving S(1) [%mm_3,
      test_explanation.py:39 down]""")


def test_a_collective_is_the_value_that_it_moves() -> None:
    one = collective_of(propagated(), "reduce_scatter")
    text = str(propagated().explain(one.id))
    assert text.startswith(f"collective {one.id}\n%mm_1: f32[2048, 1024] {{tp:P(sum)}}      # test_explanation.py:39 down\n")
    assert "constraint: tp:S(0) before its users: megatron: row-parallel output" in text


def test_a_value_that_a_pass_made_is_that_of_which_it_is_made() -> None:
    made = propagated()
    captured, explicit = (
        {line.partition(":")[0] for line in made.graph(stage).splitlines() if line.startswith("%")}
        for stage in ("CAPTURED", "COLLECTIVE")
    )
    assert explicit - captured
    for asked in explicit - captured:
        assert {choice.name for choice in made.explain(asked).choices} <= {*captured, *made.parameters, *made.inputs}, asked


def test_a_source_line_and_a_layer_that_was_left_out() -> None:
    with torch.device("meta"):
        found = plan(Deep(), Mesh("dp=2", hardware="h100"), (torch.empty(4, 8),), options=Options(recipe="fsdp"))
    assert found.state is not None and "layers.4.weight" in found.state.folded.repeats.parameters
    assert found.explain("layers.4.weight").choices[0].layout == found.parameters["layers.4.weight"].layout
    assert found.explain("test_explanation.py:29").collectives


def test_as_many_alternatives_are_solved_whether_a_parameter_or_its_module_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one layout had two prices."""
    solved = list[int]()

    def noted(*_: object, **how: int) -> tuple[()]:
        solved.append(how["solved"])
        return ()

    monkeypatch.setattr("autoshard.inspection.explanation.alternatives", noted)
    searched().explain("up.weight")
    searched().explain("up")
    assert len(solved) > 2 and len(set(solved)) == 1


def test_a_price_is_between_what_is_proven_and_what_a_plan_has() -> None:
    state = searched().state
    assert state is not None
    node, room = next(one for one in state.searched.graph.graph.nodes if one.name == "up_weight"), state.searched.budget
    assert room is not None
    found = alternatives(
        state.searched, node, asked=searched().parameters["up.weight"].layout, most=9, solved=9
    )
    assert len({one.layout for one in found}) == len(found) > 2 and sum(one.is_chosen for one in found) == 1
    for one in found:
        pinned = searched().replan(params={"up.weight": {"tp": str(one.layout.placements[0])}}).state
        assert pinned is not None
        gm = seeded(pinned.problem, pinned.folded, (None,))
        aim = goal.Goal(room.limit, gap=0.0, recomputation=room.recomputation)
        exact = prepared.best_solution(gm, pinned.problem.mesh, aim).objective
        assert one.step is not None and one.bound <= exact * (1 + 1e-6)
        assert exact <= one.step * (1 + 1e-6) and one.step <= exact * 1.05, one


def test_a_loaded_plan_knows_stages_but_no_prices_and_passes() -> None:
    loaded = ShardingPlan.from_json(propagated().to_json())
    assert_expected_inline(str(loaded.explain("%mm_1")), """\
value %mm_1
%mm_1: f32[2048, 1024] {tp:P(sum)}      # test_explanation.py:39 down
  constraint: tp:S(0) before its users: megatron: row-parallel output
  on tp: %mm_1 P(sum): follows its operands <- %permute S(1): follows its operands <- %up_weight
      S(0): megatron: column-parallel
collectives
  %reduce_scatter: reduce_scatter over tp, 6.0 MiB, forward, exposed 35.3 us of 35.3 us
    seed: megatron: row-parallel output      # test_explanation.py:39 down
  %all_reduce: all_reduce over tp, 6 B, forward, exposed 11.0 us of 18.9 us
    insert_reshards: output needs {tp:R}      # test_explanation.py:39
  %all_gather: all_gather over tp, 6.0 MiB, backward, exposed 35.3 us of 35.3 us
    insert_reshards: mm needs {tp:R}      # test_explanation.py:39 down
passes
  until PLACED changed %mm_1: f32[2048, 1024] {tp:P(sum)} = mm(%relu, %permute_1)
  until PLACED added %reshard: f32[2048, 1024] {tp:S(0)} pinned(tp:S(0) "megatron: row-parall ...
  until COLLECTIVE added %reduce_scatter: f32[2048, 1024] {tp:S(0)} = reduce_scatter(%mm_1, ["tp"])
  until COLLECTIVE added %all_reduce: f32[] {tp:R} = all_reduce(%div, ["tp"])
  until COLLECTIVE added %all_gather: f32[2048, 1024] {tp:R} = all_gather(%mul_1, ["tp"])
note: a plan from a file does not hold its model: it knows stages, not the passes between them, and
    not what other layouts would cost; for these make it again with autoshard.plan(...), or ask
    `python -m autoshard explain file.py:function ...`""")
    chains = [[choice.chains for choice in one.explain("%mm_1").choices] for one in (loaded, propagated())]
    assert chains[0] == chains[1]


def test_unknown_names_come_with_those_that_are_near() -> None:
    for asked, expected in {
        "up.weigth": (
            "the plan has no 'up.weigth': it is no parameter, module, input, output, value, collective or source line; "
            "names near it are 'up.weight', 'up_weight', 'down.weight'"
        ),
        "test_explanation.py:999": (
            "nothing of the plan is from line test_explanation.py:999; lines near it are 'test_explanation.py:39'"
        ),
    }.items():
        with pytest.raises(UserError) as caught:
            propagated().explain(asked)
        assert str(caught.value) == expected


def test_explain_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    propagated().save(tmp_path / "plan.json")
    assert main(["explain", str(tmp_path / "plan.json"), "--what", "up.weight"]) == 0
    assert capsys.readouterr().out.startswith("parameter up.weight\nup.weight: f32[4096, 1024] {tp:S(0)}\n")
    assert main(["explain", "model.py:make", "--what", "up.weight"]) == 2
    assert capsys.readouterr().err == "autoshard: give --mesh to plan model.py:make on, or a saved plan\n"
