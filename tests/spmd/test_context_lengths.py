"""Context parallelism of sequences that the ranks do not divide: positions are padded, and nothing of the padding is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Options, autoshard
from passes.ir.text import parse_graph
from passes.paddings.padded_attention import set_lengths
from passes.rules.attention import is_attention_backward
from tests.models import Case
from tests.spawn import run_on_ranks
from tests.spmd.decoders import (
    ComplexRotaryAttention,
    EinsumAttention,
    WindowAttention,
    decoder,
    loss_and_accuracy,
    shifted_loss,
    token_losses,
)
from tests.spmd.oracle import Reference, compare, relative_error
from tests.spmd.oracle import run_on_ranks as run_on_simulated
from tests.spmd.test_context import EXCHANGE, GATHER, RING, TOLERANCE, attend


class Ignoring(nn.Module):
    """Normed heads without an epsilon, which gives NaN for padding, a dropout, and a loss that ignores labels."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36, bias=False), nn.Linear(12, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        q, k, v = (heads / heads.norm(dim=-1, keepdim=True) for heads in (q, k, v))
        seen = F.dropout(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), 0.5)
        return F.cross_entropy(self.out(seen).flatten(0, 1), labels.flatten(), ignore_index=-1)


def ignoring() -> Case:
    labels = torch.randint(5, (2, 9))
    labels[:, 7:] = -1
    return Case(Ignoring().double(), (torch.randn(2, 9, 12, dtype=torch.float64), labels), {})


class Translator(nn.Module):
    """Heads attend to their own sequence and to one of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.mine, self.source, self.q, self.kv = (nn.Linear(12, width) for width in (36, 36, 12, 24))

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        x, source = self.attend(self.mine(x), causal=True), self.attend(self.source(source), causal=False)
        q = self.q(x).unflatten(-1, (2, 6)).transpose(1, 2)
        k, v = self.kv(source).unflatten(-1, (2, 2, 6)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()

    def attend(self, qkv: Tensor, *, causal: bool) -> Tensor:
        q, k, v = qkv.unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def translator() -> Case:
    values = (torch.randn(2, length, 12, dtype=torch.float64) for length in (9, 7))
    return Case(Translator().double(), tuple(values), {})


class Embedded(nn.Module):
    """Attends to tokens, of which neither the number of samples nor the length is even."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv, self.out = nn.Embedding(17, 12), nn.Linear(12, 36), nn.Linear(12, 17)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        q, k, v = self.qkv(self.tokens(x)).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.out(seen).flatten(0, 1), labels.flatten())


def embedded() -> Case:
    return Case(Embedded().double(), (torch.randint(17, (3, 9)), torch.randint(17, (3, 9))), {})


CASES: dict[str, Callable[[], Case]] = {
    "embedded": embedded,
    "causal": lambda: decoder(layers=1, seq=7),
    "full": lambda: attend((2, 9, 12)),
    "cross": lambda: attend((2, 9, 12), (2, 8, 12)),
    "rows": lambda: attend((2, 9, 12), (2, 9, 12), mask=(2, 1, 9, 9)),
    "one row, causal": lambda: attend((2, 9, 12), (2, 9, 12), mask=(2, 1, 1, 9), causal=True),
    "window": lambda: decoder(WindowAttention, layers=1, seq=7),
    "written": lambda: decoder(EinsumAttention, layers=1, seq=7),
    "rotary": lambda: decoder(ComplexRotaryAttention, layers=2, seq=8, batch=3),
    "shifted": lambda: decoder(loss=shifted_loss, layers=1, seq=7),
    "losses": lambda: decoder(loss=token_losses, layers=1, seq=7),
    "accuracy": lambda: decoder(loss=loss_and_accuracy, layers=2, seq=7),
    "small batch": lambda: decoder(layers=1, seq=7, batch=3),
    "translator": translator,
    "dropout": lambda: attend((2, 9, 12), dropout=0.5, causal=True),
    "ignoring": ignoring,
}
RANDOM = ("dropout", "ignoring")


@cache
def reference(name: str) -> Reference:
    torch.manual_seed(0)
    found = Reference.of(CASES[name]())
    if name not in RANDOM:
        return found
    return Reference(found.case, found.problem, run_on_simulated(found.case, "one=1", Options(recipe=None)))


