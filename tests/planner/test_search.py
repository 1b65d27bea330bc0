"""A searched plan is no slower than any expert's that fits, says how good it is, and computes what one device does."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import GraphModule

from autoshard import MemoryLimitError, Mesh, Options, Overlap, ShardingPlan, plan
from autoshard.config.axis_recipes import recipes_of
from autoshard.phases import default_passes, inserted
from autoshard.planner import candidates, recomputation, standings
from autoshard.planner.effort import EXHAUSTIVE, FULL
from autoshard.planner.evaluation import evaluate, fold, in_chunks, seeded
from autoshard.planner.make_plan import make_plan, plan_ahead
from autoshard.planner.prediction import state_of
from autoshard.planner.problem import captured_problem
from autoshard.planner.recomputation import SlowerError
from autoshard.planner.request import PlanRequest
from autoshard.planner.ties import TIE
from benchmarks.recipe_costs import recipe_assignment
from examples.llama import TINY, Config, Llama, step_of
from passes.base import Pass, PassContext
from passes.errors import CompilerError, UnknownOpError
from passes.insert_reshards import InsertReshards
from passes.ir.graph import (
    InputRole,
    Stage,
    has_layout,
    is_reshard,
    layout_of,
    layouts_of,
    operands,
    placeholders,
    set_recompute,
)
from passes.manager import PassManager
from passes.propagate import Propagate
from passes.search.prepared import prepare
from tests.calm import calm
from tests.extended import extended
from tests.models import Case, build
from tests.spmd.oracle import check_step, compare, run_on_ranks

SEARCH = Options()


class Mlp(nn.Module):
    """Layers with `hidden` columns; forward(x) with x [batch, 256] gives a number."""

    def __init__(self, hidden: int, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, hidden), nn.ReLU(), nn.Linear(hidden, 256)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def on_meta(hidden: int, batch: int, layers: int = 2) -> tuple[nn.Module, tuple[Tensor]]:
    with torch.device("meta"):
        return Mlp(hidden, layers), (torch.empty(batch, 256),)


def searched(hidden: int, batch: int, mesh: Mesh, options: Options = SEARCH, layers: int = 2) -> ShardingPlan:
    model, args = on_meta(hidden, batch, layers)
    return plan(model, mesh, args, options=options)


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["h100", extended("a100-pcie")])
@pytest.mark.parametrize(("hidden", "batch"), [(1 << 14, 64), (1024, 1 << 14)])
def test_no_expert_that_fits_is_faster(hidden: int, batch: int, hardware: str) -> None:
    mesh = Mesh("dp=2,tp=4", hardware=hardware)
    found = searched(hidden, batch, mesh)
    assert found.cost is not None and found.search is not None
    for recipe in ("ddp", "zero2", "fsdp", "fsdp+megatron", "ddp+megatron"):
        expert = searched(hidden, batch, mesh, Options(recipe=recipe))
        assert expert.cost is not None
        assert found.cost.step_time <= expert.cost.step_time * (1 + TIE), recipe


@pytest.mark.slow
def test_a_search_pads_a_batch_that_axes_do_not_divide_as_recipes_do() -> None:
    mesh = Mesh("dp=8", hardware="h100")
    found, expert = (searched(1024, (1 << 14) + 1, mesh, options) for options in (SEARCH, Options(recipe="zero2")))
    assert found.cost is not None and found.search is not None and expert.cost is not None
    assert found.padded_axes == ("dp",)
    assert found.cost.step_time <= expert.cost.step_time * (1 + TIE)
    assert not any("does not divide" in one.note for one in found.search.candidates)


@pytest.mark.parametrize("mesh", ["tp=3", extended("dp=2,tp=3")])
def test_a_search_pads_a_batch_for_axes_that_are_not_named_for_it(mesh: str) -> None:
    on = Mesh(mesh, hardware="a100")
    found = searched(256, 1 << 17, on)
    expert = searched(256, 1 << 17, on, Options(recipe="ddp"))
    assert found.cost is not None and found.search is not None and expert.cost is not None
    assert found.cost.step_time <= expert.cost.step_time * (1 + TIE)
    assert found.padded_axes == on.names


def test_another_recipe_pads_the_batch_for_its_axes() -> None:
    mesh = Mesh("dp=2,tp=3", hardware="a100")
    whole, expert = (searched(256, 1 << 12, mesh, Options(recipe=recipe)) for recipe in ("ddp+megatron", "ddp"))
    again = whole.replan(recipe="ddp")
    assert again.cost is not None and expert.cost is not None
    assert again.padded_axes == expert.padded_axes == ("dp", "tp") and whole.padded_axes == ()
    assert again.cost.step_time == expert.cost.step_time


@pytest.mark.slow
def test_the_gap_that_is_proven_is_in_the_plan() -> None:
    found = searched(1024, 1024, Mesh("dp=2,tp=2", hardware="h100"))
    assert found.search is not None and found.search.solver_gap is not None
    assert 0 <= found.search.solver_gap <= 0.01


def test_a_searched_plan_saves_and_loads() -> None:
    found = searched(1024, 64, Mesh("dp=2,tp=2", hardware="h100"))
    assert ShardingPlan.from_json(found.to_json()) == found


@pytest.mark.slow
def test_many_equal_layers_are_all_in_the_plan() -> None:
    found = searched(1024, 64, Mesh("dp=2,tp=2", hardware="h100"), Options(recipe="fsdp"), layers=12)
    assert set(found.parameters) == {f"layers.{i}.{j}.{k}" for i in range(12) for j in (0, 2) for k in ("weight", "bias")}
    gathered = {one.origin.fqn for one in found.collectives if one.kind == "all_gather"}
    assert {f"layers.{i}.0" for i in range(12)} <= gathered


@pytest.mark.slow
def test_equal_layers_that_a_recipe_lays_out_by_turns_are_all_planned() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
        model, x = nn.Sequential(OrderedDict(layers=layers)), torch.empty(8, 64)
    found = plan(model, Mesh("dp=2,tp=2", hardware="h100"), (x,), options=Options(recipe="fsdp+megatron"))
    sharded = [str(found.parameters[f"layers.{i}.weight"].layout.on(1)) for i in range(12)]
    assert sharded == ["S(0)", "S(1)"] * 6
    assert found.cost is not None and found.cost.step_time > 0
    assert any("all layers are planned" in remark.text for remark in found.remarks)


def test_an_op_without_a_rule_is_told_of_or_refused() -> None:
    class Unruled(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return torch.pdist(x @ w).sum()

    args, mesh = (torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)), Mesh("dp=2", hardware="h100")
    with torch.no_grad():
        found = plan(Unruled(), mesh, args, options=SEARCH)
        assert any("runs replicated" in remark.text for remark in found.remarks)
        with pytest.raises(UnknownOpError, match="has no sharding rule"):
            plan(Unruled(), mesh, args, options=replace(SEARCH, unknown_ops="error"))


def test_a_pipeline_of_ones_own_places_values_itself() -> None:
    model, args = on_meta(64, 8)
    found = plan(model, Mesh("dp=2,tp=2"), args, options=Options(passes=default_passes()))
    assert found.search is None and found.recipes == ("fsdp", "megatron")


TOLD = {  # of a batch of 7 on dp=2, by whether the best plan pads it
    True: "a batch of 7 is padded to 8, which 2 divides: 14.29% more",
    False: "a batch of 7 is not split over dp: every rank there computes all of it",
}


@pytest.mark.parametrize(("batch", "expected"), [(8, "S(0)"), (7, "R")])
def test_a_batch_that_the_caller_splits_is_split_over_its_axes_alone(batch: int, expected: str) -> None:
    model, args = on_meta(64, batch)
    mesh = Mesh("dp=2,tp=2", hardware="cpu")
    made = make_plan(PlanRequest(model, args, {}, mesh, Options(), batch_axes=(0,))).plan
    assert [str(placement) for placement in made.inputs["x"].layout.placements] == [expected, "R"]
    told = [remark.text for remark in made.remarks if "batch" in remark.text]
    assert told == ([] if expected == "S(0)" else [TOLD[made.pads]])


def test_without_figures_of_the_hardware_a_rule_of_thumb_is_followed_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.config.topology.hardware_of", lambda device: None)
    model, args = on_meta(64, 8)
    found = plan(model, Mesh("dp=2,tp=2"), args)
    assert found.search is None and found.recipes == ("fsdp", "megatron")
    assert any("nothing was searched for: dp: fsdp, tp: megatron" in remark.text for remark in found.remarks)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "tp=4"])
def test_a_searched_mlp_computes_what_one_device_does(mesh: str) -> None:
    check_step(build("mlp"), Mesh(mesh, hardware="h100"), SEARCH)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_gqa", "conv_net", "encoder", "moe", "irregular", "structured"])
def test_a_solved_model_computes_what_one_device_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "try_recipes", lambda *_: None)  # of these small models, some are faster than what is solved
    case = build(name, **({"layers": 1} if name == "encoder" else {}))
    ranks = check_step(case, Mesh("dp=2,tp=2", hardware="h100"), SEARCH)
    assert ranks.planned.plan.search is not None and ranks.planned.plan.search.chosen.startswith("solved")


@dataclass(frozen=True)
class MoveAgain(Pass):
    """Move everything once more in the backward that the forward gathers."""

    name: ClassVar[str] = "move_again"
    takes: ClassVar[Stage] = Stage.EXPLICIT
    gives: ClassVar[Stage] = Stage.EXPLICIT

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        after = set(placeholders(gm.graph, InputRole.TANGENT))
        for node in gm.graph.nodes:
            if any(value in after for value in node.all_input_nodes):
                after.add(node)
            elif is_reshard(node) and not layout_of(operands(node)[0]).has_partial:
                set_recompute(node, True)
        return True


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_what_is_moved_again_instead_of_kept_computes_what_one_device_does(name: str) -> None:
    passes = inserted(default_passes(), MoveAgain(), before="lower_reshards")
    ranks = check_step(build(name), "dp=2,tp=2", Options(recipe="zero2+megatron", passes=passes))
    gathers = [one for one in ranks.planned.plan.collectives if one.kind == "all_gather" and one.axes == ("tp",)]
    assert any(one.recomputed and not one.reason.startswith("megatron: gathered") for one in gathers)


@pytest.mark.slow
def test_searched_dropout_is_that_of_one_rank() -> None:
    one = run_on_ranks(build("gpt_dropout", layers=1), "dp=1", Options(recipe="fsdp"))
    compare(run_on_ranks(build("gpt_dropout", layers=1), Mesh("dp=2,tp=2", hardware="h100"), SEARCH), one, 1e-10)


@pytest.mark.slow
def test_depth_is_planned_as_a_few_layers() -> None:
    with torch.device("meta"):
        model, tokens = Llama(replace(TINY, layers=8)), torch.empty(8, 32, dtype=torch.long)
    found = plan(model, Mesh("dp=2,tp=2", hardware="h100"), (tokens, tokens), options=Options(recipe="fsdp+megatron"))
    gathers = [one for one in found.collectives if one.kind == "all_gather" and one.origin.fqn == "layers.7.attention.wq"]
    assert gathers and all(one.seconds for one in gathers)


@pytest.mark.extended
def test_less_memory_takes_more_time_until_the_error_says_what_would_do() -> None:
    """All state is split from the start, as that costs nothing; then gathered parameters are not kept any more."""
    config = replace(TINY, layers=2, dim=1024, heads=8, kv_heads=8, hidden=4096, vocab=1024, seq=256)
    with torch.device("meta"):
        model, tokens = Llama(config), torch.empty(64, 256, dtype=torch.long)
    found = plan(model, Mesh("dp=8", hardware="a100-pcie"), (tokens, tokens), options=Options(recompute="none"))
    costs, gathered_again, limit = [], [], 0
    try:
        while True:
            assert found.cost is not None
            costs.append(found.cost)
            gathered_again.append(sum(one.recomputed for one in found.collectives))
            limit = int(found.cost.peak_memory * 0.8)
            found = found.replan(memory_limit=limit, prove=True)
            assert found.cost is not None and found.cost.peak_memory <= limit
    except MemoryLimitError as error:
        smallest = re.search(r"takes least has a peak of .* Give memory_limit=(\d+)", str(error))
    assert smallest is not None and limit < int(smallest[1]) <= costs[-1].peak_memory
    assert len(costs) > 1
    assert all(one.step_time >= before.step_time * (1 - TIE) for before, one in pairwise(costs))
    assert all(one.memory.gathered < before.memory.gathered for before, one in pairwise(costs))
    assert gathered_again[-1] >= 7 * config.layers > gathered_again[0]  # seven weights of a layer


def test_the_plan_of_a_wide_mlp_is_megatrons() -> None:
    """Few rows and many columns: the first product by columns, the second by rows, one sum between ranks."""
    model, args = on_meta(1 << 16, 64, layers=1)
    found = plan(model, Mesh("tp=8", hardware="h100"), args, options=Options())
    layouts = {name: str(value.layout.placements[0]) for name, value in found.parameters.items() if value.layout}
    assert layouts["layers.0.0.weight"] == "S(0)" and layouts["layers.0.2.weight"] == "S(1)"
    assert found.search is not None and found.search.solver_gap is not None and found.search.solver_gap <= 0.01


def test_a_parameter_that_no_axis_divides_is_padded_where_memory_asks_for_it() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(4099, 4099, bias=False), nn.ReLU()), torch.empty(8, 4099)
    options = Options(memory_limit="200MB")  # a whole parameter with its state takes 269 MB
    found = plan(model, Mesh("dp=8", hardware="h100"), (x,), options=options)
    assert str(found.parameters["0.weight"].layout.placements[0]) == "S(0)"
    assert found.cost is not None and found.cost.peak_memory <= 200_000_000


@pytest.mark.slow
def test_what_the_solver_predicts_is_what_is_simulated() -> None:
    """On a Llama, whose layers are tied: what is kept of one layer's gathered parameters is kept of all."""
    config = replace(TINY, layers=5, dim=2048, heads=16, kv_heads=4, hidden=5632, vocab=32000, seq=2048)
    with torch.device("meta"):
        model, tokens = Llama(config), torch.empty(32, 2048, dtype=torch.long)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = plan(model, Mesh("dp=8", hardware="h100"), (tokens, tokens), options=Options(mixed_precision=policy))
    assert found.search is not None and found.search.objective is not None
    solved = next(one.cost for one in found.search.candidates if one.name == "solved")
    assert solved is not None
    assert 0.9 <= found.search.objective / solved.step_time <= 1.1


