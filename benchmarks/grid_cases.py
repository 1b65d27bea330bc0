"""The cases of the grid: models, meshes and hardware that a plan is compared with recipes for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from benchmarks.grid_models import encoder_decoder, uneven_decoder, wide_mlp
from examples import llama
from examples.gpt import gpt2
from examples.llama import llama3_8b, llama3_70b
from examples.vit import vit_huge, vit_large
from passes.hardware.hardware import Hardware, hardware_named


def multi_query_2b(batch: int, seq: int) -> llama.Case:
    """Return a decoder of 18 layers with one head of keys and values and a vocabulary of 256,000, as Gemma 2B has."""
    config = llama.Config(layers=18, dim=2048, heads=8, kv_heads=1, hidden=16384, vocab=256_000)
    return llama.step_of(config, batch, seq)


def big_vocabulary(batch: int, seq: int) -> llama.Case:
    """Return four layers under a vocabulary of 512,000: the loss takes most of the step."""
    config = llama.Config(layers=4, dim=2048, heads=16, kv_heads=8, hidden=8192, vocab=512_000)
    return llama.step_of(config, batch, seq)


def multi_head_7b(batch: int, seq: int) -> llama.Case:
    """Return a decoder with as many heads of keys as of queries, as Llama 2 7B has."""
    config = llama.Config(layers=32, dim=4096, heads=32, kv_heads=32, hidden=11008, vocab=32_000)
    return llama.step_of(config, batch, seq)


def with_network(name: str, factor: float) -> Hardware:
    """Return a preset whose network between nodes has `factor` times the bandwidth."""
    preset = hardware_named(name)
    across = replace(preset.across, bandwidth=preset.across.bandwidth * factor)
    return replace(preset, name=f"{name}, network x {factor:g}", across=across)


@dataclass(frozen=True)
class Case:
    """A model, the mesh that it is planned for, and the sizes of its global batch."""

    build: Callable[..., tuple[nn.Module, tuple[Any, ...]]]
    mesh: str
    hardware: str | Hardware
    sizes: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        hardware = self.hardware if isinstance(self.hardware, str) else self.hardware.name
        return f"{self.build.__name__} {self.mesh} {hardware}, {sizes}"


CASES = (
    Case(gpt2, "dp=8", "a100", {"batch": 64, "seq": 1024}),
    Case(gpt2, "dp=8", "a100", {"batch": 8, "seq": 1024}),
    Case(gpt2, "dp=4,tp=2", "h100", {"batch": 512, "seq": 1024}),
    Case(gpt2, "dp=2,tp=4", "h100", {"batch": 2, "seq": 8192}),
    Case(gpt2, "dp=32,tp=8", "b200", {"batch": 1024, "seq": 1024}),
    Case(gpt2, "dp=8", "a100-pcie", {"batch": 64, "seq": 1024}),
    Case(gpt2, "dp=4,tp=8", with_network("h100", 0.125), {"batch": 64, "seq": 1024}),
    Case(llama3_8b, "dp=8", "h100", {"batch": 8, "seq": 2048}),
    Case(llama3_8b, "tp=8", "h100", {"batch": 1, "seq": 8192}),
    Case(llama3_8b, "dp=8,tp=8", "a100", {"batch": 16, "seq": 2048}),
    Case(llama3_8b, "dp=32,tp=8", "h100", {"batch": 64, "seq": 8192}),
    Case(llama3_8b, "dp=64", "h100", {"batch": 64, "seq": 4096}),
    Case(llama3_8b, "dp=4,tp=8", "h200", {"batch": 4, "seq": 32768}),
    Case(llama3_8b, "dp=256,tp=8", "h100", {"batch": 512, "seq": 4096}),
    Case(llama3_8b, "dp=16,tp=8", "b200", {"batch": 256, "seq": 4096}),
    Case(llama3_8b, "dp=8,tp=8", with_network("h100", 0.25), {"batch": 64, "seq": 4096}),
    Case(llama3_8b, "dp=8,tp=8", with_network("b200", 4.0), {"batch": 64, "seq": 4096}),
    Case(llama3_8b, "dp=8", "h100-500w", {"batch": 16, "seq": 4096}),
    Case(llama3_8b, "cp=8", "h100", {"batch": 1, "seq": 65536}),
    Case(llama3_70b, "dp=8,tp=8", "h200", {"batch": 8, "seq": 4096}),
    Case(llama3_70b, "dp=32,tp=8", "h100", {"batch": 32, "seq": 4096}),
    Case(llama3_70b, "dp=32,tp=8", "b200", {"batch": 64, "seq": 8192}),
    Case(llama3_70b, "dp=256,tp=8", "h200", {"batch": 512, "seq": 4096}),
    Case(llama3_70b, "dp=16,tp=8", with_network("h200", 0.25), {"batch": 64, "seq": 4096}),
    Case(multi_head_7b, "dp=8", "a100", {"batch": 16, "seq": 4096}),
    Case(multi_head_7b, "dp=8,tp=4", "a100", {"batch": 32, "seq": 4096}),
    Case(multi_query_2b, "dp=8", "h100", {"batch": 16, "seq": 4096}),
    Case(multi_query_2b, "dp=4,tp=8", "h100", {"batch": 8, "seq": 8192}),
    Case(multi_query_2b, "dp=2,tp=8", "b200", {"batch": 64, "seq": 2048}),
    Case(big_vocabulary, "dp=8", "h100", {"batch": 16, "seq": 4096}),
    Case(big_vocabulary, "dp=4,tp=4", "a100", {"batch": 8, "seq": 2048}),
    Case(vit_large, "dp=8", "a100", {"batch": 256}),
    Case(vit_large, "dp=4,tp=2", "h100", {"batch": 16}),
    Case(vit_large, "dp=16,tp=2", with_network("h100", 0.125), {"batch": 512}),
    Case(vit_huge, "dp=64", "h100", {"batch": 4096}),
    Case(vit_huge, "dp=8,tp=8", "a100", {"batch": 64}),
    Case(encoder_decoder, "dp=8", "a100", {"batch": 64, "source": 1024, "target": 256}),
    Case(encoder_decoder, "dp=4,tp=4", "h100", {"batch": 16, "source": 2048, "target": 512}),
    Case(encoder_decoder, "dp=16,tp=8", "b200", {"batch": 512, "source": 512, "target": 512}),
    Case(uneven_decoder, "dp=8", "h100", {"batch": 16, "seq": 2048}),
    Case(uneven_decoder, "dp=4,tp=4", "a100", {"batch": 8, "seq": 2048}),
    Case(uneven_decoder, "dp=8,tp=8", with_network("h100", 0.25), {"batch": 64, "seq": 2048}),
    Case(wide_mlp, "dp=8", "h100", {"batch": 4096}),
    Case(wide_mlp, "tp=8", "a100", {"batch": 64}),
    Case(wide_mlp, "dp=4,tp=8", "h100", {"batch": 1024}),
    Case(wide_mlp, "dp=2,tp=8", "b200", {"batch": 65536}),
    Case(gpt2, "cp=4,tp=8", "h100", {"batch": 2, "seq": 16384}),
    Case(llama3_8b, "cp=4,tp=8", with_network("h100", 0.25), {"batch": 1, "seq": 65536}),
)
