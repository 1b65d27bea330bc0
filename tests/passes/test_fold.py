"""A folded model is the same model with fewer layers; what is found for them is said of all."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from torch.fx import GraphModule

from autoshard.capture.capture import capture
from passes.base import PassContext
from passes.fold import Fold, Kept
from passes.ir.folded_layers import Repeats, Run, expand_names, index_in, moved_to
from passes.ir.graph import InputRole, input_of, origin_of, outputs_of, placeholders, repeats_of
from passes.ir.mesh import Mesh
from passes.ir.text import format_graph, parse_graph
from passes.normalize import Normalize
from passes.verify import verify
from tests import models
from tests.extended import extended

MESH = Mesh("dp=2")


def captured(build: Callable[..., models.Case], layers: int, **options: Any) -> GraphModule:
    case = build(layers=layers, **options)
    gm = capture(case.model.float(), case.args, case.kwargs, training=True).graph_module
    Normalize().run(gm, PassContext(MESH))
    return gm


def fold(gm: GraphModule, distinct: tuple[tuple[str, str], ...] = ()) -> tuple[Repeats, list[str]]:
    ctx = PassContext(MESH)
    changed = Fold(distinct).run(gm, ctx)
    verify(gm, MESH)
    assert changed == bool(repeats_of(gm).runs)
    return repeats_of(gm), [remark.text for remark in ctx.remarks if not remark.routine]


def canonical(gm: GraphModule, layer_names: dict[str, str]) -> str:
    """Return the text with nodes numbered in order and layers renamed."""
    text = format_graph(gm, MESH)
    numbers = {node.name: f"%{number}" for number, node in enumerate(gm.graph.nodes)}
    text = re.sub(r"%(\w+)", lambda match: numbers[match[1]], text)
    return re.sub(r"(?:layers|blocks)\.\d+", lambda match: layer_names.get(match[0], match[0]), text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "prefix", "options"),
    [
        (models.gpt, "blocks", {"dropout": 0.1}),
        extended(models.llama, "layers", {"norm": models.FunctionalRMSNorm}),
    ],
)
def test_a_folded_decoder_is_the_decoder_of_four_layers(build: Any, prefix: str, options: dict[str, Any]) -> None:
    gm = captured(build, 5, **options)
    repeats, remarks = fold(gm)
    assert repeats.runs == (Run(prefix, (1,), (2,), (3,)),) and remarks == []
    renamed = {f"{prefix}.3": f"{prefix}.2", f"{prefix}.4": f"{prefix}.3"}
    assert canonical(gm, renamed) == canonical(captured(build, 4, **options), {})


@pytest.mark.slow
def test_a_value_that_all_layers_share_is_of_none_of_them() -> None:
    gm = captured(models.llama, 5, grouping="by_hand")  # each layer makes the same causal mask
    assert fold(gm)[0].runs == (Run("layers", (1,), (2,), (3,)),)


@pytest.mark.slow
def test_every_node_and_parameter_of_the_whole_model_has_a_representative() -> None:
    gm = captured(models.gpt, 5)
    before = {node.name: (node.target if node.op != "placeholder" else "", _rest(node)) for node in gm.graph.nodes}
    parameters = [input_of(node).name for node in placeholders(gm.graph, InputRole.PARAMETER)]
    repeats, _ = fold(gm)
    kept = {node.name: before[node.name] for node in gm.graph.nodes}
    assert expand_names(repeats, kept) == before
    kept_parameters = {input_of(node).name: input_of(node).name for node in placeholders(gm.graph, InputRole.PARAMETER)}
    expanded = expand_names(repeats, kept_parameters)
    assert sorted(expanded) == sorted(parameters)
    assert expanded["blocks.2.attn.qkv.bias"] == "blocks.1.attn.qkv.bias"
    assert [repeats.count(f"blocks.{layer}.attn") for layer in (0, 1, 3, 4)] == [1, 2, 1, 1]


def _rest(node: Any) -> str:
    fqn = input_of(node).name if node.op == "placeholder" else origin_of(node).fqn
    return re.sub(r"\d+", "#", fqn)


# --- graphs as text: a list of layers, each some lines in which {k}, {prev} and {next} are layer numbers


def chain(layers: list[str], *, results: str = "", before: str = "", after: str = "") -> GraphModule:
    """Return layers in which `%h0` is the input, layer `k` gives `%h<k + 1>` from `%h<k>`; `%w<k>` is its parameter."""
    count = len(layers)
    lines = ["mesh dp=2", "stage CAPTURED"]
    lines += [f'%w{k}: f32[8, 8] = parameter("layers.{k}.w")' for k in range(count)]
    lines += ['%shared: f32[8, 8] = parameter("shared")', '%h0: f32[4, 8] = input("x")', *before.splitlines()]
    for k, layer in enumerate(layers):
        at = f"      # net.py:5 layers.{k}"
        text = layer.format(k=k, h=f"%h{k}", out=f"%h{k + 1}", w=f"%w{k}")
        lines += [line if "#" in line else line + at for line in text.splitlines()]
    lines += after.format(last=f"%h{count}").splitlines()
    lines.append(f'return output("y") %h{count}{results}')
    gm, _ = parse_graph("\n".join(lines) + "\n")
    verify(gm, MESH)
    return gm


DENSE = "{out}: f32[4, 8] = mm({h}, {w})"
OTHER = "%a{k}: f32[4, 8] = mm({h}, {w})\n{out}: f32[4, 8] = relu(%a{k})"
TIED = "{out}: f32[4, 8] = mm({h}, %shared)"


def removed(gm: GraphModule, **options: Any) -> list[tuple[int, ...]]:
    return [run.removed for run in fold(gm, **options)[0].runs]


def test_few_layers_stay_as_they_are() -> None:
    gm = chain([DENSE] * 4)
    text = format_graph(gm, MESH)
    assert removed(gm) == [] and format_graph(gm, MESH) == text


def test_alternating_layers_fold_with_their_period() -> None:
    gm = chain([DENSE, OTHER] * 4)
    assert fold(gm)[0].runs == (Run("layers", (1, 2), (3, 4), (5, 6)),)


def test_a_margin_of_equal_layers_stays_on_either_side() -> None:
    gm = chain([DENSE] * 8)
    assert Fold(margin=1).run(gm, PassContext(MESH))
    assert repeats_of(gm).runs == (Run("layers", (2,), (3, 4), (5,)),)


LOOP = "%b{k}: f32[4, 8] = clamp(%a{k}, 0.0)      # net.py:9\n{out}: f32[4, 8] = relu(%b{k})      # net.py:9"
AFTER = "%a{k}: f32[4, 8] = mm({h}, {w})\n" + LOOP  # calls of no module follow the layer's own
AFTER_OTHER, OTHER_AFTER = AFTER.replace("0.0", "1.0"), OTHER.replace("%a", "%c").replace("{out}", "%a{k}") + "\n" + LOOP


@pytest.mark.parametrize(
    ("layers", "kept", "run"),
    [
        ([*[AFTER] * 7, OTHER_AFTER], Kept.PERIOD, Run("layers", (1,), (2, 3, 4, 5, 6), (7,))),
        ([*[AFTER] * 7, OTHER_AFTER], Kept.PERIODS, Run("layers", (1,), (2, 3, 4, 5), (6,))),
        ([AFTER_OTHER, *[AFTER] * 6, OTHER_AFTER], Kept.PERIOD, Run("layers", (2,), (3, 4), (5,))),
        ([*[AFTER] * 7, AFTER_OTHER], Kept.PERIOD, Run("layers", (2,), (3, 4), (5,))),
    ],
)
def test_a_forward_keeps_one_of_equal_layers_if_calls_next_to_them_are_equal(
    layers: list[str], kept: Kept, run: Run
) -> None:
    gm = chain(layers)
    assert Fold(forward=kept).run(gm, PassContext(MESH))
    assert repeats_of(gm).runs == (run,)


@pytest.mark.parametrize(
    ("layers", "run"),
    [
        ([DENSE] * 7, Run("layers", (0,), (1, 2, 3, 4, 5), (6,), is_wide=True)),
        ([OTHER, *[DENSE] * 6], Run("layers", (1,), (2, 3, 4, 5), (6,), is_wide=True)),
        ([*[DENSE] * 6, OTHER], Run("layers", (1,), (2, 3, 4, 5), (6,))),
        ([AFTER] * 7, Run("layers", (0,), (1, 2, 3, 4, 5), (6,), is_wide=True)),
        ([*[AFTER] * 7, AFTER_OTHER], Run("layers", (2,), (3, 4), (5,))),
    ],
)
def test_a_forward_keeps_the_layers_next_to_equal_ones_if_these_are_equal_inside(layers: list[str], run: Run) -> None:
    gm = chain(layers)
    assert Fold(forward=Kept.ENDS).run(gm, PassContext(MESH))
    assert repeats_of(gm).runs == (run,)


def test_equal_runs_around_another_layer_fold_each() -> None:
    assert removed(chain([*[DENSE] * 6, OTHER, *[DENSE] * 6])) == [(2, 3, 4), (9, 10)]


def test_layers_pinned_apart_are_not_equal() -> None:
    assert removed(chain([DENSE] * 8)) == [(2, 3, 4, 5)]
    assert removed(chain([DENSE] * 8), distinct=(("layers.4.w", "dp:S(0)"),)) == [(2,)]


def test_layers_pinned_alike_are_equal() -> None:
    assert removed(chain([DENSE] * 6), distinct=tuple((f"layers.{k}.w", "dp:S(0)") for k in range(6))) == [(2, 3)]


def test_layers_of_another_shape_or_argument_are_not_equal() -> None:
    scaled = "%a{k}: f32[4, 8] = mm({h}, {w})\n{out}: f32[4, 8] = mul.Tensor(%a{k}, 0.{k})"
    assert removed(chain([scaled] * 8)) == []


def test_a_shared_parameter_is_outside_of_the_layers() -> None:
    assert removed(chain([TIED] * 6)) == [(2, 3)]


def test_a_running_sum_over_layers_folds() -> None:
    layer = DENSE + "\n%l{k}: f32[4] = sum.dim_IntList({out}, [1])\n%t{next}: f32[4] = add.Tensor(%t{k}, %l{k})      # net.py:9"
    layers = [layer.replace("{next}", str(k + 1)) for k in range(6)]
    gm = chain(layers, before="%t0: f32[4] = full([4], 0)", results=', output("aux") %t6')
    assert removed(gm) == [(2, 3)]


def test_layers_whose_values_are_used_outside_are_kept_and_it_is_said() -> None:
    states = ", ".join(f"%h{k}" for k in range(9))
    gm = chain([DENSE] * 8, after=f"%stack: f32[9, 4, 8] = stack([{states}])      # net.py:9", results=', output("all") %stack')
    repeats, remarks = fold(gm)
    assert repeats.runs == ()
    assert remarks[0] == "layers.2 to layers.4 are planned one by one, though equal: %stack uses a value of it"


def test_layers_that_the_model_returns_are_kept() -> None:
    gm = chain([DENSE] * 8, results=', output("hidden") %h4')
    repeats, remarks = fold(gm)
    assert repeats.runs == ()
    assert remarks[0].endswith("""the output 'hidden' is a value of it""")


def test_gradients_go_with_their_layers() -> None:
    gm = captured(lambda layers: models.mlp(sizes=(64,) * layers), 8)
    results = [output.name for output in outputs_of(gm.graph)]
    fold(gm)
    left = [name for name in results if not name.startswith(("layers.2.", "layers.3."))]
    assert [output.name for output in outputs_of(gm.graph)] == left


@pytest.mark.parametrize(
    ("stages", "blocks", "runs"),
    [
        (2, 6, tuple(Run(f"stages.{stage}.blocks", (1,), (2, 3), (4,)) for stage in range(2))),
        (6, 2, (Run("stages", (1,), (2, 3), (4,)),)),
    ],
)
def test_of_nested_lists_that_which_saves_more_folds(stages: int, blocks: int, runs: tuple[Run, ...]) -> None:
    names = [f"stages.{stage}.blocks.{block}" for stage in range(stages) for block in range(blocks)]
    lines = ["mesh dp=2", "stage CAPTURED"]
    lines += [f'%w{k}: f32[8, 8] = parameter("{name}.w")' for k, name in enumerate(names)] + ['%h0: f32[4, 8] = input("x")']
    lines += [f"%h{k + 1}: f32[4, 8] = mm(%h{k}, %w{k})      # net.py:5 {name}" for k, name in enumerate(names)]
    gm, _ = parse_graph("\n".join([*lines, f'return output("y") %h{len(names)}']) + "\n")
    assert fold(gm)[0].runs == runs


def test_an_alternating_mlp_folds_by_twos() -> None:
    gm = captured(lambda layers: models.mlp(sizes=(64, 32) * layers), 6)
    assert fold(gm)[0].runs == (Run("layers", (1, 2), (3, 4, 5, 6), (7, 8)),)


def test_names_of_layers_are_read_and_moved() -> None:
    assert index_in("layers", "layers.12.attention") == 12
    assert [index_in("layers", fqn) for fqn in ("layers", "layers.norm", "layer.1", "layersx.1", "a.layers.1")] == [None] * 5
    assert moved_to("a.layers", 3, "a.layers.12.attention.wq") == "a.layers.3.attention.wq"
    assert moved_to("layers", 3, "layers.12") == "layers.3"