@pytest.mark.slow
def test_what_a_recipe_stores_is_known_before_it_is_simulated() -> None:
    """Compare all layers of a model that is folded, and a recipe that shards, copies, or splits tensors."""
    mesh, options = Mesh("dp=2,tp=2", hardware="h100"), Options(recompute="none")
    with torch.device("meta"):
        model, tokens = Llama(replace(TINY, layers=8)), torch.empty(8, 32, dtype=torch.long)
    problem = captured_problem(PlanRequest(model, (tokens, tokens), {}, mesh, options))
    folded = fold(problem)
    assert folded.repeats.runs
    for name in ("fsdp", "ddp", "fsdp+megatron"):
        recipes = recipes_of(name, mesh)
        placed = seeded(problem, folded, recipes)
        PassManager((Propagate(), InsertReshards())).run(placed, PassContext(mesh))
        timeline = evaluate(problem, folded, recipes, effort=FULL).timeline
        kinds = ("parameter", "gradient", "optimizer")
        stored = sum(buffer.nbytes for buffer in timeline.program.buffers if buffer.kind in kinds)
        assert state_of(placed, folded.repeats, mesh, "adamw") == stored <= timeline.peak_memory


@pytest.mark.slow
def test_layouts_are_the_same_whether_what_is_gathered_is_kept() -> None:
    """A search propagates `fsdp` and `zero2` once; what gathers again takes longer by its model."""
    mesh, options = Mesh("dp=2,tp=2", hardware="h100"), Options()
    with torch.device("meta"):
        model, tokens = Llama(replace(TINY, layers=2)), torch.empty(8, 32, dtype=torch.long)
    problem = captured_problem(PlanRequest(model, (tokens, tokens), {}, mesh, options))
    folded = fold(problem)
    prepared = prepare(seeded(problem, folded, (None, None)), mesh)
    for both in (("fsdp", "zero2"), ("fsdp+megatron", "zero2+megatron")):
        steps, layouts = [], []
        for name in both:
            placed = seeded(problem, folded, recipes_of(name, mesh))
            PassManager((Propagate(), InsertReshards())).run(placed, PassContext(mesh))
            layouts.append({node.name: layouts_of(node) for node in placed.graph.nodes if has_layout(node)})
            priced = recipe_assignment(prepared, placed, gathers_again=name.startswith("fsdp"))
            assert priced is not None
            steps.append(priced.objective)
        assert layouts[0] == layouts[1]
        assert steps[0] is not None and steps[1] is not None and steps[0] > steps[1]


