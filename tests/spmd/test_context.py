"""Context parallelism: the sequence is sharded, attention gathers keys and values, and the numbers are one device's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Options, RecipeError, autoshard
from passes.cost.kernel_time import kernel_flops
from passes.ir.call import call_of
from passes.rules.attention import is_attention
from tests.models import Case
from tests.spawn import run_on_ranks
from tests.spmd.decoders import DECODERS, decoder
from tests.spmd.oracle import Reference, compare, plan_ranks, relative_error

TOLERANCE = 1e-12  # relative, float64
GATHER, RING, EXCHANGE = "context(gather)", "context(ring)", "context(all_to_all)"


class Attend(nn.Module):
    """Grouped heads attend to a memory, or to the tokens themselves."""

    def __init__(self, kv_heads: int = 2, *, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(12, 24), nn.Linear(12, 12 * kv_heads)
        self.kv_heads, self.causal, self.dropout = kv_heads, causal, dropout

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        q = self.q(x).unflatten(-1, (4, 6)).transpose(1, 2)
        k, v = self.kv(source).unflatten(-1, (2, self.kv_heads, 6)).permute(2, 0, 3, 1, 4)
        how = {"is_causal": self.causal, "dropout_p": self.dropout, "enable_gqa": self.kv_heads != 4}
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **how).transpose(1, 2).flatten(2).square().mean()


def attend(*shapes: tuple[int, ...], mask: tuple[int, ...] = (), **options: object) -> Case:
    torch.manual_seed(0)
    values = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    values += [torch.rand(mask) > 0.3] if mask else []
    return Case(Attend(**options).double(), tuple(values), {})


class OfHeads(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)


class Fixed(nn.Module):
    """Learned queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(1, 1, 4, 6))

    def forward(self, x: Tensor) -> Tensor:
        keys = x.view(1, 1, 4, 6)
        return F.scaled_dot_product_attention(self.q, keys, keys).sum()


@cache
def reference(name: str) -> Reference:
    torch.manual_seed(0)
    made: dict[str, Callable[[], Case]] = {
        "causal": lambda: decoder(layers=1, seq=16),
        "grouped": lambda: attend((2, 16, 12), causal=True),
        "full": lambda: attend((2, 8, 12)),
        "cross": lambda: attend((2, 8, 12), (2, 6, 12)),
        "rotary": lambda: DECODERS["complex_rotary"](),
        "shifted": lambda: DECODERS["shifted_loss"](),
    }
    return Reference.of(made[name]())


@pytest.mark.parametrize(
    ("name", "mesh", "recipe"),
    [
        ("causal", "dp=2,cp=2", {"dp": "fsdp", "cp": GATHER}),
        ("grouped", "cp=4", GATHER),
        ("cross", "cp=4", GATHER),
        ("grouped", "cp=4", RING),
        ("full", "cp=4", RING),
        ("cross", "cp=2", RING),
        ("grouped", "cp=2", EXCHANGE),
        ("full", "cp=2", EXCHANGE),
        ("causal", "cp=2", "fsdp_context(ring)"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("full", "cp=2", GATHER),
                ("causal", "cp=2,tp=2", {"cp": "fsdp_context(ring)", "tp": "megatron"}),
                ("causal", "dp=2,cp=2", {"dp": "fsdp", "cp": "fsdp_context(gather)"}),
                ("rotary", "cp=2", GATHER),
                ("shifted", "cp=2", GATHER),
                ("causal", "cp=2,tp=2", {"cp": GATHER, "tp": "megatron"}),
                ("causal", "a=2,b=2", GATHER),
                ("causal", "cp=8", GATHER),
                ("rotary", "cp=2", RING),
                ("shifted", "cp=2", RING),
                ("causal", "tp=2,cp=2", {"cp": RING, "tp": "megatron"}),
                ("causal", "dp=2,cp=2", {"dp": "fsdp", "cp": RING}),
                ("causal", "a=2,b=2", RING),
                ("causal", "a=2,b=2", {"a": RING, "b": GATHER}),
                ("causal", "a=2,b=2", {"a": GATHER, "b": RING}),
                ("causal", "cp=8", RING),
                ("rotary", "cp=2", EXCHANGE),
                ("shifted", "cp=2", EXCHANGE),
                ("cross", "cp=2", EXCHANGE),
                ("causal", "cp=2,tp=2", {"cp": EXCHANGE, "tp": "megatron"}),
                ("causal", "dp=2,cp=2", {"dp": "fsdp", "cp": EXCHANGE}),
                ("causal", "a=2,b=2", EXCHANGE),
            )
        ),
    ],
)
def test_a_step_gives_the_numbers_of_one_device(name: str, mesh: str, recipe: str | Mapping[str, str | None]) -> None:
    whole = reference(name)
    ranks = whole.plan(mesh, Options(recipe=recipe))
    assert not [remark for remark in ranks.planned.plan.remarks if "runs whole" in remark.text]
    compare(ranks.run().step, whole.step, TOLERANCE)


