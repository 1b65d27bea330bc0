"""What a plan costs, how it was found and what else was tried is on one screen with it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import cache

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import Mesh, Options, Overlap, ShardingPlan, plan
from autoshard.compile.compiled import split_program
from autoshard.compile.overlap import OverlapPhase
from autoshard.inspection.report.cost_table import format_basis, format_links
from autoshard.inspection.report.table import format_plan
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from autoshard.plans.outcome import Candidate, Cost, Memory, Search
from examples.llama import LLAMA3_8B, TINY, Llama
from passes.cost.build_program import program_of
from passes.cost.simulate import Timeline, simulate
from passes.hardware.hardware import hardware_named
from tests.calm import calm

GIB = 1 << 30
SOLVED = Cost(1.312, 1.2, 0.9, 0.112, Memory(2 * GIB, 2 * GIB, 4 * GIB, 30 * GIB, 3 * GIB, temporary=GIB // 2))
DDP = Cost(1.5, 1.2, 0.7, 0.3, Memory(16 * GIB, 16 * GIB, 32 * GIB, 30 * GIB))
SEARCH = Search(
    "solved",
    (
        Candidate("hsdp", None, fits=False, note="the batch of 6 does not divide"),
        Candidate("ddp", DDP, fits=False),
        Candidate("solved", SOLVED, fits=True),
        Candidate("fsdp", replace(SOLVED, step_time=1.4), fits=True),
    ),
    memory_limit=72 * GIB,
    objective=1.3,
    bound=1.29,
    least=0.98,
    seconds=8.1,
)


@cache
def bare_plan(layers: int) -> ShardingPlan:
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))), torch.empty(6, 8)
    return plan(model, Mesh("dp=2", hardware="h100"), (x,), options=Options(recipe="fsdp"))


def made(search: Search | None = SEARCH, layers: int = 2) -> ShardingPlan:
    bare = bare_plan(layers)
    collectives = tuple(replace(one, exposed=0.004 if one.backward else 0.0) for one in bare.collectives)
    return replace(bare, cost=SOLVED, search=search, collectives=collectives)


def test_a_plan_reads_as_a_table_with_its_cost() -> None:
    assert_expected_inline(
        format_plan(made(), width=100, colour=False),
        """\
plan on 2 ranks of h100: dp=2 fsdp
step    1.31 s: compute 1.20 s, exposed communication 112 ms; 788 ms of communication hidden
links   in use for 34 % of the step; at 80 % of their rate it takes 6.7 % longer
rests   on the figures of h100: 18 published, 3 assumed (launch, across.reduces, link_contention)
memory  41.5 GiB of 72.0 GiB at the peak: activations 30.0 GiB, optimizer 4.0 GiB, gathered 3.0 GiB,
        parameters 2.0 GiB, gradients 2.0 GiB, temporary 512.0 MiB
search  chose solved of 4 candidates; no plan is simulated faster than 980 ms, for its kernels
        alone; none takes less than 1.29 s by the solver's model, 1.68 % below this plan; 8.10 s
candidate    step  compute  exposed  hidden    memory
* solved   1.31 s   1.20 s   112 ms  788 ms  41.5 GiB  fits
  fsdp     1.40 s   1.20 s   112 ms  788 ms  41.5 GiB  fits
  ddp      1.50 s   1.20 s   300 ms  400 ms  94.0 GiB  does not fit
  hsdp: the batch of 6 does not divide
