"""`print(plan)`: what a plan says on one screen, per module, with repeated layers folded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from autoshard import Mesh, ShardingPlan
from autoshard.inspection.report.modules import OPTIMIZER_ROW, ModuleTable, module_table, read_placed
from autoshard.inspection.report.table import format_html, format_plan
from autoshard.plans.names import fold_names, fold_text
from tests.report.plans import deep, followed, frozen, searched, tiny_llama, unknown_hardware


def plain(plan: ShardingPlan, width: int = 100) -> str:
    return format_plan(plan, width=width, colour=False)


def modules(plan: ShardingPlan) -> ModuleTable:
    return module_table(plan, *read_placed(plan))


def test_a_plan_of_32_layers_reads_as_one_screen() -> None:
    assert_expected_inline(
        plain(deep()),
        """\
plan on 4 ranks of h100: dp=2 fsdp, tp=2 megatron
step    2.98 ms: compute 2.46 ms, exposed communication 514 us; 633 us of communication hidden
links   in use for 39 % of the step; at 80 % of their rate it takes 6.6 % longer
rests   on the figures of h100: 18 published, 3 assumed (launch, across.reduces, link_contention)
memory  426.5 KiB at the peak: gathered 189.0 KiB, optimizer 96.0 KiB, activations 91.0 KiB,
        parameters 48.0 KiB, temporary 1.5 KiB, inputs 1.0 KiB, outputs 4 B
in  x[B_dp, S, D]   out output[]
module          values and weights, as stored -> as made                            compute  exposed
layers.0.up     x[B_dp, S, D] . W[D, F_tp.dp] -> [B_dp, S, F_tp]                    20.3 us  0.28 us
layers.0-31     In[B_dp, S, F_tp], ... -> [B_dp, S, F_tp], ...                       351 us        -
  down          In[B_dp, S, F_tp] . W[F_tp, D_dp] -> [B_dp, S_tp, D]                1.02 ms   259 us
layers.1-31.up  In[B_dp, S_tp, D] . W[D, F_tp.dp] -> [B_dp, S, F_tp]                 903 us   255 us
(model)         In[B_dp, S_tp, D] -> [] {U_dp, U_tp}                                 169 us        -
(optimizer)                                                                         0.12 us        -
B=8 S=4 D=16 F=48; F_tp: F sharded over tp; {U_tp}: partial sum over tp
collective      over  fwd  bwd  received  exposed  for
all_gather      tp     31   32  31.5 KiB   248 us  plans.py:25 mm
reduce_scatter  tp     32    -  16.0 KiB   244 us  plans.py:25 megatron: row-parallel output
all_gather      dp     64   63  95.2 KiB  13.5 us  plans.py:25 fsdp: gathered for use, in a bucket
reduce_scatter  dp      -   64  48.0 KiB  8.88 us  plans.py:25 gradient, in a bucket
reduce_scatter  tp      -   31  15.5 KiB      0 s  plans.py:25 add.Tensor
all_reduce      dp      1    -       4 B      0 s  plans.py:38 output
all_reduce      tp      1    -       4 B      0 s  plans.py:38 output""",
    )


def test_a_llama_reads_in_the_letters_of_the_literature() -> None:
    table = modules(tiny_llama())
    notations = {row.name: row.notation for row in table.rows}
    assert_expected_inline(
        "\n".join(f"{name}: {notation}" for name, notation in notations.items()),
        """\