def test_ranks_have_a_chunk_of_each_half_and_gradients_of_keys_are_scattered() -> None:
    plan = reference("grouped").plan("cp=4", Options(recipe=GATHER)).planned.plan
    assert str(plan.inputs["x"].layout.on(0)) == "S(1~)"
    assert plan.count("reduce_scatter", backward=True) > 0


def test_a_ring_sends_parts_of_keys_and_then_their_gradients() -> None:
    plan = reference("grouped").plan("cp=4", Options(recipe=RING)).planned.plan
    part = 2 * 2 * 2 * 4 * 6 * 8  # bytes: keys and values, f64[2, 2, 4, 6] each
    sent = [(one.bytes, one.way, one.backward) for one in plan.collectives if one.kind == "send"]
    ways = "in 3 messages of 1.5 KiB on average", "in 6 messages of 1.5 KiB on average"
    assert sent == [(3 * part, ways[0], False), (6 * part, ways[1], True)]
    assert plan.count("all_gather") == 0


def test_fsdp_context_stores_parameters_in_parts_and_gathers_them_again_in_the_backward() -> None:
    plan = reference("causal").plan("cp=2", Options(recipe="fsdp_context(ring)")).planned.plan
    assert {str(one.layout.on(0)) for one in plan.parameters.values()} == {"S(0)"}
    assert {one.layout.axes_on(1) for one in plan.inputs.values()} == {(0,)}
    gathered = [one for one in plan.collectives if one.kind == "all_gather"]
    assert {one.what.partition(" ")[0] for one in gathered} == {"parameter"}
    assert {"seed: fsdp_context(ring): gathered for use"} == {one.reason for one in gathered}
    assert {one.backward or one.recomputed for one in gathered} == {False, True}
    assert plan.count("reduce_scatter", backward=True) == len(plan.parameters)


def test_heads_are_exchanged_for_positions_and_back() -> None:
    plan = reference("grouped").plan("cp=2", Options(recipe=EXCHANGE)).planned.plan
    assert str(plan.inputs["x"].layout.on(0)) == "S(1)"
    assert (plan.count("all_to_all", backward=False), plan.count("all_to_all", backward=True)) == (4, 4)


@pytest.mark.parametrize(("way", "size"), [(GATHER, 2), (GATHER, 4), (RING, 2), (RING, 4), (EXCHANGE, 2)])
def test_calls_of_causal_attention_compute_no_pair_that_nobody_needs(way: str, size: int) -> None:
    """All ranks run one program, so that their work is equal."""
    whole = reference("grouped")
    ranks = whole.plan(f"cp={size}", Options(recipe=way))
    calls = [node for node in ranks.planned.graph.graph.nodes if is_attention(node.target)]
    computed = sum(kernel_flops(call_of(node)) for node in calls)
    query, pairs = call_of(calls[0]).arg("query"), 16 * 17 / 2
    needed = 2 * 2 * 4 * pairs * 2 * query.shape[-1] / size
    assert computed / needed < 1.02


