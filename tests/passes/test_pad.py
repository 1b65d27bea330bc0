"""Vocabularies, heads and widths that an axis does not divide are sharded, padded, with the numbers of one device."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule

import autoshard
from autoshard import Mesh, Options, ShardingPlan, plan
from autoshard.debug import checking
from examples.gpt import GPT, Config
from passes.cost.kernel_time import kernel_flops
from passes.ir.call import call_of
from passes.ir.graph import results_of
from passes.ir.text import parse_graph
from passes.pad import Pad
from tests.passes.rewrite import assert_declines, assert_same_values

VOCAB, DIM, HEADS, HEAD, WIDTH, BATCH, SEQ = 37, 8, 6, 4, 30, 2, 8
MEGATRON = Options(recipe="megatron")


class Decoder(nn.Module):
    """A block of attention and an MLP between a table and a head; none of its sizes divides by 4."""

    def __init__(self, *, heads: int = HEADS, tied: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.table = nn.Embedding(VOCAB, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * heads * HEAD), nn.Linear(heads * HEAD, DIM)
        self.up, self.down = nn.Linear(DIM, WIDTH), nn.Linear(WIDTH, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        batch, seq, _ = x.shape
        parts = self.qkv(self.norm(x)).split(self.heads * HEAD, dim=-1)
        q, k, v = (part.view(batch, seq, self.heads, HEAD).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, seq, -1))
        x = x + self.down(F.softplus(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Head(nn.Module):
    """A linear to the vocabulary of GPT-2, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(512, 50257, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.out(x), labels)


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(VOCAB, (BATCH, SEQ)), torch.randint(VOCAB, (BATCH, SEQ))


def decoder(**given: object) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Decoder(**given).double(), tokens()


@pytest.fixture(scope="module")
def planned() -> ShardingPlan:
    model, args = decoder()
    return plan(model, Mesh("tp=4", hardware="h100"), args, options=MEGATRON)


def local(made: ShardingPlan) -> GraphModule:
    return parse_graph(made.graph("LOCAL"))[0]


@pytest.mark.slow
def test_no_rank_has_full_logits(planned: ShardingPlan) -> None:
    values = [node for node in local(planned).graph.nodes if node.op != "output"]
    assert max(result.numel() for node in values for result in results_of(node)) < BATCH * SEQ * WIDTH


def products(gm: GraphModule) -> int:
    """Return the multiplications of all matrix products."""
    found = [node for node in gm.graph.nodes if node.target is torch.ops.aten.mm.default]
    return sum(math.prod(node.args[0].meta["val"].shape) * node.meta["val"].shape[1] for node in found)


def test_a_rank_computes_a_quarter_of_the_padded_products(planned: ShardingPlan) -> None:
    columns = 3 * 8 * HEAD, 8 * HEAD, 32, 32, 40
    assert products(local(planned)) == 3 * BATCH * SEQ * DIM * sum(columns) // 4


def test_only_weights_that_are_split_by_heads_are_exchanged(planned: ShardingPlan) -> None:
    exchanged = {one.origin.fqn for one in planned.collectives if one.kind == "all_to_all"}
    assert exchanged == {"qkv", "proj"}


def test_remarks_say_what_is_padded_and_what_it_costs(planned: ShardingPlan) -> None:
    assert [remark.text for remark in planned.remarks if remark.pass_name == "pad"] == [
        "table.weight[37, 8]: 37 is padded to 40, which 4 divides: 8.11% more",
        "qkv.weight[72, 8]: 6 parts of 4 elements are padded to 8, which 4 divides: 33.33% more",
        "up.weight[30, 8]: 30 is padded to 32, which 4 divides: 6.67% more",
    ]


def test_parameters_keep_their_sizes(planned: ShardingPlan) -> None:
    assert planned.parameters["table.weight"].shape == (VOCAB, DIM)
    assert planned.parameters["qkv.weight"].shape == (3 * HEADS * HEAD, DIM)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, recipe, heads, tied",
    [
        ("tp=4", "megatron", 6, True),
        ("tp=4", "megatron", 5, False),
        ("dp=2,tp=4", "fsdp+megatron", 6, True),
        ("a=2,b=2", {"a": "megatron", "b": "megatron"}, 3, False),
    ],
)
def test_numbers_are_those_of_one_device(mesh: str, recipe: str, heads: int, tied: bool) -> None:
    model, args = decoder(heads=heads, tied=tied)
    found = autoshard.check(model, mesh, args, options=Options(recipe=recipe))
    assert found and found.tolerance <= 1e-9, str(found)