tok_embeddings: tokens[B_dp, S] . W[V_tp.dp, D] -> [B_dp, S_tp, D]
layers.0.attention_norm: In[B_dp, S, D] {U_tp} . W[D_dp] -> [B_dp, S_tp, D]
layers.0-1.attention.wq: In[B_dp, S_tp, D] . W[D, H_tp.dp, K] -> [B_dp, S, H_tp, K]
layers.0-1.attention: In[B_dp, S, H_tp, K], ... -> [B_dp, S, H_tp, E]
layers.0-1.attention.wk: In[B_dp, S_tp, D] . W[D, F_tp.dp, K] -> [B_dp, S, F_tp, K]
layers.0-1.attention.wv: In[B_dp, S_tp, D] . W[D, F_tp.dp, E] -> [B_dp, S, F_tp, E]
layers.0-1.attention.wo: In[B_dp, H_tp, S, E] . W[H_tp, E, D_dp] -> [B_dp, S_tp, D]
layers.0-1.ffn_norm: In[B_dp, S_tp, D] . W[D_dp] -> [B_dp, S_tp, D]
layers.0-1.feed_forward.w{1,3}: In[B_dp, S_tp, D] . W[D, N_tp.dp] -> [B_dp, S, N_tp]
layers.0-1.feed_forward: In[B_dp, S, N_tp] -> [B_dp, S, N_tp]
layers.0-1.feed_forward.w2: In[B_dp, S, N_tp] . W[N_tp, D_dp] -> [B_dp, S_tp, D]
layers.1.attention_norm: In[B_dp, S_tp, D] . W[D_dp] -> [B_dp, S_tp, D]
norm: In[B_dp, S_tp, D] . W[D_dp] -> [B_dp, S_tp, D]
output: In[B_dp, S_tp, D] . W[D, G_tp.dp] -> [B_dp, S, G_tp]
(model): labels[B_dp, S], ... -> []
(optimizer): """,
    )
    assert table.sizes["S"] == 32 and table.sizes["D"] == 64 and table.sizes["H"] == 8


def test_one_rank_is_no_ranks() -> None:
    assert plain(replace(unknown_hardware(), mesh=Mesh("dp=1,tp=1"))).startswith("plan on 1 rank: dp=1 ddp, tp=1 ddp\n")


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        (True, "parameters per rank: 8.4 KiB of 16.8 KiB, gradients 256 B"),
        (False, "parameters per rank: 8.4 KiB of 16.8 KiB, no gradients"),
    ],
)
def test_gradients_are_of_what_is_trained(*, trained: bool, expected: str) -> None:
    assert expected in plain(frozen(trained=trained)).splitlines()


def test_long_names_of_candidates_leave_room_for_their_notes() -> None:
    search = searched().search
    assert search is not None
    long = "solved, batch padded for dp x tp, dims not padded"
    note = "solved again with dearer messages"
    candidates = tuple(replace(one, name=long, note=note) for one in search.candidates if one.name == search.chosen)
    text = plain(replace(searched(), search=replace(search, candidates=candidates, chosen=long)))
    rows = text[text.index("\ncandidate") + 1 : text.index("in  ")].splitlines()
    assert [row[:27].rstrip() for row in rows][1:] == ["* solved, batch padded for", "  dp x tp, dims not padded"]
    assert [row[74:] for row in rows][1:] == ["fits: solved again with", "dearer messages"]


def test_what_was_not_simulated_has_a_line_and_a_plan_without_a_step_says_bytes() -> None:
    assert "exposed" not in plain(unknown_hardware())
    assert "parameters per rank: 21.5 KiB of 21.5 KiB, gradients the same" in plain(unknown_hardware())
    search = searched().search
    assert search is not None
    declined = tuple(replace(one, cost=None, note="it was not tried") for one in search.candidates if one.name != "ddp")
    kept = tuple(one for one in search.candidates if one.name == "ddp")
    text = plain(replace(searched(), search=replace(search, candidates=(*kept, *declined[:2]))))
    assert f"  {declined[0].name}, {declined[1].name}: it was not tried" in text.splitlines()


def test_times_that_are_not_known_are_not_shown() -> None:
    text = plain(followed())
    assert "step    " in text
    assert "exposed  for" not in text and "received  for" in text


def test_a_program_with_an_op_that_is_not_registered_here_prints_what_it_can() -> None:
    graph = deep().graphs["PLACED"].replace("relu(", "mylib.relu(", 1)
    text = plain(replace(deep(), graphs={**deep().graphs, "PLACED": graph}))
    (line,) = (line for line in text.splitlines() if line.startswith("modules cannot be read here: "))
    assert "unknown op 'mylib.relu'" in text
    assert "collective      over" in text and line


@pytest.mark.parametrize("width", [100, 140])
@pytest.mark.parametrize("make", [deep, tiny_llama, searched, followed, unknown_hardware])
def test_no_line_is_wider_than_the_screen(make: object, width: int) -> None:
    assert callable(make)
    lines = plain(make(), width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 50


def test_figures_of_modules_add_up_to_the_step() -> None:
    for plan in (deep(), tiny_llama(), searched()):
        rows = modules(plan).rows
        assert plan.cost is not None
        assert sum(row.figures.compute for row in rows) == pytest.approx(plan.cost.compute)
        assert sum(row.figures.exposed for row in rows) == pytest.approx(sum(one.exposed or 0.0 for one in plan.collectives))
        assert sum(row.figures.received for row in rows) == sum(one.bytes for one in plan.collectives)
        assert [row.name for row in rows if row.name.startswith("(")][-1] == OPTIMIZER_ROW


def test_every_module_with_parameters_has_one_row() -> None:
    for plan in (deep(), tiny_llama(), searched(), unknown_hardware()):
        named = [fqn for row in modules(plan).rows for fqn in row.fqns]
        assert len(named) == len(set(named))
        assert {name.rpartition(".")[0] for name in plan.parameters} <= set(named)


def test_a_loaded_plan_prints_the_same() -> None:
    for plan in (deep(), searched()):
        assert plain(ShardingPlan.from_json(plan.to_json())) == plain(plan)


def test_a_terminal_has_colours_and_a_notebook_has_html() -> None:
    assert "\x1b[" in format_plan(deep(), width=100, colour=True)
    assert "\x1b[" not in str(deep())
    html = deep()._repr_html_()
    assert html == format_html(deep())
    assert html.startswith("<pre style=") and "[D, F" in html and "color:" in html


def test_names_fold() -> None:
    assert fold_names(["layers.0.w", "layers.1.w", "layers.2.w"]) == "layers.0-2.w"
    assert fold_names(["a.0", "a.2"]) == "a.{0,2}"
    assert fold_names(["a"]) == "a"
    assert fold_names(["layers.0.w", "head", "layers.1.w", "a1.w"]) == "layers.0-1.w, head, a1.w"
    assert fold_text(["at 1", "at 2", "in 1"]) == ["at 1 (and 1 alike)", "in 1"]
