"""`megatron` shards a linear and its low-rank adapter alike (LoRA, Hu et al. 2021)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import Mesh, Options, ShardingPlan, check, plan
from autoshard.planner.make_plan import make_plan
from autoshard.planner.request import PlanRequest
from passes.ir.graph import operands, tensor_of

SEQ, BATCH = 8, 4


class Adapted(nn.Module):
    """A linear and its low-rank adapter, as in LoRA: `base(x) + B(A(dropout(x))) * scale`."""

    def __init__(self, base: nn.Linear, rank: int, *, is_first: bool) -> None:
        super().__init__()
        self.base, self.is_first, self.drop = base.requires_grad_(False), is_first, nn.Dropout(0.0)
        self.A = nn.Linear(base.in_features, rank, bias=False)
        self.B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        adapter = self.B(self.A(self.drop(x))) * 0.5
        return adapter + self.base(x) if self.is_first else self.base(x) + adapter


class AdaptedBlock(nn.Module):
    """Attention and an MLP, every linear of which has an adapter (rank 0: none); q, k and v are one linear if `fused`."""

    def __init__(self, rank: int, *, is_first: bool = False, fused: bool = False, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.dim, self.heads, self.fused = dim, heads, fused
        sizes = {"qkv": (dim, 3 * dim)} if fused else dict.fromkeys("qkv", (dim, dim))
        sizes |= {"o": (dim, dim), "up": (dim, 4 * dim), "down": (4 * dim, dim)}
        for name, (inner, outer) in sizes.items():
            base = nn.Linear(inner, outer)
            setattr(self, name, Adapted(base, rank, is_first=is_first) if rank else base)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.qkv(y).split(self.dim, -1) if self.fused else (self.q(y), self.k(y), self.v(y))
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (q, k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return (x + self.down(F.gelu(self.up(self.norm(x))))).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "is_first", "fused", "mesh"),
    [
        pytest.param(4, False, False, "dp=2,tp=2", id="q_k_v_apart"),
        pytest.param(4, True, True, "tp=2", id="q_k_v_fused_adapter_first", marks=pytest.mark.extended),
        pytest.param(3, False, True, "tp=2", id="a_rank_that_does_not_divide"),
    ],
)
def test_a_base_and_its_adapter_are_sharded_alike(rank: int, is_first: bool, fused: bool, mesh: str) -> None:
    torch.manual_seed(0)
    model = AdaptedBlock(rank, is_first=is_first, fused=fused).double()
    args = (torch.randn(BATCH, SEQ, 32, dtype=torch.float64),)
    options = Options(recipe={"tp": "megatron"})
    checked = check(model, mesh, args, options=options)
    assert checked, str(checked)
    made = plan(model, Mesh(mesh), args=args, options=options)
    first = "S(0/3)" if fused else "S(0)"
    for name in ("qkv",) if fused else ("q", "k", "v"):
        modules = f"{name}.base", f"{name}.A", f"{name}.B"
        assert list(placements(made, *modules).values()) == [first, "R", first]
    assert list(placements(made, "up.base", "up.A", "up.B").values()) == ["S(0)", "R", "S(0)"]
    assert list(placements(made, "o.base", "o.A", "o.B").values()) == ["S(1)", "S(1)", "S(0)"]
    assert list(placements(made, "down.base", "down.A", "down.B").values()) == ["S(1)", "S(1)", "S(0)"]


@pytest.mark.slow
def test_adapters_leave_the_products_of_a_rank_few() -> None:
    """A rank does half of the base's products, and half or all of those with a factor of an adapter, which are few."""
    base, adapted = products(AdaptedBlock(0), "tp=2"), products(AdaptedBlock(4), "tp=2")
    alone, whole = products(AdaptedBlock(0), "tp=1"), products(AdaptedBlock(4), "tp=1")
    assert base == alone / 2
    assert whole / 2 <= adapted < 0.62 * whole


def products(model: AdaptedBlock, mesh: str) -> float:
    """Return multiplications that one rank does in products of matrices, forward and backward."""
    args = (torch.randn(BATCH, SEQ, 32),)
    planned = make_plan(PlanRequest(model, args, {}, Mesh(mesh), Options(recipe="megatron")))
    nodes = [node for node in planned.graph.graph.nodes if node.target is torch.ops.aten.mm.default]
    return float(sum(tensor_of(node).numel() * tensor_of(operands(node)[0]).shape[1] for node in nodes))


@pytest.mark.slow
def test_the_remark_names_the_adapter() -> None:
    args = (torch.randn(BATCH, SEQ, 32),)
    made = plan(AdaptedBlock(4), Mesh("tp=2"), args=args, options=Options(recipe="megatron"))
    said = [str(remark) for remark in made.remarks]
    assert any("q.A.weight stays whole: its 4 columns are the rank of an adapter, which add" in text for text in said), said


def placements(made: ShardingPlan, *modules: str) -> dict[str, str]:
    names = [f"{module}.weight" for module in modules]
    return {name: str(made.parameters[name].layout.placements[-1]) for name in names}  # on tp, the last axis
