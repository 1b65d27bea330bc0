"""The sections of the check: what each rank runs. Rank 0 prints; an assertion that fails is a finding."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autoshard import Mesh, Options, Overlap, ShardedModule, autoshard
from autoshard.measure.calibrate import calibrate, format_calibration
from examples.llama import TINY, Config, Llama
from passes.ir.call import Call
from passes.ir.call import Tensor as Described
from passes.ir.layout import R, Shard
from passes.ir.units import format_bytes, format_seconds
from passes.rules.rule import Row, rows, rule_of

aten = torch.ops.aten
STEPS = 5  # of which the fastest counts
NEAR = 1e-9  # relative, in float64
LOW = 2e-2  # relative, of kernels in float16


# Rules of attention kernels ------------------------------------------------------------------------------------------------


def rules(device: str) -> Iterator[str]:
    """Run each attention kernel of the device whole and in parts, as its rule's rows split it, and compare."""
    for op, args in _attentions(device):
        rule, results = rule_of(op), op(*args)
        assert rule is not None, f"{op} has no rule"
        whole = [one for one in results if isinstance(one, Tensor)]
        call = Call(op, tuple(map(_described, args)), {}, tuple(map(_described, whole)))
        space = rule.space(call)
        assert space is not None, f"{op} is not split"
        tried = [row for row in rows(space, 2)[1:] if _is_split(row)]
        for row in tried:
            halves = [op(*_part(args, row, rank)) for rank in range(2)]
            for number in _compared(row):
                parts = [[one for one in half if isinstance(one, Tensor)][number] for half in halves]
                placement = row.results[number]
                joined = torch.cat(parts, placement.dim) if isinstance(placement, Shard) else parts[0]
                torch.testing.assert_close(joined, whole[number], rtol=LOW, atol=LOW, msg=f"{op}: {row}, result {number}")
        yield f"{op}: {len(tried)} rows"