class Convolved(nn.Module):
    """Attention to the first positions of each sequence, after a convolution over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.keys = nn.Conv1d(8, 8, 5, padding=2), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(x.shape[1])[None] < lengths[:, None]
        near = self.near(x.mT).mT[:, None]
        mask = seen[:, None, None, :]
        return nn.functional.scaled_dot_product_attention(near, self.keys(near), near, attn_mask=mask).square().mean()


class ClassToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.qkv = nn.Parameter(torch.zeros(1, 1, 8)), nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(tokens).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v)[:, :, 0].sum()


def refusal(case: Case, recipe: str = "context", mesh: str = "cp=2") -> str:
    with pytest.raises(RecipeError) as caught:
        plan_ranks(case, mesh, Options(recipe=recipe))
    return str(caught.value)


class Joint(nn.Module):
    """Attends to a text and an image together: the positions of its queries are no dim of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        q, k, v = self.qkv(torch.cat([text, image], 1)).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).square().mean()


@pytest.mark.parametrize("recipe", [RING, f"fsdp_{GATHER}"])
def test_inputs_that_the_recipe_does_not_find_may_be_sharded_by_hand(recipe: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(2, 4, 12, dtype=torch.float64), torch.randn(2, 8, 12, dtype=torch.float64)
    whole = Reference.of(Case(Joint().double(), values, {}))
    ranks = whole.plan("cp=2", Options(recipe=recipe, inputs={"image": {"cp": "S(1)"}}))
    assert not [remark.text for remark in ranks.planned.plan.remarks if "runs whole" in remark.text]
    compare(ranks.run().step, whole.step, TOLERANCE)


BY_HAND = ", or shard inputs by hand, such as Options(inputs={{{!r}: {{'cp': Shard(1)}}}})"


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (attend((2, 1, 12)), "attention cannot be sharded: a length of 1 does not divide by 2; pad it to a multiple of 2"),
        (
            Case(Convolved(), (torch.randn(2, 11, 8), torch.tensor([7, 9])), {}),
            "attention cannot be sharded: a length of 11 does not divide by 2, and cannot be padded, as where a convolution "
            "reads neighbouring positions; pad it to a multiple of 2",
        ),
        (
            Case(ClassToken(), (torch.randn(2, 12, 8),), {}),
            "attention cannot be sharded: a length of 13 does not divide by 2, and cannot be padded, as no input has it: a class "
            "token adds to one; pad it to a multiple of 2",
        ),
        (
            Case(nn.Linear(4, 4), (torch.randn(2, 4),), {}),
            "the model has no attention, neither a kernel nor a softmax between two products, nor a convolution over positions; "
            f"call torch.nn.functional.scaled_dot_product_attention{BY_HAND.format('input')}",
        ),
        (
            Case(Fixed(), (torch.randn(2, 12),), {}),
            f"the positions of attention's queries are no dim of an input; use another recipe{BY_HAND.format('x')}",
        ),
    ],
    ids=["length", "convolution", "class_token", "no_attention", "no_input"],
)
def test_what_cannot_be_sharded_is_refused(case: Case, why: str) -> None:
    for recipe in (GATHER, f"fsdp_{GATHER}"):
        assert refusal(case, recipe) == f"recipe {recipe!r} on axis 'cp': {why}"


@pytest.mark.parametrize(
    ("case", "recipe", "mesh", "why"),
    [
        (attend((2, 8, 12)), EXCHANGE, "cp=4", "2 heads of keys do not divide by 4; use context(gather) or context(ring)"),
        (attend((2, 8, 12), (2, 7, 12)), RING, "cp=2", "7 keys do not divide by 2; use context(gather) or context(all_to_all)"),
    ],
    ids=["heads", "keys"],
)
def test_a_way_that_cannot_be_is_refused(case: Case, recipe: str, mesh: str, why: str) -> None:
    said = refusal(case, recipe, mesh)
    assert said == f"recipe {recipe!r} on axis 'cp': attention cannot be sharded: {why}"


