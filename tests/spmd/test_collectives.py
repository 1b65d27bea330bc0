"""What each recipe sends is what its textbook says."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping

import pytest
import torch

from autoshard import Mesh, Options, ShardingPlan, plan
from passes.ir.graph import results_of
from tests.models import Case, build, gpt, llama
from tests.spmd.oracle import plan_ranks

Recipe = str | Mapping[str, str | None]
Counts = dict[tuple[str, str, str], int]  # kind, axes joined by ".", "forward" or "backward" -> how many

DECODERS: dict[str, Callable[..., Case]] = {"gpt": gpt, "llama": llama}
# One for each use of the vocabulary-parallel logits: the maximum, the sum of exponentials, the label's logit.
LOSS_REDUCTIONS = 3
EACH_DECODER = pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
UNREAD = ("pos.weight", "tok_embeddings.weight")  # embeddings whose weight is of no use in the backward


def _plan(name: str, mesh: str, recipe: Recipe, layers: int = 2) -> ShardingPlan:
    return _planned(name, mesh, recipe if isinstance(recipe, str) else tuple(recipe.items()), layers)


@functools.cache
def _planned(name: str, mesh: str, recipe: str | tuple[tuple[str, str | None], ...], layers: int) -> ShardingPlan:
    return _captured(name, layers).replan(mesh=mesh, recipe=recipe if isinstance(recipe, str) else dict(recipe))


@functools.cache
def _captured(name: str, layers: int) -> ShardingPlan:
    case = DECODERS[name](layers=layers)
    case.model.double()
    return plan(case.model, Mesh("dp=1"), case.args, case.kwargs, options=Options(recipe="ddp"))


def _counts(plan: ShardingPlan) -> Counts:
    """Return collectives by kind, axes and direction; one that the backward repeats counts in both."""
    found: Counter[tuple[str, str, str]] = Counter()
    for one in plan.collectives:
        directions = ["backward"] if one.backward else ["forward"] + ["backward"] * one.recomputed
        found.update((one.kind, ".".join(one.axes), direction) for direction in directions)
    return dict(found)


def _per_block(name: str, mesh: str, recipe: Recipe) -> Counts:
    two, three = (_counts(_plan(name, mesh, recipe, layers=layers)) for layers in (2, 3))
    assert two.keys() == three.keys()
    return {key: three[key] - two[key] for key in three if three[key] != two[key]}


def _parameters(name: str) -> int:
    return len(list(DECODERS[name]().model.parameters()))  # tied ones once


def _read_in_backward(name: str) -> int:
    """Return what the backward reads: no gradient depends on a bias, nor on an embedding that is not the head's weight."""
    names = [one for one, _ in DECODERS[name]().model.named_parameters()]
    return sum(not one.endswith("bias") and one not in UNREAD for one in names)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "axes"), [("tp=2", "tp"), ("tp=4", "tp"), ("t=2,u=2", "t.u")])
@pytest.mark.parametrize(
    ("name", "whole"),
    # Norms and the biases after a reduction see a part of the sequence: their gradients are summed.
    [("gpt", 6), ("llama", 2)],
)
def test_megatron_has_two_gathers_and_two_scatters_per_block(name: str, whole: int, mesh: str, axes: str) -> None:
    counts = _per_block(name, mesh, "megatron")
    backward = sum(n for (kind, _, direction), n in counts.items() if (kind, direction) == ("all_gather", "backward"))
    assert counts.pop(("all_gather", axes, "forward")) == 2
    assert counts.pop(("reduce_scatter", axes, "forward")) == 2
    assert backward == 2
    assert counts.pop(("all_gather", axes, "backward")) == 2
    assert counts.pop(("reduce_scatter", axes, "backward")) == 2
    assert counts == {("all_reduce", axes, "backward"): whole}


@EACH_DECODER
def test_megatron_around_the_blocks(name: str) -> None:
    """One scatter after the embedding, one gather before the head, and their mirror."""
    counts = _counts(_plan(name, "tp=2", "megatron"))
    for kind in ("all_gather", "reduce_scatter"):
        for direction in ("forward", "backward"):
            assert counts[kind, "tp", direction] == 2 * 2 + 1, (kind, direction)
    assert counts["all_reduce", "tp", "forward"] == LOSS_REDUCTIONS
    assert not any(kind == "all_to_all" for kind, _, _ in counts)


@EACH_DECODER
def test_fsdp_gathers_each_parameter_in_each_direction_that_reads_it_and_scatters_its_gradient(name: str) -> None:
    assert _counts(_plan(name, "dp=4", "fsdp")) == {
        ("all_gather", "dp", "forward"): _parameters(name),
        ("all_gather", "dp", "backward"): _read_in_backward(name),
        ("reduce_scatter", "dp", "backward"): _parameters(name),
        ("all_reduce", "dp", "forward"): 2,  # the loss, and the number of its tokens
    }


@EACH_DECODER
def test_zero2_keeps_what_it_gathered(name: str) -> None:
    assert _counts(_plan(name, "dp=4", "zero2")) == {
        ("all_gather", "dp", "forward"): _parameters(name),
        ("reduce_scatter", "dp", "backward"): _parameters(name),
        ("all_reduce", "dp", "forward"): 2,
    }


@pytest.mark.slow
def test_reshard_after_forward_holds_for_recipes() -> None:
    case = build("mlp")
    kept = plan(case.model, Mesh("dp=2"), case.args, options=Options(recipe="fsdp", reshard_after_forward=False))
    zero2 = plan(case.model, Mesh("dp=2"), case.args, options=Options(recipe="zero2"))
    assert _counts(kept) == _counts(zero2)
    freed = plan(case.model, Mesh("dp=2"), case.args, options=Options(recipe="zero2", reshard_after_forward=True))
    fsdp = plan(case.model, Mesh("dp=2"), case.args, options=Options(recipe="fsdp"))
    assert _counts(freed) == _counts(fsdp) != _counts(kept)