@pytest.mark.slow
def test_recipes_that_cannot_win_are_not_simulated_to_the_end() -> None:
    """Once a plan fits: neither what stores too much nor what is proven to be slower."""
    model, args = on_meta(4096, 1 << 12, layers=6)
    mesh = Mesh("dp=2,tp=4", hardware=calm("a100-pcie"))
    free = plan(model, mesh, args, options=Options())
    assert free.cost is not None
    found = plan(model, mesh, args, options=Options(memory_limit=free.cost.peak_memory))
    assert found.search is not None
    notes = {one.name: one.note for one in found.search.candidates if not one.fits}
    assert notes["ddp"] == "takes 192.4 MiB for parameters, gradients and optimizer: not simulated"
    assert notes["zero2"] == "at least 8.23 ms: not simulated"


def test_a_recipe_that_is_not_simulated_is_proven_to_be_slower() -> None:
    model, args = on_meta(1024, 1 << 12)
    mesh, options = Mesh("dp=2,tp=4", hardware="a100-pcie"), Options()
    problem = captured_problem(PlanRequest(model, args, {}, mesh, options))
    folded = fold(problem)
    for name in ("fsdp", "zero2+megatron", "megatron"):
        recipes = recipes_of(name, mesh)
        with pytest.raises(SlowerError, match=r"at least [\d.]+ .s: not simulated") as slower:
            evaluate(problem, folded, recipes, effort=FULL, worst=1e-9)
        step = in_chunks(problem, evaluate(problem, folded, recipes, effort=FULL)).cost.step_time
        assert 0.5 * step < slower.value.seconds <= step