in  input[B_dp, F]   out output[B_dp, D]
module       values and weights, as stored -> as made                               compute  exposed
0            input[B_dp, F] . W[F, D_dp], bias[D_dp] -> [B_dp, D]                   24.7 us  8.00 ms
1            In[B_dp, D] . W[D_dp, D], bias[D_dp] -> [B_dp, D]                      35.7 us  8.00 ms
(optimizer)                                                                               -        -
B=6 D=8 F=8; F_dp: F sharded over dp; {U_dp}: partial sum over dp
collective      over  fwd  bwd  received  exposed  for
reduce_scatter  dp      -    4     288 B  16.0 ms  linear.py:130 gradient, in a bucket
all_gather      dp      4    1     416 B      0 s  linear.py:130 fsdp: gathered fo..., 3 in a bucket""",
    )


def test_a_plan_says_what_slower_links_would_cost_it() -> None:
    whole = made().timeline
    assert whole is not None
    sent = [replace(task, seconds=0.0 if task.is_collective else task.seconds) for task in whole.program.tasks]
    assert format_links(simulate(replace(whole.program, tasks=tuple(sent)))) is None
    step = simulate(whole.program, links=1.25).step_time
    assert f"at 80 % of their rate it takes {100 * (step / whole.step_time - 1):.1f} % longer" in str(format_links(whole))


def test_a_plan_says_what_it_rests_on() -> None:
    h100 = hardware_named("h100")
    own = replace(h100, name="own", sources=(("launch", "measured by calibrate"), ("across", "not measured: the preset's")))
    assert format_basis(own) == "on the figures of own: 1 measured, 1 assumed (across)"
    assert format_basis(replace(own, sources=())) == "on the figures of own: no source is given"


def test_a_recipe_alone_has_a_cost_and_no_candidates() -> None:
    text = format_plan(made(None), width=100, colour=False)
    assert "step    1.31 s: " in text
    assert "search" not in text and "candidate" not in text


def _search_line(search: Search) -> str:
    (line,) = (line for line in format_plan(made(search), width=240, colour=False).splitlines() if line.startswith("search"))
    return line.removeprefix("search  chose ").removesuffix("; 8.10 s")


def test_a_choice_between_nearly_equal_plans_is_said() -> None:
    nearly = Candidate("fsdp", replace(SOLVED, step_time=1.318), fits=True)
    given = replace(SEARCH, chosen="fsdp", candidates=(*SEARCH.candidates[:3], nearly), bound=None, least=None)
    why = "solved is 0.46 % faster, too little to tell: sturdiness, memory and simplicity decide"
    assert _search_line(given) == f"fsdp of 4 candidates ({why})"


def test_what_is_proven_is_said() -> None:
    def said(bound: float | None, least: float | None) -> str:
        return _search_line(replace(SEARCH, bound=bound, least=least)).removeprefix("solved of 4 candidates; ")

    simulated = "no plan is simulated faster than 1.00 s, for its kernels alone"
    assert said(1.312, 1.0) == f"{simulated}; none takes less than 1.31 s by the solver's model, 0.00 % below this plan"
    assert said(1.181, None) == "none takes less than 1.18 s by the solver's model, 9.98 % below this plan"
    slower = "the solver's model puts every plan at 1.40 s or more, above this one, and so proves nothing"
    assert said(1.4, 1.0) == f"{simulated}; {slower}"
    assert said(None, 1.0) == simulated
    assert said(None, None) == said(None, 0.0) == "solved of 4 candidates"


def test_memory_by_kind_adds_up_to_the_peak() -> None:
    assert SOLVED.peak_memory == SOLVED.memory.total == int(41.5 * GIB)
    kinds = {"parameter": 1, "gradient": 2, "optimizer": 4, "activation": 8, "gathered": 16, "buffer": 32, "input": 64}
    more = {"output": 128, "temporary": 256, "workspace": 512}
    assert Memory.of(kinds | more).total == 1023
    assert Memory.of(kinds | more).temporary == 768


def test_hidden_communication_is_what_is_not_exposed() -> None:
    assert abs(SOLVED.hidden_comm - 0.788) < 1e-12


@pytest.mark.slow
def test_calls_of_an_eager_program_are_priced_one_by_one() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Tanh()), torch.empty(6, 8)
    how = (Options(recipe="ddp", compile=one) for one in ("inductor", "eager"))
    compiled, eager = (plan(model, Mesh("dp=2", hardware="h100"), (x,), options=one).cost for one in how)
    assert compiled is not None and eager is not None
    assert eager.compute > compiled.compute


def test_a_plan_of_32_layers_is_one_screen() -> None:
    text = format_plan(made(layers=32), width=100, colour=False)
    assert len(text.splitlines()) < 50
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "recipe", "reduced", "in_buckets"),
    [
        ("dp=8", "fsdp", torch.float32, set()),
        ("dp=4,tp=2", "fsdp+megatron", torch.bfloat16, {("dp", "bf16"), ("dp", "f32"), ("tp", "f32")}),
    ],
)
def test_the_cost_of_a_plan_is_that_of_the_program_that_is_run(
    axes: str, recipe: str, reduced: torch.dtype, in_buckets: set[tuple[str, str]]
) -> None:
    """The plan is of a folded graph, a run takes the halves as they are compiled: of each, messages of a sort are joined
    as it is fastest for them."""
    policy = MixedPrecisionPolicy(param_dtype=reduced, reduce_dtype=torch.float32)
    options = Options(recipe=recipe, mixed_precision=policy)
    mesh, config = Mesh(axes, hardware=calm("a100-pcie")), replace(TINY, layers=5, dim=1024, hidden=2816, vocab=32000, seq=1024)
    with torch.device("meta"):
        model, tokens = Llama(config), torch.zeros(8, config.seq, dtype=torch.long)
    made = plan(model, mesh, (tokens, tokens), options=options)
    run = _compiled(model, (tokens, tokens), mesh, options)
    assert made.cost is not None and made.timeline is not None
    assert run.step_time == pytest.approx(made.cost.step_time, rel=0.01)
    assert run.peak_memory == pytest.approx(made.cost.peak_memory, rel=0.1)
    for program in (made.timeline.program, run.program):
        assert {(*task.axes, task.dtype) for task in program.tasks if len(task.steps) > 1} == in_buckets


def _compiled(model: nn.Module, args: tuple[torch.Tensor, ...], mesh: Mesh, options: Options) -> Timeline:
    """Return the step of the program that Inductor is given, of all layers."""
    split = split_program(make_plan(PlanRequest(model, args, {}, mesh, options)).graph, mode="inductor")
    overlap = OverlapPhase.of(options, mesh)
    assert overlap is not None
    overlap.apply(split, mode="inductor")
    return simulate(program_of(split.forward, split.backward, mesh, outputs=split.outputs, gradients=split.gradients))


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


class Blocks(nn.Module):
    """Equal layers whose messages over tp take about as long as their products."""

    def __init__(self, layers: int, dim: int = 4096) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim, 4 * dim) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def blocks(layers: int = 8) -> tuple[nn.Module, tuple[torch.Tensor]]:
    with torch.device("meta"):
        return Blocks(layers).bfloat16(), (torch.empty(2, 8192, 4096, dtype=torch.bfloat16),)


@pytest.mark.slow
@pytest.mark.parametrize("symmetric_memory", [False, True])
def test_the_cost_of_a_plan_counts_the_chunks_that_are_sent(symmetric_memory: bool) -> None:
    (model, args), mesh = blocks(), Mesh("tp=8", hardware=calm("h100"))
    options = Options(recipe="megatron", overlap=Overlap(symmetric_memory=symmetric_memory))
    made = plan(model, mesh, args, options=options)
    whole = plan(model, mesh, args, options=replace(options, overlap=Overlap(split_matmuls=False)))
    run = _compiled(model, args, mesh, options)
    assert made.repeats and made.cost is not None and made.timeline is not None and whole.cost is not None
    assert run.step_time == pytest.approx(made.cost.step_time, rel=0.01)
    assert whole.cost.step_time > 1.05 * run.step_time
    assert run.peak_memory == pytest.approx(made.cost.peak_memory, rel=0.1)
    sent = [sum(task.is_sending for task in one.program.tasks) for one in (made.timeline, run)]
    assert sent[0] == sent[1]
    exposed = sum(seconds for _, seconds in made.timeline.exposed_by_task)
    assert sum(one.exposed or 0.0 for one in made.collectives) == pytest.approx(exposed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("symmetric_memory", "ways"), [(False, {"in 2 chunks"}), (True, {"in 2 chunks", "in one operator with its product"})]
)
def test_a_plan_says_of_a_collective_how_it_is_sent(symmetric_memory: bool, ways: set[str]) -> None:
    (model, args), mesh = blocks(), Mesh("tp=8", hardware=calm("h100"))
    made = plan(model, mesh, args, options=Options(recipe="megatron", overlap=Overlap(symmetric_memory=symmetric_memory)))
    changed = [one for one in made.collectives if one.way]
    assert {one.way for one in changed} == {f"{way} (decompose_matmuls)" for way in ways}
    lines = format_plan(made, width=100, colour=False).splitlines()
    assert any(line.startswith("reduce_scatter") and line.endswith(f", {way}") for line in lines for way in ways)
    if len(ways) > 1:  # the gathers: each way stands on a line of its own
        assert {"7 in one operator with its product", "8 in 2 chunks"} <= {line.strip() for line in lines}
    told = " ".join(str(made.explain(changed[0].id)).split())
    assert f"forward, {changed[0].way}, exposed" in told
    assert ShardingPlan.from_json(made.to_json()).collectives == made.collectives


@pytest.mark.slow
def test_a_search_counts_the_chunks_of_what_it_chooses() -> None:
    (model, (x,)), mesh, options = blocks(), Mesh("tp=8", hardware=calm("h100")), Options(inputs={"x": {"tp": "R"}})
    args = (x[:, :4096],)  # with all positions, it moves weights and splits nothing
    made, run = plan(model, mesh, args, options=options), _compiled(model, args, mesh, options)
    assert made.cost is not None and made.search is not None and any(one.chunks > 1 for one in made.collectives)
    assert made.cost == next(one.cost for one in made.search.candidates if one.name == made.search.chosen)
    assert run.step_time == pytest.approx(made.cost.step_time, rel=0.01)


@pytest.mark.slow
def test_a_plan_of_two_axes_counts_the_chunks_that_are_sent() -> None:
    """Gathers of parameters on one link, chunks on the other; planned on a folded graph, compiled with all layers."""
    mesh, config = Mesh("dp=4,tp=8", hardware="h100"), replace(LLAMA3_8B, layers=7, vocab=32768)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = Options(recipe="fsdp+megatron", mixed_precision=policy)
    with torch.device("meta"):
        model, tokens = Llama(config), torch.zeros(8, config.seq, dtype=torch.long)
    made = plan(model, mesh, (tokens, tokens), options=options)
    run = _compiled(model, (tokens, tokens), mesh, options)
    assert made.repeats and made.cost is not None and any(one.chunks > 1 for one in made.collectives)
    assert run.step_time == pytest.approx(made.cost.step_time, rel=0.01)


def test_a_recipe_that_runs_is_predicted_as_one_that_is_planned() -> None:
    mesh, options = Mesh("dp=2,tp=2", hardware="h100"), Options(recipe="fsdp", overlap=Overlap(bucket_bytes=0))
    model, x = nn.Sequential(OrderedDict(layers=nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))))), torch.randn(8, 8)
    planned, run = plan(model, mesh, (x,), options=options), make_plan(PlanRequest(model, (x,), {}, mesh, options)).plan
    assert planned.repeats and run.cost == planned.cost is not None and run.timeline == planned.timeline
    times = [{one.origin.fqn: one.exposed for one in made.collectives if one.backward} for made in (planned, run)]
    assert times[0] == times[1] and None not in times[0].values()


def test_what_is_received_has_the_padding_of_the_last_parts() -> None:
    """Gather five rows on four ranks: each holds two, and the first receives six, not the three that it lacks."""
    with torch.device("meta"):
        model, x = nn.Linear(10, 5), torch.empty(8, 10)
    found = plan(model, Mesh("dp=4", hardware="h100"), (x,), options=Options(recipe="fsdp"))
    layout = found.parameters["weight"].layout
    assert layout is not None and layout.format(found.mesh) == "{dp:S(0)}"
    rows = {one.kind: one.bytes // (10 * 4) for one in found.collectives if one.what.endswith(" weight")}
    assert rows == {"all_gather": 6, "reduce_scatter": 6}
