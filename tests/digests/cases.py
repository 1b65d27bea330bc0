"""What is digested: models on meshes with options, each small; no case has a limit of time, so that all repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from autoshard import Mesh, Options, Overlap
from examples import gpt, llama, vit
from tests import models

Call = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]  # a model and the global arguments of one call
WHAT_IF = ({"mesh": "dp=4"}, {"hardware": "a100", "optimizer": "sgd"}, {"memory_limit": "1KB"})
HSDP_MEGATRON = {"r": "hsdp", "s": "hsdp", "tp": "megatron"}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDE = replace(llama.TINY, layers=6, dim=1024, heads=8, kv_heads=8, hidden=4096, vocab=1024, seq=256)


@dataclass(frozen=True)
class Case:
    """A model, where it is to run and how, and what of it is digested beside its plan.

    `program`: what would be compiled; `step`: that, and the numbers of a step on simulated ranks; `evaluation`: and what
    would be compiled for a call without gradients. Where it `follows`, that is of the plan, read from a file; else it is
    planned anew, with the batch split over `batch_axes`. `changes`: what `plan.replan` gives for each. `slow`: takes ten
    seconds or more.
    """

    name: str
    build: Callable[[], Call]
    mesh: str
    options: Options = field(default_factory=Options)
    hardware: str = "h100"
    training: bool = True
    program: bool = False
    step: bool = False
    evaluation: bool = False
    follows: bool = False
    batch_axes: tuple[int, ...] | None = None
    changes: tuple[Mapping[str, Any], ...] = ()
    slow: bool = False

    def where(self) -> Mesh:
        """Return the mesh with its hardware: never that of the machine that digests."""
        return Mesh(self.mesh, hardware=self.hardware)


def small(name: str, dtype: torch.dtype = torch.float64) -> Callable[[], Call]:
    """Return a model of `tests/models.py`, with values."""

    def made() -> Call:
        case = models.build(name, dtype=dtype)
        return case.model, case.args, case.kwargs

    return made


def on_meta(make: Callable[..., tuple[nn.Module, tuple[Any, ...]]], *args: Any) -> Callable[[], Call]:
    """Return what an example makes, without values."""

    def build() -> Call:
        with torch.device("meta"):
            model, given = make(*args)
        return model, given, {}

    return build


class Block(nn.Module):
    """Two products and what is between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """Residual layers that make a number of x."""

    def __init__(self, layers: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def blocks(layers: int, dim: int, hidden: int, shape: tuple[int, ...]) -> tuple[nn.Module, tuple[Tensor]]:
    """Return wide products of bfloat16, whose messages take long."""
    return Blocks(layers, dim, hidden).bfloat16(), (torch.empty(*shape, dim, dtype=torch.bfloat16),)


def gpt_step(config: gpt.Config, batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the GPT of the examples and the arguments of one step."""
    tokens = torch.zeros(batch, config.seq, dtype=torch.long)
    return gpt.GPT(config), (tokens, tokens)


WIDE_BLOCKS = on_meta(blocks, 3, 4096, 16384, (2, 8192))
TINY_LLAMA = on_meta(llama.step_of, llama.TINY, 8, 32)
TINY_GPT = on_meta(gpt_step, gpt.Config(layers=3), 16)
TINY_VIT = on_meta(vit.step_of, vit.Config(), 16)

RAN = partial(Case, hardware="cpu", step=True)
PROGRAM = partial(Case, program=True)
SLOW = partial(Case, slow=True)

RECIPES = (
    RAN("mlp-ddp", small("mlp"), "dp=4", Options(recipe="ddp")),
    RAN("gpt-zero2", small("gpt"), "dp=2", Options(recipe="zero2")),
    RAN("llama-fsdp-megatron", small("llama"), "dp=2,tp=2", Options(recipe="fsdp+megatron"), evaluation=True),
    RAN("dropout-fsdp", small("gpt_dropout"), "dp=2", Options(recipe="fsdp")),
    RAN("conv-fsdp", small("conv_net"), "dp=2", Options(recipe="fsdp")),
    RAN("irregular-zero2", small("irregular"), "dp=4", Options(recipe="zero2")),
    RAN("structured-hsdp", small("structured"), "replicate=2,shard=2", Options(recipe="hsdp")),
    PROGRAM("uneven-fsdp", small("mlp_uneven"), "dp=4", Options(recipe="fsdp")),
    PROGRAM("encoder-megatron", small("encoder"), "tp=4", Options(recipe="megatron"), hardware="a100"),
    PROGRAM("llama-three-axes", small("llama"), "pod=2,dp=2,tp=2", Options(recipe="fsdp+megatron")),
    PROGRAM("gqa-hsdp-megatron", small("llama_gqa"), "r=2,s=2,tp=2", Options(recipe=HSDP_MEGATRON)),
)

CONSTRAINTS = (
    RAN(
        "params-only",
        small("mlp"),
        "dp=2,tp=2",
        Options(recipe=None, params={"layers.0.weight": {"tp": Shard(0)}, "layers.1.*": {"dp": "S(0)"}}),
    ),
    PROGRAM(
        "inputs-outputs",
        small("gpt_dict"),
        "dp=2,tp=2",
        Options(
            recipe="zero2+megatron",
            params={"tok.weight": {"tp": "R"}},
            inputs={"tokens": {"dp": Shard(0)}},
            outputs={"logits": {"dp": "S(0)", "tp": "S(2)"}},
        ),
    ),
)

OPTIONS = (
    PROGRAM("block-again", TINY_GPT, "dp=4", Options(recipe="fsdp", recompute="block", mixed_precision=BF16)),
    PROGRAM("fit-again", TINY_GPT, "dp=2,tp=2", Options(recipe="fsdp+megatron", memory_limit="40MB")),
    PROGRAM("mixed-precision", TINY_LLAMA, "dp=4", Options(recipe="fsdp", mixed_precision=BF16)),
    PROGRAM("no-buckets", TINY_LLAMA, "dp=4", Options(recipe="fsdp", overlap=Overlap(bucket_bytes=0))),
    PROGRAM("small-buckets", TINY_LLAMA, "dp=8", Options(recipe="zero2", optimizer="sgd", overlap=Overlap(bucket_bytes=60_000))),
    PROGRAM("no-overlap", TINY_LLAMA, "dp=4", Options(recipe="fsdp", overlap=False, compile="eager")),
    PROGRAM("chunks", WIDE_BLOCKS, "tp=8", Options(recipe="megatron")),
    Case("kept", TINY_GPT, "dp=4", Options(recipe="fsdp", reshard_after_forward=False)),
    PROGRAM("one-operator", WIDE_BLOCKS, "tp=8", Options(recipe="megatron", overlap=Overlap(symmetric_memory=True))),
    PROGRAM("no-chunks", WIDE_BLOCKS, "tp=8", Options(recipe="megatron", overlap=Overlap(split_matmuls=False))),
    PROGRAM("inference", small("gpt_logits"), "dp=2,tp=2", Options(recipe="fsdp+megatron"), training=False),
)

SEARCHED = (
    PROGRAM("auto-mlp", small("mlp"), "dp=2,tp=2", batch_axes=(0,), changes=WHAT_IF),
    Case("auto-llama", TINY_LLAMA, "dp=2,tp=2", changes=({"recipe": "fsdp"}, {"memory_limit": "1500KB"}), slow=True),
    Case("auto-moe", small("moe"), "ep=4", hardware="a100"),
    Case("auto-conv", small("conv_net"), "dp=4", hardware="a100-pcie"),
    PROGRAM("auto-inference", small("gpt_logits", torch.float32), "dp=2,tp=2", training=False, follows=True),
    Case("auto-vit", TINY_VIT, "dp=4"),
    Case("auto-chunks", WIDE_BLOCKS, "tp=8", Options(inputs={"x": {"tp": "R"}})),
    SLOW("auto-limit", on_meta(llama.step_of, WIDE, 64, 256), "dp=8", Options(memory_limit="900MB"), hardware="a100-pcie"),
)

REAL = (
    SLOW("8b-fsdp", on_meta(llama.llama3_8b), "dp=32", Options(recipe="fsdp", mixed_precision=BF16)),
    SLOW("8b-auto", on_meta(llama.llama3_8b), "dp=32", Options(mixed_precision=BF16)),
    SLOW("8b-fsdp-megatron", on_meta(llama.llama3_8b), "dp=8,tp=8", Options(recipe="fsdp+megatron", mixed_precision=BF16)),
)

CASES = {case.name: case for case in (*RECIPES, *CONSTRAINTS, *OPTIONS, *SEARCHED, *REAL)}