def test_a_recipe_that_is_far_slower_is_left_out_before_its_graph_is_partitioned(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a bound that the program, once it is made, does not fall below."""
    model, args = on_meta(1024, 1 << 12)
    mesh, options = Mesh("dp=2,tp=4", hardware="a100-pcie"), Options()
    problem = captured_problem(PlanRequest(model, args, {}, mesh, options))
    folded, recipes = fold(problem), recipes_of("zero2+megatron", mesh)
    with pytest.raises(SlowerError) as early:
        evaluate(problem, folded, recipes, effort=FULL, worst=1e-9)
    with pytest.raises(SlowerError) as late:
        evaluate(problem, folded, recipes, effort=FULL, worst=early.value.seconds)
    assert early.value.seconds < late.value.seconds

    def partitioned(*_: object, **__: object) -> None:
        raise AssertionError("the graph is partitioned")

    monkeypatch.setattr(recomputation, "split_program", partitioned)
    with pytest.raises(SlowerError):
        evaluate(problem, folded, recipes, effort=FULL, worst=early.value.seconds * 0.99)
    with pytest.raises(AssertionError, match="the graph is partitioned"):
        evaluate(problem, folded, recipes, effort=FULL, worst=early.value.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ddp", "zero2"])
def test_a_recipe_whose_messages_are_small_is_compared_in_its_buckets(recipe: str) -> None:
    """Alone, each of its messages takes a launch and latency, and the step more than that of another plan by a quarter."""
    model, args = on_meta(512, 1 << 9, layers=12)
    mesh, options = Mesh("dp=16", hardware="h100"), Options()
    problem = captured_problem(PlanRequest(model, args, {}, mesh, options))
    folded, recipes = fold(problem), recipes_of(recipe, mesh)
    alone = replace(problem, options=replace(options, overlap=Overlap(bucket_bytes=0)))
    free = evaluate(problem, folded, recipes, effort=FULL).cost.step_time
    assert evaluate(alone, folded, recipes, effort=FULL).cost.step_time > 1.3 * free
    assert evaluate(problem, folded, recipes, effort=FULL, worst=free).cost.step_time == free


@pytest.mark.slow
def test_recipes_are_left_out_by_what_is_proven_of_them_alone() -> None:
    found = searched(4096, 1 << 12, Mesh("dp=2,tp=4", hardware="h100"))
    assert found.search is not None and found.cost is not None
    notes = {one.name: one.note for one in found.search.candidates if one.cost is None}
    assert notes["megatron"].startswith("at least ") and all("model" not in note for note in notes.values())


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "tp=4"])
def test_no_plan_is_simulated_faster_than_its_kernels_alone(mesh: str) -> None:
    found = searched(1024, 1 << 13, Mesh(mesh, hardware="h100"))
    assert found.search is not None and found.search.least is not None
    steps = [one.cost.step_time for one in found.search.candidates if one.cost is not None]
    assert 0.5 * min(steps) < found.search.least <= min(steps)


class OneHead(nn.Module):
    """Causal attention of one head, on x [1, 1, positions, 64]."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).square().mean()


def test_what_is_proven_of_kernels_holds_for_plans_that_the_search_leaves_out() -> None:
    """It does not consider to shard positions of short sequences, where the axis has no name for them."""
    mesh, args = Mesh("dp=4", hardware="h100"), (torch.empty(1, 1, 8192, 64, device="meta"),)
    found = plan(OneHead(), mesh, args)
    sharded = found.replan(recipe="context")
    assert found.search is not None and found.search.least is not None
    assert found.cost is not None and sharded.cost is not None
    assert found.search.least <= sharded.cost.step_time < 0.9 * found.cost.step_time


def fail_for(monkeypatch: pytest.MonkeyPatch, *recipes: str | None) -> None:
    """Put a defect in what makes the programs of these recipes, or of all; None: of the solver's plan."""

    def failing(problem: Any, folded: Any, named: Any, solution: Any = None, **how: Any) -> Any:
        if not recipes or named[0] in recipes:
            raise ZeroDivisionError("a defect")
        return evaluate(problem, folded, named, solution, **how)

    monkeypatch.setattr(standings, "evaluate", failing)


def test_a_candidate_that_fails_is_left_out_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, "fsdp", None)
    model, args = on_meta(64, 8)
    with pytest.warns(UserWarning, match=r"is left out.*ZeroDivisionError: a defect.*report") as told:
        found = plan(model, Mesh("dp=4", hardware="h100"), args)
    assert found.search is not None and found.search.chosen in ("ddp", "zero2")
    notes = {one.name: one.note for one in found.search.candidates}
    assert notes["solved"] == notes["fsdp"] == "failed: ZeroDivisionError: a defect"
    texts = [str(one.message) for one in told if "left out" in str(one.message)]
    assert [text.split("'")[1] for text in texts] == ["solved", "fsdp"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "kv_heads", "hidden", "name", "exactly"),
    [("dp=2,tp=2", 2, 1408, "hsdp", False), extended("dp=4,tp=2", 8, 1536, "fsdp", True)],
)
def test_a_candidate_that_may_be_faster_by_name_says_so(
    mesh: str, kv_heads: int, hidden: int, name: str, *, exactly: bool
) -> None:
    config = Config(layers=2, dim=512, heads=8, kv_heads=kv_heads, hidden=hidden, vocab=16_000, seq=512)
    with torch.device("meta"):
        model, args = step_of(config, 8, 512)
    options = Options(mixed_precision=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16))
    found = plan(model, Mesh(mesh, hardware="h100"), args, options=options)
    assert found.search is not None and found.cost is not None
    notes = {one.name: one.note for one in found.search.candidates}
    assert (candidates.UNTUNED not in notes[name]) == exactly and candidates.UNTUNED not in notes[found.search.chosen]
    steps = {one.name: one.cost.step_time for one in found.search.candidates if one.cost}
    alone = plan(model, Mesh(mesh, hardware="h100"), args, options=replace(options, recipe=name)).cost
    assert alone is not None and (alone.step_time == pytest.approx(steps[name])) == exactly
    assert found.cost.step_time < alone.step_time <= steps[name] * (1 + 1e-9)