def test_a_ring_over_axes_in_another_order_than_the_blocks_is_refused() -> None:
    case = attend((2, 32, 12), (2, 32, 12), mask=(2, 1, 32, 32))
    tokens = {"a": "S(1/8)", "b": "S(1/4)"}
    inputs = {"x": tokens, "memory": tokens, "mask": {"a": "S(2/8)", "b": "S(2/4)"}}
    with pytest.raises(RecipeError) as caught:
        plan_ranks(case, "a=2,b=2", Options(recipe=None, inputs=inputs))
    assert str(caught.value) == (
        "causal or masked attention with queries {a:S(2/8), b:S(2/4)} cannot pass keys {a:S(2/8), b:S(2/4)} around a ring: the "
        "ring's axes shard the same blocks, outside of other axes and in the order of the mesh; give all axes that shard the "
        "sequence the same way, such as context(gather)"
    )


def test_a_remark_says_that_attention_runs_whole() -> None:
    options = Options(recipe=None, inputs={"q": {"cp": "S(3)"}})  # of the heads' dims, which a kernel needs whole
    ranks = plan_ranks(Case(OfHeads(), (torch.randn(2, 3, 8, 6),), {}), "cp=2", options)
    found = [remark.text for remark in ranks.planned.plan.remarks if "runs whole" in remark.text]
    assert found == [
        "on cp: attention runs whole on all 2 ranks: each computes 9.22e+03 FLOP in 6.71 us, and as a part 4.61e+03"
    ]


class Pooled(nn.Module):
    """Attention of all positions, and one of a learned query to them."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        seen = F.scaled_dot_product_attention(x, x, x)
        return F.scaled_dot_product_attention(self.probe.expand(len(x), x.shape[1], 1, 6), seen, seen).square().mean()


def test_a_recipe_says_which_attention_runs_whole_why_and_what_that_costs() -> None:
    whole = Reference.of(Case(Pooled().double(), (torch.randn(2, 3, 8, 6, dtype=torch.float64),), {}))
    ranks = whole.plan("cp=2", Options(recipe="context"))
    found = [remark.text for remark in ranks.planned.plan.remarks if "runs whole" in remark.text]
    assert found == [
        "on cp: attention runs whole on all 2 ranks: a length of 1 does not divide by 2; pad it to a multiple of 2",
        "on cp: attention runs whole on all 2 ranks: each computes 1.15e+03 FLOP in 4.92 us, and as a part 576",
    ]
    compare(ranks.run().step, whole.step, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_halves_are_merged_in_float32(dtype: torch.dtype, tolerance: float) -> None:
    case = attend((2, 16, 12), causal=True)
    narrow = Case(case.model.to(dtype), tuple(value.to(dtype) for value in case.args), {})
    whole = Reference.of(narrow)
    compare(whole.plan("cp=4", Options(recipe="context")).run().step, whole.step, tolerance)


@pytest.mark.slow
def test_a_mask_is_sharded_with_the_queries() -> None:
    whole = Reference.of(attend((2, 8, 12), (2, 6, 12), mask=(2, 1, 8, 6)))
    ranks = whole.plan("cp=2", Options(recipe="context"))
    assert str(ranks.planned.plan.inputs["mask"].layout.on(0)) == "S(2)"
    compare(ranks.run().step, whole.step, TOLERANCE)


@pytest.mark.slow
@pytest.mark.gloo
def test_two_real_ranks_give_the_numbers_of_one_device_and_one_text() -> None:
    (first, text), (second, other) = run_on_ranks(_train, 2, timeout=200)
    assert max(first, second) < 1e-10
    assert text == other and "attention" in text


def _train(rank: int) -> tuple[float, str]:
    """Return the relative error of the worst gradient after one step, and the program."""
    torch.manual_seed(0)
    case = decoder(layers=1, seq=16)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = autoshard(case.model, mesh, case.args, options=Options(recipe=RING, compile="eager"))
    loss, want = model(*model.shard(*case.args)), case.model(*case.args)
    loss.backward()
    want.backward()
    grads = {name: one.grad for name, one in case.model.named_parameters()}
    errors = [relative_error(one.grad.full_tensor(), grads[name]) for name, one in model.named_parameters()]
    return max(*errors, relative_error(loss.detach(), want.detach())), str(model.plan)
