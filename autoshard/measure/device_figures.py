"""Measure one device: kernel launch, memory bandwidth, matrix products and attention."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from autoshard.config.topology import hardware_of
from autoshard.measure.clocks import Clock, Effort, clock_of
from autoshard.measure.fit_hardware import ProductTime, fit_products, work_seconds
from passes.cost.kernel_time import Attended, Product, attention_seconds
from passes.hardware.hardware import Hardware, hardware_named
from passes.ir.text import DTYPES


def measure_device(device: str, effort: Effort) -> tuple[Hardware, tuple[ProductTime, ...]]:
    """Return the figures of this process's device, and the times of products that they were fitted to."""
    clock, machine = clock_of(device, effort), _blank(device)
    one = torch.zeros(1, device=device)
    machine = replace(machine, launch=clock.seconds(lambda: one.add(1.0)))
    source = torch.empty(effort.copied, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    machine = replace(machine, memory_bandwidth=2 * effort.copied / clock.seconds(lambda: copy.copy_(source)))
    products = tuple(_measure_products(device, effort, clock))
    machine = fit_products(machine, products)
    return replace(machine, attention=_measure_attention(device, effort, clock, machine)), products


def _blank(device: str) -> Hardware:
    """Return what is known of the device without measuring; the rest is the preset's, or that of an A100."""
    known = hardware_of(device)
    machine = known or hardware_named("a100")
    if device == "cuda":
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        memory, units = int(found.total_memory), int(found.multi_processor_count)
        machine = replace(machine, name=found.name, memory_bytes=memory, units=units)
        return machine if known else replace(machine, node_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    size = dist.get_world_size() if dist.is_initialized() else 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes
    node_size = processes if processes < size else machine.node_size
    return replace(machine, memory_bytes=memory, units=torch.get_num_threads(), node_size=node_size)


def _measure_products(device: str, effort: Effort, clock: Clock) -> Iterator[ProductTime]:
    dtypes = ("bf16", "f16", "f32", "f64") if device == "cuda" else ("bf16", "f32", "f64")
    for name in dtypes:
        for edge in effort.edges:
            for shape in ((edge, edge, edge), (4 * edge, edge, edge // 4), (edge // 4, edge, 4 * edge)):
                rows, columns, terms = shape
                left = torch.randn(rows, terms, device=device).to(DTYPES[name])
                right = torch.randn(terms, columns, device=device).to(DTYPES[name])
                seconds = clock.seconds(lambda left=left, right=right: left @ right)  # type: ignore[misc]
                yield ProductTime(Product(1, *shape), name, left.element_size(), seconds)


def _measure_attention(device: str, effort: Effort, clock: Clock, machine: Hardware) -> float:
    """Return the part of the rate that a causal attention forward reaches, by `passes.cost.kernel_time.ATTENTION`."""
    heads, width, positions = 8, 64, effort.attended
    dtype = "bf16" if device == "cuda" else "f32"
    query = torch.randn(1, heads, positions, width, device=device).to(DTYPES[dtype])
    seconds = clock.seconds(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True))
    keys = (positions + 1) / 2
    flops, attended = 4 * heads * width * positions * keys, Attended(heads * positions, width, keys, causal=True)
    least = attention_seconds(attended, flops, 0.0, dtype, replace(machine, attention=1.0, spread=0.0)) - machine.launch
    return min(1.0, least / work_seconds(seconds, machine))