def test_candidates_that_all_fail_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch)
    model, args = on_meta(64, 8)
    text = "no candidate plan could be made: the first failure is above"
    with pytest.warns(UserWarning), pytest.raises(CompilerError, match=text) as raised:
        plan(model, Mesh("dp=4", hardware="h100"), args)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_a_candidate_that_fails_is_an_error_in_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, "fsdp")
    model, args = on_meta(64, 8)
    with pytest.raises(UserWarning, match="'fsdp' is left out"):
        plan(model, Mesh("dp=4", hardware="h100"), args)


class Given(nn.Module):
    """Returns a parameter and an input as they are, besides a result; the gradients of both are those of the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 16), nn.Parameter(torch.ones(8, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), self.scale, x


@pytest.mark.parametrize("recipe", ["auto", "ddp", "fsdp", "megatron"])
def test_a_model_that_returns_what_it_is_given_trains(recipe: str) -> None:
    case = Case(Given().double(), (torch.randn(8, 16, dtype=torch.float64, requires_grad=True),), {})
    check_step(case, "dp=2,tp=2", Options(recipe=recipe, hardware="h100"))


def test_a_model_whose_only_output_is_a_parameter_trains() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 16))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight

    made = plan(Table(), Mesh("dp=2,tp=2", hardware="h100"), (torch.randn(8, 16),))
    assert made.search is not None and not any("failed" in one.note for one in made.search.candidates)


class Scores(nn.Module):
    """Returns values that the loss is computed from as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        scores = self.head(x)
        return {"scores": scores, "loss": scores.square().mean()}


