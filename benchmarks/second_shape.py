"""Measure what the programs of further shapes cost, beside the first one's.

    python -m benchmarks.second_shape
    python -m benchmarks.second_shape --recipe auto --layers 24
    python -m benchmarks.second_shape --model llama

Two gloo processes, run op by op (`compile="eager"`): a GPT of 12 layers, or a Llama of transformers, is trained on batches
of three shapes. Printed are the seconds of the first rank, CPU and wall, for each shape's first call and for its second one.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from autoshard import Options, autoshard
from examples.gpt import GPT, Config

RANKS = 2
SHAPES = ((8, 64), (8, 48), (6, 64))


def _gpt(layers: int) -> nn.Module:
    return GPT(Config(layers=layers))


def _llama(layers: int) -> nn.Module:
    library = import_module("transformers")  # which the other model does without
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model: nn.Module = library.LlamaForCausalLM(library.LlamaConfig(num_hidden_layers=layers, vocab_size=256, **sizes))
    return model


MODELS: dict[str, Callable[[int], nn.Module]] = {"gpt": _gpt, "llama": _llama}


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    out = model(tokens, labels=tokens)
    return out if isinstance(out, torch.Tensor) else out.loss


def main() -> None:
    """Run the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fsdp")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--model", choices=list(MODELS), default="gpt")
    given = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(_rank, (port, given.recipe, given.layers, given.model), nprocs=RANKS)


def _rank(rank: int, port: int, recipe: str, layers: int, name: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = autoshard(MODELS[name](layers), mesh, options=Options(recipe=recipe, compile="eager"))
    first = 0.0
    for batch, length in SHAPES:
        tokens = torch.zeros(batch // RANKS, length, dtype=torch.long)
        for call in ("first", "second"):
            cpu, wall = time.process_time(), time.perf_counter()
            _loss(model, tokens).backward()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            first = first or cpu
            if rank == 0:
                print(
                    f"{name}, {recipe}, {layers} layers, {batch} x {length} tokens, {call} call: {cpu:.2f} s of CPU, "
                    f"{wall:.2f} s in all, {cpu / first:.2f} of the first program",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