@pytest.mark.slow
def test_gpt2_has_its_real_vocabulary_and_a_fourth_of_the_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = GPT(Config(layers=1, dim=24, heads=6, vocab=50257, seq=8)).double()
    args = torch.randint(50257, (BATCH, SEQ)), torch.randint(50257, (BATCH, SEQ))
    made = plan(model, Mesh("tp=4", hardware="h100"), args, options=MEGATRON)
    values = [result for node in local(made).graph.nodes if node.op != "output" for result in results_of(node)]
    assert max(value.shape[-1] for value in values if value.dim() > 1 and value.shape[0] == BATCH * SEQ) <= 12565
    one = plan(model, Mesh("tp=1", hardware="h100"), args, options=MEGATRON)
    assert 0.25 < flops(local(made)) / flops(local(one)) < 0.25 * 1.01  # a fourth, and two heads beside six
    monkeypatch.setitem(checking.TOLERANCE, torch.float64, 1e-10)
    found = autoshard.check(model, "tp=4", args, options=MEGATRON)
    assert found and found.tolerance == 1e-10, str(found)


def flops(gm: GraphModule) -> float:
    calls = (node for node in gm.graph.nodes if isinstance(node.target, OpOverload) and results_of(node))
    return sum(kernel_flops(call_of(node)) for node in calls)


@pytest.mark.slow
def test_a_search_takes_the_better_of_plans_with_and_without_padding() -> None:
    model, args = decoder()
    options = Options(hardware="h100")
    made = plan(model, Mesh("tp=4", hardware="h100"), args, options=options)
    assert made.search is not None and made.cost is not None
    other = next(one for one in made.search.candidates if one.name == f"solved, {'not padded' if made.pads else 'padded'}")
    assert other.cost is not None and other.cost.step_time >= made.cost.step_time
    assert autoshard.check(model, "tp=4", args, plan=made)


@pytest.mark.slow
def test_a_search_shards_a_vocabulary_that_does_not_divide() -> None:
    with torch.device("meta"):
        model = Head().bfloat16()
        args = torch.empty(1024, 512, dtype=torch.bfloat16), torch.empty(1024, dtype=torch.int64)
    made = plan(model, Mesh("tp=4", hardware="h100"), args)
    assert made.pads and not made.parameters["out.weight"].layout.is_replicated


def text(*calls: str) -> str:
    """Return a graph of an input and a weight of 6 rows."""
    lines = ("mesh tp=4", "stage CAPTURED", '%w: f32[6, 8] = parameter("w")', '%x: f32[4, 8] = input("x")')
    return "\n".join((*lines, *calls)) + "\n"


LINEAR = ("%permute: f32[8, 6]<1, 8> = permute(%w, [1, 0])", "%mm: f32[4, 6] = mm(%x, %permute)")

REDUCTIONS = (
    "%r: f32[4] = sum.dim_IntList(%cos, [1])",
    "%r: f32[4] = amax(%mm, [1])",
    "%r: f32[4] = amin(%mm, [1])",
    "%r: f32[4] = prod.dim_int(%cos, 1)",
    "%r: f32[6] = sum.dim_IntList(%cos, [0])",
    "%r: (f32[4, 6], i64[4, 6]) = sort(%cos, 1)\n%s: f32[4, 6] = getitem(%r, 0)",
    "%r: f32[4, 6] = _softmax(%mm, 1, False)",
    "%r: f32[4, 2, 3] = view(%cos, [4, 2, 3])",
    "%r: f32[24] = view(%cos, [24])",
    "%r: f32[4, 6] = flip(%cos, [1])",
    "%r: f32[4, 12] = cat([%cos, %cos], 1)",
    "%r: f32[4, 4] = slice.Tensor(%cos, 1, 2, 6)",
    "%r: f32[4] = select.int(%cos, 1, -1)",
    "%r: f32[4, 6] = cumsum(%cos, 1)",
    "%r: f32[5, 6] = constant_pad_nd(%mm, [0, 0, 0, 1], 0.25)\n%s: f32[5] = sum.dim_IntList(%r, [1])",
    "%i: i64[1, 6] = full([1, 6], 2, dtype=i64, device=device(cpu), pin_memory=False)\n"
    "%r: f32[4, 6] = scatter.value(%mm, 0, %i, 0.5)\n%s: f32[4] = sum.dim_IntList(%r, [1])",
)


@pytest.mark.parametrize("call", REDUCTIONS, ids=lambda call: call.split("= ")[1].split("(")[0])
def test_values_are_the_same_after_any_op(call: str) -> None:
    result = "%s" if "%s:" in call else "%r"
    cos = "%cos: f32[4, 6] = cos(%mm)"
    assert_same_values(Pad(4), text(*LINEAR, cos, *call.split("\n"), f'return output("output") {result}'))


def test_an_index_that_counts_from_the_end_counts_from_the_end_of_what_was_there() -> None:
    calls = (
        '%i: i64[2] = input("i")',
        *LINEAR,
        "%sub: i64[2] = sub.Tensor(%i, 6)",
        "%r: f32[4, 2] = index.Tensor(%mm, [None, %sub])",
        'return output("output") %r',
    )
    assert_same_values(Pad(4), text(*calls))


def test_sizes_that_divide_stay() -> None:
    assert_declines(Pad(3), text(*LINEAR, 'return output("output") %mm'))