def test_an_output_that_the_user_pins_is_searched_around() -> None:
    options = Options(outputs={"scores": {"tp": "S(2)"}})
    made = plan(Scores(), Mesh("tp=2", hardware="h100"), (torch.randn(4, 6, 16),), options=options)
    assert made.search is not None and not any("failed" in one.note for one in made.search.candidates)


MESH_OF_FOUR = Mesh("dp=2,tp=2", hardware="h100")


@pytest.mark.parametrize("recipe", ["fsdp", "megatron"])
def test_a_recipe_that_does_not_fit_is_refused_and_the_limit_that_is_named_does(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    args = (torch.randn(32, 64),)
    with pytest.raises(MemoryLimitError) as caught:
        plan(model, MESH_OF_FOUR, args, options=Options(recipe=recipe, memory_limit=1000))
    first = str(caught.value).splitlines()[0]
    assert first.startswith("the recipe's plan does not fit in 1000 B on a device: it has a peak of ")
    found = re.search(
        r"Give memory_limit=(\d+), recipe='auto', a larger mesh, a smaller batch, or mixed_precision. "
        "The largest values are made at$",
        first,
    )
    assert found is not None
    fitting = plan(model, MESH_OF_FOUR, args, options=Options(recipe=recipe, memory_limit=int(found[1])))
    assert fitting.cost is not None and fitting.cost.peak_memory <= int(found[1])


def test_a_limit_is_heeded_where_the_program_is_made() -> None:
    """On a CPU that the user did not name, a step is simulated only where that can change something."""
    options = Options(recipe="fsdp", recompute="none", memory_limit=1000)
    with pytest.raises(MemoryLimitError, match="the recipe's plan does not fit in 1000 B on a device"):
        make_plan(PlanRequest(nn.Linear(64, 64), (torch.randn(8, 64),), {}, Mesh("dp=2"), options))


def test_without_overlap_all_communication_is_exposed() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, device="meta") for _ in range(3)))
    args = (torch.empty(4096, 1024, device="meta"),)
    costs = [
        plan(model, Mesh("dp=8", hardware=calm("h100")), args, options=Options(recipe="fsdp", overlap=overlap)).cost
        for overlap in (True, False)
    ]
    assert costs[0] is not None and costs[1] is not None
    assert costs[0].exposed_comm < 0.5 * costs[0].communication
    assert costs[1].exposed_comm == pytest.approx(costs[1].communication)
    assert costs[1].step_time > costs[0].step_time