@pytest.mark.parametrize(
    ("name", "mesh", "recipe"),
    [
        ("causal", "cp=2", GATHER),
        ("causal", "cp=4", RING),
        ("full", "cp=4", GATHER),
        ("full", "cp=2", RING),
        ("ignoring", "cp=2", "context"),
        ("embedded", "dp=2,cp=2", {"dp": "fsdp", "cp": GATHER}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("causal", "cp=4", GATHER),
                ("causal", "cp=2", RING),
                ("causal", "cp=2", EXCHANGE),
                ("full", "cp=2", EXCHANGE),
                ("cross", "cp=4", GATHER),
                ("cross", "cp=4", RING),
                ("rows", "cp=4", GATHER),
                ("rows", "cp=4", RING),
                ("rows", "cp=2", EXCHANGE),
                ("one row, causal", "cp=2", GATHER),
                ("one row, causal", "cp=4", RING),
                ("window", "cp=2", RING),
                ("written", "cp=4", GATHER),
                ("rotary", "cp=3", RING),
                ("shifted", "cp=4", GATHER),
                ("losses", "cp=2", RING),
                ("accuracy", "cp=4", RING),
                ("small batch", "dp=2,cp=2", {"dp": "fsdp", "cp": RING}),
                ("causal", "dp=2,cp=2", {"dp": "fsdp", "cp": GATHER}),
                ("causal", "cp=2,tp=2", {"cp": RING, "tp": "megatron"}),
                ("causal", "a=2,b=2", RING),
                ("full", "a=2,b=2", GATHER),
                ("translator", "cp=4", GATHER),
                ("translator", "cp=2", RING),
                ("dropout", "cp=2", GATHER),
                ("ignoring", "cp=4", RING),
                ("embedded", "dp=2,cp=2", {"dp": "ddp", "cp": "fsdp_context"}),
                ("embedded", "dp=2,cp=2", {"dp": "fsdp", "cp": RING}),
            )
        ),
    ],
)
def test_a_step_gives_the_numbers_of_one_device(name: str, mesh: str, recipe: str | Mapping[str, str]) -> None:
    whole = reference(name)
    ranks = whole.plan(mesh, Options(recipe=recipe))
    plan = ranks.planned.plan
    assert not [remark.text for remark in plan.remarks if "runs whole" in remark.text]
    assert any("a sequence of" in remark.text for remark in plan.remarks)
    assert not any(one.layout.axes_on(1) for one in plan.inputs.values() if one.shape[1] in (7, 9))
    compare(ranks.run().step, whole.step, TOLERANCE)


class Merged(nn.Module):
    """Attends to 12 positions, then to 6 pairs of them, and then to the 12 again."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.merge, self.split = nn.Linear(8, 24), nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        pairs = self._attend(self.merge(self._attend(x).unflatten(1, (-1, 2)).flatten(2)))
        return self._attend(x + self.split(pairs).view_as(x)).square().mean()

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("recipe", ["context", "fsdp_context(ring)"])
def test_positions_that_divide_are_not_padded_for_those_that_are_made_of_them(recipe: str) -> None:
    torch.manual_seed(0)
    whole = Reference.of(Case(Merged().double(), (torch.randn(2, 12, 8, dtype=torch.float64),), {}))
    ranks = whole.plan("cp=4", Options(recipe=recipe))
    remarks = [remark.text for remark in ranks.planned.plan.remarks]
    assert [text.partition(", and")[0] for text in remarks if "runs whole" in text] == [
        "on cp: attention runs whole on all 4 ranks: a length of 6 does not divide by 4"
    ]
    assert ranks.planned.plan.inputs["x"].layout.axes_on(1)
    compare(ranks.run().step, whole.step, TOLERANCE)


def test_a_kernel_is_told_how_long_its_padded_operands_are() -> None:
    kernel, numbers = "_scaled_dot_product_flash_attention_backward", "None, None, 9, 7, 0.0, False"
    gm, _ = parse_graph(
        f"""
        mesh cp=2
        stage CAPTURED
        %q: f32[1, 4, 10, 8] = input("q")
        %k: f32[1, 4, 8, 8] = input("k")
        %l: f32[1, 4, 10] = input("l")
        %s: i64[] = input("seed")
        %g: (f32[1, 4, 10, 8], f32[1, 4, 8, 8], f32[1, 4, 8, 8]) = {kernel}(%q, %q, %k, %k, %q, %l, {numbers}, %s, %s)
        %grad: f32[1, 4, 10, 8] = getitem(%g, 0)
        return output("output") %grad
        """
    )
    (node,) = (node for node in gm.graph.nodes if is_attention_backward(node.target))
    set_lengths(node)
    assert node.args[8:10] == (10, 8)


@pytest.mark.slow
@pytest.mark.gloo
def test_calls_on_two_real_ranks_take_sequences_that_they_do_not_divide() -> None:
    for found in run_on_ranks(_train_each, 2):
        assert {name: errors for name, errors in found.items() if max(errors) >= TOLERANCE} == {}


CALLS: dict[str, tuple[tuple[int, ...], Options]] = {
    "odd, ring": ((7, 9), Options(recipe=RING, compile="eager")),
    "even, ring": ((8, 7), Options(recipe=RING, compile="eager")),
    "even, rule of thumb": ((8, 7), Options(compile="eager", hardware=None)),  # fsdp_context
    "even, searched": ((8, 7), Options(compile="eager", hardware="h100")),
}


def _train_each(rank: int) -> dict[str, list[float]]:
    return {name: _train(lengths, options, rank) for name, (lengths, options) in CALLS.items()}


def _train(lengths: tuple[int, ...], options: Options, rank: int) -> list[float]:
    """Return the relative error of the loss, and of the worst gradient, of a step of each length."""
    torch.manual_seed(0)
    cases = [decoder(layers=1, seq=length) for length in lengths]
    alone, mesh = cases[0].model, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = autoshard(alone, mesh, cases[0].args, options=options)
    errors = list[float]()
    for case in cases:
        alone.zero_grad()
        model.zero_grad()
        loss, want = model(*model.shard(*case.args)), alone(*case.args)
        loss.backward()
        want.backward()
        grads = {name: one.grad for name, one in alone.named_parameters()}
        found = [relative_error(one.grad.full_tensor(), grads[name]) for name, one in model.named_parameters()]
        errors += [relative_error(loss.detach(), want.detach()), max(found)]
    return errors