@EACH_DECODER
def test_ddp_reduces_each_gradient(name: str) -> None:
    assert _counts(_plan(name, "dp=4", "ddp")) == {
        ("all_reduce", "dp", "backward"): _parameters(name),
        ("all_reduce", "dp", "forward"): 2,
    }


def test_hsdp_scatters_inside_and_reduces_what_is_left_outside() -> None:
    count = _parameters("llama")
    plan = _plan("llama", "outer=2,inner=2", "hsdp")
    counts = _counts(plan)
    assert counts["all_gather", "inner", "forward"] == count
    assert counts["all_gather", "inner", "backward"] == _read_in_backward("llama")
    assert counts["reduce_scatter", "inner", "backward"] == counts["all_reduce", "outer", "backward"] == count
    scattered = sum(c.bytes for c in plan.collectives if c.kind == "reduce_scatter")
    reduced = sum(c.bytes for c in plan.collectives if c.kind == "all_reduce" and c.backward)
    # Half of a gradient arrives by the scatter; what is left, a half, is reduced with 2 (k - 1) / k of itself.
    assert scattered == reduced


def test_fsdp_over_two_axes_is_one_gather_per_parameter() -> None:
    counts = _counts(_plan("llama", "a=2,b=2", "fsdp"))
    count = _parameters("llama")
    assert counts["all_gather", "a.b", "forward"] == counts["reduce_scatter", "a.b", "backward"] == count
    assert not {("all_gather", axis, "forward") for axis in "ab"} & counts.keys()


@pytest.mark.slow
@EACH_DECODER
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", pytest.param("tp=2,dp=2", marks=pytest.mark.slow)])
def test_fsdp_times_megatron_is_the_sum_of_both(name: str, mesh: str) -> None:
    counts = _counts(_plan(name, mesh, {"dp": "fsdp", "tp": "megatron"}))
    fsdp, megatron = (_counts(_plan(name, *one)) for one in (("dp=2", "fsdp"), ("tp=2", "megatron")))
    assert counts == fsdp | megatron


@pytest.mark.slow
@EACH_DECODER
@pytest.mark.parametrize(
    ("mesh", "recipe"),
    [
        ("dp=2,tp=2", "fsdp+megatron"),
        pytest.param("tp=4", "megatron", marks=pytest.mark.slow),
        pytest.param("dp=4", "fsdp", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_device_holds_more_than_its_part_of_the_logits(name: str, mesh: str, recipe: Recipe) -> None:
    """At these sizes the logits are the largest value of the program, buckets of parameters included."""
    vocab, batch, seq = 4096, 8, 64
    case = DECODERS[name](vocab=vocab, dim=32, seq=seq, **({"hidden": 64} if name == "llama" else {}))
    case.model.double()
    case = Case(case.model, 2 * (torch.zeros(batch, seq, dtype=torch.long),), {})
    graph = plan_ranks(case, mesh, Options(recipe=recipe)).planned.graph.graph
    values = {node.name: results_of(node) for node in graph.nodes if node.op != "output"}
    sizes = {name: max((tensor.numel() for tensor in tensors), default=0) for name, tensors in values.items()}
    largest = max(sizes, key=lambda node: sizes[node])
    assert sizes[largest] == batch * seq * vocab // 4, f"%{largest} has {sizes[largest]} elements"


@pytest.mark.slow
def test_a_fused_projection_is_sharded_inside_each_of_its_parts() -> None:
    made = _plan("gpt", "dp=2,tp=2", "fsdp+megatron")
    layouts = {name: str(value.layout.on(1)) for name, value in made.parameters.items() if name.startswith("blocks.0")}
    assert layouts == {
        "blocks.0.norm1.weight": "R",
        "blocks.0.norm1.bias": "R",
        "blocks.0.attn.qkv.weight": "S(0/3)",
        "blocks.0.attn.qkv.bias": "S(0/3)",
        "blocks.0.attn.proj.weight": "S(1)",
        "blocks.0.attn.proj.bias": "R",
        "blocks.0.norm2.weight": "R",
        "blocks.0.norm2.bias": "R",
        "blocks.0.up.weight": "S(0)",
        "blocks.0.up.bias": "S(0)",
        "blocks.0.down.weight": "S(1)",
        "blocks.0.down.bias": "R",
    }


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "tp=2,dp=2"])
def test_tensor_parallelism_lies_outside_of_the_data_axis_on_one_dim(mesh: str) -> None:
    """A gather over `dp` alone must give each tensor-parallel rank a contiguous part."""
    made = _plan("llama", mesh, {"dp": "fsdp", "tp": "megatron"})
    layout = made.parameters["layers.0.attention.wq.weight"].layout
    assert str(layout.on(made.mesh.index("tp"))) == "S(0)"
    assert str(layout.on(made.mesh.index("dp"))) == "S(0/2)"
    gathers = [c for c in made.collectives if c.kind == "all_gather" and not c.backward and c.recomputed]
    assert {c.axes for c in gathers} == {("dp",)}


@pytest.mark.slow
def test_every_collective_knows_who_caused_it() -> None:
    made = _plan("llama", "dp=2,tp=2", "fsdp+megatron")
    for one in made.collectives:
        assert one.reason, one
        # A parameter is gathered, and its gradient reduced, for the line that uses it.
        assert one.origin.file.endswith("models.py") and one.origin.line and one.origin.source, one