@pytest.mark.slow
def test_a_table_of_all_recipes_shows_each_as_it_is_by_name() -> None:
    """Messages are in chunks in it also where these cannot make a plan the best."""
    with torch.device("meta"):
        model, args = nn.Linear(8192, 8192, bias=False), (torch.empty(4096, 8192),)
    mesh = Mesh("dp=2,tp=2", hardware="h100")
    table, _ = plan_ahead(PlanRequest(model, args, {}, mesh, Options()), effort=EXHAUSTIVE)
    assert table.search is not None
    steps = {one.name: one.cost.step_time for one in table.search.candidates if one.cost is not None}
    for recipe in ("fsdp", "ddp", "fsdp+megatron"):
        alone = plan(model, mesh, args, options=Options(recipe=recipe))
        assert alone.cost is not None and alone.cost.step_time == pytest.approx(steps[recipe], rel=1e-3), recipe


def test_thousands_of_ranks_are_planned() -> None:
    """Sharding may move within an axis of 512, for which no mesh of 512 x 512 x 8 ranks is made."""
    with torch.device("meta"):
        model, args = Mlp(1024), (torch.empty(4096, 256),)
    found = plan(model, Mesh("dp=512,tp=8", hardware="h100"), args)
    assert found.cost is not None and found.search is not None and found.search.chosen == "solved"