def _attentions(device: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v, gradient = (torch.randn(4, 4, 128, 64, device=device, dtype=dtype) for _ in range(4))
    if device == "cpu":
        forward = aten._scaled_dot_product_flash_attention_for_cpu.default
        out, logsumexp = forward(q, k, v, 0.0, True)
        yield forward, (q, k, v, 0.0, True)
        yield aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (
            gradient, q, k, v, out, logsumexp, 0.0, True,
        )  # fmt: skip
        return
    flash = aten._scaled_dot_product_flash_attention.default
    out, logsumexp, *lengths, seed, offset, _ = flash(q, k, v, 0.0, True, False)
    yield flash, (q, k, v, 0.0, True, False)
    yield aten._scaled_dot_product_flash_attention_backward.default, (
        gradient, q, k, v, out, logsumexp, *lengths, 0.0, True, seed, offset,
    )  # fmt: skip
    yield aten._scaled_dot_product_efficient_attention.default, (q, k, v, None, True, 0.0, True)
    yield aten._scaled_dot_product_cudnn_attention.default, (q, k, v, None, True, 0.0, True)


def _described(value: Any) -> Any:
    return Described(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _is_split(row: Row) -> bool:
    """Return whether batch or heads are split: ranks that hold a part of the positions run another call."""
    return all(one == R or (isinstance(one, Shard) and one.dim < 2) for one in (*row.operands, *row.results))


def _compared(row: Row) -> list[int]:
    """Return the results that hold values of their own: those that are split."""
    return [number for number, placement in enumerate(row.results) if isinstance(placement, Shard)]


def _part(args: tuple[Any, ...], row: Row, rank: int) -> list[Any]:
    placements = iter(row.operands)
    return [_half(value, next(placements), rank) if isinstance(value, Tensor) else value for value in args]


def _half(value: Tensor, placement: object, rank: int) -> Tensor:
    return value.chunk(2, placement.dim)[rank].contiguous() if isinstance(placement, Shard) else value


# Steps -----------------------------------------------------------------------------------------------------------------


def figures(device: str) -> Iterator[str]:
    """Measure device and links, contention too, and what the formulas make of them."""
    yield format_calibration(calibrate(_axes("dp"), device=device, is_quick=device == "cpu"))


def numerics(device: str) -> Iterator[str]:
    """Train one step in float64 under recipes, on NCCL or gloo; loss and gradients equal those of one device."""
    config = replace(TINY, layers=2)
    for recipe in ("ddp", "zero2", "fsdp", "megatron"):
        torch.manual_seed(0)
        with torch.device(device):
            model, tokens = Llama(config).double(), torch.randint(config.vocab, (8, config.seq))
        loss = model(tokens, tokens)
        loss.backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        trained = _sharded(model, tokens, device, Options(recipe=recipe, compile="eager"))
        found = trained(*trained.shard(tokens, tokens))
        found.backward()
        torch.testing.assert_close(found.detach(), loss.detach(), rtol=NEAR, atol=NEAR)
        for name, parameter in trained.named_parameters():
            gradient = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            torch.testing.assert_close(whole, expected[name], rtol=1e-6, atol=NEAR, msg=f"{recipe}: {name}")
        yield f"{recipe}: loss {float(found.detach()):.12f}, {len(expected)} gradients equal"


def step(device: str) -> Iterator[str]:
    """Hold predicted time and memory of a compiled step against measured ones, by figures measured here."""
    machine = replace(calibrate(_axes("dp"), device=device, is_quick=True).hardware, name="here")
    config = _config(device)
    for recipe in ("ddp", "fsdp"):
        torch.manual_seed(0)
        with torch.device(device):
            model, tokens = Llama(config), torch.randint(config.vocab, (8, config.seq))
        options = Options(recipe=recipe, hardware=machine, optimizer=None, compile="inductor" if device == "cuda" else "eager")
        trained = _sharded(model, tokens, device, options)
        cost = trained.plan.cost
        assert cost is not None
        seconds, peak = _measured(trained, tokens, device)
        memory = f"{format_bytes(peak)}, ratio {cost.peak_memory / peak:.3f}" if peak else "nothing on a CPU"
        yield (
            f"{recipe}: step predicted {format_seconds(cost.step_time)}, measured {format_seconds(seconds)}, ratio "
            f"{cost.step_time / seconds:.3f}; memory predicted {format_bytes(cost.peak_memory)}, measured {memory}"
        )


def symmetric(device: str) -> Iterator[str]:
    """Run torch's operators that send while they multiply, over symmetric memory; compare the loss, and the time."""
    if device == "cpu" or dist.get_world_size() == 1:
        yield "left out: symmetric memory takes two CUDA devices or more"
        return
    config = _config(device)
    found = dict[bool, tuple[float, float]]()
    for is_on in (False, True):
        torch.manual_seed(0)
        with torch.device(device):
            model, tokens = Llama(config), torch.randint(config.vocab, (8, config.seq))
        overlap = Overlap(symmetric_memory=is_on)
        trained = _sharded(model, tokens, device, Options(recipe="megatron", overlap=overlap), axis="tp")
        seconds, _ = _measured(trained, tokens, device)
        found[is_on] = float(trained(*trained.shard(tokens, tokens)).detach()), seconds
        yield f"symmetric memory {'on' if is_on else 'off'}: loss {found[is_on][0]:.6f}, step {format_seconds(seconds)}"
    assert math.isclose(found[False][0], found[True][0], rel_tol=LOW), "the losses differ"


def _config(device: str) -> Config:
    return replace(TINY, layers=4, dim=1024, hidden=4096, heads=16, kv_heads=16, seq=1024) if device == "cuda" else TINY


def _axes(name: str) -> str:
    return f"{name}={dist.get_world_size()}"


def _sharded(model: Llama, tokens: Tensor, device: str, options: Options, *, axis: str = "dp") -> ShardedModule:
    mesh = Mesh(_axes(axis))
    return autoshard(model, init_device_mesh(device, mesh.sizes, mesh_dim_names=mesh.names), (tokens, tokens), options=options)


def _measured(trained: ShardedModule, tokens: Tensor, device: str) -> tuple[float, int]:
    """Return the seconds of the fastest step, and the bytes at the peak of memory; 0 on a CPU."""
    batch, found = trained.shard(tokens, tokens), list[float]()
    for _ in range(STEPS + 1):
        trained.zero_grad()
        dist.barrier()
        started = time.perf_counter()
        trained(*batch).backward()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found[1:]), torch.cuda.max_memory_allocated() if device == "cuda" else 0


SECTIONS: dict[str, Callable[[str], Iterator[str]]] = {
    "rules": rules,
    "figures": figures,
    "numerics": numerics,
    "step": step,
    "symmetric": symmetric,
}


def main() -> None:
    """Run one section on this rank."""
    name, device = sys.argv[1:]
    logging.disable(logging.INFO)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    for line in SECTIONS[name](device):
        if dist.get_rank() == 0:
            print(line, flush=True)
    dist.barrier()  # no rank leaves while another one connects
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
